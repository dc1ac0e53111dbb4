"""What is explained: a run with its weights, or a preset as it would be built; and checks of the texts it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headstock.config import parse_setting, to_dict
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError, did_you_mean
from headstock.inference.pipeline import Pipeline, load
from headstock.inference.translate import display_tokens
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Task
from headstock.tasks.labelled import is_labelled
from headstock.train import resolve
from headstock.train.distributed import choose_device
from headstock.train.loop import sequence_length
from headstock.train.models import blueprint
from headstock.train.run_folder import open_run
from headstock.train.settings import RunConfig, preset_names

VOCABULARY_SETTINGS = {"vocabulary", "tokenizer.vocabulary", "model.vocabulary"}


@dataclass(frozen=True)
class ExplainSubject:
    model: Model
    tokenizer: Tokenizer | None  # None for a preset, which has read no text
    task: Task  # whose heads the model has
    config: RunConfig
    name: str
    notes: tuple[str, ...] = ()  # assumptions the user did not make


def open_subject(
    run: str | None,
    preset: str | None,
    assignments: list[str] | None = None,
    *,
    task: str | None = None,
    classes: int | None = None,
    device: str = "auto",
    weights: bool = True,
) -> ExplainSubject:
    """A run, or a preset with initial weights; with `task`, either has new heads of that task.

    Without `weights` a preset is built on the meta device.
    """
    if (run is None) == (preset is None):
        problem = "both were given" if run else "neither was given"
        raise UserError(f"name a run (or a bundled model), or a preset with --preset: {problem}")
    settings = dict(parse_setting(text) for text in assignments or [])
    if task is not None and task not in TASKS.names():
        names = TASKS.names()
        raise UserError(f"--task {task}: no such task{did_you_mean(task, names)} (have: {', '.join(names)})")
    if preset is not None:
        return preset_subject(preset, settings, task, classes, device if weights else None)
    assert run is not None
    return run_subject(run, settings, task, classes, device)


def run_subject(
    run: str, settings: dict[str, Any], task: str | None, classes: int | None, device: str
) -> ExplainSubject:
    if run in preset_names() and not is_run(run):
        raise UserError(f"{run}: is a preset, not a run; name it with --preset {run}")
    pipeline = load(run, device=device)
    if task is None:
        if settings:
            raise UserError(f"{run}: --set goes with --preset, or with --task for a new head")
        return ExplainSubject(pipeline.model, pipeline.tokenizer, pipeline.task, pipeline.config, str(pipeline.run))
    config = resolve.resolve_finetune_config(open_run(run), task, None, settings | class_settings(task, classes))
    if to_dict(config.model) != to_dict(pipeline.config.model):
        raise UserError(f"{run}: with --task, --set changes settings of the task only, not those of the model")
    new_task = TASKS.get(task)(config.task, pipeline.tokenizer)
    model = pipeline.model.with_heads(new_task.heads(pipeline.model.backbone)).to(pipeline.model.device)
    return ExplainSubject(model, pipeline.tokenizer, new_task, config, str(pipeline.run))


def open_single_run(run: str | Path, *, device: str = "auto") -> Pipeline:
    """A run that is one model; an ensemble is refused."""
    pipeline = load(run, device=device)
    if len(pipeline.models) > 1:
        raise UserError(f"{pipeline.run}: is an ensemble; name one of its models, such as {pipeline.run.member(0)}")
    return pipeline


def is_run(name: str) -> bool:
    try:
        open_run(name)
    except UserError:
        return False
    return True


def preset_subject(
    preset: str, settings: dict[str, Any], task: str | None, classes: int | None, device: str | None
) -> ExplainSubject:
    """On `device`, or on the meta device."""
    if task is not None and TASKS.get(task).is_labelled:
        config = resolve.resolve_finetune_config(
            None, task, None, settings | class_settings(task, classes), preset=preset
        )
    else:
        config = resolve.resolve_pretrain_config(preset, None, settings | ({"task.name": task} if task else {}))
    model, new_task = blueprint(config, weights=device is not None)
    if device is not None:
        model.to(choose_device(device)).eval()
    note = f"vocabulary {config.model.vocabulary:,}, the default of pretraining (--set vocabulary=N)"
    notes = () if VOCABULARY_SETTINGS & settings.keys() else (note,)
    return ExplainSubject(model, None, new_task, config, preset, notes)


def class_settings(task: str, classes: int | None) -> dict[str, Any]:
    """Classes named by number, for tasks that have classes."""
    if "classes" not in {part.name for part in fields(TASKS.get(task).Config)}:
        return {}
    if classes is None or classes < 1:
        raise UserError(f"--task {task}: needs the number of classes, --classes N")
    return {"task.classes": [str(number) for number in range(classes)]}


# Texts for a run


def check_length(pipeline: Pipeline, count: int) -> None:
    """Refuse a text that the run cannot read whole."""
    limit = pipeline.model.backbone.context
    if is_labelled(pipeline.task):
        limit = sequence_length(pipeline.model, pipeline.config.train)
    if limit is not None and count > limit:
        problem = f"the text has {count:,} tokens with special tokens, and this run reads {limit:,}"
        raise UserError(f"{pipeline.run}: {problem}")


def check_texts(pipeline: Pipeline, texts: Sequence[str]) -> None:
    """As many texts as a row of the run's task has, none of them empty."""
    if len(texts) != pipeline.task.texts_per_row:
        raise UserError(f"{pipeline.run}: expects {pipeline.task.row_description}, found {len(texts)}")
    if not all(text.strip() for text in texts):
        raise UserError(f"{pipeline.run}: the text is empty")


def tokenize(pipeline: Pipeline, text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    if not (ids := (tokenizer or pipeline.tokenizer).encode(text)):
        raise UserError(f"{pipeline.run}: the tokenizer returns no tokens for the text")
    return ids


def source_tokenizer(pipeline: Pipeline) -> Tokenizer:
    return pipeline.tokenizer.source_tokenizer or pipeline.tokenizer


def row_tokens(pipeline: Pipeline, batch: Batch, *, source: bool = False) -> list[str]:
    """The tokens of the first row as text; `source` if it is the source of an encoder-decoder."""
    return display_tokens(source_tokenizer(pipeline) if source else pipeline.tokenizer, batch.tokens[0].tolist())


def find_token(tokens: Sequence[str], word: str) -> int | None:
    """The index of a token; a number is a position, counted from 1."""
    if word in tokens:
        return tokens.index(word)
    return int(word) - 1 if word.isdecimal() and 1 <= int(word) <= len(tokens) else None
