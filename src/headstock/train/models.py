"""Builds models and tasks from a run's configuration, and loads weights into them."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Size, Tensor

from headstock.data.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from headstock.errors import UserError
from headstock.model.allocation import AllocationLimit, AllocationTooLarge
from headstock.model.backbone import BACKBONES
from headstock.model.backbones.encoder_decoder import EncoderDecoder, weights_from_transformer
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.auxiliary import LM_HEAD
from headstock.tasks.base import TASKS, Task
from headstock.tasks.labelled import LabelledTask
from headstock.train.resolve import resolve_pretrain_config
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig, make_config, preset_file

SPARE_BYTES = 1 << 28  # for buffers that the weights file does not contain


def build_task(run_config: RunConfig, tokenizer: Tokenizer) -> Task:
    task = TASKS.get(run_config.objective)(run_config.task, tokenizer)
    task.needs_prefix = BACKBONES.get(run_config.family).carries_state
    return task


def build_model(run_config: RunConfig, task: Task) -> Model:
    """A newly initialized model. The seed determines the weights; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed every GPU's generator
        torch.default_generator.manual_seed(derive_seed(run_config.train.seed, "weights"))
        backbone = BACKBONES.get(run_config.family)(run_config.model)
        return Model(backbone, task.heads(backbone))


def build_checked_model(run: RunFolder, run_config: RunConfig, task: Task) -> Model:
    """A model with the shapes of the run's weights.

    Sizes in config.json that the weights do not have are rejected before memory is allocated for them.
    """
    shapes = run.shapes()
    values = check_config_sizes(run, run_config, shapes)
    model = build_limited_model(run_config, task, values=values, source=str(run))
    model.check_shapes(shapes, source=str(run))
    return model


def build_limited_model(run_config: RunConfig, task: Task, *, values: int, source: str) -> Model:
    """A new model for weights of this many values, refused if its sizes need far more memory than they have."""
    try:
        with AllocationLimit(8 * values + SPARE_BYTES):
            return build_model(run_config, task)
    except AllocationTooLarge:
        names = ("context", "width", "vocabulary")
        sizes = ", ".join(f"model.{name} {getattr(run_config.model, name)}" for name in names)
        raise UserError(
            f"{source}: the sizes in config.json ({sizes}) need more memory than its {values} weights"
        ) from None
    except (RuntimeError, OverflowError, TypeError) as error:
        raise UserError(f"{source}: no model has the sizes in config.json ({str(error).splitlines()[0]})") from None


def check_config_sizes(run: RunFolder, run_config: RunConfig, shapes: Mapping[str, Size]) -> int:
    """The number of values in the weights; rejects a size in config.json that exceeds it."""
    values = sum(shape.numel() for shape in shapes.values())
    for part in fields(run_config.model):
        size, limit = getattr(run_config.model, part.name), len(shapes) if part.name.endswith("depth") else values
        if part.name != "context" and isinstance(size, int) and size > limit:
            raise UserError(f"{run}: config.json says model.{part.name} {size}, but its weights have {values} values")
    return values


def load_run_model(run: RunFolder, run_config: RunConfig, task: Task) -> Model:
    """A run's model with its weights."""
    model = build_checked_model(run, run_config, task)
    model.load_tensors(run.weights(checked=True), source=str(run))
    return model


def source_weights(run: RunFolder) -> dict[str, Tensor]:
    """The weights of a run that another one starts from."""
    run_config = make_config(run.config())
    build_checked_model(run, run_config, build_task(run_config, run.tokenizer()))
    return run.weights(checked=True)


def load_backbone_and_shared_heads(model: Model, weights: dict[str, Tensor], *, source: str) -> None:
    """Load a source's backbone and the heads that both models have; the model's other heads keep their weights."""
    own = model.tensors()

    def heads(names: Iterable[str]) -> set[str]:
        return {name.split(".")[1] for name in names if name.startswith("heads.")}

    shared = heads(own) & heads(weights)

    def is_shared(name: str) -> bool:
        return not name.startswith("heads.") or name.split(".")[1] in shared

    new = {name: tensor for name, tensor in own.items() if not is_shared(name)}
    transferred = {name: tensor for name, tensor in weights.items() if is_shared(name)}
    model.load_tensors(new | transferred, source=source)


def load_source_weights(model: Model, task: LabelledTask, weights: dict[str, Tensor], *, source: str) -> None:
    """Load a source's backbone, and its head if the task reuses one."""
    if isinstance(model.backbone, EncoderDecoder) and not any(name.startswith("backbone.encoder.") for name in weights):
        weights = weights_from_transformer(weights, model.tensors())
    load = load_backbone_and_shared_heads if task.reuses_head else Model.load_backbone
    load(model, weights, source=source)


def build_lm_objective(source: RunFolder | None, run_config: RunConfig) -> Task | None:
    """The pretraining objective of a source, whose loss is added to that of the task; None without `lm_loss`."""
    if source is None or not run_config.transfer.lm_loss:
        return None
    return build_task(make_config(source.config()), source.tokenizer())


def with_lm_head(model: Model, objective: Task, weights: Mapping[str, Tensor], *, source: str) -> Model:
    """The same model with the language-model head of a source beside its own heads."""
    with torch.random.fork_rng(devices=[]):
        head = objective.heads(model.backbone)[LM_HEAD]
    extended = Model(model.backbone, dict(model.heads.items()) | {LM_HEAD: head})
    own = {name: tensor for name, tensor in weights.items() if name.startswith(f"heads.{LM_HEAD}.")}
    extended.load_tensors(model.tensors() | own, source=source)
    return extended


def average_weights(first: dict[str, Tensor], second: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """The weighted average of two runs' weights, of which `share` is the second's; other tensors are the second's.

    The first may be in half precision, as those of the bundled runs are.
    """
    average = {
        name: torch.lerp(first[name].to(tensor.dtype), tensor, share)
        for name, tensor in second.items()
        if name in first and tensor.is_floating_point()
    }
    return second | average


def new_top_layers(model: Model, count: int) -> dict[str, Tensor]:
    """A copy of the parameters of the backbone's top layers, by name."""
    stages = model.backbone.parameters_by_layer()
    top = {id(parameter) for stage in stages[len(stages) - count :] for parameter in stage}
    return {name: p.detach().clone() for name, p in model.named_parameters() if id(p) in top}


def blueprint(run_config: RunConfig, *, weights: bool = False) -> tuple[Model, Task]:
    """The model and task of a configuration without data; on the meta device unless `weights`."""
    with nullcontext() if weights else torch.device("meta"):
        task = build_task(run_config, placeholder_tokenizer())
        return build_model(run_config, task), task


def describe_preset(name: str) -> dict[str, Any]:
    """A preset's family, objective and sizes, with the number of parameters after pretraining."""
    run_config = resolve_pretrain_config(name, None, {})
    model, _ = blueprint(run_config)
    return {
        "preset": name,
        "family": run_config.family,
        "objective": run_config.objective,
        "parameters": model.parameter_counts()["total"],
        "context": run_config.train.length or getattr(run_config.model, "context", None) or model.backbone.context,
        "vocabulary": run_config.model.vocabulary,
        "about": preset_file(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "),
    }


@cache
def placeholder_tokenizer() -> Tokenizer:
    """A tokenizer of one letter, for tasks that need special tokens before there is any text."""
    return train_tokenizer(["a"], TokenizerSettings(kind="char", vocabulary=16, min_frequency=1))
