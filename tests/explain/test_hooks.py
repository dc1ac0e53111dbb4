"""Hook points: activations are those of a plain forward pass, and replacements act like changed weights."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.explain.hooks import hook_points, hooked, run_with_cache, run_with_hooks
from headstock.model.backbone import BACKBONES
from headstock.model.batch import Batch
from headstock.model.heads import LMHead
from headstock.model.model import Model
from tests.model.small import small_model, some_tokens, stir

RECURRENT = {"vocabulary": 13, "depth": 2, "width": 8, "hidden": 12}
TRANSFORMER = {"vocabulary": 13, "context": 16, "depth": 2, "width": 8, "heads": 2, "hidden": 12}
PADDING = torch.arange(7)[None] >= torch.tensor([7, 4])[:, None]
SOURCE = Batch(some_tokens(2, 5, seed=2))
FAMILIES = {
    "causal": ("transformer", TRANSFORMER, Batch(some_tokens(2, 7))),
    "post-norm": ("transformer", TRANSFORMER | {"norm": "post"}, Batch(some_tokens(2, 7))),
    "masked": ("transformer", TRANSFORMER | {"causal": False}, Batch(some_tokens(2, 7), PADDING)),
    "seq2seq": ("seq2seq", TRANSFORMER | {"encoder_depth": 3}, Batch(some_tokens(2, 7), source=SOURCE)),
    "bitransformer": ("bitransformer", TRANSFORMER, Batch(some_tokens(2, 7), PADDING)),
    "lstm": ("recurrent", RECURRENT, Batch(some_tokens(2, 7))),
    "elmo": ("elmo", RECURRENT, Batch(some_tokens(2, 7))),
    "ngram": ("ngram", RECURRENT | {"order": 3}, Batch(some_tokens(2, 7))),
    "rnn-seq2seq": ("rnn-seq2seq", RECURRENT, Batch(some_tokens(2, 7), source=SOURCE)),
}


def make_model(name: str) -> tuple[Model, Batch]:
    family, settings, batch = FAMILIES[name]
    kind = BACKBONES.get(family)
    torch.manual_seed(0)
    backbone = kind(kind.Config(**settings))
    stir(backbone)
    return Model(backbone, {"token": LMHead(backbone)}).eval(), batch


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_reading_changes_nothing_and_every_replacement_matters(name):
    model, batch = make_model(name)
    plain = model(batch).hidden
    output, cache = run_with_cache(model, batch)
    assert torch.equal(output.hidden, plain)
    points = hook_points(model)
    assert cache.keys() == points.keys()
    assert all(value.dim() == points[point].shape.count(",") + 1 for point, value in cache.items())
    same = run_with_hooks(model, batch, dict.fromkeys(points, torch.clone)).hidden
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-5)
    for point in points:
        changed = run_with_hooks(model, batch, {point: lambda value: value.flip(-1) + 1}).hidden
        assert not torch.allclose(changed, plain, atol=1e-4), point
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(getattr(module, "hook", None) for module in model.modules())


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
@torch.no_grad()
def test_points_match_a_plain_forward_pass(norm):
    model, batch = small_model(norm=norm).double(), Batch(some_tokens(2, 7))
    output, cache = run_with_cache(model, batch)
    layers = model(batch, keep_layers=True).layers
    assert torch.equal(cache["embedding"], layers[0]) and ("final_norm" in cache) is (norm == "pre")
    for layer, block in enumerate(model.backbone.blocks):
        before, around = layers[layer], block.around_attention
        assert torch.equal(cache[f"blocks.{layer}.resid_pre"], before)
        assert torch.equal(cache[f"blocks.{layer}.resid_post"], layers[layer + 1])
        parts = block.attention.inputs(around.norm(before) if norm == "pre" else before).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        scores = (query @ key.mT / key.size(-1) ** 0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        weights = scores.softmax(-1)
        added = block.attention.output((weights @ value).transpose(1, 2).flatten(2))
        mid = around.norm(before + added) if norm == "post" else before + added
        hidden = F.gelu(block.feed.up(block.around_feed.norm(mid) if norm == "pre" else mid))
        expected = {
            "attention.query": query,
            "attention.weights": weights,
            "attention.head_output": weights @ value,
            "attention.output": added,
            "resid_mid": mid,
            "feed.hidden": hidden,
            "feed.output": block.feed.down(hidden),
        }
        for point, value in expected.items():
            torch.testing.assert_close(cache[f"blocks.{layer}.{point}"], value, msg=point)
    assert torch.equal(output.hidden, cache["final_norm"] if norm == "pre" else layers[-1])


@torch.no_grad()
def test_a_zeroed_head_equals_zeroed_weights():
    model, reference, other = (small_model() for _ in range(3))
    batch = Batch(some_tokens(2, 7))
    reference.backbone.blocks[1].attention.output.weight[:, :4] = 0  # the columns of the first head
    other.backbone.blocks[1].attention.output.weight[:, 4:] = 0

    def without_first(heads):
        return torch.cat([torch.zeros_like(heads[:, :1]), heads[:, 1:]], 1)

    ablated = run_with_hooks(model, batch, {"blocks.1.attention.head_output": without_first}).hidden
    torch.testing.assert_close(ablated, reference(batch).hidden)
    assert not torch.allclose(ablated, other(batch).hidden, atol=1e-4)


@torch.no_grad()
def test_functions_can_be_given_for_patterns():
    model, batch = small_model(), Batch(some_tokens(2, 7))
    for point in ("attention.head_output", "feed.output"):
        names = [f"blocks.{layer}.{point}" for layer in range(2)]
        expected = run_with_hooks(model, batch, dict.fromkeys(names, torch.zeros_like)).hidden
        one = run_with_hooks(model, batch, {names[0]: torch.zeros_like}).hidden
        every = run_with_hooks(model, batch, {f"blocks.*.{point}": torch.zeros_like}).hidden
        assert torch.equal(every, expected) and not torch.allclose(every, one, atol=1e-4)
        seen = []  # a second match receives the replacement, and reading it changes nothing
        both = run_with_hooks(model, batch, {f"blocks.*.{point}": torch.zeros_like, names[1]: seen.append}).hidden
        assert torch.equal(both, expected) and len(seen) == 1 and not seen[0].any()


@torch.no_grad()
def test_replaced_queries_and_weights_are_those_that_attend():
    model, batch = small_model(), Batch(some_tokens(1, 6))
    _, cache = run_with_cache(model, batch)
    uniform = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    zero_query = run_with_hooks(model, batch, {"blocks.0.attention.query": torch.zeros_like}).hidden
    functions = {"blocks.0.attention.weights": lambda weights: uniform.expand_as(weights)}
    even = run_with_hooks(model, batch, functions).hidden
    torch.testing.assert_close(zero_query, even)  # equal scores give equal weights
    means = {"blocks.0.attention.head_output": lambda heads: uniform @ cache["blocks.0.attention.value"]}
    torch.testing.assert_close(run_with_hooks(model, batch, means).hidden, even)


@torch.no_grad()
def test_contexts_nest_and_are_left_on_errors():
    model, batch, seen = small_model(), Batch(some_tokens(1, 6)), []
    with hooked(model, {"blocks.0.attention.head_output": torch.zeros_like}):
        _, cache = run_with_cache(model, batch, "blocks.0.attention.*")
        inner = run_with_hooks(model, batch, {"blocks.0.attention.head_output": seen.append}).hidden
    assert cache["blocks.0.attention.head_output"].abs().max() == 0 and seen[0].abs().max() == 0
    assert not torch.allclose(inner, model(batch).hidden)
    with pytest.raises(ZeroDivisionError):
        run_with_hooks(model, batch, {"embedding": lambda value: 1 / 0, "blocks.0.attention.weights": torch.clone})
    assert not any(module._forward_pre_hooks or getattr(module, "hook", None) for module in model.modules())


def test_invalid_names_and_packed_rows_are_refused():
    model, batch = small_model(), Batch(some_tokens(1, 6))
    with pytest.raises(UserError, match=r"blocks.0.attention.weight: .* did you mean 'blocks.0.attention.weights'"):
        run_with_cache(model, batch, ["blocks.0.attention.weight"])
    with pytest.raises(UserError, match="no hook point"):
        run_with_hooks(model, batch, {"blocks.7.resid_pre": torch.clone})
    model, batch = make_model("lstm")
    packed = replace(batch, document_ids=torch.tensor([[0] * 6 + [1], [0] * 7]))
    with pytest.raises(UserError, match="packed rows: the recurrent family rearranges them"):
        run_with_cache(model, packed, "stack.*")
    padded = replace(batch, padding=PADDING)
    assert run_with_cache(model, padded, "stack.*")[1]["stack.layers.0.hidden"].shape == (2, 7, 12)
    with pytest.raises(UserError, match="rows of different lengths: the elmo family"):
        run_with_cache(make_model("elmo")[0], padded)
