"""Settings of a comparison: a recipe file and command-line options merged and checked, and the arms they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headstock import config
from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.recipe import fixed_setting_problems, section_problems, table_problems
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import override_flat

SECTIONS = ("compare", "finetune", "arms", "pretrain")
DEFAULT_ARMS = ("scratch", "pretrained", "frozen", "tfidf")  # those that apply to the task
FIXED_SETTINGS = {  # fine-tuning settings that a comparison chooses itself
    "init": "it follows from the kind of the arm",
    "method": "it follows from the kind of the arm",
    "freeze": "it follows from the kind of the arm",
    "seed": "each trial has its own; the first is compare.seed",
    "classes": "they come from the training rows",
    "ensemble": "a trial is one model; compare reports how much models of different seeds differ",
    "adapt_steps": "arms start from the run as it is; adapt it with finetune, then compare the run in its adapted/",
}


@dataclass(frozen=True)
class CompareSettings:
    task: str = "classify"  # a labelled task
    train: str = ""  # labelled training rows
    valid: str | None = None  # labelled validation rows
    test: str | None = None  # labelled test rows; without labels the validation rows are evaluated
    columns: tuple[str, ...] = ()  # column names of the files, such as text=review
    separator: str | None = None  # between several classes of one row
    arms: tuple[str, ...] = ()  # default: all arms that apply to the task
    features: tuple[str, ...] = ()  # one frozen arm for each choice of layers: last, sum4, concat4, mix, N
    prompt: str | None = None  # template of prompt arms
    label_words: tuple[str, ...] = ()  # of prompt arms: LABEL=WORD or LABEL=WORD|WORD
    labels: tuple[int, ...] = ()  # numbers of training rows; default: all rows
    seeds: int = 5  # trials per arm and number of labels
    seed: int = 0  # the first seed
    leakage: Literal["exclude", "keep", "skip"] = "exclude"  # what to do with test texts found in the pretraining text
    rows: int | None = None  # evaluate on at most this many test rows
    skip_blank: bool = False  # drop rows with a blank text or label
    slices: tuple[str, ...] = ()  # groups of rows that are also scored: a column, contains:WORD, regex:PATTERN, ...

    def __post_init__(self) -> None:
        minimum = (("seeds", self.seeds, 1), ("rows", self.rows, 1), *(("labels", count, 2) for count in self.labels))
        problems = [
            (name, f"must be {least} or more, not {value}")
            for name, value, least in minimum
            if value is not None and value < least
        ]
        for name, noun in (("labels", "number"), ("features", "choice")):
            values = getattr(self, name)
            problems += [(name, f"contains a {noun} twice")] if len(set(values)) < len(values) else []
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
    compare = config.from_dict(CompareSettings, merged, prefix="compare")
    feature_arms = {f"frozen {layers}": {"kind": "frozen", "task.layers": layers} for layers in compare.features}
    names = compare.arms or (() if feature_arms else default_arms(compare))
    compare = replace(compare, arms=(*names, *feature_arms))
    arms = with_prompt_defaults(arms, compare)
    return ComparisonPlan(compare, finetune, arms | feature_arms, recipe.get("pretrain", {}))


def with_prompt_defaults(arms: dict[str, dict[str, Any]], settings: CompareSettings) -> dict[str, dict[str, Any]]:
    """Add the template and the label words of the comparison to all prompt arms without their own."""
    defaults = {"template": settings.prompt, "label_words": list(settings.label_words) or None}
    if not (defaults := {key: value for key, value in defaults.items() if value is not None}):
        return arms
    names = {"prompt", *(name for name, table in arms.items() if table.get("kind") == "prompt")}
    return arms | {name: defaults | arms.get(name, {}) for name in sorted(names)}


def default_arms(settings: CompareSettings) -> tuple[str, ...]:
    """The usual arms, without those that do not apply to the task."""
    return tuple(name for name in DEFAULT_ARMS if ARM_KINDS.get(name).unsupported(settings) is None)


@dataclass(frozen=True)
class Arm:
    """A way to obtain a model, with its own settings."""

    name: str
    kind: str
    run: RunFolder | None = None  # None for a kind that needs none
    settings: dict[str, Any] = field(default_factory=dict)

    def options(self, common: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Fine-tuning settings: those common to all arms, those implied by the kind, and the arm's own.

        A common setting that does not apply to the kind, such as the rank of LoRA to other kinds, is left out.
        """
        kind = ARM_KINDS.get(self.kind)
        foreign = {name for other in ARM_KINDS.names() for name in ARM_KINDS.get(other).defaults} - set(kind.defaults)
        foreign |= kind.ignored
        implied = {"transfer.init": "pretrained", "transfer.freeze": False, **kind.options}
        shared = {key: value for key, value in (common or {}).items() if bare_name(key) not in foreign}
        options: dict[str, Any] = {}
        for settings in (kind.defaults, shared, implied, self.settings):
            options |= {bare_name(key) if bare_name(key) in kind.defaults else key: settings[key] for key in settings}
        return options


def bare_name(key: str) -> str:
    """`transfer.lora` -> `lora`."""
    return key.rpartition(".")[2]


ArmTables = Mapping[str, Mapping[str, Any]]


def make_arms(runs: Sequence[str | Path], names: Sequence[str], tables: ArmTables | None = None) -> list[Arm]:
    """The named arms, once per run if they need one.

    `tables` defines custom arms, such as `{"fast": {"kind": "frozen", "lr": 1e-3}}`, and settings of standard ones.
    """
    tables = tables or {}
    check_arm_names(names, tables)
    folders = [open_run(run) for run in runs]
    paths = [run.path.resolve() for run in folders]
    if repeated := [run for run in folders if paths.count(run.path.resolve()) > 1]:
        raise UserError(f"{repeated[0]}: given twice")
    if not folders and any(ARM_KINDS.get(kind_of_arm(name, tables)).needs_run for name in names):
        raise UserError("no run to compare: give one, such as reviews-en, or use --arms tfidf")
    titles = [run.title for run in folders]
    if len(set(titles)) < len(titles):
        titles = [str(run) for run in folders]
    arms = []
    for name in names:
        kind = kind_of_arm(name, tables)
        settings = {key: value for key, value in tables.get(name, {}).items() if key != "kind"}
        if not ARM_KINDS.get(kind).needs_run:
            arms.append(Arm(name, kind, settings=settings))
            continue
        for run, title in zip(folders, titles, strict=True):
            arms.append(Arm(name if len(folders) == 1 else f"{name} {title}", kind, run, settings))
    return arms


def check_arm_names(names: Sequence[str], tables: ArmTables) -> None:
    """Refuse unknown and repeated arms, tables without a kind, and settings that a kind does not have."""
    available = [*ARM_KINDS.names(), *(name for name in tables if name not in ARM_KINDS.names())]
    for name in names:
        if name not in available:
            hint = did_you_mean(name, available)
            raise UserError(f"--arms {name}: no such arm{hint} (have: {', '.join(available)})")
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise UserError(f"--arms: {', '.join(repeated)} given twice")
    for name, table in tables.items():
        settings = {key: value for key, value in table.items() if key != "kind"}
        ARM_KINDS.get(kind_of_arm(name, tables)).check_settings(name, settings)


def kind_of_arm(name: str, tables: ArmTables) -> str:
    kind = tables.get(name, {}).get("kind", name)
    if kind not in (kinds := ARM_KINDS.names()):
        hint = did_you_mean(str(kind), kinds)
        raise UserError(f"arms.{name}.kind: must be one of {', '.join(kinds)}, not {kind!r}{hint}")
    return str(kind)
