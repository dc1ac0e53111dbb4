"""Settings of a comparison: a recipe file and command-line options merged and checked."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headstock import config
from headstock.errors import ConfigError
from headstock.experiments.recipe import fixed_setting_problems, section_problems, table_problems
from headstock.train.resolve import labelled_task
from headstock.train.settings import override_flat

SECTIONS = ("compare", "finetune", "arms", "pretrain")
FIXED_SETTINGS = {  # fine-tuning settings that a comparison chooses itself
    "init": "it follows from the kind of the arm",
    "freeze": "it follows from the kind of the arm",
    "seed": "each trial has its own; the first is compare.seed",
    "classes": "they come from the training rows",
    "ensemble": "a trial is one model; compare reports how much models of different seeds differ",
    "adapt_steps": "arms start from the run as it is; adapt it with finetune, then compare the run in its adapted/",
}


@dataclass(frozen=True)
class CompareSettings:
    task: str = "classify"  # or pair, tag, answer, translate
    train: str = ""
    valid: str | None = None
    test: str | None = None
    columns: tuple[str, ...] = ()
    separator: str | None = None  # between several classes of one row
    arms: tuple[str, ...] = ()  # default: all arms that apply to the task
    features: tuple[str, ...] = ()  # one frozen arm for each choice of layers: last, sum4, concat4, mix, N
    labels: tuple[int, ...] = ()  # numbers of training rows; default: all rows
    seeds: int = 5
    seed: int = 0  # the first seed
    leakage: Literal["exclude", "keep", "skip"] = "exclude"  # what to do with test texts found in the pretraining text
    rows: int | None = None  # evaluate on at most this many test rows
    skip_blank: bool = False  # drop rows with a blank text or label

    def __post_init__(self) -> None:
        problems = []
        if self.seeds < 1:
            problems.append(("seeds", f"must be 1 or more, not {self.seeds}"))
        if self.rows is not None and self.rows < 1:
            problems.append(("rows", f"must be 1 or more, not {self.rows}"))
        problems += [("labels", f"must be 2 or more, not {count}") for count in self.labels if count < 2]
        if len(set(self.labels)) < len(self.labels):
            problems.append(("labels", "contains a number twice"))
        if len(set(self.features)) < len(self.features):
            problems.append(("features", "contains a choice twice"))
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class ComparisonPlan:
    """The four sections of a comparison recipe."""

    compare: CompareSettings
    settings: dict[str, Any]  # of every fine-tuned arm
    arms: dict[str, dict[str, Any]]  # custom arms, and settings of single arms
    pretrain: dict[str, Any]  # how to pretrain the run to compare if none is given


def make_plan(file: str | Path | None, options: dict[str, Any], settings: dict[str, Any]) -> ComparisonPlan:
    """Merge a recipe file with options, which take precedence."""
    recipe = config.read_settings(Path(file)) if file else {}
    arms = recipe.get("arms", {})
    arm_tables = {f"arms.{name}": table for name, table in arms.items()} if isinstance(arms, dict) else {}
    if problems := section_problems(recipe, SECTIONS) + table_problems(arm_tables):
        raise ConfigError(problems)
    finetune = override_flat(recipe.get("finetune", {}), settings)
    for section, table in {"finetune": finetune, **arm_tables}.items():
        problems += fixed_setting_problems(table, FIXED_SETTINGS, prefix=f"{section}.")
    if problems:
        raise ConfigError(problems)
    separators = [finetune.pop(key) for key in ("separator", "task.separator") if key in finetune]
    merged = recipe.get("compare", {}) | ({"separator": separators[0]} if separators else {}) | options
    compare = config.from_dict(CompareSettings, merged, at="compare")
    feature_arms = {f"frozen {layers}": {"kind": "frozen", "task.layers": layers} for layers in compare.features}
    names = compare.arms or (() if feature_arms else default_arms(compare))
    compare = replace(compare, arms=(*names, *feature_arms))
    return ComparisonPlan(compare, finetune, arms | feature_arms, recipe.get("pretrain", {}))


def default_arms(settings: CompareSettings) -> tuple[str, ...]:
    """All arms that apply to the task: TF-IDF predicts one class per text, a frozen backbone needs a separate head."""
    task = labelled_task(settings.task)
    frozen = ["frozen"] if task.can_freeze_backbone else []
    tfidf = ["tfidf"] if task.predicts_classes and settings.separator is None else []
    return ("scratch", "pretrained", *frozen, *tfidf)
