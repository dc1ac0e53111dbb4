"""One token in one layer, forward and backward: every intermediate value, computed step by step as in a textbook.

B rows, T tokens, S keys, D width, H heads, K = D / H width of a head, F hidden. The steps are recomputed from the
layer's own weights; their output and their gradient must equal the model's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.errors import UserError, did_you_mean
from headstock.explain.document import Check
from headstock.explain.gradients import trainable_copy
from headstock.explain.hooks import need_block_stacks
from headstock.explain.targets import ExplainTarget, find_token, training_target
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.attention_mask import AttentionMask
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch
from headstock.model.layers import Attention, Block, FeedForward, Residual, apply_rotary
from headstock.model.model import Model

TOLERANCE = 1e-9  # of the recomputed output and gradient, relative to the largest value


@dataclass(frozen=True)
class Step:
    """One intermediate value of one token."""

    name: str
    part: str  # embedding (stream in later layers), attention, cross-attention or feed-forward
    formula: str
    columns: list[str]  # the tokens that the numbers belong to; empty for features
    forward: list[float]
    backward: list[float] | None  # the gradient of the loss; None for constants
    note: str = ""


@dataclass(frozen=True)
class LayerWalkthrough:
    """All steps of one token in one layer."""

    stack: str  # "stack"; "encoder" or "decoder" where there are two
    layer: int
    head: int
    position: int  # of the token, from 1
    tokens: list[str]
    sizes: dict[str, int]  # D, H, K, F
    norm: str
    loss: float
    target: str  # what the loss is computed over
    steps: list[Step]
    forward_error: float  # of the recomputed output, relative to the largest value
    backward_error: float  # of the recomputed gradient at the layer's input
    notes: list[str] = field(default_factory=list)

    @property
    def token(self) -> str:
        return self.tokens[self.position - 1]

    def checks(self) -> list[Check]:
        return [
            Check(
                "the steps reproduce the layer's output",
                self.forward_error < TOLERANCE,
                f"relative error {self.forward_error:.0e}",
            ),
            Check(
                "their gradient is that of the model's backward pass",
                self.backward_error < TOLERANCE,
                f"relative error {self.backward_error:.0e}",
            ),
        ]

    def select(self, names: Sequence[str]) -> "LayerWalkthrough":
        """The named steps only."""
        known = [step.name for step in self.steps]
        if unknown := next((name for name in names if name not in known), None):
            raise UserError(f"--step {unknown}: no such step{did_you_mean(unknown, known)} (have: {', '.join(known)})")
        return replace(self, steps=[step for step in self.steps if step.name in names])

    def to_dict(self) -> dict[str, Any]:
        """Infinities become null, since JSON has no infinity."""
        values = asdict(self)
        for step in values["steps"]:
            step["forward"] = [value if math.isfinite(value) else None for value in step["forward"]]
        return {"place": values.pop("position"), "wanted": values.pop("target")} | values | {"token": self.token}


def explain_layer(
    pipeline: Pipeline,
    texts: Sequence[str],
    *,
    layer: int = 1,
    head: int = 1,
    word: str | None = None,
    where: str | None = None,
    label: str | None = None,
) -> LayerWalkthrough:
    """One token in one layer and head; `word` is a token or its position from 1, by default the last."""
    stacks = need_block_stacks(pipeline.model.backbone, pipeline.run)
    if where is not None and where not in stacks:
        known = "one stack" if "stack" in stacks else "encoder, decoder"
        raise UserError(f"--where {where}: {pipeline.run} has no such part (it has {known})")
    target = training_target(pipeline, texts, label=label, visible=word)
    name = where or ("decoder" if "decoder" in stacks else "stack")
    for option, value, limit, what in (
        ("--layer", layer, len(stacks[name].blocks), "layers"),
        ("--head", head, stacks[name].config.heads, "heads"),
    ):
        if not 1 <= value <= limit:
            raise UserError(f"{option} {value}: {pipeline.run} has {limit} {what}, counted from 1")
    row = target.batch.source if name == "encoder" else target.batch
    assert row is not None
    tokens = token_names(pipeline, row, source=row is not target.batch)
    source = [] if target.batch.source is None else token_names(pipeline, target.batch.source, source=True)
    position = len(tokens) - 1 if word is None else find_token(tokens, word)
    if position is None:
        start = " ".join(tokens[:24]) + (" …" if len(tokens) > 24 else "")
        hint = did_you_mean(str(word), tokens)
        raise UserError(f"--word {word}: is no token of the text{hint}; {pipeline.run} reads: {start}")
    recorder = StepRecorder(head - 1, position, tokens, source)
    return walk_through(trainable_copy(pipeline.model), target, name, layer, recorder)


def token_names(pipeline: Pipeline, row: Batch, *, source: bool) -> list[str]:
    tokenizer = pipeline.tokenizer.source_tokenizer or pipeline.tokenizer if source else pipeline.tokenizer
    return display_tokens(tokenizer, row.tokens[0].tolist())


@dataclass
class BlockCall:
    """The inputs and the output of a block in a forward pass."""

    input: Tensor  # (B, T, D) H, a view used nowhere else
    mask: AttentionMask
    options: dict[str, Any]
    output: Tensor | None = None


def record_block(model: Model, block: Block, target: ExplainTarget) -> tuple[Tensor, BlockCall]:
    """The loss, and the call of one block on the way to it."""
    calls: list[BlockCall] = []

    def before(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x, mask = inputs
        calls.append(BlockCall(x.view_as(x), mask, options))
        return (calls[-1].input, mask), options

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        calls[-1].output = output

    handles = [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    try:
        with torch.enable_grad():
            return target.loss(model), calls[-1]
    finally:
        for handle in handles:
            handle.remove()


def walk_through(
    model: Model, target: ExplainTarget, name: str, layer: int, recorder: "StepRecorder"
) -> LayerWalkthrough:
    stack: Any = need_block_stacks(model.backbone, name)[name]
    block = stack.blocks[layer - 1]
    loss, call = record_block(model, block, target)
    assert call.output is not None
    received, passed = torch.autograd.grad(loss, [call.output, call.input], retain_graph=True)
    row = target.batch.source if name == "encoder" else target.batch
    assert row is not None
    with torch.enable_grad():
        if layer == 1:
            start = embed(recorder, stack, row)
        else:
            start = call.input.detach().requires_grad_()
            recorder.add("resid_pre", "stream", f"H = output of layer {layer - 1}", start, norm_note)
        output = apply_block(recorder, block, start, call)
    differentiable = [one.value for one in recorder.steps if one.value.requires_grad]
    gradients = torch.autograd.grad(output, differentiable, received, allow_unused=True, materialize_grads=True)
    by_id = {id(tensor): gradient for tensor, gradient in zip(differentiable, gradients, strict=True)}
    config = stack.config
    return LayerWalkthrough(
        stack=name,
        layer=layer,
        head=recorder.head + 1,
        position=recorder.position + 1,
        tokens=recorder.tokens,
        sizes={"D": config.width, "H": config.heads, "K": config.width // config.heads, "F": config.hidden},
        norm=config.norm,
        loss=float(loss.detach()),
        target=target.description,
        steps=[recorder.step(one, by_id) for one in recorder.steps],
        forward_error=relative_error(output, call.output),
        backward_error=relative_error(by_id[id(start)], passed),
        notes=list(target.notes),
    )


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-300))


@dataclass(frozen=True)
class RecordedStep:
    """One step for all tokens."""

    name: str
    part: str
    formula: str
    value: Tensor  # (B, T, ·), or (B, H, T, ·) per head
    note: Callable[[Tensor], str]
    columns: list[str]


@dataclass
class StepRecorder:
    """Collects the steps in the order of computation."""

    head: int
    position: int
    tokens: list[str]
    source: list[str]
    steps: list[RecordedStep] = field(default_factory=list)
    input_symbol: str = "x"  # of the current sublayer

    def add(
        self,
        name: str,
        part: str,
        formula: str,
        value: Tensor,
        note: Callable[[Tensor], str] | str = "",
        columns: list[str] | None = None,
    ) -> Tensor:
        note_of = (lambda _: note) if isinstance(note, str) else note
        self.steps.append(RecordedStep(name, part, formula, value, note_of, columns or []))
        return value

    def own(self, value: Tensor) -> Tensor:
        """The numbers of the one token, in the one head."""
        return value.detach()[0, self.position] if value.dim() == 3 else value.detach()[0, self.head, self.position]

    def step(self, one: RecordedStep, gradients: dict[int, Tensor]) -> Step:
        own, gradient = self.own(one.value), gradients.get(id(one.value))
        backward = None if gradient is None else self.own(gradient).tolist()
        return Step(one.name, one.part, one.formula, one.columns, own.tolist(), backward, one.note(own))


# The layer, as in a textbook


def embed(recorder: StepRecorder, stack: Transformer, batch: Batch) -> Tensor:
    """(B, T, D) the input of the first layer."""
    config, part = stack.config, "embedding"
    x = recorder.add("token", part, "e = E[w], the token's row of the embedding", stack.tokens.weight[batch.tokens])
    terms = ["e"]
    if config.embed_scale:
        scaled = x * math.sqrt(config.width)
        x, terms = recorder.add("token scaled", part, f"√D · e, D = {config.width}", scaled), ["√D · e"]
    positions = stack.token_positions(batch, None).expand_as(batch.tokens)
    if config.positions != "rotary":
        table = stack.waves if stack.positions is None else stack.positions.weight
        kind = "sines and cosines, fixed" if stack.positions is None else "learned"
        note = f"t = {int(positions[0, recorder.position])}"
        x, terms = x + recorder.add("position", part, f"p = P[t], {kind}", table[positions], note), [*terms, "p"]
    if stack.segments is not None:
        segments = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
        row = recorder.add("segment", part, "g = G[segment]", stack.segments.weight[segments])
        x, terms = x + row, [*terms, "g"]
    total = " + ".join(terms)
    if stack.embed_norm is not None:
        recorder.add("embedding sum", part, f"S = {total}", x, spread_note)
        x, total = stack.embed_norm(x), f"N(S){norm_formula(stack.embed_norm, 'S')}"
    elif len(terms) == 1:
        x = x.view_as(x)  # a tensor of its own, so that both steps have a gradient
    return recorder.add("resid_pre", part, f"H = {total}", x, norm_note)


def apply_block(recorder: StepRecorder, block: Block, x: Tensor, call: BlockCall) -> Tensor:
    """(B, T, D) the output of the block."""
    rotation = call.options.get("rotation")

    def self_attention(h: Tensor) -> Tensor:
        attention, part = block.attention, "attention"
        query, key, value = attention.split_heads(attention.inputs(h), 3)
        bias = attention.inputs.bias is not None
        for name, symbol, vector in (("query", "q", query), ("key", "k", key), ("value", "v", value)):
            plus = f" + b_{symbol.upper()}" if bias else ""
            recorder.add(name, part, f"{symbol} = W_{symbol.upper()} {recorder.input_symbol}{plus}", vector)
        if attention.query_norm is not None and attention.key_norm is not None:
            query = recorder.add("query normalized", part, "q / √mean(q²) · g", attention.query_norm(query))
            key = recorder.add("key normalized", part, "k / √mean(k²) · g", attention.key_norm(key))
        if rotation is not None:
            query = recorder.add(
                "query rotated", part, "R(t) q, rotated by its position", apply_rotary(query, rotation)
            )
            key = recorder.add("key rotated", part, "R(t) k, rotated by its position", apply_rotary(key, rotation))
        return attend(recorder, attention, query, key, value, call.mask, recorder.tokens, part)

    def cross_attention(h: Tensor) -> Tensor:
        attention, part = block.cross, "cross-attention"
        assert attention is not None
        key, value = call.options["memory"]
        width, inputs = h.size(-1), attention.inputs
        bias = None if inputs.bias is None else inputs.bias[:width]
        (query,) = attention.split_heads(F.linear(h, inputs.weight[:width], bias), 1)
        plus = " + b_Q" if bias is not None else ""
        recorder.add("cross query", part, f"q = W_Q {recorder.input_symbol}{plus}", query)
        if attention.query_norm is not None:
            query = recorder.add("cross query normalized", part, "q / √mean(q²) · g", attention.query_norm(query))
        return attend(recorder, attention, query, key, value, call.options["memory_mask"], recorder.source, part)

    x = apply_residual(recorder, block.around_attention, x, self_attention, "attention", "resid_mid")
    if block.around_cross is not None:
        x = apply_residual(recorder, block.around_cross, x, cross_attention, "cross-attention", "resid_cross")
    return apply_residual(
        recorder, block.around_feed, x, lambda h: feed_forward(recorder, block.feed, h), "feed-forward", "resid_post"
    )


def attend(
    recorder: StepRecorder,
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    tokens: list[str],
    part: str,
) -> Tensor:
    """(B, T, D): scores, mask, softmax, weighted values, concatenated heads, and the output projection."""
    prefix, width = "cross " if part == "cross-attention" else "", query.size(-1)
    product = recorder.add(f"{prefix}products", part, "q · k of each token", query @ key.mT, columns=tokens)
    scaled = f"s = q · k / √K, K = D / H = {width}"
    score = recorder.add(f"{prefix}scores", part, scaled, product / math.sqrt(width), columns=tokens)
    allowed = mask.dense(query.size(2), key.size(2), query.device)
    bias = torch.zeros_like(score).masked_fill(~allowed, -torch.inf).detach()
    recorder.add(f"{prefix}mask", part, "m = 0, or −∞ where masked", bias, columns=tokens)
    weights = (score + bias).softmax(-1)
    recorder.add(f"{prefix}weights", part, "a = softmax(s + m)", weights, lambda a: f"sum {a.sum():.3f}", tokens)
    one = recorder.add(f"{prefix}head", part, "z = Σ a · v, the head's own K numbers", weights @ value)
    heads = one.transpose(1, 2).flatten(2)  # (B, H, T, K) -> (B, T, D)
    recorder.add(f"{prefix}heads", part, f"Z = z₁ … z_H concatenated, H = {attention.heads}", heads)
    plus = " + b_O" if attention.output.bias is not None else ""
    return recorder.add(f"{prefix}output", part, f"o = W_O Z{plus}", attention.output(heads), norm_note)


def feed_forward(recorder: StepRecorder, feed: FeedForward, x: Tensor) -> Tensor:
    """(B, T, D): up to F numbers, the activation, and down again."""
    part, plus = "feed-forward", (" + b₁", " + b₂") if feed.up.bias is not None else ("", "")
    function = getattr(feed.activation, "__name__", "gelu")  # GPT-2's is a partial of gelu
    up = recorder.add("hidden", part, f"u = W₁ {recorder.input_symbol}{plus[0]}", feed.up(x))
    if feed.gate is None:
        note = dead_note if function == "relu" else ""
        activation = recorder.add("activation", part, f"{function}(u)", feed.activation(up), note)
    else:
        gate = recorder.add("gate", part, f"g = W_g {recorder.input_symbol}", feed.gate(x))
        activation = recorder.add("activation", part, f"{function}(g) · u", feed.activation(gate) * up)
    return recorder.add("feed-forward", part, f"f = W₂ activation{plus[1]}", feed.down(activation), norm_note)


def apply_residual(
    recorder: StepRecorder,
    residual: Residual,
    x: Tensor,
    sublayer: Callable[[Tensor], Tensor],
    part: str,
    point: str,
) -> Tensor:
    """(B, T, D) a sublayer with its skip connection and its norm, before or after."""
    before = {"resid_mid": "H", "resid_cross": "resid_mid"}.get(point, recorder.steps[-1].name)
    added = "f" if part == "feed-forward" else "o"
    formula = norm_formula(residual.norm, "S" if residual.post else before)
    recorder.input_symbol = before if residual.post else "x"
    if residual.post:
        total = x + sublayer(x)
        recorder.add(f"{part} sum", part, f"S = {before} + {added}", total, spread_note)
        return recorder.add(point, part, f"N(S){formula}", residual.norm(total), norm_note)
    normed = recorder.add(f"{part} norm", part, f"x = N({before}){formula}", residual.norm(x), norm_note)
    return recorder.add(point, part, f"{before} + {added}", x + sublayer(normed), norm_note)


def norm_formula(norm: nn.Module, symbol: str) -> str:
    if isinstance(norm, nn.LayerNorm):
        return f" = ({symbol} − mean) / deviation · g" + (" + b" if norm.bias is not None else "")
    return f" = {symbol} / √mean({symbol}²) · g"


def norm_note(values: Tensor) -> str:
    return f"norm {values.norm():.3f}"


def spread_note(values: Tensor) -> str:
    return f"mean {values.mean():.3f}, deviation {values.std(correction=0):.3f}"


def dead_note(values: Tensor) -> str:
    return f"{int((values == 0).sum())} of {len(values)} are 0"
