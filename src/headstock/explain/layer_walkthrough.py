"""One token in one layer, forward and backward: every intermediate value, computed step by step as in a textbook.

B rows, T tokens, S keys, D width, H heads, K = D / H width of a head, F hidden. The steps are recomputed from the
layer's own weights; their output and their gradient must equal the model's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.errors import UserError, did_you_mean
from headstock.explain.document import Check
from headstock.explain.gradients import trainable_copy
from headstock.explain.hooks import need_block_stacks
from headstock.explain.inputs import ExplainTarget, training_target
from headstock.explain.residual_connections import record_calls
from headstock.explain.subject import find_token, row_tokens
from headstock.inference.pipeline import Pipeline
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
        claims = {
            "the steps reproduce the layer's output": self.forward_error,
            "their gradient is that of the model's backward pass": self.backward_error,
        }
        return [Check(claim, error < TOLERANCE, f"relative error {error:.0e}") for claim, error in claims.items()]

    def select(self, names: Sequence[str]) -> "LayerWalkthrough":
        """The named steps only."""
        steps = [step.name for step in self.steps]
        if unknown := next((name for name in names if name not in steps), None):
            raise UserError(f"--step {unknown}: no such step{did_you_mean(unknown, steps)} (have: {', '.join(steps)})")
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
        names = "one stack" if "stack" in stacks else "encoder, decoder"
        raise UserError(f"--where {where}: {pipeline.run} has no such part (it has {names})")
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
    tokens = row_tokens(pipeline, row, source=row is not target.batch)
    source = [] if target.batch.source is None else row_tokens(pipeline, target.batch.source, source=True)
    position = len(tokens) - 1 if word is None else find_token(tokens, word)
    if position is None:
        start = " ".join(tokens[:24]) + (" …" if len(tokens) > 24 else "")
        hint = did_you_mean(str(word), tokens)
        raise UserError(f"--word {word}: is no token of the text{hint}; {pipeline.run} reads: {start}")
    recorder = StepRecorder(head - 1, position, tokens, source)
    return walk_through(trainable_copy(pipeline.model), target, name, layer, recorder)


class BlockCall(NamedTuple):
    """The inputs and the output of a block in a forward pass."""

    input: Tensor  # (B, T, D) H, a view used nowhere else
    mask: AttentionMask
    options: dict[str, Any]
    output: Tensor


def walk_through(
    model: Model, target: ExplainTarget, name: str, layer: int, recorder: "StepRecorder"
) -> LayerWalkthrough:
    stack: Any = need_block_stacks(model.backbone, name)[name]
    block, calls = stack.blocks[layer - 1], []
    row = target.batch.source if name == "encoder" else target.batch
    assert row is not None

    def record(_: int, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        x, mask = inputs
        calls.append(BlockCall(x, mask, options, output))

    with torch.enable_grad():
        with record_calls({layer: block}, record):
            loss = target.loss(model)
        (call,) = calls
        received, passed = torch.autograd.grad(loss, [call.output, call.input], retain_graph=True)
        if layer == 1:
            start = embed(recorder, stack, row)
        else:
            start = call.input.detach().requires_grad_()
            recorder.part = "stream"
            recorder.add("resid_pre", f"H = output of layer {layer - 1}", start, norm_note)
        output = apply_block(recorder, block, start, call)
    gradients = recorder.gradients(output, received)
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
        steps=recorder.finished_steps(gradients),
        forward_error=relative_error(output, call.output),
        backward_error=relative_error(gradients[id(start)], passed),
        notes=list(target.notes),
    )


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-300))


@dataclass
class StepRecorder:
    """Collects the steps of one token and head in the order of computation."""

    head: int
    position: int
    tokens: list[str]
    source: list[str]
    part: str = "embedding"  # of the layer, which later steps belong to
    input_symbol: str = "x"  # of the current sublayer
    steps: list[Step] = field(default_factory=list)  # without gradients
    values: list[Tensor] = field(default_factory=list)  # for all tokens: (B, T, ·), or (B, H, T, ·) per head

    def add(
        self,
        name: str,
        formula: str,
        value: Tensor,
        note: Callable[[Tensor], str] | str = "",
        columns: Sequence[str] = (),
    ) -> Tensor:
        own = self.own(value)
        note = note if isinstance(note, str) else note(own)
        self.steps.append(Step(name, self.part, formula, list(columns), own.tolist(), None, note))
        self.values.append(value)
        return value

    def own(self, value: Tensor) -> Tensor:
        """The numbers of the one token, in the one head."""
        return value.detach()[0, self.position] if value.dim() == 3 else value.detach()[0, self.head, self.position]

    def gradients(self, output: Tensor, received: Tensor) -> dict[int, Tensor]:
        """The gradients of all values that are not constants, by the id of the tensor."""
        tensors = [value for value in self.values if value.requires_grad]
        gradients = torch.autograd.grad(output, tensors, received, allow_unused=True, materialize_grads=True)
        return {id(tensor): gradient for tensor, gradient in zip(tensors, gradients, strict=True)}

    def finished_steps(self, gradients: dict[int, Tensor]) -> list[Step]:
        return [
            replace(step, backward=self.own(gradients[id(value)]).tolist()) if id(value) in gradients else step
            for step, value in zip(self.steps, self.values, strict=True)
        ]


# The layer, as in a textbook


def embed(recorder: StepRecorder, stack: Transformer, batch: Batch) -> Tensor:
    """(B, T, D) the input of the first layer."""
    config = stack.config
    x = recorder.add("token", "e = E[w], the token's row of the embedding", stack.tokens.weight[batch.tokens])
    terms = ["e"]
    if config.embed_scale:
        x = recorder.add("token scaled", f"√D · e, D = {config.width}", x * math.sqrt(config.width))
        terms = ["√D · e"]
    positions = stack.token_positions(batch, None).expand_as(batch.tokens)
    if config.positions in ("learned", "sinusoidal"):
        table = stack.waves if stack.positions is None else stack.positions.weight
        kind = "sines and cosines, fixed" if stack.positions is None else "learned"
        note = f"t = {int(positions[0, recorder.position])}"
        x = x + recorder.add("position", f"p = P[t], {kind}", table[positions], note)
        terms.append("p")
    if stack.segments is not None:
        segments = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
        x = x + recorder.add("segment", "g = G[segment]", stack.segments.weight[segments])
        terms.append("g")
    total = " + ".join(terms)
    if stack.embed_norm is not None:
        recorder.add("embedding sum", f"S = {total}", x, spread_note)
        x, total = stack.embed_norm(x), f"N(S){norm_formula(stack.embed_norm, 'S')}"
    elif len(terms) == 1:
        x = x.view_as(x)  # a tensor of its own, so that both steps have a gradient
    return recorder.add("resid_pre", f"H = {total}", x, norm_note)


def apply_block(recorder: StepRecorder, block: Block, x: Tensor, call: BlockCall) -> Tensor:
    """(B, T, D) the output of the block."""
    rotation = call.options.get("rotation")

    def self_attention(h: Tensor) -> Tensor:
        attention = block.attention
        query, key, value = attention.split_heads(attention.inputs(h), 3)
        for name, symbol, vector in (("query", "q", query), ("key", "k", key), ("value", "v", value)):
            recorder.add(name, projection_formula(symbol, attention, recorder.input_symbol), vector)
        if attention.query_norm is not None and attention.key_norm is not None:
            query = recorder.add("query normalized", "q / √mean(q²) · g", attention.query_norm(query))
            key = recorder.add("key normalized", "k / √mean(k²) · g", attention.key_norm(key))
        if rotation is not None:
            query = recorder.add("query rotated", "R(t) q, rotated by its position", apply_rotary(query, rotation))
            key = recorder.add("key rotated", "R(t) k, rotated by its position", apply_rotary(key, rotation))
        return attend(recorder, attention, (query, key, value), call.mask, recorder.tokens)

    def cross_attention(h: Tensor) -> Tensor:
        attention = block.cross
        assert attention is not None
        width, inputs = h.size(-1), attention.inputs
        bias = None if inputs.bias is None else inputs.bias[:width]
        (query,) = attention.split_heads(F.linear(h, inputs.weight[:width], bias), 1)
        recorder.add("cross query", projection_formula("q", attention, recorder.input_symbol), query)
        if attention.query_norm is not None:
            query = recorder.add("cross query normalized", "q / √mean(q²) · g", attention.query_norm(query))
        vectors, mask = (query, *call.options["memory"]), call.options["memory_mask"]
        return attend(recorder, attention, vectors, mask, recorder.source, prefix="cross ")

    recorder.part = "attention"
    x = apply_residual(recorder, block.around_attention, x, self_attention, "resid_mid")
    if block.around_cross is not None:
        recorder.part = "cross-attention"
        x = apply_residual(recorder, block.around_cross, x, cross_attention, "resid_cross")
    recorder.part = "feed-forward"
    return apply_residual(recorder, block.around_feed, x, partial(feed_forward, recorder, block.feed), "resid_post")


def projection_formula(symbol: str, attention: Attention, input_symbol: str) -> str:
    """`q = W_Q x + b_Q`."""
    bias = "" if attention.inputs.bias is None else f" + b_{symbol.upper()}"
    return f"{symbol} = W_{symbol.upper()} {input_symbol}{bias}"


def attend(
    recorder: StepRecorder,
    attention: Attention,
    vectors: tuple[Tensor, Tensor, Tensor],
    mask: AttentionMask,
    tokens: list[str],
    prefix: str = "",
) -> Tensor:
    """(B, T, D): scores, mask, softmax, weighted values, concatenated heads, and the output projection."""
    query, key, value = vectors  # (B, H, T, K), (B, H, S, K) twice
    width = query.size(-1)
    product = recorder.add(f"{prefix}products", "q · k of each token", query @ key.mT, columns=tokens)
    scaled = f"s = q · k / √K, K = D / H = {width}"
    score = recorder.add(f"{prefix}scores", scaled, product / math.sqrt(width), columns=tokens)
    allowed = mask.dense(query.size(2), key.size(2), query.device)
    if mask.bias is not None:
        relative = mask.bias.masked_fill(~allowed, 0).expand_as(score)
        score = score + recorder.add(f"{prefix}relative", "r, learned for the distance", relative, columns=tokens)
    bias = torch.zeros_like(score).masked_fill(~allowed, -torch.inf).detach()
    recorder.add(f"{prefix}mask", "m = 0, or −∞ where masked", bias, columns=tokens)
    weights = (score + bias).softmax(-1)
    formula = "a = softmax(s + m)" if mask.bias is None else "a = softmax(s + r + m)"
    recorder.add(f"{prefix}weights", formula, weights, lambda a: f"sum {a.sum():.3f}", tokens)
    head = recorder.add(f"{prefix}head", "z = Σ a · v, the head's own K numbers", weights @ value)
    heads = head.transpose(1, 2).flatten(2)  # (B, H, T, K) -> (B, T, D)
    recorder.add(f"{prefix}heads", f"Z = z₁ … z_H concatenated, H = {attention.heads}", heads)
    plus = " + b_O" if attention.output.bias is not None else ""
    return recorder.add(f"{prefix}output", f"o = W_O Z{plus}", attention.output(heads), norm_note)


def feed_forward(recorder: StepRecorder, feed: FeedForward, x: Tensor) -> Tensor:
    """(B, T, D): up to F numbers, the activation, and down again."""
    plus = (" + b₁", " + b₂") if feed.up.bias is not None else ("", "")
    function = getattr(feed.activation, "__name__", "gelu")  # GPT-2's is a partial of gelu
    up = recorder.add("hidden", f"u = W₁ {recorder.input_symbol}{plus[0]}", feed.up(x))
    if feed.outer:
        down = recorder.add("projection", f"v = W₂ u{plus[1]}", feed.down(up))
        return recorder.add("feed-forward", f"f = {function}(v)", feed.activation(down), norm_note)
    if feed.gate is None:
        note = dead_note if function == "relu" else ""
        activation = recorder.add("activation", f"{function}(u)", feed.activation(up), note)
    else:
        gate = recorder.add("gate", f"g = W_g {recorder.input_symbol}", feed.gate(x))
        activation = recorder.add("activation", f"{function}(g) · u", feed.activation(gate) * up)
    return recorder.add("feed-forward", f"f = W₂ activation{plus[1]}", feed.down(activation), norm_note)


def apply_residual(
    recorder: StepRecorder, residual: Residual, x: Tensor, sublayer: Callable[[Tensor], Tensor], point: str
) -> Tensor:
    """(B, T, D) a sublayer with its skip connection and its norm, before or after."""
    before = {"resid_mid": "H", "resid_cross": "resid_mid"}.get(point, recorder.steps[-1].name)
    added = "f" if recorder.part == "feed-forward" else "o"
    total = f"{before} + {added}" if residual.skip else added
    if residual.post:
        recorder.input_symbol = before
        summed = recorder.add(f"{recorder.part} sum", f"S = {total}", combine(residual, x, sublayer(x)), spread_note)
        return recorder.add(point, f"N(S){norm_formula(residual.norm, 'S')}", residual.norm(summed), norm_note)
    normed, recorder.input_symbol = x, before
    if not isinstance(residual.norm, nn.Identity):
        formula = f"x = N({before}){norm_formula(residual.norm, before)}"
        normed, recorder.input_symbol = recorder.add(f"{recorder.part} norm", formula, residual.norm(x), norm_note), "x"
    return recorder.add(point, total, combine(residual, x, sublayer(normed)), norm_note)


def combine(residual: Residual, x: Tensor, update: Tensor) -> Tensor:
    """The sum before any norm; without a skip connection, a view of the update, so that both have a gradient."""
    return x + update if residual.skip else update.view_as(update)


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
