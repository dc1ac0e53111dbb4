"""A token's weight is what it does to the score: exact where the model is linear, adding up to the whole elsewhere."""

import pytest
import torch
from torch import nn

from headstock.data.corpus import read_corpus
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.inference import attribution
from headstock.inference.attribution import baseline_embedding, token_attributions
from headstock.model.backbone import Backbone
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Output
from headstock.model.model import Model
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.tasks.labelled import EncodedRows
from tests.model.small import stir

TEXTS = ["Anne likes Paris.", "Ben finds the sea. Zoë sees home.", "le café"]
CLASSES = ("bad", "fair", "good")
LENGTH = 24


class Bag(Backbone):
    """A text as its words in no order: every score is linear in the embeddings."""

    def __init__(self, vocabulary: int, *, causal: bool):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 6)
        self.width, self.causal, self.context = 6, causal, None

    def forward(self, batch, state=None, *, keep_layers=False):
        return Output(self.tokens(batch.tokens))

    def stages(self):
        return [list(self.parameters())]

    def new_state(self, rows, capacity):
        raise AssertionError("a bag remembers nothing")


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_tokenizer((d.text for d in read_corpus(corpus)), TokenizerSettings(vocabulary=300))


def make(tokenizer, kind, **settings):
    """A model in double precision, its task, and the texts as it reads them; `kind` is what it was pretrained as."""
    torch.manual_seed(0)
    causal = kind == "causal"
    task = Classify(
        ClassifyConfig(
            **{"classes": CLASSES, "pool": "last" if causal else "mean", "opening": "start" if causal else "cls"}
            | {key: value for key, value in settings.items() if key in ("pool", "long")}
        ),
        tokenizer,
    )
    if settings.get("bag"):
        backbone = Bag(tokenizer.vocabulary, causal=causal)
    else:
        sizes = {"context": LENGTH, "depth": 2, "width": 8, "heads": 2, "hidden": 12}
        backbone = Transformer(TransformerConfig(tokenizer.vocabulary, causal=causal, **sizes))
    model = Model(backbone, task.heads(backbone)).double().eval()
    stir(model, spread=0.5)
    tokens = tokenizer.encode_batch(settings.get("texts", TEXTS))
    return model, task, EncodedRows(tokens, None, [str(i) for i in range(len(tokens))])


@torch.no_grad()
def score(model, task, data, row, target, change=lambda x: x, length=LENGTH):
    """The score of a class against the mean of all, with the embeddings (rows, T, D) changed on their way."""
    hook = model.backbone.tokens.register_forward_hook(lambda module, inputs, output: change(output))
    scores = model.heads["label"](task.pooled_features(model, task.examples(data, length=length).batch([row])))[0]
    hook.remove()
    return float(scores[target] - scores.mean())


def moved(place, vector):
    """Puts a vector in the place of one token's embedding; `place` may be a slice of several."""

    def change(x):
        x = x.clone()
        x[:, place] = vector
        return x

    return change


# Linear models


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_in_a_linear_model_a_weight_is_what_the_score_loses_without_the_token(tokenizer, kind):
    model, task, data = make(tokenizer, kind, bag=True, pool="mean")
    blank = baseline_embedding(model, task)
    for row in range(3):
        for target in range(3):
            weighed = token_attributions(model, task, data, row, target=target, length=LENGTH)
            whole = score(model, task, data, row, target)
            lost = [
                whole - score(model, task, data, row, target, moved(place + 1, blank)) for place in range(len(weighed))
            ]
            assert [weight for _, weight in weighed] == pytest.approx(lost, abs=1e-12)
            empty = score(model, task, data, row, target, moved(slice(1, None), blank))
            assert sum(weight for _, weight in weighed) == pytest.approx(whole - empty, abs=1e-12)
    assert max(abs(weight) for _, weight in weighed) > 0.01


def test_without_a_token_means_masked_where_the_model_knows_a_mask(tokenizer):
    model, task, data = make(tokenizer, "masked", bag=True)
    weighed = token_attributions(model, task, data, 0, target=2, length=LENGTH)
    for place, (_, weight) in enumerate(weighed):
        hidden = list(data.tokens[0])
        hidden[place] = tokenizer.mask
        without = EncodedRows([hidden], None, ["0"])
        assert weight == pytest.approx(score(model, task, data, 0, 2) - score(model, task, without, 0, 2), abs=1e-12)


def test_the_weights_for_all_classes_cancel(tokenizer):
    model, task, data = make(tokenizer, "masked", bag=True)
    of = [token_attributions(model, task, data, 1, target=target, length=LENGTH) for target in range(3)]
    for place in range(len(of[0])):
        assert sum(weighed[place][1] for weighed in of) == pytest.approx(0, abs=1e-12)


# Real models

KINDS = [("causal", "last"), ("causal", "mean"), ("masked", "mean"), ("masked", "cls")]


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_finite_differences_agree(tokenizer, kind, pool):
    """On every step of the way, move one token a little further and a little back, and look at the score."""
    model, task, data = make(tokenizer, kind, pool=pool)
    blank, steps, tiny = baseline_embedding(model, task), attribution.STEPS, 1e-5
    for row, target in ((0, 2), (2, 0)):
        weighed = token_attributions(model, task, data, row, target=target, length=LENGTH)
        for place, (_, weight) in enumerate(weighed, 1):
            slopes = []
            for step in range(steps):

                def on_the_way(x, share=(step + 0.5) / steps, extra=0.0, place=place):
                    far = x - blank
                    far[:, 0] = 0
                    begun = x - far + share * far
                    begun[:, place] += extra * far[:, place]
                    return begun

                two = [
                    score(model, task, data, row, target, lambda x, e=sign * tiny: on_the_way(x, extra=e))
                    for sign in (1, -1)
                ]
                slopes.append((two[0] - two[1]) / (2 * tiny))
            assert weight == pytest.approx(sum(slopes) / steps, abs=1e-6)


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_the_weights_add_up_to_what_the_text_says(tokenizer, kind, pool, monkeypatch):
    model, task, data = make(tokenizer, kind, pool=pool)
    blank = baseline_embedding(model, task)
    errors = []
    for steps in (2, 512):
        monkeypatch.setattr(attribution, "STEPS", steps)
        weighed = token_attributions(model, task, data, 1, target=0, length=LENGTH)
        whole = score(model, task, data, 1, 0) - score(model, task, data, 1, 0, moved(slice(1, None), blank))
        errors.append(abs(sum(weight for _, weight in weighed) - whole))
    assert errors[1] < 1e-4 < abs(whole)
    assert errors[1] < errors[0]


def test_single_precision_and_frozen_weights_will_do(tokenizer):
    model, task, data = make(tokenizer, "causal")
    exact = token_attributions(model, task, data, 1, target=1, length=LENGTH)
    rough = token_attributions(model.float().requires_grad_(False), task, data, 1, target=1, length=LENGTH)
    assert [weight for _, weight in rough] == pytest.approx([weight for _, weight in exact], abs=1e-4)


# Which tokens


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_all_tokens_are_told_in_their_order_but_not_the_opening_mark(tokenizer, kind):
    model, task, data = make(tokenizer, kind)
    for row, text in enumerate(TEXTS):
        weighed = token_attributions(model, task, data, row, target=0, length=LENGTH)
        assert [token for token, _ in weighed] == [tokenizer.id_to_token(number) for number in tokenizer.encode(text)]
        assert all(isinstance(weight, float) for _, weight in weighed)


def test_the_other_texts_do_not_matter(tokenizer):
    model, task, data = make(tokenizer, "masked")
    alone = EncodedRows([data.tokens[2]], None, ["2"])
    assert token_attributions(model, task, data, 2, target=1, length=LENGTH) == token_attributions(
        model, task, alone, 0, target=1, length=LENGTH
    )


LONG = " ".join(["Anne likes the sea.", "Ben finds Paris.", "Zoë sees home."] * 6)


@pytest.mark.parametrize("long", ["head", "tail", "head+tail"])
def test_only_what_was_read_is_told(tokenizer, long):
    model, task, data = make(tokenizer, "masked", texts=[LONG], long=long)
    (row,) = task.sequences(data.tokens[0], LENGTH)
    weighed = token_attributions(model, task, data, 0, target=0, length=LENGTH)
    assert len(data.tokens[0]) > LENGTH == len(row)
    assert [token for token, _ in weighed] == [tokenizer.id_to_token(number) for number in row[1:]]


@pytest.mark.parametrize("length", [24, 25, 2])
def test_a_text_read_in_windows_is_told_once_and_padding_not_at_all(tokenizer, length):
    model, task, data = make(tokenizer, "masked", bag=True, texts=[LONG], long="windows")
    weighed = token_attributions(model, task, data, 0, target=2, length=length)
    assert [token for token, _ in weighed] == [tokenizer.id_to_token(number) for number in data.tokens[0]]
    batch = task.examples(data, length=length).batch([0])
    assert len(batch.tokens) > 2
    assert length == 2 or batch.padding is not None  # the last window is shorter
    blank = baseline_embedding(model, task)
    empty = score(model, task, data, 0, 2, moved(slice(1, None), blank), length)
    whole = score(model, task, data, 0, 2, length=length)
    assert sum(weight for _, weight in weighed) == pytest.approx(whole - empty, abs=1e-12)


# Nothing is left behind


@pytest.mark.parametrize("target", [1, 7])
def test_the_model_is_left_as_it_was(tokenizer, target):
    model, task, data = make(tokenizer, "causal")
    before = {name: tensor.clone() for name, tensor in model.tensors().items()}
    said = score(model, task, data, 0, 1)
    if target < len(CLASSES):
        token_attributions(model, task, data, 0, target=target, length=LENGTH)
    else:  # also when it fails
        with pytest.raises(IndexError):
            token_attributions(model, task, data, 0, target=target, length=LENGTH)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.tensors().items())
    assert not model.backbone.tokens._forward_hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert score(model, task, data, 0, 1) == said
