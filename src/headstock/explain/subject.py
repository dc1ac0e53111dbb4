"""What is to be explained: a run with its weights, or a preset as it would be built."""

from dataclasses import dataclass, fields
from typing import Any

from headstock import config as settings
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError, did_you_mean
from headstock.inference.pipeline import load
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Task
from headstock.train import finetune_config as transfer
from headstock.train import pretrain
from headstock.train.blueprint import blueprint
from headstock.train.distributed import choose_device
from headstock.train.run_folder import open_run
from headstock.train.settings import RunConfig, preset_names


@dataclass(frozen=True)
class ExplainSubject:
    model: Model
    tokenizer: Tokenizer | None  # none where a preset is looked at, which has read no text
    task: Task  # what its heads are for
    config: RunConfig
    name: str
    notes: tuple[str, ...] = ()  # what nobody asked for but is so


def open_subject(
    run: str | None,
    preset: str | None,
    sets: list[str] | None = None,
    *,
    task: str | None = None,
    classes: int | None = None,
    device: str = "auto",
    weights: bool = True,
) -> ExplainSubject:
    """A run as it is, or a preset with fresh weights; `task` gives either the heads of that task.

    Without `weights` a preset is only a plan: its tensors have a shape, but nothing in it.
    """
    if (run is None) == (preset is None):
        have = "both came" if run else "neither came"
        raise UserError(f"name a run (or a stock that ships), or a preset with --preset: {have}")
    given = dict(settings.parse_setting(text) for text in sets or [])
    if task is not None and task not in TASKS.names():
        have = ", ".join(TASKS.names())
        raise UserError(f"--task {task}: no such task{did_you_mean(task, TASKS.names())} (have: {have})")
    if preset is not None:
        return of_preset(preset, given, task, classes, device if weights else None)
    assert run is not None
    return of_run(run, given, task, classes, device)


def of_run(run: str, given: dict[str, Any], task: str | None, classes: int | None, device: str) -> ExplainSubject:
    if not open_run_is_there(run):
        raise UserError(f"{run}: is a preset, not a run; name it with --preset {run}")
    loaded = load(run, device=device)
    if task is None:
        if given:
            raise UserError(f"{run}: a run is what it is; --set goes with --preset, or with --task for a new head")
        return ExplainSubject(loaded.model, loaded.tokenizer, loaded.task, loaded.config, str(loaded.run))
    chosen = transfer.resolve_finetune_config(open_run(run), task, None, given | named_classes(task, classes))
    if settings.to_dict(chosen.model) != settings.to_dict(loaded.config.model):
        raise UserError(f"{run}: its model is what it is; with --task, --set changes the task's own settings only")
    made = TASKS.get(task)(chosen.task, loaded.tokenizer)
    model = loaded.model.with_heads(made.heads(loaded.model.backbone)).to(loaded.model.device)
    return ExplainSubject(model, loaded.tokenizer, made, chosen, str(loaded.run))


def open_run_is_there(name: str) -> bool:
    """False for a preset's name where no run has it: an easy slip, and worth a better word than a missing folder."""
    try:
        open_run(name)
    except UserError:
        return name not in preset_names()
    return True


def of_preset(
    preset: str, given: dict[str, Any], task: str | None, classes: int | None, device: str | None
) -> ExplainSubject:
    """On `device`, or nowhere: then it has no weights."""
    asked = {"vocabulary", "tokenizer.vocabulary", "model.vocabulary"} & set(given)
    if task is not None and labelled(task):
        chosen = transfer.resolve_finetune_config(None, task, None, given | named_classes(task, classes), preset=preset)
    else:
        chosen = pretrain.resolve_config(preset, None, given | ({"task.name": task} if task else {}))
    model, made = blueprint(chosen, weights=device is not None)
    if device is not None:
        model.to(choose_device(device)).eval()
    notes = (
        ()
        if asked
        else (f"vocabulary: {chosen.model.vocabulary:,}, as pretraining would make it (--set vocabulary=N)",)
    )
    return ExplainSubject(model, None, made, chosen, preset, notes)


def labelled(task: str) -> bool:
    """Whether a task is learned from labelled rows, not an objective of pretraining."""

    return TASKS.get(task).is_labelled


def named_classes(task: str, classes: int | None) -> dict[str, Any]:
    """So many classes, called by their numbers; asked for where a task has them."""
    if "classes" not in {part.name for part in fields(TASKS.get(task).Config)}:
        return {}
    if classes is None or classes < 1:
        raise UserError(f"--task {task}: has classes; say with --classes how many")
    return {"task.classes": [str(number) for number in range(classes)]}
