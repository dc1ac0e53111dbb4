"""Every weight of a model counted beside its closed form, and what a token and a training step cost by such forms."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from headstock.cost.training import flops_per_token, model_cost, training_memory
from headstock.errors import UserError
from headstock.explain.subject import Subject
from headstock.explain.symbols import Letter, formula, legend, letters_of, values_of
from headstock.model.formulas import Dimensions, ExecutionContext, ModuleCost, product
from headstock.model.heads import ClassificationHead, LMHead
from headstock.model.model import Model

# the names that torch's own nn.TransformerEncoderLayer and nn.TransformerDecoderLayer have for the same tensors
TORCH = {"attention.inputs.": "self_attn.in_proj_", "attention.output": "self_attn.out_proj"}
TORCH |= {"cross.inputs.": "multihead_attn.in_proj_", "cross.output": "multihead_attn.out_proj"}
TORCH |= {"feed.up": "linear1", "feed.down": "linear2", "around_attention.norm": "norm1"}
OUTSIDE = {"backbone.tokens.weight": "embedding.weight"}
OUTSIDE |= {"heads.token.weight": "decoder.weight", "heads.token.bias": "decoder.bias"}
PLACES = {"cpu, float32": ExecutionContext(), "gpu, bfloat16, estimated": ExecutionContext("cuda", half=True)}


@dataclass(frozen=True)
class Line:
    """A module or one of its tensors: its formula, what that comes to, and what was counted in the model."""

    path: str  # as the model names it, with * for the number of a layer
    level: int
    tensor: bool
    shape: tuple[Any, ...]  # of a tensor, in letters
    formula: Any
    value: int  # of one, where several are alike
    count: int  # the same, counted
    times: int  # so many are alike


@dataclass(frozen=True)
class Row:
    """One tensor of the model."""

    module: str
    count: int
    formula: str
    value: int
    torch: str | None  # what the course's nn.TransformerEncoder calls it


@dataclass(frozen=True)
class Total:
    """A model with some heads: all of it learns, or the heads alone."""

    heads: tuple[str, ...]
    formula: Any
    total: int
    own: int  # weights of the heads, which are all that learns where the backbone is frozen


@dataclass(frozen=True)
class Cost:
    """A quantity in closed form."""

    name: str
    formula: Any
    value: float


@dataclass(frozen=True)
class Params:
    """What `explain params` knows of a model."""

    name: str
    family: str
    lines: list[Line]
    rows: list[Row]
    letters: list[Letter]
    by: tuple[Any, ...]  # letters that long formulas are grouped by
    base: int
    base_formula: Any
    heads: dict[str, int]
    totals: list[Total]  # the model's own heads first
    frozen: bool  # the run trained its heads alone
    derivative: Any  # of the total by the number of attention heads; None where there is no attention
    fixed: Cost | None  # numbers beside the weights that nothing trains
    flops: list[Cost]  # of a token on the way forward, part by part
    forward: Cost
    training: Cost
    memory: dict[str, list[Cost]]  # by where it is computed
    batch: int
    length: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.totals[0].total

    @property
    def trainable(self) -> int:
        return self.totals[0].own if self.frozen else self.total

    def facts(self) -> dict[str, Any]:
        def told(costs: list[Cost]) -> dict[str, Any]:
            return {cost.name: {"formula": formula(cost.formula), "value": round(cost.value)} for cost in costs}

        modules = [
            {"module": line.path, "count": line.count, "formula": formula(line.formula), "value": line.value}
            | {"times": line.times}
            for line in self.lines
            if not line.tensor
        ]
        return {
            "name": self.name,
            "family": self.family,
            "total": self.total,
            "base": self.base,
            "heads": self.heads,
            "trainable": self.trainable,
            "frozen": self.total - self.trainable,
            "formula": formula(self.totals[0].formula),
            "rows": [vars(row) for row in self.rows],
            "modules": modules,
            "totals": [
                {"heads": list(one.heads), "total": one.total, "formula": formula(one.formula), "trainable": one.total}
                | {"backbone_frozen": {"trainable": one.own, "frozen": one.total - one.own}}
                for one in self.totals
            ],
            "letters": {one.name: {"meaning": one.meaning, "value": one.value} for one in self.letters},
            "derivative_by_heads": None if self.derivative is None else formula(self.derivative),
            "batch": self.batch,
            "length": self.length,
            "flops_per_token": told([self.forward, self.training]) | {"parts": told(self.flops)},
            "memory": {place: told(costs) for place, costs in self.memory.items()},
        }


def explain_params(
    subject: Subject, *, classes: int | None = None, batch: int | None = None, length: int | None = None
) -> Params:
    """Count a model and derive the same numbers from its settings; the two must agree, tensor by tensor."""
    model, config = subject.model, subject.config
    length = length or config.train.length or model.backbone.context or 256
    if model.backbone.context and length > model.backbone.context:
        raise UserError(f"--length {length}: this model reads rows of at most {model.backbone.context} tokens")
    batch = batch or config.train.micro_batch or config.train.batch
    others = other_heads(subject, classes)
    together = model.with_heads({**model.heads, **{name: head for one in others for name, head in one.heads.items()}})
    letters, meanings = letters_of(together)
    numbers = together.dimensions(length=length)
    values = values_of(letters, numbers)
    parts = model.counted(letters)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    lines = [line for part in parts.parts for line in lines_of(part, values, counts)]
    totals = [total_of(one, letters, values) for one in (model, *others)]
    costs = costs_of(subject, letters, values, batch)
    attends = hasattr(model.backbone.config, "heads")
    fixed = Cost("fixed", parts.fixed, evaluated(parts.fixed, values)) if evaluated(parts.fixed, values) else None
    used = [line.formula for line in lines] + [one.formula for one in totals] + costs["formulas"]
    known = values | {costs["rows"]: batch}
    return Params(
        subject.name,
        config.family,
        lines,
        rows_of(model, lines),
        legend([*used, letters.heads] if attends else used, known, meanings | {"B": "rows in a batch"}),
        (letters.depth, letters.encoder_depth),
        model.parameter_counts()["base"],
        parts.parts[0].count,
        {
            name: count
            for one in (model, *others)
            for name, count in one.parameter_counts().items()
            if name in one.heads
        },
        totals,
        bool(config.transfer and config.transfer.freeze),
        totals[0].formula.diff(letters.heads) if attends else None,
        fixed,
        costs["flops"],
        costs["forward"],
        costs["training"],
        costs["memory"],
        batch,
        length,
        subject.notes,
    )


def other_heads(subject: Subject, classes: int | None) -> list[Model]:
    """The same backbone with what it could have instead: a language model's head, a classifier's."""
    backbone, found = subject.model.backbone, []
    with torch.device("meta"):
        if "token" not in subject.model.heads:
            found.append(subject.model.with_heads({"token": LMHead(backbone)}))
        if any(isinstance(head, ClassificationHead) for head in subject.model.heads.values()):
            return found
        if not backbone.is_encoder_decoder:
            found.append(subject.model.with_heads({"label": ClassificationHead(backbone.width, classes or 2)}))
        elif classes:
            raise UserError("--classes: an encoder-decoder writes texts; it has no head that chooses among classes")
    return found


def evaluated(expression: Any, values: dict[Any, int]) -> Any:
    import sympy

    form = sympy.sympify(expression)
    made = form.xreplace({letter: sympy.Integer(values[letter]) for letter in form.free_symbols})
    return int(made) if made.is_Integer else float(made)


def total_of(model: Model, letters: Dimensions, values: dict[Any, int]) -> Total:
    whole = model.counted(letters).count
    sizes = model.parameter_counts()
    assert evaluated(whole, values) == sizes["total"], (whole, sizes)
    return Total(tuple(model.heads), whole, sizes["total"], sizes["total"] - sizes["base"])


def lines_of(
    part: ModuleCost, values: dict[Any, int], counts: dict[str, int], *, level: int = 0, above: str = "", times: int = 1
) -> Iterator[Line]:
    """The part and what is in it, the closed form of each beside what was counted."""
    path = f"{above}.{part.name}" if above else part.name
    if part.times is not None:
        path, times = f"{path}.*", times * evaluated(part.times, values)
    if part.one == 0:
        return

    def line(path: str, level: int, form: Any, shape: tuple[Any, ...] | None = None) -> Line:
        value, seen = evaluated(form, values), counted(path, counts)
        assert value == seen, f"{path}: {form} is {value}, but {seen} were counted"
        return Line(path, level, shape is not None, shape or (), form, value, seen, times)

    yield line(path, level, part.one)
    for name, shape in part.shapes.items():
        yield line(f"{path}.{name}", level + 1, product(shape), shape)
    for inner in part.parts:
        yield from lines_of(inner, values, counts, level=level + 1, above=path, times=times)


def counted(path: str, counts: dict[str, int]) -> int:
    """The weights at a path; where a layer's number is left open, those of the first, which all others equal."""
    first = path.replace("*", "0")
    return sum(count for name, count in counts.items() if name == first or name.startswith(f"{first}."))


def rows_of(model: Model, lines: list[Line]) -> list[Row]:
    """Every tensor of every layer, in the model's own order."""
    forms = {line.path: line for line in lines if line.tensor}
    rows = []
    for name, parameter in model.named_parameters():
        line = forms[next(path for path in pattern(name) if path in forms)]
        assert parameter.numel() == line.value, name
        rows.append(Row(name, parameter.numel(), formula(line.formula), line.value, known_to_torch(name)))
    return rows


def pattern(name: str) -> Iterator[str]:
    """The paths that a tensor may have in the closed forms: a number in it may stand for any."""
    yield name
    yield ".".join("*" if word.isdecimal() else word for word in name.split("."))


def known_to_torch(name: str) -> str | None:
    """What the same tensor is called in torch's own Transformer layers, where it has one."""
    _, block, rest = name.partition(".blocks.")
    if not block:
        return OUTSIDE.get(name)
    number, _, inside = rest.partition(".")
    across = name.startswith("backbone.decoder")
    names = TORCH | {"around_cross.norm": "norm2", "around_feed.norm": "norm3" if across else "norm2"}
    ours = next((ours for ours in names if inside.startswith(ours)), None)
    return None if ours is None else f"layers.{number}.{inside.replace(ours, names[ours], 1)}"


def costs_of(subject: Subject, letters: Dimensions, values: dict[Any, int], batch: int) -> dict[str, Any]:
    """Arithmetic and memory of the model as its task trains it."""
    import sympy

    rows = sympy.Symbol("B", positive=True, integer=True)
    known = values | {rows: batch}
    model, task = subject.model, subject.task
    parts = model_cost(model, task, letters)

    def cost(name: str, form: Any) -> Cost:
        return Cost(name, sympy.expand(form), evaluated(form, known))

    kinds: dict[str, list[Cost]] = {}
    held = [name for name in ("adamw", "muon") if name == "adamw" or subject.config.transfer is None]
    for name, place in PLACES.items():
        of = {one: training_memory(model, task, letters, rows=rows, optimizer=one, place=place) for one in held}
        plain, used = of["adamw"], of.get(subject.config.train.optimizer, of["adamw"])
        kinds[name] = [
            cost("weights", plain.weights),
            cost("gradients", plain.gradients),
            *(cost(f"optimizer ({one})", of[one].optimizer) for one in held),
            cost("activations", plain.activations),
            cost("working", plain.working),
            cost("total", used.total),
        ]
    shares = [cost(name, form) for name, form in flops_by_part(parts)]
    forward, training = cost("forward", flops_per_token(parts)), cost("training", flops_per_token(parts, training=True))
    formulas = [one.formula for costs in kinds.values() for one in costs] + [one.formula for one in shares]
    return {"rows": rows, "flops": shares, "forward": forward, "training": training, "memory": kinds} | {
        "formulas": formulas
    }


def flops_by_part(parts: ModuleCost) -> Iterator[tuple[str, Any]]:
    """The way forward in pieces that a reader can name; only those that take any arithmetic."""

    def walk(part: ModuleCost, path: str, often: Any) -> Iterator[tuple[str, Any]]:
        often = often * part.used * (1 if part.times is None else part.times)
        if part.flops != 0:
            yield path, often * part.flops
        for inner in part.parts:
            yield from walk(inner, f"{path}.{inner.name}".strip("."), often)

    yield from walk(replace(parts, name=""), "", 1)
