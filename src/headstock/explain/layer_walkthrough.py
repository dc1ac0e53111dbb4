"""One token on its way through one layer, forward and backward, every number of it: the textbook's steps, one by one.

B rows, T tokens, S tokens that are looked at, D width, H heads, K = D / H a head's width, F hidden. The steps are made
from the layer's own weights beside the model, and must end where the model itself ends, in both directions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.errors import UserError, did_you_mean
from headstock.explain.gradients import doubled
from headstock.explain.hooks import need_stacks
from headstock.explain.targets import Asked, lesson, place_of
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.attention_mask import AttentionMask
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch
from headstock.model.layers import Attention, Block, FeedForward, Residual, apply_rotary
from headstock.model.model import Model


@dataclass(frozen=True)
class Step:
    """One line of the textbook for one token."""

    name: str
    part: str  # embedding (of a later layer, stream), attention, cross-attention or feed-forward
    formula: str
    columns: list[str]  # what each number is of: the tokens that are looked at, or nothing for features
    forward: list[float]
    backward: list[float] | None  # the gradient of the loss by each number; None where a number is fixed
    note: str = ""


@dataclass(frozen=True)
class Walk:
    """A token's whole way through a layer."""

    stack: str  # "stack" where there is one; "encoder" or "decoder" where there are two
    layer: int
    head: int
    place: int  # of the token, from 1
    tokens: list[str]
    sizes: dict[str, int]  # D, H, K, F
    norm: str
    loss: float
    wanted: str  # what the loss is that of
    steps: list[Step]
    forward_error: float  # of where the steps end, beside where the model ends, as a share of the largest number
    backward_error: float  # the same of the gradient that they hand down
    notes: list[str] = field(default_factory=list)

    @property
    def token(self) -> str:
        return self.tokens[self.place - 1]

    def facts(self) -> dict[str, Any]:
        """Minus infinity is null, which JSON has no number for."""
        told = asdict(self) | {"token": self.token}
        for step in told["steps"]:
            step["forward"] = [value if math.isfinite(value) else None for value in step["forward"]]
        return told


def walk(
    loaded: Pipeline,
    texts: Sequence[str],
    *,
    layer: int = 1,
    head: int = 1,
    word: str | None = None,
    where: str | None = None,
    label: str | None = None,
) -> Walk:
    """A token of a text, the last unless a word or its place (from 1) is named, through one layer and head."""
    stacks = need_stacks(loaded.model.backbone, loaded.run)
    if where is not None and where not in stacks:
        have = "one stack" if "stack" in stacks else "encoder, decoder"
        raise UserError(f"--where {where}: {loaded.run} has no such part (it has {have})")
    asked = lesson(loaded, texts, label=label, shown=word)
    name = where or ("decoder" if "decoder" in stacks else "stack")
    check_number("--layer", layer, len(stacks[name].blocks), "layers", loaded)
    check_number("--head", head, stacks[name].config.heads, "heads", loaded)
    row = asked.batch.source if name == "encoder" else asked.batch
    assert row is not None
    tokens, source = (names_of(loaded, part, part is not asked.batch) for part in (row, asked.batch.source))
    place = len(tokens) - 1 if word is None else place_of(tokens, word)
    if place is None:
        cut = " ".join(tokens[:24]) + (" …" if len(tokens) > 24 else "")
        near = did_you_mean(str(word), tokens)
        raise UserError(f"--word {word}: is no token of the text{near}; {loaded.run} reads: {cut}")
    return follow(doubled(loaded.model), asked, name, layer, head, place, tokens, source)


def check_number(option: str, given: int, most: int, what: str, loaded: Pipeline) -> None:
    if not 1 <= given <= most:
        raise UserError(f"{option} {given}: {loaded.run} has {most} {what}, counted from 1")


def names_of(loaded: Pipeline, row: Batch | None, read: bool) -> list[str]:
    if row is None:
        return []
    tokenizer = loaded.tokenizer.source_tokenizer or loaded.tokenizer if read else loaded.tokenizer
    return display_tokens(tokenizer, row.tokens[0].tolist())


# What the layer is given, and what becomes of it


@dataclass
class Met:
    """What a block was called with, and what it gave."""

    given: Tensor  # (B, T, D) H, a view that nothing else uses
    mask: AttentionMask
    more: dict[str, Any]
    made: Tensor | None = None


def meet(model: Model, block: Block, asked: Asked) -> tuple[Tensor, Met]:
    """The loss, with what passed one block on the way to it."""
    met: list[Met] = []

    def before(module: nn.Module, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        x, mask = given
        met.append(Met(x.view_as(x), mask, more))
        return (met[-1].given, mask), more

    def after(module: nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
        met[-1].made = made

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    try:
        with torch.enable_grad():
            return asked.loss(model), met[-1]
    finally:
        for hook in hooks:
            hook.remove()


def follow(
    model: Model, asked: Asked, name: str, layer: int, head: int, place: int, tokens: list[str], source: list[str]
) -> Walk:
    stack: Any = need_stacks(model.backbone, name)[name]
    block = stack.blocks[layer - 1]
    loss, met = meet(model, block, asked)
    assert met.made is not None
    received, passed = torch.autograd.grad(loss, [met.made, met.given], retain_graph=True)
    row = asked.batch.source if name == "encoder" else asked.batch
    assert row is not None
    trail = Trail(head - 1, place, tokens, source)
    with torch.enable_grad():
        if layer == 1:
            begun = embedded(trail, stack, row)
        else:
            begun = met.given.detach().requires_grad_()
            trail.add("resid_pre", "stream", f"H = what layer {layer - 1} gave", begun, length_of)
        made = through(trail, block, begun, met)
    wanted = [one.value for one in trail.made if one.value.requires_grad]
    gradients = torch.autograd.grad(made, wanted, received, allow_unused=True, materialize_grads=True)
    back = {id(tensor): gradient for tensor, gradient in zip(wanted, gradients, strict=True)}
    c = stack.config
    return Walk(
        stack=name,
        layer=layer,
        head=head,
        place=place + 1,
        tokens=tokens,
        sizes={"D": c.width, "H": c.heads, "K": c.width // c.heads, "F": c.hidden},
        norm=c.norm,
        loss=float(loss.detach()),
        wanted=asked.wanted,
        steps=[trail.told(one, back) for one in trail.made],
        forward_error=apart(made, met.made),
        backward_error=apart(back[id(begun)], passed),
        notes=list(asked.notes),
    )


def apart(found: Tensor, true: Tensor) -> float:
    return float((found - true).detach().abs().max() / true.detach().abs().max().clamp(min=1e-300))


@dataclass(frozen=True)
class Made:
    """One step for all tokens at once."""

    name: str
    part: str
    formula: str
    value: Tensor  # (B, T, ·), or (B, H, T, ·) where heads work apart
    note: Callable[[Tensor], str]
    columns: list[str]


@dataclass
class Trail:
    """The steps in the order in which they are made."""

    head: int
    place: int
    tokens: list[str]
    source: list[str]
    made: list[Made] = field(default_factory=list)
    letter: str = "x"  # what a sublayer is given

    def add(
        self,
        name: str,
        part: str,
        formula: str,
        value: Tensor,
        note: Callable[[Tensor], str] | str = "",
        columns: list[str] | None = None,
    ) -> Tensor:
        told = (lambda one: note) if isinstance(note, str) else note
        self.made.append(Made(name, part, formula, value, told, columns or []))
        return value

    def here(self, value: Tensor) -> Tensor:
        """The one token's numbers, in the one head."""
        return value.detach()[0, self.place] if value.dim() == 3 else value.detach()[0, self.head, self.place]

    def told(self, one: Made, back: dict[int, Tensor]) -> Step:
        mine = self.here(one.value)
        gradient = back.get(id(one.value))
        backward = None if gradient is None else self.here(gradient).tolist()
        return Step(one.name, one.part, one.formula, one.columns, mine.tolist(), backward, one.note(mine))


# The textbook


def embedded(trail: Trail, stack: Transformer, batch: Batch) -> Tensor:
    """(B, T, D) what stands for each token before the first layer."""
    c, part = stack.config, "embedding"
    x = trail.add("token", part, "e = E[w], the token's row of the table", stack.tokens.weight[batch.tokens])
    terms = ["e"]
    if c.embed_scale:
        x, terms = trail.add("token scaled", part, f"√D · e, D = {c.width}", x * math.sqrt(c.width)), ["√D · e"]
    places = stack.token_positions(batch, None).expand_as(batch.tokens)
    if c.positions != "rotary":
        table = stack.waves if stack.positions is None else stack.positions.weight
        kind = "sines and cosines, fixed" if stack.positions is None else "learned"
        note = f"t = {int(places[0, trail.place])}"
        x, terms = x + trail.add("position", part, f"p = P[t], {kind}", table[places], note), [*terms, "p"]
    if stack.segments is not None:
        kinds = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
        kind_row = trail.add("segment", part, "g = G[which of two texts]", stack.segments.weight[kinds])
        x, terms = x + kind_row, [*terms, "g"]
    total = " + ".join(terms)
    if stack.embed_norm is not None:
        trail.add("embedding sum", part, f"S = {total}", x, spread_of)
        x, total = stack.embed_norm(x), f"N(S){norm_words(stack.embed_norm, 'S')}"
    elif len(terms) == 1:
        x = x.view_as(x)  # a step of its own, though nothing is added
    return trail.add("resid_pre", part, f"H = {total}", x, length_of)


def through(trail: Trail, block: Block, x: Tensor, met: Met) -> Tensor:
    """(B, T, D) what leaves the block."""
    rotation = met.more.get("rotation")

    def attend(h: Tensor) -> Tensor:
        query, key, value = block.attention.split(block.attention.inputs(h), 3)
        bias = block.attention.inputs.bias is not None
        for name, letter, vector in (("query", "q", query), ("key", "k", key), ("value", "v", value)):
            capital = letter.upper()
            trail.add(
                name, "attention", f"{letter} = W_{capital} {trail.letter}{f' + b_{capital}' if bias else ''}", vector
            )
        if block.attention.query_norm is not None and block.attention.key_norm is not None:
            query = trail.add("query normed", "attention", "q / √mean(q²) · g", block.attention.query_norm(query))
            key = trail.add("key normed", "attention", "k / √mean(k²) · g", block.attention.key_norm(key))
        if rotation is not None:
            query = trail.add(
                "query turned", "attention", "R(t) q, by the angles of its place", apply_rotary(query, rotation)
            )
            key = trail.add(
                "key turned", "attention", "R(t) k, by the angles of its place", apply_rotary(key, rotation)
            )
        return mixed(trail, block.attention, query, key, value, met.mask, trail.tokens, "attention")

    def look_across(h: Tensor) -> Tensor:
        assert block.cross is not None
        key, value = met.more["memory"]
        width, inputs = h.size(-1), block.cross.inputs
        bias = None if inputs.bias is None else inputs.bias[:width]
        (query,) = block.cross.split(F.linear(h, inputs.weight[:width], bias), 1)
        trail.add(
            "cross query", "cross-attention", f"q = W_Q {trail.letter}{' + b_Q' if bias is not None else ''}", query
        )
        if block.cross.query_norm is not None:
            query = trail.add(
                "cross query normed", "cross-attention", "q / √mean(q²) · g", block.cross.query_norm(query)
            )
        return mixed(trail, block.cross, query, key, value, met.more["memory_mask"], trail.source, "cross-attention")

    x = around(trail, block.around_attention, x, attend, "attention", "resid_mid")
    if block.around_cross is not None:
        x = around(trail, block.around_cross, x, look_across, "cross-attention", "resid_cross")
    return around(trail, block.around_feed, x, lambda h: feed(trail, block.feed, h), "feed-forward", "resid_post")


def mixed(
    trail: Trail,
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    tokens: list[str],
    part: str,
) -> Tensor:
    """(B, T, D): scores, mask, softmax, values, heads side by side, and the output's product."""
    prefix, width = "cross " if part == "cross-attention" else "", query.size(-1)
    product = trail.add(f"{prefix}products", part, "q · k, with the key of each token", query @ key.mT, columns=tokens)
    scaled = f"s = q · k / √K, K = D / H = {width}"
    score = trail.add(f"{prefix}scores", part, scaled, product / math.sqrt(width), columns=tokens)
    allowed = mask.dense(query.size(2), key.size(2), query.device)
    hidden = torch.zeros_like(score).masked_fill(~allowed, -torch.inf).detach()
    trail.add(f"{prefix}mask", part, "m = 0, or −∞ where it may not look", hidden, columns=tokens)
    share = (score + hidden).softmax(-1)
    trail.add(f"{prefix}weights", part, "a = softmax(s + m)", share, lambda a: f"sum {a.sum():.3f}", tokens)
    one = trail.add(f"{prefix}head", part, "z = Σ a · v, the head's own K numbers", share @ value)
    all_heads = one.transpose(1, 2).flatten(2)  # (B, H, T, K) -> (B, T, D)
    trail.add(f"{prefix}heads", part, f"Z = z₁ … z_H side by side, H = {attention.heads}", all_heads)
    plus = " + b_O" if attention.output.bias is not None else ""
    return trail.add(f"{prefix}output", part, f"o = W_O Z{plus}", attention.output(all_heads), length_of)


def feed(trail: Trail, part: FeedForward, x: Tensor) -> Tensor:
    """(B, T, D): up to F numbers, bent, and down again."""
    name, plus = "feed-forward", (" + b₁", " + b₂") if part.up.bias is not None else ("", "")
    bend = getattr(part.activation, "__name__", "gelu")  # GPT-2's is a partial of it
    up = trail.add("hidden", name, f"u = W₁ {trail.letter}{plus[0]}", part.up(x))
    if part.gate is None:
        bent = trail.add("bent", name, f"{bend}(u)", part.activation(up), dead if bend == "relu" else "")
    else:
        gate = trail.add("gate", name, f"g = W_g {trail.letter}", part.gate(x))
        bent = trail.add("bent", name, f"{bend}(g) · u", part.activation(gate) * up)
    return trail.add("feed-forward", name, f"f = W₂ bent{plus[1]}", part.down(bent), length_of)


def around(
    trail: Trail, connection: Residual, x: Tensor, sublayer: Callable[[Tensor], Tensor], part: str, point: str
) -> Tensor:
    """(B, T, D) a sublayer with the way around it and its norm, before or after."""
    before = {"resid_mid": "H", "resid_cross": "resid_mid"}.get(point, trail.made[-1].name)
    added, words = (
        "f" if part == "feed-forward" else "o",
        norm_words(connection.norm, "S" if connection.post else before),
    )
    trail.letter = before if connection.post else "x"
    if connection.post:
        total = x + sublayer(x)
        trail.add(f"{part} sum", part, f"S = {before} + {added}", total, spread_of)
        return trail.add(point, part, f"N(S){words}", connection.norm(total), length_of)
    normed = trail.add(f"{part} norm", part, f"x = N({before}){words}", connection.norm(x), length_of)
    return trail.add(point, part, f"{before} + {added}", x + sublayer(normed), length_of)


def norm_words(norm: nn.Module, of: str) -> str:
    if isinstance(norm, nn.LayerNorm):
        return f" = ({of} − mean) / deviation · g" + (" + b" if norm.bias is not None else "")
    return f" = {of} / √mean({of}²) · g"


def length_of(mine: Tensor) -> str:
    return f"length {mine.norm():.3f}"


def spread_of(mine: Tensor) -> str:
    return f"mean {mine.mean():.3f}, deviation {mine.std(correction=0):.3f}"


def dead(mine: Tensor) -> str:
    return f"{int((mine == 0).sum())} of {len(mine)} are 0"
