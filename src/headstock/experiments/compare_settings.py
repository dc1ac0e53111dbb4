"""What a comparison is asked to do: a recipe file and options as one checked whole."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headstock import config
from headstock.errors import ConfigError
from headstock.train.finetune_config import labelled_task
from headstock.train.settings import override_flat


@dataclass(frozen=True)
class CompareSettings:
    task: str = "classify"  # or pair, tag, answer, translate
    train: str = ""
    valid: str | None = None
    test: str | None = None
    columns: tuple[str, ...] = ()
    separator: str | None = None  # between the classes of one label
    arms: tuple[str, ...] = ()  # all that the task has a use for unless given
    features: tuple[str, ...] = ()  # a frozen arm for each of these choices of layers: last, sum4, concat4, mix, N
    labels: tuple[int, ...] = ()  # numbers of training rows; all of them unless given
    seeds: int = 5
    seed: int = 0  # the first of them
    leakage: Literal["exclude", "keep", "skip"] = "exclude"  # what becomes of test texts that pretraining has seen
    rows: int | None = None  # measure on at most so many test rows
    skip_blank: bool = False  # leave out rows with a blank text or label

    def __post_init__(self) -> None:
        problems = []
        if self.seeds < 1:
            problems.append(("seeds", f"must be 1 or more, not {self.seeds}"))
        if self.rows is not None and self.rows < 1:
            problems.append(("rows", f"must be 1 or more, not {self.rows}"))
        problems += [("labels", f"must be 2 or more, not {count}") for count in self.labels if count < 2]
        if len(set(self.labels)) < len(self.labels):
            problems.append(("labels", "names a number twice"))
        if len(set(self.features)) < len(self.features):
            problems.append(("features", "names a choice twice"))
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class ComparisonPlan:
    """The four sections of a recipe."""

    compare: CompareSettings
    settings: dict[str, Any]  # of every fine-tuned arm
    arms: dict[str, dict[str, Any]]  # arms of other names, or with settings of their own
    pretrain: dict[str, Any]  # how to make the run, where none is named


# settings of fine-tuning that a comparison decides itself
DECIDED = {
    "init": "the kind of an arm says it",
    "freeze": "the kind of an arm says it",
    "seed": "each cell has its own; the first is compare.seed",
    "classes": "they are those of the training rows",
    "ensemble": "a cell is one model; compare tells how much models from several seeds differ",
    "adapt_steps": "arms begin with a run as it is; adapt it with finetune, then compare what that leaves in adapted/",
}


def make_plan(file: str | Path | None, given: dict[str, Any], settings: dict[str, Any]) -> ComparisonPlan:
    written = config.read_settings(Path(file)) if file else {}
    known = ("compare", "finetune", "arms", "pretrain")
    problems = [(name, f"unknown section (have: {', '.join(known)})") for name in written if name not in known]
    tables = {name: written.get(name, {}) for name in known}
    arms = tables["arms"] if isinstance(tables["arms"], dict) else {}
    tables |= {f"arms.{name}": table for name, table in arms.items()}
    problems += [(name, "must be a table") for name, table in tables.items() if not isinstance(table, dict)]
    if problems:
        raise ConfigError(problems)
    finetune = override_flat(tables["finetune"], settings)
    for where, table in {"finetune": finetune, **{f"arms.{name}": table for name, table in arms.items()}}.items():
        named = ((key, DECIDED.get(key.rpartition(".")[2])) for key in table)
        problems += [(f"{where}.{key}", f"cannot be set: {why}") for key, why in named if why]
    if problems:
        raise ConfigError(problems)
    separators = [finetune.pop(key) for key in ("separator", "task.separator") if key in finetune]
    merged = tables["compare"] | ({"separator": separators[0]} if separators else {}) | given
    asked = config.from_dict(CompareSettings, merged, at="compare")
    tried = {f"frozen {layers}": {"kind": "frozen", "task.layers": layers} for layers in asked.features}
    names = asked.arms or (() if tried else default_arms(asked))
    return ComparisonPlan(replace(asked, arms=(*names, *tried)), finetune, arms | tried, tables["pretrain"])


def default_arms(asked: CompareSettings) -> tuple[str, ...]:
    """All ways to learn a task; TF-IDF has a use for whole texts of one class only."""
    task = labelled_task(asked.task)
    of_texts = task.predicts_classes and asked.separator is None
    frozen = ["frozen"] if task.can_freeze_backbone else []
    return ("scratch", "pretrained", *frozen, *(["tfidf"] if of_texts else []))
