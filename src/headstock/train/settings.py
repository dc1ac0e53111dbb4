"""Everything a run is made from: the sections of config.json, and how presets, files and --set are joined."""

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
    valid: tuple[str, ...] = ()  # held-out text; without it a share of the corpus is held out
    documents: Literal["auto", "line", "block", "file"] = "auto"
    column: str = "text"  # where the text is in .csv, .tsv, .jsonl and .parquet
    valid_fraction: float = 0.05
    split_seed: int = 0  # which documents those are; not the run's own seed, so that runs are measured on the same text
    deduplicate: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise ConfigError([("valid_fraction", f"must be above 0 and below 1, not {self.valid_fraction}")])


@dataclass(frozen=True)
class LabelledSettings:
    train: str = ""  # a table of texts and labels, or the first of two files
    valid: str | None = None  # without it a share of the training rows is held out
    test: str | None = None  # measured at the end if it has labels, predicted if not
    columns: tuple[str, ...] = ()  # what the columns are called there, such as text=review
    valid_fraction: float = 0.1
    skip_blank: bool = False  # leave out rows with a blank text or label, which are refused otherwise

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise ConfigError([("valid_fraction", f"must be above 0 and below 1, not {self.valid_fraction}")])


@dataclass(frozen=True)
class TransferSettings:
    run: str = ""  # whose backbone it is,
    preset: str | None = None  # or what it is made like, where nothing was pretrained
    init: Literal["pretrained", "scratch"] = "pretrained"  # its weights, or only its architecture
    freeze: bool = False  # train the head alone, on features that are computed once
    bidirectional: bool | None = None  # read a causal backbone with (false) or without (true) its mask
    adapt_steps: int = 0  # first go on pretraining on the task's own texts for so many steps,
    adapt_lr: float | None = None  # at this learning rate; a third of the run's own unless given
    ensemble: int = 1  # so many models, from as many seeds; their probabilities are averaged
    least_steps: int = 100  # a small file is read more often, until there are so many steps; 0 where `epochs` is given

    def __post_init__(self) -> None:
        problems = [
            (name, f"must be {least} or more, not {getattr(self, name)}")
            for name, least in (("adapt_steps", 0), ("ensemble", 1), ("least_steps", 0))
            if getattr(self, name) < least
        ]
        if self.init == "scratch" and self.adapt_steps:
            problems.append(("adapt_steps", "goes on from pretrained weights, so it does not go with init scratch"))
        if problems:
            raise ConfigError(problems)


RUN_LENGTHS = ("steps", "epochs", "minutes")  # at most one of these is set


@dataclass(frozen=True)
class TrainSettings:
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    batch: int = 32  # rows in one step, over all processes;
    batch_tokens: int | None = None  # or as many rows as have about so many tokens, which are then not counted
    micro_batch: int | None = None  # rows a process reads at once; the rest is accumulated
    length: int | None = None  # tokens in a row; the model's context unless given
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    schedule: Literal["cosine", "linear", "trapezoid", "constant"] = "cosine"
    warmup: float = 0.05  # share of the run over which the learning rate rises
    cooldown: float = 0.3  # share of the run over which a trapezoid falls
    lr_floor: float = 0.0  # share of the learning rate that is left at the end
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95  # muon's
    clip: float = 1.0  # longest gradient; 0 leaves it as it is
    label_smoothing: float = 0.0
    layer_decay: float = 1.0  # each layer's learning rate is this share of that of the one above it
    unfreeze: float | None = (
        None  # epochs after which the next layer from the top starts to move; all at once unless given
    )
    patience: int | None = None  # validations without a better one after which training stops
    ema: float = 0.0  # decay of the averaged weights that are kept in the end; 0 keeps the last ones
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"  # float8: bfloat16, but large products in 8 bits
    # auto: on a GPU as it pays; true: by torch.compile; replay: steps recorded as CUDA graphs, for small models; both
    compile: Literal["auto", True, False, "replay", "both"] = "auto"
    vocabulary_multiple: int = 1  # a new model's vocabulary is rounded up to one, which GPUs may read faster
    validate_every: int | None = None  # steps; a tenth of the run unless given
    # at most so many are read by a validation on the way; unless given, as many as take about 5% of the run's time
    valid_tokens: int | None = None
    checkpoint_every: int | None = None  # steps; with every validation unless given
    keep: int = 2  # newest checkpoints that stay, beside the best
    weights: Literal["best", "last"] = "best"  # which are the run's in the end
    log_every: int | None = None  # steps; a fiftieth of the run unless given
    tensorboard: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        given = [name for name in RUN_LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            problems.append((given[1], f"cannot be set together with {given[0]}: a run has one length"))
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
    """All settings of a run. `model` and `task` are of the class that their family or name asks for.

    A pretraining run has the sections of PRETRAINING, a fine-tuned one those of TRANSFER or GROWN.
    """

    family: str
    objective: str
    model: Any
    task: Any
    train: TrainSettings
    data: Any  # DataSettings or LabelledSettings
    tokenizer: Any = None  # TokenizerSettings; none where the tokenizer is another run's
    transfer: Any = None  # TransferSettings, of a fine-tuned run

    def plain(self) -> dict[str, Any]:
        return {
            "model": {"family": self.family, **config.to_dict(self.model)},
            "task": {"name": self.objective, **config.to_dict(self.task)},
            **{name: config.to_dict(getattr(self, name)) for name in self.sections()},
        }

    def sections(self) -> dict[str, type]:
        return PRETRAINING if self.transfer is None else GROWN if self.tokenizer else TRANSFER


PRETRAINING: dict[str, type] = {"data": DataSettings, "tokenizer": TokenizerSettings, "train": TrainSettings}
TRANSFER: dict[str, type] = {"data": LabelledSettings, "transfer": TransferSettings, "train": TrainSettings}
GROWN: dict[str, type] = {"tokenizer": TokenizerSettings, **TRANSFER}  # of a fine-tuned run that began from nothing


def sections_of(tree: dict[str, Any]) -> dict[str, type]:
    return PRETRAINING if "transfer" not in tree else GROWN if "tokenizer" in tree else TRANSFER


def make_config(tree: dict[str, Any]) -> RunConfig:
    """A run's settings from the tree that files and options were merged into; every problem is named at once."""
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
    """Whether a model of these settings never sees what follows a token, by its family or by its own setting."""
    family = BACKBONES.get(model.get("family", "transformer"))
    return getattr(family, "causal", model.get("causal", True))


def assign_sections(settings: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Put `depth=4` or `model.depth=4` where it belongs.

    `vocabulary` alone is the tokenizer's: the model follows it.
    """
    family = tree.get("model", {}).get("family", "transformer")
    objective = tree.get("task", {}).get("name", "causal")
    own = sections_of(tree)
    parts = {"model": BACKBONES.get(family).Config, "task": TASKS.get(objective).Config}
    if "transfer" in own:  # the model is given, so its settings come last: `dropout` alone is the head's
        grown = {name: own[name] for name in ("tokenizer",) if name in own}
        sections = {**grown, "transfer": own["transfer"], "task": parts["task"], "train": own["train"], **own, **parts}
    else:
        sections = {"tokenizer": own["tokenizer"], **parts, "train": own["train"], **own}
    names = {name: {part.name for part in fields(section)} for name, section in sections.items()}
    names["model"].add("family")
    placed: dict[str, Any] = {}
    problems = []
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if not dot:
            section, name = next((s for s in names if key in names[s]), ""), key
        if section not in names or name not in names[section]:
            everything = [*set().union(*names.values()), *(f"{s}.{n}" for s in names for n in names[s])]
            problems.append((key, "unknown setting" + did_you_mean(key, everything)))
        else:
            placed.setdefault(section, {})[name] = value
    if problems:
        raise ConfigError(problems)
    return placed


def override_settings(tree: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of files with those of options above them: a length in steps takes the place of one in epochs."""
    placed = assign_sections(given, tree)
    return config.merge(tree, placed) | {"train": override_flat(tree.get("train", {}), placed.get("train", {}))}


def override_flat(settings: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, bare or such as `train.lr`, with others above them: a run has one length, and the later one it is."""
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
