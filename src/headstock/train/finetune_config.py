"""The settings of a fine-tuned run: another run's model, what its way to begin needs, and what the rows tell."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from headstock import config
from headstock.data.records import Records
from headstock.errors import UserError, did_you_mean
from headstock.model.backbone import BACKBONES
from headstock.model.layer_features import check_layers
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.train.run_folder import RunFolder
from headstock.train.settings import (
    RunConfig,
    TransferSettings,
    is_causal,
    make_config,
    override_settings,
    read_preset,
)

COMMON = {"batch": 16, "schedule": "linear", "warmup": 0.1, "beta2": 0.999, "weight_decay": 0.01}
COMMON |= {"valid_tokens": 10**12, "log_every": 10**9, "keep": 1, "tensorboard": False}
# what each way to begin needs to do well; found on the validation rows of short film quotes
BY_KIND: dict[str, dict[str, Any]] = {
    "pretrained": {"lr": 3e-4, "epochs": 4.0},
    "scratch": {"lr": 1e-3, "epochs": 6.0},
    "frozen": {"lr": 1e-3, "epochs": 40.0, "weight_decay": 0.0},
}


CHARACTERS = 4  # about so many are in a token


def labelled_task(name: str) -> type[LabelledTask]:
    """A task by name, which must be one that labelled rows are for."""
    known = [one for one in TASKS.names() if TASKS.get(one).is_labelled]
    if name in known:
        return cast(type[LabelledTask], TASKS.get(name))
    have = ", ".join(known)
    if name in TASKS.names():
        raise UserError(f"--task {name}: is an objective of pretraining; a run is fine-tuned for one of {have}")
    raise UserError(f"--task {name}: no such task{did_you_mean(name, known)} (a run is fine-tuned for one of {have})")


def resolve_finetune_config(
    source: RunFolder | None, task: str, file: str | Path | None, given: dict[str, Any], *, preset: str | None = None
) -> RunConfig:
    """The source's model, the task's defaults, a file and options, as one checked whole.

    Without a source, the model and the tokenizer are made from nothing as a preset says.
    """
    if source is None:
        return from_preset(preset, task, file, given)
    theirs = source.config()
    known = {part.name for part in fields(labelled_task(task).Config)}
    opening = theirs["task"].get("opening") or TASKS.get(theirs["task"]["name"]).bos_role
    marks = {"opening": opening, "closed": theirs["task"].get("closed", False)}
    tree: dict[str, Any] = {
        "model": theirs["model"],
        "task": {"name": task} | {name: mark for name, mark in marks.items() if name in known},
        "data": {},
        "transfer": {"run": str(source)},
        "train": {} if theirs["model"].get("context") else {"length": theirs["train"].get("length")},
    }
    tree = config.merge(tree, read_file(file), {"transfer": {"run": str(source)}})
    return complete(override_settings(tree, given))


def from_preset(preset: str | None, task: str, file: str | Path | None, given: dict[str, Any]) -> RunConfig:
    """A model that was never pretrained: what the preset says of pretraining is left aside."""
    labelled_task(task)
    written = read_file(file)
    begins = {"run": "", "init": "scratch"}
    name = preset or written.get("transfer", {}).get("preset")
    if name is None:
        raise UserError("nothing to begin with: name a run, or with --preset what a new model is made like")
    if given.get("transfer.init", "scratch") != "scratch":
        raise UserError(f"--init {given['transfer.init']}: a preset has no weights to begin with; name a run")
    base = read_preset(name)
    vocabulary = base.get("tokenizer", {}).get("vocabulary", 8000)
    tree: dict[str, Any] = {
        "model": reading_of(base),
        "tokenizer": base.get("tokenizer", {}),
        "task": {"name": task},
        "data": {},
        "transfer": begins | {"preset": name},
        "train": {},
    }
    tree = config.merge(tree, written, {"transfer": begins | {"preset": name}})
    tree = override_settings(tree, given)
    vocabulary = tree["tokenizer"].get("vocabulary", vocabulary)
    return complete(config.merge({"model": {"vocabulary": vocabulary}}, tree))  # settled when the tokenizer is there


def read_file(file: str | Path | None) -> dict[str, Any]:
    return config.read_settings(Path(file), tables=config.SECTIONS) if file else {}


def reading_of(preset: dict[str, Any]) -> dict[str, Any]:
    """A preset's model, which looks back only or both ways as its objective would have it."""
    model = preset["model"]
    causal = TASKS.get(preset.get("task", {}).get("name", "causal")).causal
    told = causal is None or hasattr(BACKBONES.get(model.get("family", "transformer")), "causal")
    return model if told else {"causal": causal} | model


def defaults_of(task: type[LabelledTask], kind: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What training needs to do well, where nothing else is asked for."""
    defaults = COMMON | BY_KIND.get(kind, {}) | task.training_defaults
    if asked.get("batch"):  # who names a number of rows means it
        defaults.pop("batch_tokens", None)
    if asked.get("steps") or asked.get("minutes"):
        defaults.pop("epochs", None)
    return defaults


def check_kind(tree: dict[str, Any], task: type[LabelledTask], kind: str) -> None:
    """Refuse models and ways to begin that a task has no use for."""
    family = tree["model"].get("family", "transformer")
    if BACKBONES.get(family).is_encoder_decoder != task.needs_encoder_decoder:
        able = [
            name for name in BACKBONES.names() if BACKBONES.get(name).is_encoder_decoder == task.needs_encoder_decoder
        ]
        other = [name for name in TASKS.names() if TASKS.get(name).needs_encoder_decoder != task.needs_encoder_decoder]
        uses = [name for name in other if TASKS.get(name).is_labelled]
        raise UserError(
            f"--task {task.name}: a model of the family {family!r} cannot learn it (families that can: "
            f"{', '.join(able)}; tasks for {family!r}: {', '.join(uses)})"
        )
    if kind == "frozen" and not task.can_freeze_backbone:
        raise UserError(f"--freeze: {task.name} has no head that could be trained alone")
    if tree["transfer"].get("ensemble", 1) > 1 and not task.can_ensemble:
        raise UserError(f"transfer.ensemble: what models of {task.name} say cannot be averaged")


def complete(tree: dict[str, Any]) -> RunConfig:
    """Fill in what a way to begin needs to do well, and check that the parts go together."""
    transfer, asked = tree["transfer"], tree["train"]
    config.from_dict(TransferSettings, transfer, at="transfer")  # what is asked of it below must be of the right type
    kind = "frozen" if transfer.get("freeze") else transfer.get("init", "pretrained")
    task = labelled_task(tree["task"]["name"])
    check_kind(tree, task, kind)
    defaults = defaults_of(task, kind, asked)
    if asked.get("epochs"):  # who names a number of epochs means it
        tree = config.merge({"transfer": {"least_steps": 0}}, tree)
    tree = config.merge(tree, {"train": defaults | asked})
    if transfer.get("bidirectional") is not None:
        tree = with_direction(tree, causal=not transfer["bidirectional"])
    causal = is_causal(tree["model"])
    own = {part.name for part in fields(task.Config)}
    pools = "pool" in own
    if pools:
        tree["task"] = {"pool": "last" if causal else "mean"} | tree["task"]
    chosen = make_config(tree)
    if "layers" in own:
        check_layers(chosen.task.layers, chosen.model.depth)
    settings = chosen.train
    if transfer.get("freeze") and (settings.unfreeze or settings.layer_decay != 1):
        name = "unfreeze" if settings.unfreeze else "layer_decay"
        raise UserError(f"train.{name}: with --freeze there is nothing to train below the head, so it has no meaning")
    if pools and chosen.task.pool == "cls" and causal:
        raise UserError("task.pool: a causal model's first mark sees no text; use last, mean or bidirectional=true")
    context = getattr(chosen.model, "context", None)
    if settings.length and context and settings.length > context:
        raise UserError(f"train.length: {settings.length} is longer than model.context {context}")
    return chosen


def with_direction(tree: dict[str, Any], *, causal: bool) -> dict[str, Any]:
    """The model told to look back only or both ways, where its family can be told."""
    family = tree["model"]["family"]
    own = getattr(BACKBONES.get(family), "causal", None)
    if own is None:
        return config.merge(tree, {"model": {"causal": causal}})
    if own != causal:
        reads = "looks back only" if own else "looks both ways"
        raise UserError(f"transfer.bidirectional: a model of the family {family!r} {reads}, whatever is set")
    return tree


def resolve_with_data(chosen: RunConfig, records: Records) -> RunConfig:
    """What only the labelled rows can tell: the classes, their weights, and how long an epoch is."""
    task = labelled_task(chosen.objective).infer_settings(chosen.task, records)
    return replace(chosen, task=task, train=with_length(chosen, records))


def with_length(chosen: RunConfig, records: Records) -> Any:
    """Epochs enough for the least number of steps, and a validation after each.

    Where a step is of so many tokens, how many steps an epoch has is known only when the rows are cut: here it is
    guessed, and validations are a tenth of the run apart.
    """
    settings = chosen.train
    if settings.batch_tokens is None:
        steps = math.ceil(len(records) / settings.batch)
    else:
        steps = math.ceil(sum(map(len, records.documents)) / CHARACTERS / settings.batch_tokens)
    if settings.steps is None and settings.minutes is None:
        epochs = max(settings.epochs or 1.0, math.ceil(chosen.transfer.least_steps / steps))
        settings = replace(settings, epochs=float(epochs))
    every = settings.validate_every or (steps if settings.batch_tokens is None else None)
    return replace(settings, validate_every=every)
