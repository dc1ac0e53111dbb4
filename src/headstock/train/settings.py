"""The settings of a run: the sections of config.json, and how options are assigned to them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from headstock import config
from headstock.data.tokenizer import TokenizerSettings
from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.model.backbone import BACKBONES
from headstock.tasks.base import TASKS


@dataclass(frozen=True)
class DataSettings:
    corpus: tuple[str, ...] = ()  # files, folders, globs, or - for standard input
    valid: tuple[str, ...] = ()  # held-out text; a fraction of the corpus unless given
    documents: Literal["auto", "line", "block", "file"] = "auto"
    column: str = "text"  # of .csv, .tsv, .jsonl and .parquet files
    valid_fraction: float = 0.05
    split_seed: int = 0  # of the held-out documents; not the run's seed, so that runs are evaluated on the same text
    deduplicate: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise ConfigError([("valid_fraction", f"must be above 0 and below 1, not {self.valid_fraction}")])


@dataclass(frozen=True)
class LabelledSettings:
    train: str = ""  # table of texts and labels, or the first of two files
    valid: str | None = None  # a fraction of the training rows unless given
    test: str | None = None  # evaluated at the end if it has labels, predicted if not
    columns: tuple[str, ...] = ()  # column names of the files, such as text=review
    valid_fraction: float = 0.1
    skip_blank: bool = False  # skip rows with a blank text or label instead of rejecting them

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise ConfigError([("valid_fraction", f"must be above 0 and below 1, not {self.valid_fraction}")])


@dataclass(frozen=True)
class TransferSettings:
    run: str = ""  # source of the backbone,
    preset: str | None = None  # or the preset of a new model
    init: Literal["pretrained", "scratch"] = "pretrained"  # the source's weights, or only its architecture
    freeze: bool = False  # train the head alone, on cached features
    bidirectional: bool | None = None  # use a causal backbone with (false) or without (true) its causal mask
    adapt_steps: int = 0  # steps of further pretraining on the task's own texts,
    adapt_lr: float | None = None  # at this learning rate; a third of the source's unless given
    ensemble: int = 1  # number of models with different seeds, whose probabilities are averaged
    least_steps: int = 100  # epochs are added for small files to reach this; 0 if `epochs` is given

    def __post_init__(self) -> None:
        problems = [
            (name, f"must be {least} or more, not {getattr(self, name)}")
            for name, least in (("adapt_steps", 0), ("ensemble", 1), ("least_steps", 0))
            if getattr(self, name) < least
        ]
        if self.init == "scratch" and self.adapt_steps:
            problems.append(("adapt_steps", "needs pretrained weights, so it conflicts with init scratch"))
        if problems:
            raise ConfigError(problems)


RUN_LENGTHS = ("steps", "epochs", "minutes")  # at most one of these is set


@dataclass(frozen=True)
class TrainSettings:
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    batch: int = 32  # rows per step, over all processes;
    batch_tokens: int | None = None  # or the number of tokens per step
    micro_batch: int | None = None  # rows per forward pass and process; gradients are accumulated
    length: int | None = None  # tokens per row; the model's context unless given
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    schedule: Literal["cosine", "linear", "trapezoid", "constant"] = "cosine"
    warmup: float = 0.05  # fraction of the run in which the learning rate rises
    cooldown: float = 0.3  # fraction of the run in which a trapezoid falls
    lr_floor: float = 0.0  # final learning rate, as a fraction of lr
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95  # muon's
    clip: float = 1.0  # maximum gradient norm; 0: no clipping
    label_smoothing: float = 0.0
    layer_decay: float = 1.0  # ratio of a layer's learning rate to that of the layer above
    unfreeze: float | None = (
        None  # epochs between unfreezing one layer and the next, from the top; all at once unless given
    )
    patience: int | None = None  # stop after this many validations without improvement
    ema: float = 0.0  # decay of the exponential moving average of the weights; 0: no averaging
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = (
        "auto"  # float8: bfloat16 with large matrix products in 8 bits
    )
    # true: torch.compile; replay: CUDA graphs, for small models; both; auto: whichever is faster on a GPU
    compile: Literal["auto", True, False, "replay", "both"] = "auto"
    vocabulary_multiple: int = 1  # a new model's vocabulary is padded to a multiple of this, for GPU speed
    validate_every: int | None = None  # steps; a tenth of the run unless given
    # maximum tokens per validation; unless given, validations take about 5% of the run's time
    valid_tokens: int | None = None
    checkpoint_every: int | None = None  # steps; with every validation unless given
    keep: int = 2  # newest checkpoints to keep, beside the best
    weights: Literal["best", "last"] = "best"  # the run's final weights
    log_every: int | None = None  # steps; a fiftieth of the run unless given
    tensorboard: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        lengths = [name for name in RUN_LENGTHS if getattr(self, name) is not None]
        if len(lengths) > 1:
            problems.append((lengths[1], f"cannot be set together with {lengths[0]}: a run has one length"))
        for name in (
            "steps",
            "epochs",
            "minutes",
            "micro_batch",
            "batch_tokens",
            "length",
            "validate_every",
            "checkpoint_every",
            "log_every",
            "valid_tokens",
            "unfreeze",
            "patience",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                problems.append((name, f"must be above 0, not {value}"))
        for name in ("batch", "keep", "vocabulary_multiple", "lr", "layer_decay"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append((name, f"must be above 0, not {getattr(self, name)}"))
        for name in ("weight_decay", "clip", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append((name, f"must be 0 or above, not {getattr(self, name)}"))
        for name in ("warmup", "cooldown", "lr_floor", "label_smoothing", "layer_decay"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append((name, f"must be from 0 to 1, not {getattr(self, name)}"))
        for name in ("beta1", "beta2", "momentum", "ema"):
            if not 0 <= getattr(self, name) < 1:
                problems.append((name, f"must be from 0 to below 1, not {getattr(self, name)}"))
        if self.micro_batch and self.batch % self.micro_batch:
            problems.append(("batch", f"{self.batch} must be a multiple of micro_batch {self.micro_batch}"))
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. The classes of `model` and `task` follow from the family and the objective."""

    family: str
    objective: str
    model: Any
    task: Any
    train: TrainSettings
    data: Any  # DataSettings or LabelledSettings
    tokenizer: Any = None  # TokenizerSettings, unless the tokenizer is the source run's
    transfer: Any = None  # TransferSettings, of a fine-tuned run

    def plain(self) -> dict[str, Any]:
        return {
            "model": {"family": self.family, **config.to_dict(self.model)},
            "task": {"name": self.objective, **config.to_dict(self.task)},
            **{name: config.to_dict(getattr(self, name)) for name in self.sections()},
        }

    def sections(self) -> dict[str, type]:
        return PRETRAINING if self.transfer is None else FROM_SCRATCH if self.tokenizer else FINETUNING


PRETRAINING: dict[str, type] = {"data": DataSettings, "tokenizer": TokenizerSettings, "train": TrainSettings}
FINETUNING: dict[str, type] = {"data": LabelledSettings, "transfer": TransferSettings, "train": TrainSettings}
FROM_SCRATCH: dict[str, type] = {"tokenizer": TokenizerSettings, **FINETUNING}  # a labelled task without a source run


def sections_of(tree: dict[str, Any]) -> dict[str, type]:
    return PRETRAINING if "transfer" not in tree else FROM_SCRATCH if "tokenizer" in tree else FINETUNING


def make_config(tree: dict[str, Any]) -> RunConfig:
    """A run's settings from a tree of sections; all problems are reported together."""
    problems: config.Problems = []
    sections = sections_of(tree)
    known = [*sections, "model", "task"]
    problems += [(key, "unknown section" + did_you_mean(key, known)) for key in tree if key not in known]
    model, task = dict(tree.get("model", {})), dict(tree.get("task", {}))
    family, objective = model.pop("family", "transformer"), task.pop("name", "causal")
    parts = {
        "model": config.collect_problems(BACKBONES.get(family).Config, model, "model", problems),
        "task": config.collect_problems(TASKS.get(objective).Config, task, "task", problems),
    }
    for name, section in sections.items():
        parts[name] = config.collect_problems(section, tree.get(name, {}), name, problems)
    if problems:
        raise ConfigError(problems)
    return RunConfig(family=family, objective=objective, **parts)


def is_causal(model: dict[str, Any]) -> bool:
    """Whether a model of these settings is causal, by its family or by its own setting."""
    family = BACKBONES.get(model.get("family", "transformer"))
    return getattr(family, "causal", model.get("causal", True))


def assign_sections(settings: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Assign options such as `depth=4` or `model.depth=4` to sections.

    A bare `vocabulary` is the tokenizer's, which the model follows.
    """
    family = tree.get("model", {}).get("family", "transformer")
    objective = tree.get("task", {}).get("name", "causal")
    own = sections_of(tree)
    parts = {"model": BACKBONES.get(family).Config, "task": TASKS.get(objective).Config}
    if "transfer" in own:  # the model exists already, so a bare `dropout` is the head's
        tokenizer = {name: own[name] for name in ("tokenizer",) if name in own}
        sections = {
            **tokenizer,
            "transfer": own["transfer"],
            "task": parts["task"],
            "train": own["train"],
            **own,
            **parts,
        }
    else:
        sections = {"tokenizer": own["tokenizer"], **parts, "train": own["train"], **own}
    names = {name: {part.name for part in fields(section)} for name, section in sections.items()}
    names["model"].add("family")
    assigned: dict[str, Any] = {}
    problems = []
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if not dot:
            section, name = next((s for s in names if key in names[s]), ""), key
        if section not in names or name not in names[section]:
            everything = [*set().union(*names.values()), *(f"{s}.{n}" for s in names for n in names[s])]
            problems.append((key, "unknown setting" + did_you_mean(key, everything)))
        else:
            assigned.setdefault(section, {})[name] = value
    if problems:
        raise ConfigError(problems)
    return assigned


def override_settings(tree: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Merge options over a tree; a new run length replaces the old one, whatever its unit."""
    sections = assign_sections(options, tree)
    return config.merge(tree, sections) | {"train": override_flat(tree.get("train", {}), sections.get("train", {}))}


def override_flat(settings: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge flat settings (`lr` or `train.lr`); a new run length replaces the old one, whatever its unit."""
    lengths = [key for key in settings if key.rpartition(".")[2] in RUN_LENGTHS]
    if any(key.rpartition(".")[2] in RUN_LENGTHS for key in above):
        settings = {key: value for key, value in settings.items() if key not in lengths}
    return {**settings, **above}


@cache
def preset_names() -> tuple[str, ...]:
    folder = resources.files("headstock.model") / "presets"
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")))


def read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        have = ", ".join(preset_names())
        raise UserError(f"no preset called {name!r}{did_you_mean(str(name), preset_names())} (have: {have})")
    return config.read_settings(preset_file(name))


def preset_file(name: str) -> Path:
    return Path(str(resources.files("headstock.model") / "presets" / f"{name}.toml"))
