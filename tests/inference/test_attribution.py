"""Integrated gradients: exact for linear models, complete for others, independent of the batch."""

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


class BagOfWords(Backbone):
    """A backbone whose scores are linear in the embeddings."""

    def __init__(self, vocabulary: int, *, causal: bool):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 6)
        self.width, self.causal, self.context = 6, causal, None

    def forward(self, batch, state=None, *, keep_layers=False):
        return Output(self.tokens(batch.tokens))

    def parameters_by_layer(self):
        return [list(self.parameters())]

    def new_state(self, rows, capacity):
        raise AssertionError("a bag of words has no state")


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_tokenizer((d.text for d in read_corpus(corpus)), TokenizerSettings(vocabulary=300))


def make(tokenizer, kind, **settings):
    """A model in double precision, its task, and encoded texts; `kind` is its pretraining objective."""
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
        backbone = BagOfWords(tokenizer.vocabulary, causal=causal)
    else:
        sizes = {"context": LENGTH, "depth": 2, "width": 8, "heads": 2, "hidden": 12}
        backbone = Transformer(TransformerConfig(vocabulary=tokenizer.vocabulary, causal=causal, **sizes))
    model = Model(backbone, task.heads(backbone)).double().eval()
    stir(model, spread=0.5)
    tokens = tokenizer.encode_batch(settings.get("texts", TEXTS))
    return model, task, EncodedRows(tokens, None, [str(i) for i in range(len(tokens))])


@torch.no_grad()
def score(model, task, data, row, target, change=lambda x: x, length=LENGTH):
    """The score of a class relative to the mean of all, with `change` applied to the embeddings (rows, T, D)."""
    hook = model.backbone.tokens.register_forward_hook(lambda module, inputs, output: change(output))
    scores = model.heads["label"](task.pooled_features(model, task.examples(data, length=length).batch([row])))[0]
    hook.remove()
    return float(scores[target] - scores.mean())


def replaced(position, vector):
    """Replaces the embeddings at a position or slice by a vector."""

    def change(x):
        x = x.clone()
        x[:, position] = vector
        return x

    return change


# Linear models


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_attributions_of_a_linear_model_are_exact(tokenizer, kind):
    model, task, data = make(tokenizer, kind, bag=True, pool="mean")
    blank = baseline_embedding(model, task)
    for row in range(3):
        for target in range(3):
            attributions = token_attributions(model, task, data, row, target=target, length=LENGTH)
            total = score(model, task, data, row, target)
            positions = range(1, len(attributions) + 1)
            expected = [total - score(model, task, data, row, target, replaced(p, blank)) for p in positions]
            assert [weight for _, weight in attributions] == pytest.approx(expected, abs=1e-12)
            empty = score(model, task, data, row, target, replaced(slice(1, None), blank))
            assert sum(weight for _, weight in attributions) == pytest.approx(total - empty, abs=1e-12)
    assert max(abs(weight) for _, weight in attributions) > 0.01


def test_the_baseline_of_a_masked_model_is_the_mask_token(tokenizer):
    model, task, data = make(tokenizer, "masked", bag=True)
    attributions = token_attributions(model, task, data, 0, target=2, length=LENGTH)
    for position, (_, weight) in enumerate(attributions):
        masked = list(data.tokens[0])
        masked[position] = tokenizer.mask
        without = EncodedRows([masked], None, ["0"])
        assert weight == pytest.approx(score(model, task, data, 0, 2) - score(model, task, without, 0, 2), abs=1e-12)


def test_attributions_sum_to_zero_over_the_classes(tokenizer):
    model, task, data = make(tokenizer, "masked", bag=True)
    by_class = [token_attributions(model, task, data, 1, target=target, length=LENGTH) for target in range(3)]
    for position in range(len(by_class[0])):
        assert sum(attributions[position][1] for attributions in by_class) == pytest.approx(0, abs=1e-12)


# Transformers

KINDS = [("causal", "last"), ("causal", "mean"), ("masked", "mean"), ("masked", "cls")]


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_finite_differences_agree(tokenizer, kind, pool):
    """Central differences along the path from the baseline to the text."""
    model, task, data = make(tokenizer, kind, pool=pool)
    blank, steps, epsilon = baseline_embedding(model, task), attribution.STEPS, 1e-5
    for row, target in ((0, 2), (2, 0)):
        attributions = token_attributions(model, task, data, row, target=target, length=LENGTH)
        for position, (_, weight) in enumerate(attributions, 1):
            slopes = []
            for step in range(steps):

                def interpolate(x, share=(step + 0.5) / steps, extra=0.0, position=position):
                    difference = x - blank
                    difference[:, 0] = 0
                    interpolated = x - difference + share * difference
                    interpolated[:, position] += extra * difference[:, position]
                    return interpolated

                above, below = (
                    score(model, task, data, row, target, lambda x, e=sign * epsilon: interpolate(x, extra=e))
                    for sign in (1, -1)
                )
                slopes.append((above - below) / (2 * epsilon))
            assert weight == pytest.approx(sum(slopes) / steps, abs=1e-6)


@pytest.mark.parametrize(("kind", "pool"), KINDS)
def test_attributions_add_up_to_the_score_difference(tokenizer, kind, pool, monkeypatch):
    model, task, data = make(tokenizer, kind, pool=pool)
    blank = baseline_embedding(model, task)
    errors = []
    for steps in (2, 512):
        monkeypatch.setattr(attribution, "STEPS", steps)
        attributions = token_attributions(model, task, data, 1, target=0, length=LENGTH)
        total = score(model, task, data, 1, 0) - score(model, task, data, 1, 0, replaced(slice(1, None), blank))
        errors.append(abs(sum(weight for _, weight in attributions) - total))
    assert errors[1] < 1e-4 < abs(total)
    assert errors[1] < errors[0]


def test_single_precision_and_frozen_weights(tokenizer):
    model, task, data = make(tokenizer, "causal")
    exact = token_attributions(model, task, data, 1, target=1, length=LENGTH)
    single = token_attributions(model.float().requires_grad_(False), task, data, 1, target=1, length=LENGTH)
    assert [weight for _, weight in single] == pytest.approx([weight for _, weight in exact], abs=1e-4)


# Tokens


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_all_tokens_but_the_first_special_token_have_attributions(tokenizer, kind):
    model, task, data = make(tokenizer, kind)
    for row, text in enumerate(TEXTS):
        attributions = token_attributions(model, task, data, row, target=0, length=LENGTH)
        assert [token for token, _ in attributions] == [
            tokenizer.id_to_token(number) for number in tokenizer.encode(text)
        ]
        assert all(isinstance(weight, float) for _, weight in attributions)


def test_attributions_are_independent_of_other_texts(tokenizer):
    model, task, data = make(tokenizer, "masked")
    alone = EncodedRows([data.tokens[2]], None, ["2"])
    assert token_attributions(model, task, data, 2, target=1, length=LENGTH) == token_attributions(
        model, task, alone, 0, target=1, length=LENGTH
    )


LONG = " ".join(["Anne likes the sea.", "Ben finds Paris.", "Zoë sees home."] * 6)


@pytest.mark.parametrize("long", ["head", "tail", "head+tail"])
def test_only_tokens_that_were_read_have_attributions(tokenizer, long):
    model, task, data = make(tokenizer, "masked", texts=[LONG], long=long)
    (row,) = task.sequences(data.tokens[0], LENGTH)
    attributions = token_attributions(model, task, data, 0, target=0, length=LENGTH)
    assert len(data.tokens[0]) > LENGTH == len(row)
    assert [token for token, _ in attributions] == [tokenizer.id_to_token(number) for number in row[1:]]


@pytest.mark.parametrize("length", [24, 25, 2])
def test_tokens_of_overlapping_windows_are_attributed_once(tokenizer, length):
    model, task, data = make(tokenizer, "masked", bag=True, texts=[LONG], long="windows")
    attributions = token_attributions(model, task, data, 0, target=2, length=length)
    assert [token for token, _ in attributions] == [tokenizer.id_to_token(number) for number in data.tokens[0]]
    batch = task.examples(data, length=length).batch([0])
    assert len(batch.tokens) > 2
    assert length == 2 or batch.padding is not None  # the last window is shorter
    blank = baseline_embedding(model, task)
    empty = score(model, task, data, 0, 2, replaced(slice(1, None), blank), length)
    total = score(model, task, data, 0, 2, length=length)
    assert sum(weight for _, weight in attributions) == pytest.approx(total - empty, abs=1e-12)


# Side effects


@pytest.mark.parametrize("target", [1, 7])
def test_the_model_is_unchanged(tokenizer, target):
    model, task, data = make(tokenizer, "causal")
    before = {name: tensor.clone() for name, tensor in model.tensors().items()}
    expected = score(model, task, data, 0, 1)
    if target < len(CLASSES):
        token_attributions(model, task, data, 0, target=target, length=LENGTH)
    else:  # also when it fails
        with pytest.raises(IndexError):
            token_attributions(model, task, data, 0, target=target, length=LENGTH)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.tensors().items())
    assert not model.backbone.tokens._forward_hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert score(model, task, data, 0, 1) == expected
