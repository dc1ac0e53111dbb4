"""Parameter counts beside their closed forms, and what a token and a training step cost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from headstock.cost.formulas import Dimensions, ExecutionContext, ModuleCost, WeightTensor
from headstock.cost.measured import measured_note
from headstock.cost.model import model_cost, model_dimensions, module_costs
from headstock.cost.training_cost import (
    FLOAT32,
    adapter_weights,
    flops_per_token,
    lora_flops_per_token,
    optimizer_state_bytes,
    training_memory,
)
from headstock.errors import UserError
from headstock.explain.subject import ExplainSubject
from headstock.explain.symbols import Symbol, formula, legend, symbols_of, values_of
from headstock.model.heads import ClassificationHead, LMHead
from headstock.model.lora import LoRAConfig
from headstock.model.model import Model

# the names of the same tensors in nn.TransformerEncoderLayer and nn.TransformerDecoderLayer
TORCH = {"attention.inputs.": "self_attn.in_proj_", "attention.output": "self_attn.out_proj"}
TORCH |= {"cross.inputs.": "multihead_attn.in_proj_", "cross.output": "multihead_attn.out_proj"}
TORCH |= {"feed.up": "linear1", "feed.down": "linear2", "around_attention.norm": "norm1"}
OUTSIDE = {"backbone.tokens.weight": "embedding.weight"}
OUTSIDE |= {"heads.token.weight": "decoder.weight", "heads.token.bias": "decoder.bias"}
TYPICAL_LORA = LoRAConfig(rank=8, alpha=16.0, dropout=0.0, targets="attention")
DEVICES = {"cpu, float32": ExecutionContext(), "gpu, bfloat16, estimated": ExecutionContext("cuda", half=True)}


@dataclass(frozen=True)
class ModuleCount:
    """A module or one of its tensors: its formula, the formula's value, and the number counted in the model."""

    path: str  # in the model, with * for the number of a layer
    level: int
    tensor: bool
    shape: tuple[Any, ...]  # of a tensor, in symbols
    formula: Any
    value: int  # of one of them, where `times` are identical
    count: int  # the same, counted in the model
    times: int

    def to_dict(self) -> dict[str, Any]:
        values = {"module": self.path, "count": self.count, "formula": formula(self.formula), "value": self.value}
        return values | {"times": self.times}


@dataclass(frozen=True)
class TensorCount:
    """One tensor of the model."""

    module: str
    count: int
    formula: str
    value: int
    torch: str | None  # its name in torch.nn.TransformerEncoder or TransformerDecoder


@dataclass(frozen=True)
class HeadTotal:
    """The backbone with some heads."""

    heads: tuple[str, ...]
    formula: Any
    total: int
    own: int  # parameters of the heads, which are all that is trained with a frozen backbone

    def to_dict(self) -> dict[str, Any]:
        frozen = {"trainable": self.own, "frozen": self.total - self.own}
        values = {"heads": list(self.heads), "total": self.total, "formula": formula(self.formula)}
        return values | {"trainable": self.total, "backbone_frozen": frozen}


@dataclass(frozen=True)
class Cost:
    """A quantity in closed form."""

    name: str
    formula: Any
    value: float


@dataclass(frozen=True)
class FinetuneCost:
    """What one way of fine-tuning the backbone with a head trains and costs."""

    name: str
    trainable: Cost  # parameters
    state: Cost  # bytes of gradients and AdamW's moments
    flops: Cost | None  # of a token in the backbone, forward and backward; None if it is read only once

    def to_dict(self) -> dict[str, Any]:
        costs = {"trainable": self.trainable, "state_bytes": self.state, "flops_per_token": self.flops}
        values = {
            name: cost and {"formula": formula(cost.formula), "value": cost.value} for name, cost in costs.items()
        }
        return {"name": self.name} | values


@dataclass(frozen=True)
class TrainingCosts:
    rows: Any  # the symbol for rows per batch
    flops: list[Cost]  # of a token in the forward pass, by module
    forward: Cost
    training: Cost
    memory: dict[str, list[Cost]]  # by device and precision

    def formulas(self) -> list[Any]:
        return [cost.formula for costs in (self.flops, *self.memory.values()) for cost in costs]


@dataclass(frozen=True)
class ParameterFacts:
    name: str
    family: str
    modules: list[ModuleCount]
    tensors: list[TensorCount]
    symbols: list[Symbol]
    by: tuple[Any, ...]  # symbols that long formulas are grouped by
    base: int
    base_formula: Any
    heads: dict[str, int]
    totals: list[HeadTotal]  # the model's own heads first
    finetuning: list[FinetuneCost]  # all weights, LoRA, the head alone
    frozen: bool  # the run trained its heads only
    lora: int  # rank of the run's adapters; 0: none
    derivative: Any  # of the total by the number of attention heads; None without attention
    fixed: Cost | None  # numbers that are not trained, such as sinusoidal positions
    costs: TrainingCosts
    batch: int
    length: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.totals[0].total

    @property
    def trainable(self) -> int:
        if self.lora:
            return next(int(way.trainable.value) for way in self.finetuning if way.name.startswith("LoRA"))
        return self.totals[0].own if self.frozen else self.total

    @property
    def fixed_count(self) -> int:
        """Parameters that are not trained; adapters are not part of the total."""
        return self.total - self.totals[0].own if self.frozen or self.lora else 0

    def to_dict(self) -> dict[str, Any]:
        def costs_dict(costs: list[Cost]) -> dict[str, Any]:
            return {cost.name: {"formula": formula(cost.formula), "value": round(cost.value)} for cost in costs}

        return {
            "name": self.name,
            "family": self.family,
            "total": self.total,
            "base": self.base,
            "heads": self.heads,
            "trainable": self.trainable,
            "frozen": self.fixed_count,
            "formula": formula(self.totals[0].formula),
            "rows": [vars(tensor) for tensor in self.tensors],
            "modules": [module.to_dict() for module in self.modules if not module.tensor],
            "totals": [total.to_dict() for total in self.totals],
            "finetuning": [way.to_dict() for way in self.finetuning],
            "letters": {symbol.name: {"meaning": symbol.meaning, "value": symbol.value} for symbol in self.symbols},
            "derivative_by_heads": None if self.derivative is None else formula(self.derivative),
            "batch": self.batch,
            "length": self.length,
            "flops_per_token": costs_dict([self.costs.forward, self.costs.training])
            | {"parts": costs_dict(self.costs.flops)},
            "memory": {device: costs_dict(costs) for device, costs in self.costs.memory.items()},
        }


def explain_parameters(
    subject: ExplainSubject, *, classes: int | None = None, batch: int | None = None, length: int | None = None
) -> ParameterFacts:
    """Count the parameters of a model, and derive the same numbers from its settings; the two must agree."""
    from sympy import sympify

    model, config = subject.model, subject.config
    length = length or config.train.length or model.backbone.context or 256
    if model.backbone.context and length > model.backbone.context:
        raise UserError(f"--length {length}: this model reads rows of at most {model.backbone.context} tokens")
    batch = batch or config.train.micro_batch or config.train.batch
    models = [model, *other_heads(subject, classes)]
    with_all_heads = model.with_heads({name: head for variant in models for name, head in variant.heads.items()})
    symbols, meanings = symbols_of(with_all_heads)
    values = values_of(symbols, model_dimensions(with_all_heads, length=length))
    forms = module_costs(model, symbols)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    modules = [module for part in forms.parts for module in module_counts(part, values, counts)]
    totals = [head_total(variant, symbols, values) for variant in models]
    costs = training_costs(subject, symbols, values, batch)
    lora = config.transfer and config.transfer.adapters
    ways, rank = finetune_costs(finetuned_variant(models), symbols, values, lora or TYPICAL_LORA)
    has_attention = hasattr(model.backbone.config, "heads")
    fixed = evaluate(forms.buffer_count, values)
    used = [module.formula for module in modules] + [total.formula for total in totals] + costs.formulas()
    used += [symbols.heads] if has_attention else []
    used += [way.trainable.formula for way in ways]
    letters = values | {costs.rows: batch, rank: (lora or TYPICAL_LORA).rank}
    return ParameterFacts(
        name=subject.name,
        family=config.family,
        modules=modules,
        tensors=tensor_counts(model, modules),
        symbols=legend(used, letters, meanings | {"B": "rows per batch", "r": "rank of LoRA"}),
        by=(symbols.depth, symbols.encoder_depth),
        base=model.parameter_counts()["base"],
        base_formula=forms.parts[0].count,
        heads={name: variant.parameter_counts()[name] for variant in models for name in variant.heads},
        totals=totals,
        finetuning=ways,
        frozen=bool(config.transfer and config.transfer.freeze),
        lora=lora.rank if lora else 0,
        derivative=sympify(totals[0].formula).diff(symbols.heads) if has_attention else None,
        fixed=Cost("fixed", forms.buffer_count, fixed) if fixed else None,
        costs=costs,
        batch=batch,
        length=length,
        notes=(*subject.notes, *measured_notes(forms)),
    )


def measured_notes(forms: ModuleCost) -> Iterator[str]:
    if names := forms.measured_parts():
        yield measured_note(names)


def other_heads(subject: ExplainSubject, classes: int | None) -> list[Model]:
    """The same backbone with other heads it could have: a language model's and a classifier's."""
    backbone, models = subject.model.backbone, []
    with torch.device("meta"):
        if "token" not in subject.model.heads:
            models.append(subject.model.with_heads({"token": LMHead(backbone)}))
        if any(isinstance(head, ClassificationHead) for head in subject.model.heads.values()):
            return models
        if not backbone.is_encoder_decoder:
            models.append(subject.model.with_heads({"label": ClassificationHead(backbone.width, classes or 2)}))
        elif classes:
            raise UserError("--classes: an encoder-decoder generates text and has no classification head")
    return models


def evaluate(expression: Any, values: dict[Any, int]) -> Any:
    import sympy

    form = sympy.sympify(expression)
    number = form.xreplace({symbol: sympy.Integer(values[symbol]) for symbol in form.free_symbols})
    return int(number) if number.is_Integer else float(number)


def head_total(model: Model, symbols: Dimensions, values: dict[Any, int]) -> HeadTotal:
    total = module_costs(model, symbols).count
    sizes = model.parameter_counts()
    assert evaluate(total, values) == sizes["total"], (total, sizes)
    return HeadTotal(tuple(model.heads), total, sizes["total"], sizes["total"] - sizes["base"])


def module_counts(
    part: ModuleCost,
    values: dict[Any, int],
    counts: dict[str, int],
    *,
    level: int = 0,
    parent: str = "",
    times: int = 1,
) -> Iterator[ModuleCount]:
    """A module and its children, each closed form beside the number counted in the model."""
    path = f"{parent}.{part.name}" if parent else part.name
    if part.times is not None:
        path, times = f"{path}.*", times * evaluate(part.times, values)
    if part.count_each == 0:
        return

    def module(path: str, level: int, form: Any, shape: tuple[Any, ...] | None = None) -> ModuleCount:
        value, count = evaluate(form, values), count_at(path, counts)
        assert value == count, f"{path}: {form} is {value}, but {count} were counted"
        return ModuleCount(path, level, shape is not None, shape or (), form, value, count, times)

    yield module(path, level, part.count_each)
    for name, shape in part.shapes.items():
        yield module(f"{path}.{name}", level + 1, math.prod(shape), shape)
    for child in part.parts:
        yield from module_counts(child, values, counts, level=level + 1, parent=path, times=times)


def count_at(path: str, counts: dict[str, int]) -> int:
    """The parameters below a path; of identical layers those of the first."""
    first = path.replace("*", "0")
    return sum(count for name, count in counts.items() if name == first or name.startswith(f"{first}."))


def tensor_counts(model: Model, modules: list[ModuleCount]) -> list[TensorCount]:
    """Every tensor of every layer, in the order of the model."""
    forms = {module.path: module for module in modules if module.tensor}
    tensors = []
    for name, parameter in model.named_parameters():
        pattern = ".".join("*" if word.isdecimal() else word for word in name.split("."))
        form = forms.get(name) or forms[pattern]
        assert parameter.numel() == form.value, name
        tensors.append(TensorCount(name, parameter.numel(), formula(form.formula), form.value, torch_name(name)))
    return tensors


def torch_name(name: str) -> str | None:
    """The name of the same tensor in PyTorch's Transformer layers, where it has one."""
    _, separator, path = name.partition(".blocks.")
    if not separator:
        return OUTSIDE.get(name)
    number, _, inside = path.partition(".")
    in_decoder = name.startswith("backbone.decoder")
    names = TORCH | {"around_cross.norm": "norm2", "around_feed.norm": "norm3" if in_decoder else "norm2"}
    prefix = next((prefix for prefix in names if inside.startswith(prefix)), None)
    return None if prefix is None else f"layers.{number}.{inside.replace(prefix, names[prefix], 1)}"


def training_costs(subject: ExplainSubject, symbols: Dimensions, values: dict[Any, int], batch: int) -> TrainingCosts:
    """FLOP and memory of the model as its task trains it."""
    import sympy

    rows = sympy.Symbol("B", positive=True, integer=True)
    values = values | {rows: batch}
    model, task = subject.model, subject.task
    parts = model_cost(model, task, symbols)

    def cost(name: str, form: Any) -> Cost:
        return Cost(name, sympy.expand(form), evaluate(form, values))

    optimizers = ["adamw"] if subject.config.transfer is not None else ["adamw", "muon"]
    memory: dict[str, list[Cost]] = {}
    for device, context in DEVICES.items():
        forms = {
            optimizer: training_memory(model, task, symbols, rows=rows, optimizer=optimizer, context=context)
            for optimizer in optimizers
        }
        adamw, used = forms["adamw"], forms.get(subject.config.train.optimizer, forms["adamw"])
        memory[device] = [
            cost("weights", adamw.weights),
            cost("gradients", adamw.gradients),
            *(cost(f"optimizer ({optimizer})", form.optimizer) for optimizer, form in forms.items()),
            cost("activations", adamw.activations),
            cost("working", adamw.working),
            cost("total", used.total),
        ]
    return TrainingCosts(
        rows,
        [cost(name, form) for name, form in flops_by_module(parts)],
        cost("forward", flops_per_token(parts)),
        cost("training", flops_per_token(parts, training=True)),
        memory,
    )


def finetuned_variant(models: list[Model]) -> Model:
    """The backbone with a classification head if it can have one, otherwise with its own heads."""
    classifiers = (m for m in models if any(isinstance(head, ClassificationHead) for head in m.heads.values()))
    return next(classifiers, models[0])


def finetune_costs(
    model: Model, symbols: Dimensions, values: dict[Any, int], lora: LoRAConfig
) -> tuple[list[FinetuneCost], Any]:
    """Full fine-tuning, LoRA and a frozen backbone, for AdamW; also returns the symbol of the rank."""
    import sympy

    rank = sympy.Symbol("r", positive=True, integer=True)
    values = values | {rank: lora.rank}
    forms = module_costs(model, symbols)
    weights = list(forms.weights())
    heads = [tensor for tensor in weights if tensor.path.startswith("heads.")]
    adapters = adapter_weights(weights, lora, rank=rank)

    def cost(name: str, form: Any) -> Cost:
        return Cost(name, sympy.expand(form), evaluate(form, values))

    def way(name: str, tensors: list[WeightTensor], flops: Any) -> FinetuneCost:
        count = sum(tensor.count * tensor.times for tensor in tensors)
        state = FLOAT32 * count + optimizer_state_bytes(tensors, "adamw")
        return FinetuneCost(name, cost("trainable", count), cost("state", state), flops and cost("flops", flops))

    backbone = ModuleCost("", parts=(forms.parts[0], ModuleCost("heads")))
    ways = [way("all weights", weights, flops_per_token(backbone, training=True))]
    if adapters:
        flops = lora_flops_per_token(backbone, lora, rank=rank)
        ways.append(way(f"LoRA, rank {lora.rank}, {lora.targets}", [*adapters, *heads], flops))
    return [*ways, way("the head alone", heads, None)], rank


def flops_by_module(parts: ModuleCost) -> Iterator[tuple[str, Any]]:
    """FLOP of the forward pass by module, where there are any."""

    def walk(part: ModuleCost, path: str, times: Any) -> Iterator[tuple[str, Any]]:
        times = times * part.passes * part.copies
        if part.flops != 0:
            yield path, times * part.flops
        for child in part.parts:
            yield from walk(child, f"{path}.{child.name}".strip("."), times)

    yield from walk(replace(parts, name=""), "", 1)
