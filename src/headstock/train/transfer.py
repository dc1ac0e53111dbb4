"""The settings of a fine-tuned run: another run's model, what its way to begin needs, and what the rows tell."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headstock import config
from headstock.errors import UserError, did_you_mean
from headstock.model.features import check_layers
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.task import TASKS
from headstock.text.records import Records
from headstock.train.run import Run
from headstock.train.settings import RunConfig, make_config, place_settings

COMMON = {"batch": 16, "schedule": "linear", "warmup": 0.1, "beta2": 0.999, "weight_decay": 0.01}
COMMON |= {"valid_tokens": 10**12, "log_every": 10**9, "keep": 1, "tensorboard": False}
# what each way to begin needs to do well; found on the validation rows of short film quotes
BY_KIND: dict[str, dict[str, Any]] = {
    "pretrained": {"lr": 3e-4, "epochs": 4.0},
    "scratch": {"lr": 1e-3, "epochs": 6.0},
    "frozen": {"lr": 1e-3, "epochs": 40.0, "weight_decay": 0.0},
}


def labelled_task(name: str) -> type[LabelledTask]:
    """A task by name, which must be one that labelled rows are for."""
    known = {one: task for one in TASKS.names() if issubclass(task := TASKS.get(one), LabelledTask)}
    if name in known:
        return known[name]
    have = ", ".join(known)
    if name in TASKS.names():
        raise UserError(f"--task {name}: is an objective of pretraining; a run is fine-tuned for one of {have}")
    raise UserError(f"--task {name}: no such task{did_you_mean(name, known)} (a run is fine-tuned for one of {have})")


def gather_config(source: Run, task: str, file: str | Path | None, given: dict[str, Any]) -> RunConfig:
    """The source's model, the task's defaults, a file and options, as one checked whole."""
    theirs = source.config()
    labelled_task(task)
    opening = theirs["task"].get("opening") or TASKS.get(theirs["task"]["name"]).opening
    tree: dict[str, Any] = {
        "model": theirs["model"],
        "task": {"name": task, "opening": opening},
        "data": {},
        "transfer": {"run": str(source)},
        "train": {},
    }
    tree = config.merge(tree, config.read_settings(Path(file)) if file else {}, {"transfer": {"run": str(source)}})
    return complete(config.merge(tree, place_settings(given, tree)))


def complete(tree: dict[str, Any]) -> RunConfig:
    """Fill in what a way to begin needs to do well, and check that the parts go together."""
    transfer, asked = tree["transfer"], tree["train"]
    kind = "frozen" if transfer.get("freeze") else transfer.get("init", "pretrained")
    defaults = COMMON | BY_KIND.get(kind, {})
    if asked.get("steps") or asked.get("minutes"):
        defaults.pop("epochs", None)
    if asked.get("epochs"):  # who names a number of epochs means it
        tree = config.merge({"transfer": {"least_steps": 0}}, tree)
    tree = config.merge(tree, {"train": defaults | asked})
    if transfer.get("bidirectional") is not None:
        tree = config.merge(tree, {"model": {"causal": not transfer["bidirectional"]}})
    causal = tree["model"].get("causal", True)
    pools = "pool" in {part.name for part in fields(labelled_task(tree["task"]["name"]).Config)}
    if pools:
        tree["task"] = {"pool": "last" if causal else "mean"} | tree["task"]
    chosen = make_config(tree)
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


def settle(chosen: RunConfig, records: Records) -> RunConfig:
    """What only the labelled rows can tell: the classes, their weights, and how long an epoch is."""
    task = labelled_task(chosen.objective).settle(chosen.task, records)
    return replace(chosen, task=task, train=with_length(chosen, len(records)))


def with_length(chosen: RunConfig, rows: int) -> Any:
    """Epochs enough for the least number of steps, and a validation after each."""
    settings = chosen.train
    steps = math.ceil(rows / settings.batch)
    if settings.steps is None and settings.minutes is None:
        epochs = max(settings.epochs or 1.0, math.ceil(chosen.transfer.least_steps / steps))
        settings = replace(settings, epochs=float(epochs))
    every = settings.validate_every or steps
    return replace(settings, validate_every=every)
