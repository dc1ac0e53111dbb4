"""Named points inside a model at which activations can be read and replaced, in the manner of TransformerLens.

B rows, T tokens (queries), S keys, D width, H heads, K head width, F hidden. Names follow those of the tensors:
`blocks.0.attention.weights` is computed by the module that owns `backbone.blocks.0.attention.inputs.weight`. Of two
stacks, each has its own prefix (`encoder.`, `decoder.`, `forwards.`, `backwards.`).

>>> output, cache = run_with_cache(model, batch, ["blocks.*.attention.weights"])
>>> output = run_with_hooks(model, batch, {"blocks.0.attention.head_output": lambda heads: heads * 0})
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from headstock.errors import UserError, did_you_mean
from headstock.explain import document as doc
from headstock.model.attention_mask import AttentionMask
from headstock.model.attention_weights import masked_weights
from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.backbones.bidirectional_transformer import BidirectionalTransformer
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.ngram import HiddenLayer, NGram
from headstock.model.backbones.recurrent import RecurrentLayer, RecurrentStack
from headstock.model.backbones.recurrent_encoder_decoder import GlobalAttention
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch, Output
from headstock.model.layers import Attention, AttentionHook, Block
from headstock.model.model import Model

Site = Literal["input", "output", "query", "key", "value", "weights", "head_output"]
HookFunction = Callable[[Tensor], Tensor | None]  # returns a replacement, or None to leave the activation as it is
PointSpec = tuple[str, str, Site, str, str]  # name, submodule that it belongs to, and the fields of a HookPoint

POINT_AFTER = {"attention": "resid_mid", "cross": "resid_cross", "feed": "resid_post"}  # the stream after a sublayer
SUBLAYERS = {"attention": "attention", "cross": "cross-attention", "feed": "feed-forward"}  # display names


@dataclass(frozen=True)
class HookPoint:
    """A place in a model where an activation can be read and replaced."""

    name: str
    shape: str
    meaning: str
    module: nn.Module = field(repr=False)
    site: Site = "output"  # of the module


def attention_points(sublayer: str, kind: str) -> list[PointSpec]:
    return [
        (f"{sublayer}.query", sublayer, "query", "(B, H, T, K)", f"queries of {kind}, as they enter the scores"),
        (f"{sublayer}.key", sublayer, "key", "(B, H, S, K)", "keys"),
        (f"{sublayer}.value", sublayer, "value", "(B, H, S, K)", "values"),
        (f"{sublayer}.weights", sublayer, "weights", "(B, H, T, S)", "attention weights; each row sums to one"),
        (f"{sublayer}.head_output", sublayer, "head_output", "(B, H, T, K)", "weights times values, of each head"),
        (f"{sublayer}.output", sublayer, "output", "(B, T, D)", f"what {kind} adds to the stream"),
    ]


POINTS: dict[type[nn.Module], list[PointSpec]] = {
    Transformer: [("embedding", "blocks.0", "input", "(B, T, D)", "tokens with positions and segments")],
    Block: [
        ("resid_pre", "", "input", "(B, T, D)", "the residual stream that enters the layer"),
        *attention_points("attention", "self-attention"),
        ("resid_mid", "around_attention", "output", "(B, T, D)", "the stream after self-attention"),
        *attention_points("cross", "cross-attention"),
        ("resid_cross", "around_cross", "output", "(B, T, D)", "the stream after cross-attention"),
        ("feed.hidden", "feed.down", "input", "(B, T, F)", "hidden units of the feed-forward layer"),
        ("feed.output", "feed", "output", "(B, T, D)", "what the feed-forward layer adds to the stream"),
        ("resid_post", "around_feed", "output", "(B, T, D)", "the stream that leaves the layer"),
    ],
    RecurrentStack: [("embedding", "layers.0", "input", "(B, T, D)", "token embeddings")],
    RecurrentLayer: [
        ("hidden", "cells", "output", "(B, T, H)", "hidden state after each token; a replacement does not recur"),
        ("output", "", "output", "(B, T, D)", "output of the layer"),
    ],
    NGram: [("embedding", "layers.0", "input", "(B, T, N D)", "the embeddings of the last N tokens")],
    HiddenLayer: [
        ("hidden", "down", "input", "(B, T, H)", "hidden units"),
        ("output", "", "output", "(B, T, D)", "output of the layer"),
    ],
    GlobalAttention: [("output", "", "output", "(B, T, D)", "the decoder's output after attention over the source")],
}
FINAL_NORM: PointSpec = ("", "", "output", "(B, T, D)", "the stream after the final norm, which the heads read")


def hook_points(model: Model) -> dict[str, HookPoint]:
    """All points of a model by name, from the bottom up."""
    points = {}
    for path, module in model.backbone.named_modules():
        final_norm = [FINAL_NORM] if path.endswith("final_norm") else []
        specs = next((specs for kind, specs in POINTS.items() if isinstance(module, kind)), final_norm)
        for name, submodule, site, shape, meaning in specs:
            if (part := find_submodule(module, submodule)) is not None:
                full_name = ".".join(filter(None, (path, name)))
                points[full_name] = HookPoint(full_name, shape, meaning, part, site)
    return points


def find_submodule(module: nn.Module, path: str) -> nn.Module | None:
    """A submodule, or None where this module has none of that name."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def select_names(points: Mapping[str, HookPoint], patterns: Sequence[str]) -> list[str]:
    """The names that match any of the patterns, in which * stands for anything."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in points):
            raise UserError(f"{pattern}: is no hook point of this model{did_you_mean(pattern, list(points))}")
    return [name for name in points if any(fnmatchcase(name, pattern) for pattern in patterns)]


def run_with_cache(
    model: Model, batch: Batch, names: str | Sequence[str] | None = None
) -> tuple[Output, dict[str, Tensor]]:
    """The output for a batch and the activations at `names`, which may contain *; None for all points."""
    patterns = ["*"] if names is None else [names] if isinstance(names, str) else names
    cache: dict[str, Tensor] = {}

    selected = select_names(hook_points(model), patterns)
    output = run_with_hooks(model, batch, {name: partial(cache.__setitem__, name) for name in selected})
    return output, cache


def run_with_hooks(model: Model, batch: Batch, functions: Mapping[str, HookFunction]) -> Output:
    """The output for a batch while each activation is passed to its function by name (see `hooked`)."""
    check_order(model, batch)
    with hooked(model, functions):
        return model(batch)


def check_order(model: Model, batch: Batch) -> None:
    """Refuse batches whose rows a recurrent model would rearrange, so that activations would not belong to rows."""
    stacks = sum(isinstance(module, RecurrentStack) for module in model.backbone.modules())
    rows = [part for part in (batch, batch.source) if part is not None]
    packed = any(part.document_ids is not None or part.prefix is not None for part in rows)
    padded = any(part.padding is not None for part in rows)
    if stacks and (packed or (stacks > 1 and padded)):
        problem = "packed rows" if packed else "rows of different lengths"
        raise UserError(f"{problem}: the {model.backbone.name} family rearranges them; hook one text at a time")


@contextmanager
def hooked(model: Model, functions: Mapping[str, HookFunction]) -> Iterator[None]:
    """Within this context, whatever runs the model passes its activations through `functions`.

    Names may contain *; where several match a point, each function receives what the one before it returned.
    """
    points = hook_points(model)
    attentions: dict[Attention, dict[str, HookFunction]] = {}
    with ExitStack() as stack:
        for name in select_names(points, list(functions)):
            point = points[name]
            function = chain_functions([each for pattern, each in functions.items() if fnmatchcase(name, pattern)])
            if point.site == "input":
                handle = point.module.register_forward_pre_hook(input_hook(function), with_kwargs=True)
                stack.callback(handle.remove)
            elif point.site == "output":
                stack.callback(point.module.register_forward_hook(output_hook(function)).remove)
            else:
                assert isinstance(point.module, Attention)
                attentions.setdefault(point.module, {})[point.site] = function
        for attention, by_site in attentions.items():
            stack.callback(setattr, attention, "hook", attention.hook)
            attention.hook = attention_hook(by_site, attention.hook)
        yield


def chain_functions(functions: Sequence[HookFunction]) -> HookFunction:
    """One function that applies all in order; it returns None where none of them replaces the activation."""

    def apply(activation: Tensor) -> Tensor | None:
        result = None
        for function in functions:
            if (replacement := function(activation)) is not None:
                result = activation = replacement
        return result

    return apply


def input_hook(function: HookFunction) -> Callable[..., Any]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        value = function(inputs[0])
        return None if value is None else ((value, *inputs[1:]), options)

    return hook


def output_hook(function: HookFunction) -> Callable[..., Any]:
    """Of a recurrent layer, which also returns its final state, the outputs alone are passed."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        value = function(output[0] if isinstance(output, tuple) else output)
        return value if value is None or not isinstance(output, tuple) else (value, *output[1:])

    return hook


def attention_hook(functions: Mapping[str, HookFunction], before: AttentionHook | None) -> AttentionHook:
    """Fused attention has no weights to replace: where something is replaced, its output is computed from weights."""

    def hook(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, output: Tensor) -> Tensor:
        if before is not None and (replaced := before(query, key, value, mask, output)) is not None:
            output = replaced
        changed = False

        def apply(site: str, activation: Tensor) -> Tensor:
            nonlocal changed
            replacement = functions[site](activation) if site in functions else None
            changed = changed or replacement is not None
            return activation if replacement is None else replacement

        query, key, value = apply("query", query), apply("key", key), apply("value", value)
        if changed or "weights" in functions:
            weights = apply("weights", masked_weights(query, key, mask)[0])
            if changed:
                output = (weights @ value.to(weights)).to(output)
        return apply("head_output", output)

    return hook


def hook_document(model: Model, name: str) -> doc.ExplainDocument:
    """The points of a model as a table; those of equal layers are listed once, with * for the number of the layer."""
    points = hook_points(model)
    layers: dict[str, list[HookPoint]] = {}
    for point in points.values():
        layers.setdefault(re.sub(r"\b\d+\b", "*", point.name), []).append(point)
    rows = [[pattern, len(group), group[0].shape, group[0].meaning] for pattern, group in layers.items()]
    columns = {"name": "code", "points": "count", "shape": "text", "activation": "text"}
    caption = "B rows, T tokens, S keys, D width, H heads or units, K head width, F hidden; * stands for a number."

    def no_picture() -> str:
        raise UserError("--out: hook points have no picture; write a page (.html)")

    return doc.ExplainDocument(
        subject="hook points",
        title=f"{name}: {len(points)} hook points",
        summary="",
        page_title=f"Hook points of {name}",
        sections=[doc.Section("", [doc.Table("Hook points", columns, rows, caption)])],
        json={"points": [{"name": p.name, "shape": p.shape, "activation": p.meaning} for p in points.values()]},
        picture=no_picture,
    )


# Stacks of Transformer blocks


def block_stacks(backbone: Backbone) -> dict[str, Transformer]:
    """The stacks of Transformer blocks by name; empty for other families."""
    if isinstance(backbone, EncoderDecoder):
        return {"encoder": backbone.encoder, "decoder": backbone.decoder}
    return {"stack": backbone} if isinstance(backbone, Transformer) else {}


def need_block_stacks(backbone: Backbone, run: object) -> dict[str, Transformer]:
    """`block_stacks`, or an error for a family without a residual stream."""
    if stacks := block_stacks(backbone):
        return stacks
    streams = "two residual streams" if isinstance(backbone, BidirectionalTransformer) else "no residual stream"
    raise UserError(f"{run}: its {backbone.name} backbone has {streams} (families with one: {transformer_families()})")


def stack_prefix(stack: str) -> str:
    """What the names of a stack's hook points begin with."""
    return "" if stack == "stack" else f"{stack}."


def transformer_families() -> str:
    """The model families with Transformer blocks."""
    families = [name for name in BACKBONES.names() if issubclass(BACKBONES.get(name), Transformer | EncoderDecoder)]
    return ", ".join(families)
