"""A bert preset against Hugging Face's BERT with the same weights.  B rows, T tokens, D width."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from headstock.interop.huggingface.architectures.bert import Bert
from headstock.interop.tensor_map import export_tensors
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch
from headstock.model.heads import LMHead, NextSentenceHead
from headstock.model.model import Model
from headstock.train.resolve import resolve_pretrain_config
from headstock.train.settings import RunConfig
from tests.model.small import small_backbone, some_tokens, stir

bert = pytest.importorskip("transformers.models.bert.modeling_bert")
BertConfig = pytest.importorskip("transformers.models.bert.configuration_bert").BertConfig

SMALL = {"width": 16, "depth": 3, "heads": 4, "hidden": 24, "context": 12, "vocabulary": 40}
PADDING = torch.arange(9)[None] >= torch.tensor([9, 6, 2])[:, None]
SEGMENTS = (torch.arange(9)[None] >= torch.tensor([4, 3, 1])[:, None]).long()


def preset_config(preset: str, **settings: int) -> RunConfig:
    return resolve_pretrain_config(preset, None, {"data.corpus": ["text.txt"], **settings})


def make_model(config: RunConfig) -> Model:
    torch.manual_seed(0)
    backbone = Transformer(config.model)
    heads = {"token": LMHead(backbone, transform=config.task.transform), "next": NextSentenceHead(backbone.width)}
    return Model(backbone, heads).eval()


@pytest.fixture(scope="module")
def ours() -> Model:
    model = make_model(preset_config("bert-nano", **SMALL))
    stir(model)  # no bias or norm keeps its initial zero or one
    return model


def to_huggingface(ours: Model) -> dict[str, Tensor]:
    """Our weights under their names."""
    config = preset_config("bert-nano", **SMALL, nsp=True)
    return export_tensors(Bert().tensor_map(config, Bert().export_spec(config)), ours.tensors())


def huggingface_model(model_class: type[nn.Module], tensors: dict[str, Tensor]) -> nn.Module:
    model = model_class(BertConfig(**Bert().export_spec(preset_config("bert-nano", **SMALL)).config))
    expected = model.state_dict()
    shared = {name: tensor for name, tensor in tensors.items() if name in expected}
    missing, unknown = model.load_state_dict(shared, strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} and not unknown
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def run(model: nn.Module, *, segments: Tensor = SEGMENTS):
    """The outputs of both models for the same padded pairs of texts."""
    tokens = some_tokens(*PADDING.shape, vocabulary=SMALL["vocabulary"])
    if isinstance(model, Model):
        return model(Batch(tokens, padding=PADDING, segments=segments), keep_layers=True)
    mask = (~PADDING).long()
    return model(input_ids=tokens, attention_mask=mask, token_type_ids=segments, output_hidden_states=True)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference at real tokens."""
    return (a - b)[~PADDING].abs().max().item()


def test_every_layer_matches_bert(ours):
    tensors = {name.removeprefix("bert."): tensor for name, tensor in to_huggingface(ours).items()}
    theirs, mine = run(huggingface_model(bert.BertModel, tensors)), run(ours)
    assert len(theirs.hidden_states) == len(mine.layers) == SMALL["depth"] + 1
    assert max(map(distance, mine.layers, theirs.hidden_states)) < 1e-5
    assert distance(mine.hidden, theirs.last_hidden_state) < 1e-5


@pytest.mark.parametrize("model_class", ["BertForMaskedLM", "BertForPreTraining"])
def test_heads_match_bert(ours, model_class):
    theirs, mine = run(huggingface_model(getattr(bert, model_class), to_huggingface(ours))), run(ours)
    token, following = ours.heads["token"](mine.hidden).detach(), ours.heads["next"](mine.hidden[:, 0]).detach()
    assert distance(token, theirs.logits if model_class == "BertForMaskedLM" else theirs.prediction_logits) < 1e-5
    assert token.std() > 0.1
    if model_class == "BertForPreTraining":
        torch.testing.assert_close(following.flip(1), theirs.seq_relationship_logits, atol=1e-5, rtol=0)
        assert not torch.allclose(following, theirs.seq_relationship_logits, atol=1e-3)  # the classes are swapped


def swap_query_and_key(name: str) -> str:
    """Query and key weights swapped."""
    b = {"query": "key", "key": "query"}
    return ".".join(b.get(part, part) for part in name.split("."))


def test_a_single_difference_is_detected(ours):
    """Controls: each variant must differ from BERT."""
    theirs = run(huggingface_model(bert.BertForPreTraining, to_huggingface(ours)))
    last = theirs.hidden_states[-1]
    assert distance(run(ours).hidden, last) < 1e-5
    assert distance(run(ours, segments=1 - SEGMENTS).hidden, last) > 1e-3
    exchanged = huggingface_model(
        bert.BertForPreTraining, {swap_query_and_key(name): tensor for name, tensor in to_huggingface(ours).items()}
    )
    assert distance(run(ours).hidden, run(exchanged).hidden_states[-1]) > 1e-3
    config = preset_config("bert-nano", **SMALL)
    first = make_model(replace(config, model=replace(config.model, norm="pre")))
    born = {name: tensor for name, tensor in first.tensors().items() if "final_norm" in name}
    first.load_tensors(ours.tensors() | born, source="the model that norms afterwards")
    assert distance(run(first).hidden, last) > 1e-3


def test_dropout_matches_bert(ours):
    """With one seed both drop the same features, and none inside the feed-forward layer."""
    tensors = {name.removeprefix("bert."): tensor for name, tensor in to_huggingface(ours).items()}

    def draw(model: nn.Module):
        torch.manual_seed(3)
        return run(model.train())

    theirs = draw(huggingface_model(bert.BertModel, tensors)).hidden_states
    for inner in (False, True):
        mine = make_model(preset_config("bert-nano", **SMALL, inner_dropout=inner))
        mine.load_tensors(ours.tensors(), source="the model that is not trained")
        layers = draw(mine).layers
        assert distance(layers[0], theirs[0]) < 1e-5 < 1e-2 < distance(layers[0], run(ours).layers[0])
        assert (max(map(distance, layers, theirs)) < 1e-5) == (not inner)  # with inner dropout they differ


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [{}, {"bias": False, "norm_kind": "rms", "activation": "swiglu"}])
def test_a_transform_head_has_an_output_bias(tied, shape):
    backbone = small_backbone(tied=tied, **shape)
    model = Model(backbone, {"token": LMHead(backbone, transform=True)})
    names = {name.removeprefix("heads.token.") for name in model.tensors() if name.startswith("heads.")}
    biases = set() if shape else {"transform.dense.bias", "transform.norm.bias"}  # as in the backbone
    assert names == {"transform.dense.weight", "transform.norm.weight", "bias", *biases, *([] if tied else ["weight"])}
    assert (model.heads["token"].weight is backbone.tokens.weight) == tied
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    head, straight = model.heads["token"], LMHead(backbone)
    # the norm makes logits independent of the scale of the vectors
    torch.testing.assert_close(head(1e4 * hidden), head(1e5 * hidden), atol=1e-3, rtol=0)
    assert not torch.allclose(straight(1e4 * hidden), straight(1e5 * hidden), atol=1.0)


def test_bert_base_has_the_parameters_of_bert():
    with torch.device("meta"):  # shapes only
        mine = make_model(preset_config("bert-base"))
        theirs = bert.BertForPreTraining(BertConfig())
    assert mine.parameter_counts()["total"] == sum(p.numel() for p in theirs.parameters()) == 110_106_428
