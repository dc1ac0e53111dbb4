"""Closed forms: how many weights, how much arithmetic and how much memory each part of a model takes.

Every form is written once, as plain arithmetic: with numbers it gives numbers, with symbols the textbook's formula.
D width, F hidden, A heads, L tokens in a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Size = Any  # a number, or a symbol that stands for one


@dataclass(frozen=True)
class Dimensions:
    """How large a model is, and how long the rows are that it reads; zero for what it does not have."""

    vocabulary: Size
    width: Size
    depth: Size
    context: Size = 0
    hidden: Size = 0
    heads: Size = 0
    segments: Size = 0
    classes: Size = 0
    source_vocabulary: Size = 0
    encoder_depth: Size = 0
    length: Size = 0  # tokens in a row; of the target, where there is a source
    source_length: Size = 0

    @property
    def head_width(self) -> Size:
        return in_parts(self.width, self.heads)


@dataclass(frozen=True)
class ExecutionContext:
    """What else decides which numbers training keeps for the way back."""

    device: Literal["cpu", "cuda"] = "cpu"
    packed: bool = False  # rows join several documents, so that attention needs a table of who may look at whom
    half: bool = False  # products are computed in bfloat16
    workspace: bool = True  # a CPU's LSTM cells are oneDNN's, which keep a workspace of their own


CPU = ExecutionContext()


@dataclass(frozen=True)
class SavedActivations:
    """The numbers that one token leaves behind for the way back."""

    values: Size = 0  # in the precision that products are computed in
    single: Size = 0  # in single precision whatever the products are in
    dropped: Size = 0  # whether dropout left each of so many features out

    def __add__(self, other: "SavedActivations") -> "SavedActivations":
        return SavedActivations(self.values + other.values, self.single + other.single, self.dropped + other.dropped)

    def times(self, often: Size) -> "SavedActivations":
        return SavedActivations(often * self.values, often * self.single, often * self.dropped)

    def size(self, place: ExecutionContext) -> Size:
        """In bytes. The CPU remembers what dropout did as a number for each feature, a GPU as a byte."""
        value = 2 if place.half else 4
        return value * self.values + 4 * self.single + (1 if place.device == "cuda" else value) * self.dropped


@dataclass(frozen=True)
class WeightTensor:
    """One tensor of weights; as many alike as `times` says."""

    path: str  # its name in the model, with * for the number of a layer
    shape: tuple[Size, ...]
    times: Size
    table: bool  # an embedding: rows are looked up, not multiplied

    @property
    def count(self) -> Size:
        return product(self.shape)


@dataclass(frozen=True)
class ModuleCost:
    """A module: its own weights, what a token that passes through it costs, and the parts inside it."""

    name: str  # in the module above it
    shapes: dict[str, tuple[Size, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[Size, ...]] = field(default_factory=dict)  # fixed numbers that nothing trains
    flops: Size = 0  # of its own; a product and a sum are two
    kept: SavedActivations = SavedActivations()  # of its own
    parts: tuple["ModuleCost", ...] = ()
    times: Size | None = None  # so many alike, numbered from 0
    used: Size = 1  # how often a token of the row passes through it
    table: bool = False

    def weights(self, above: str = "", times: Size = 1) -> Iterator[WeightTensor]:
        """Every tensor of weights, in the order in which the model has them."""
        path = ".".join(filter(None, (above, self.name, "*" if self.times is not None else "")))
        times = times if self.times is None else times * self.times
        for name, shape in self.shapes.items():
            yield WeightTensor(f"{path}.{name}" if path else name, shape, times, self.table)
        for part in self.parts:
            yield from part.weights(path, times)

    @property
    def one(self) -> Size:
        """Weights in one of those that are alike."""
        return sum(map(product, self.shapes.values())) + sum(part.count for part in self.parts)

    @property
    def count(self) -> Size:
        return self.one * (1 if self.times is None else self.times)

    @property
    def fixed(self) -> Size:
        """Numbers in buffers."""
        own = sum(map(product, self.buffers.values())) + sum(part.fixed for part in self.parts)
        return own * (1 if self.times is None else self.times)

    def total_flops(self) -> Size:
        """Of one token on the way forward."""
        own = self.flops + sum(part.total_flops() for part in self.parts)
        return own * self.used * (1 if self.times is None else self.times)

    def total_kept(self) -> SavedActivations:
        """Of one token."""
        own = sum((part.total_kept() for part in self.parts), self.kept)
        return own.times(self.used * (1 if self.times is None else self.times))


def in_parts(size: Size, parts: Size) -> Size:
    """A size that is a multiple of `parts`, divided by it: a whole number stays one."""
    return size // parts if isinstance(size, int) else size / parts


def product(shape: tuple[Size, ...]) -> Size:
    count: Size = 1
    for size in shape:
        count = count * size
    return count


# What all families are made of


def table(name: str, entries: Size, width: Size) -> ModuleCost:
    """An embedding: a row is looked up, which takes no arithmetic."""
    return ModuleCost(name, {"weight": (entries, width)}, table=True)


def linear(name: str, inputs: Size, outputs: Size, *, bias: bool = True, keeps: bool = True) -> ModuleCost:
    """A product with a matrix, which needs what came in again for its gradient; unless another part `keeps` that."""
    shapes: dict[str, tuple[Size, ...]] = {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {})
    return ModuleCost(
        name, shapes, flops=2 * inputs * outputs, kept=SavedActivations(inputs) if keeps else SavedActivations()
    )


def norm(name: str, width: Size, kind: str, place: ExecutionContext, *, bias: bool = True) -> ModuleCost:
    """What came in is kept with its mean and scale. RMS norm on a CPU also keeps what it became."""
    shapes: dict[str, tuple[Size, ...]] = {"weight": (width,)}
    if kind == "layer":
        return ModuleCost(name, shapes | ({"bias": (width,)} if bias else {}), kept=SavedActivations(single=width + 2))
    return ModuleCost(name, shapes, kept=SavedActivations(single=width + 1 + (width if place.device == "cpu" else 0)))


# The Transformer's block; `c` are the settings that choose among its forms, `d` the sizes


def blocks(name: str, c: Any, d: Dimensions, place: ExecutionContext) -> ModuleCost:
    def residual(of: str) -> ModuleCost:
        dropped = SavedActivations(dropped=d.width) if c.dropout else SavedActivations()
        return ModuleCost(f"around_{of}", parts=(norm("norm", d.width, c.norm_kind, place, bias=c.bias),), kept=dropped)

    parts = [attention("attention", c, d, place), residual("attention")]
    if c.cross:
        parts += [attention("cross", c, d, place, across=True), residual("cross")]
    parts += [feed("feed", c, d), residual("feed")]
    return ModuleCost(name, parts=tuple(parts), times=d.depth)


def attention(name: str, c: Any, d: Dimensions, place: ExecutionContext, *, across: bool = False) -> ModuleCost:
    """Queries meet the keys of the row itself, or `across` those of the source."""
    width, keys = d.width, d.source_length if across else d.length
    share = keys / d.length if across else 1  # keys and values that are made for each query
    inputs = linear("inputs", width, 3 * width, bias=c.bias)
    projected = 2 * width * width * (1 + 2 * share)
    norms: tuple[ModuleCost, ...] = ()
    if c.qk_norm:
        weight: dict[str, tuple[Size, ...]] = {"weight": (d.head_width,)}
        norms = (ModuleCost("query_norm", weight), ModuleCost("key_norm", weight))
    return ModuleCost(
        name,
        flops=4 * keys * width,  # every query with every key, and every weight with every value
        kept=mixing_keeps(c, d, place, keys=keys, share=share, rotary=c.positions == "rotary" and not across)
        + (SavedActivations(keys) if place.packed and not across and fused(c, place) else SavedActivations()),
        parts=(
            ModuleCost("inputs", inputs.shapes, flops=projected, kept=inputs.kept),
            linear("output", width, width, bias=c.bias),
            *norms,
        ),
    )


def fused(c: Any, place: ExecutionContext) -> bool:
    """Attention without a table of all weights; the CPU has no such kernel that can drop weights."""
    return place.device == "cuda" or not c.dropout


def mixing_keeps(
    c: Any, d: Dimensions, place: ExecutionContext, *, keys: Size, share: Size, rotary: bool
) -> SavedActivations:
    """What stays between the input product and the output product of attention."""
    width, both = d.width, d.width * (1 + share)  # a query and the keys made for it
    made = SavedActivations(width + 2 * width * share)  # queries, keys and values as the product gave them
    normed = SavedActivations(single=d.heads * (1 + share)) if c.qk_norm else SavedActivations()
    if c.qk_norm and place.device == "cpu":
        normed += SavedActivations(both)
    if not fused(c, place):
        weights = SavedActivations(3 * d.heads * keys)  # after the softmax, what dropout left out, and what was left
        return made + weights + normed + (made if c.qk_norm else SavedActivations())
    moved = c.qk_norm or rotary  # then they are new tensors, and what comes out lies otherwise than the next part reads
    return (
        made
        + normed
        + SavedActivations(single=d.heads)
        + (SavedActivations(both + width) if moved else SavedActivations())
    )


def feed(name: str, c: Any, d: Dimensions) -> ModuleCost:
    """Each position by itself: up to the hidden width, bent, and down again."""
    gated, drops = c.activation == "swiglu", c.dropout and c.inner_dropout
    bent = {"relu": d.hidden if drops else 0, "swiglu": 3 * d.hidden}.get(c.activation, d.hidden)
    gate = (linear("gate", d.width, d.hidden, bias=c.bias, keeps=False),) if gated else ()
    return ModuleCost(
        name,
        kept=SavedActivations(bent, dropped=d.hidden if drops else 0),
        parts=(
            *gate,
            linear("up", d.width, d.hidden, bias=c.bias),
            linear("down", d.hidden, d.width, bias=c.bias),
        ),
    )


# Cells

GATES = {"lstm": 4, "gru": 3}


def cells(name: str, c: Any, d: Dimensions, place: ExecutionContext) -> ModuleCost:
    """A layer of LSTM or GRU cells: each gate reads the input and what the cells gave before."""
    gates, width, hidden = GATES[c.cell], d.width, d.hidden
    shapes: dict[str, tuple[Size, ...]] = {
        "weight_ih_l0": (gates * hidden, width),
        "weight_hh_l0": (gates * hidden, hidden),
        "bias_ih_l0": (gates * hidden,),
        "bias_hh_l0": (gates * hidden,),
    }
    inside = 7 * hidden  # the gates, and what the cells held and gave
    if c.cell == "lstm" and place.device == "cpu" and place.workspace:
        # the workspace has these instead, with a step more than there are tokens; this fits what it asks for
        states = 5 * hidden + 6 * (hidden if c.hidden >= c.width else width)
        inside = 5 * hidden + states * (d.length + 1) / d.length
    kept = SavedActivations(single=width + inside)  # cells compute in single precision always
    return ModuleCost(name, shapes, flops=2 * gates * hidden * (width + hidden), kept=kept)


def recurrent_layers(name: str, c: Any, d: Dimensions, place: ExecutionContext) -> ModuleCost:
    project = (linear("project", d.hidden, d.width),) if c.hidden != c.width else ()
    dropped = SavedActivations(dropped=d.width) if c.dropout and c.dropout_kind == "plain" else SavedActivations()
    return ModuleCost(name, parts=(cells("cells", c, d, place), *project), kept=dropped, times=d.depth)
