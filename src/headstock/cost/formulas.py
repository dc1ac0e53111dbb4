"""The cost of a module: parameters, FLOPs per token, and activations saved for the backward pass.

Formulas are plain arithmetic: with numbers they give numbers, with sympy symbols the textbook's formula.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Size = Any  # a number or a sympy symbol
Shapes = dict[str, tuple[Size, ...]]


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model and of the rows it reads; zero for what it does not have."""

    vocabulary: Size
    width: Size
    depth: Size
    context: Size = 0
    hidden: Size = 0
    heads: Size = 0
    segments: Size = 0
    relative_buckets: Size = 0
    classes: Size = 0
    source_vocabulary: Size = 0
    encoder_depth: Size = 0
    length: Size = 0  # tokens in a row; of the target, in an encoder-decoder
    source_length: Size = 0

    @property
    def head_width(self) -> Size:
        return divide(self.width, self.heads)


@dataclass(frozen=True)
class ExecutionContext:
    """What else determines the activations that training saves."""

    device: Literal["cpu", "cuda"] = "cpu"
    packed: bool = False  # rows contain several documents, so attention needs a mask tensor
    half: bool = False  # matmuls run in bfloat16
    workspace: bool = True  # LSTM cells on a CPU are oneDNN's, which save a workspace


CPU = ExecutionContext()


@dataclass(frozen=True)
class SavedActivations:
    """The number of values that one token saves for the backward pass."""

    values: Size = 0  # in the dtype of matmuls
    single: Size = 0  # in float32, whatever the dtype of matmuls
    dropped: Size = 0  # dropout mask

    def __add__(self, other: "SavedActivations") -> "SavedActivations":
        return SavedActivations(self.values + other.values, self.single + other.single, self.dropped + other.dropped)

    def times(self, factor: Size) -> "SavedActivations":
        return SavedActivations(factor * self.values, factor * self.single, factor * self.dropped)

    def size(self, context: ExecutionContext) -> Size:
        """In bytes. A dropout mask takes a value per feature on the CPU and a byte on a GPU."""
        value = 2 if context.half else 4
        return value * self.values + 4 * self.single + (1 if context.device == "cuda" else value) * self.dropped


@dataclass(frozen=True)
class WeightTensor:
    """A parameter tensor, or `times` of equal shape."""

    path: str  # its name in the model, with * for the number of a layer
    shape: tuple[Size, ...]
    times: Size
    is_embedding: bool  # an embedding, which is indexed and not multiplied

    @property
    def count(self) -> Size:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModuleCost:
    """A module: its own parameters, the cost of one token, and its submodules."""

    name: str  # in its parent
    shapes: Shapes = field(default_factory=dict)
    buffers: Shapes = field(default_factory=dict)
    flops: Size = 0  # its own; a multiplication and an addition are two
    saved: SavedActivations = SavedActivations()  # its own
    parts: tuple["ModuleCost", ...] = ()
    times: Size | None = None  # as many equal modules, numbered from 0
    passes: Size = 1  # passes through it per token of the row
    is_embedding: bool = False
    measured: bool = False  # counted in the module instead of derived from its config: see measured.py

    def weights(self, parent: str = "", times: Size = 1) -> Iterator[WeightTensor]:
        """Every parameter tensor, in the order of the model."""
        path = ".".join(filter(None, (parent, self.name, "*" if self.times is not None else "")))
        times = times * self.copies
        for name, shape in self.shapes.items():
            yield WeightTensor(f"{path}.{name}" if path else name, shape, times, self.is_embedding)
        for part in self.parts:
            yield from part.weights(path, times)

    @property
    def copies(self) -> Size:
        return 1 if self.times is None else self.times

    @property
    def count_each(self) -> Size:
        """Parameters of one of the equal modules."""
        return sum(map(math.prod, self.shapes.values())) + sum(part.count for part in self.parts)

    @property
    def count(self) -> Size:
        """Parameters."""
        return self.count_each * self.copies

    @property
    def buffer_count(self) -> Size:
        """Values in buffers."""
        values = sum(map(math.prod, self.buffers.values())) + sum(part.buffer_count for part in self.parts)
        return values * self.copies

    def total_flops(self) -> Size:
        """Of one token in the forward pass."""
        flops = self.flops + sum(part.total_flops() for part in self.parts)
        return flops * self.passes * self.copies

    def total_saved(self) -> SavedActivations:
        """Of one token."""
        saved = sum((part.total_saved() for part in self.parts), self.saved)
        return saved.times(self.passes * self.copies)

    def measured_parts(self) -> list[str]:
        """Names of the submodules without a closed form."""
        return [self.name] if self.measured else [name for part in self.parts for name in part.measured_parts()]


def divide(size: Size, parts: Size) -> Size:
    """A multiple of `parts` divided by it: an integer stays one."""
    return size // parts if isinstance(size, int) else size / parts


def embedding(name: str, entries: Size, width: Size) -> ModuleCost:
    """An embedding: an index operation without FLOPs."""
    return ModuleCost(name, {"weight": (entries, width)}, is_embedding=True)


def linear(name: str, inputs: Size, outputs: Size, *, bias: bool = True, saves_input: bool = True) -> ModuleCost:
    """A linear layer; it saves its input for the gradient unless another module does."""
    shapes: Shapes = {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {})
    saved = SavedActivations(inputs if saves_input else 0)
    return ModuleCost(name, shapes, flops=2 * inputs * outputs, saved=saved)


def norm(name: str, width: Size, kind: str, context: ExecutionContext, *, bias: bool = True) -> ModuleCost:
    """A norm saves its input with mean and scale. RMSNorm on a CPU also saves the normalized input."""
    shapes: Shapes = {"weight": (width,)}
    if kind == "layer":
        return ModuleCost(name, shapes | ({"bias": (width,)} if bias else {}), saved=SavedActivations(single=width + 2))
    normalized = width if context.device == "cpu" else 0
    return ModuleCost(name, shapes, saved=SavedActivations(single=width + 1 + normalized))
