"""The settings of a run: the sections of config.json, and how options are assigned to them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from headstock import config
from headstock.data import urls
from headstock.data.tokenizer import TokenizerSettings
from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.model.backbone import BACKBONES
from headstock.model.lora import LoRAConfig
from headstock.tasks.base import TASKS

Bound = tuple[str, Callable[[float], bool]]  # what a setting must be, and whether a value is
ABOVE_0: Bound = ("above 0", lambda value: 0 < value < math.inf)
NOT_NEGATIVE: Bound = ("0 or above", lambda value: 0 <= value < math.inf)
INSIDE_0_1: Bound = ("above 0 and below 1", lambda value: 0 < value < 1)
FROM_0_TO_1: Bound = ("from 0 to 1", lambda value: 0 <= value <= 1)
BELOW_1: Bound = ("from 0 to below 1", lambda value: 0 <= value < 1)
SHARE: Bound = ("above 0 and at most 1", lambda value: 0 < value <= 1)


def out_of_bounds(settings: Any, bounds: Mapping[Bound, str]) -> config.Problems:
    """The settings (names separated by spaces) that violate their bounds; None is always valid."""
    return [
        (name, f"must be {description}, not {value}")
        for (description, is_valid), names in bounds.items()
        for name in names.split()
        if (value := getattr(settings, name)) is not None and not is_valid(value)
    ]


def reject(problems: config.Problems) -> None:
    if problems:
        raise ConfigError(problems)


def not_writable(settings: Any, name: str) -> config.Problems:
    """The problem of a setting that must be a URL to write to, if it has one."""
    value = getattr(settings, name)
    if value is None or (urls.is_url(value) and not urls.is_http(value)):
        return []
    return [(name, f"must be a URL that can be written to, such as s3://bucket/folder, not {value}")]


def redact(settings: Any, *names: str) -> None:
    """Remove the credentials from URLs among settings, which are written to config.json; this process keeps them."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, str):
            object.__setattr__(settings, name, urls.redact(value))
        elif isinstance(value, tuple):
            object.__setattr__(settings, name, tuple(urls.redact(str(item)) for item in value))


@dataclass(frozen=True)
class DataSettings:
    corpus: tuple[str, ...] = ()  # files, folders, globs, URLs, catalog:NAME, or - for standard input
    valid: tuple[str, ...] = ()  # held-out text; a fraction of the corpus unless given
    # line; block: separated by blank lines; file; auto detects it and says so (catalog corpora are block)
    documents: Literal["auto", "line", "block", "file"] = "auto"
    column: str = "text"  # text column of .csv, .tsv, .jsonl and .parquet files
    valid_fraction: float = 0.05  # held-out share of the documents; of a single document, its end
    split_seed: int = 0  # seed of the held-out documents; not the run's, so that runs are evaluated on the same text
    deduplicate: bool = True  # drop exact duplicates of documents
    stores: str | None = config.added(None)  # URL where machines share token stores

    def __post_init__(self) -> None:
        redact(self, "corpus", "valid", "stores")
        problems = out_of_bounds(self, {INSIDE_0_1: "valid_fraction"})
        reject(problems + not_writable(self, "stores"))


@dataclass(frozen=True)
class LabelledSettings:
    train: str = ""  # table of texts and labels, or the first of two files
    valid: str | None = None  # a fraction of the training rows unless given
    test: str | None = None  # evaluated at the end if it has labels, predicted if not
    columns: tuple[str, ...] = ()  # column names of the files, such as text=review
    valid_fraction: float = 0.1  # held-out share of the training rows
    skip_blank: bool = False  # skip rows with a blank text or label instead of rejecting them

    def __post_init__(self) -> None:
        redact(self, "train", "valid", "test")
        reject(out_of_bounds(self, {INSIDE_0_1: "valid_fraction"}))


@dataclass(frozen=True)
class TransferSettings:
    run: str = ""  # source of the backbone
    preset: str | None = None  # of a new model, instead of a source
    init: Literal["pretrained", "scratch"] = "pretrained"  # the source's weights, or only its architecture
    freeze: bool = False  # train the head alone, on cached features
    method: Literal["finetune", "setfit"] = config.added("finetune")  # train the head, or SetFit for few labels
    bidirectional: bool | None = None  # use a causal backbone with (false) or without (true) its causal mask
    adapt_steps: int = 0  # steps of further pretraining on the task's own texts
    adapt_lr: float | None = None  # its learning rate; a third of the source's unless given
    adapt_text: tuple[str, ...] = config.added(())  # further unlabelled text for it: files, folders, globs or URLs
    adapt_fraction: float | None = config.added(None)  # its masking rate; the source's unless given
    adapt_average: float = config.added(1.0)  # weight of the adapted weights in an average with the source's; 1: alone
    lm_loss: float = config.added(0.0)  # weight of the source's language-model loss on the training rows
    r_drop: float = config.added(0.0)  # weight of the divergence between two readings of a row with different dropout
    token_dropout: float = config.added(0.0)  # share of the tokens that training replaces by [MASK], anew in every step
    # start from a head that is fitted to the frozen features by logistic regression, not from a random one (LP-FT)
    linear_probe: bool = config.added(False)
    reinit_layers: int = config.added(0)  # top layers that start from new weights instead of the pretrained ones
    ensemble: int = 1  # number of models with different seeds, whose probabilities are averaged
    soup: int = config.added(1)  # number of models with different seeds, whose weights are averaged (a model soup)
    least_steps: int = 100  # epochs are added for small files to reach this; 0 if `epochs` is given
    lora: int = config.added(0)  # rank of low-rank adapters, which are trained instead of the backbone; 0: none
    lora_alpha: float = config.added(16.0)  # adapters are scaled by alpha / rank
    lora_dropout: float = config.added(0.0)  # of the features that adapters read
    lora_targets: Literal["attention", "all-linear"] = config.added("attention")  # attention: or recurrent cells

    def __post_init__(self) -> None:
        redact(self, "run", "adapt_text")
        bounds = {
            NOT_NEGATIVE: "adapt_steps least_steps lora lm_loss r_drop reinit_layers",
            ABOVE_0: "ensemble soup adapt_lr lora_alpha",
            BELOW_1: "lora_dropout token_dropout",
            INSIDE_0_1: "adapt_fraction",
            SHARE: "adapt_average",
        }
        reject(out_of_bounds(self, bounds) + self.conflicts())

    def conflicts(self) -> config.Problems:
        """Settings that conflict with another one, or have no effect without it."""
        scratch, freeze, setfit, lora = self.init == "scratch", self.freeze, self.method == "setfit", self.lora > 0
        soup, common_start = self.soup > 1, "averages models that start from the same weights, so it conflicts with"
        reasons = [
            ("adapt_steps", scratch, "needs pretrained weights, so it conflicts with init scratch"),
            ("lora", scratch, "adapts pretrained weights, so it conflicts with init scratch"),
            ("lora", freeze, "trains adapters in the backbone, so it conflicts with freeze"),
            ("lora", setfit, "conflicts with method setfit, which trains all weights"),
            ("lm_loss", scratch, "needs the source's language-model head, so it conflicts with init scratch"),
            ("lm_loss", freeze, "trains the backbone, so it conflicts with freeze"),
            ("lm_loss", lora, "trains the language-model head, so it conflicts with lora"),
            ("lm_loss", setfit, "conflicts with method setfit, which has a loss of its own"),
            ("lm_loss", self.bidirectional is not None, "needs the attention mask of pretraining, not bidirectional"),
            ("r_drop", setfit, "conflicts with method setfit, which has a loss of its own"),
            ("token_dropout", setfit, "conflicts with method setfit, which has a loss of its own"),
            ("token_dropout", freeze, "changes what the backbone reads, so it conflicts with freeze"),
            ("linear_probe", scratch, "fits the head to pretrained features, so it conflicts with init scratch"),
            ("linear_probe", freeze, "is where fine-tuning starts; with freeze, the head is all that is trained"),
            (
                "linear_probe",
                self.reinit_layers > 0,
                "fits the head to pretrained layers, so it conflicts with reinit_layers",
            ),
            ("linear_probe", setfit, "conflicts with method setfit, which fits its own head at the end"),
            ("reinit_layers", scratch, "replaces pretrained weights, so it conflicts with init scratch"),
            ("reinit_layers", freeze, "needs layers that are trained, so it conflicts with freeze"),
            ("reinit_layers", lora, "needs layers that are trained, so it conflicts with lora"),
            ("soup", soup and scratch, f"{common_start} init scratch"),
            ("soup", soup and self.preset is not None, f"{common_start} preset, a new model"),
            ("soup", soup and self.reinit_layers > 0, f"{common_start} reinit_layers"),
            ("soup", soup and self.ensemble > 1, "ends in one model, so it conflicts with ensemble"),
            ("soup", soup and lora, "averages the weights of whole models, so it conflicts with lora"),
            ("soup", soup and setfit, "conflicts with method setfit, whose heads are fitted to their own backbones"),
        ]
        adapting = {"adapt_text": (), "adapt_fraction": None, "adapt_average": 1.0}
        unused = [name for name, default in adapting.items() if not self.adapt_steps and getattr(self, name) != default]
        conflicting = [(name, reason) for name, applies, reason in reasons if applies and getattr(self, name)]
        return conflicting + [(name, "has no effect without adapt_steps") for name in unused]

    @property
    def adapters(self) -> LoRAConfig | None:
        return LoRAConfig(self.lora, self.lora_alpha, self.lora_dropout, self.lora_targets) if self.lora else None


def kind_of_transfer(settings: Mapping[str, Any]) -> str:
    """How a run is trained: `frozen` (the head), `lora` (adapters and head), `setfit`, `pretrained` or `scratch`."""
    if settings.get("method") == "setfit":
        return "setfit"
    if settings.get("freeze") or settings.get("lora"):
        return "frozen" if settings.get("freeze") else "lora"
    return settings.get("init") or "pretrained"


RUN_LENGTHS = ("steps", "epochs", "minutes")  # at most one of these is set
NO_LOG_LINES = 10**9  # steps: the default of fine-tuning in the first versions, which keys of cached results contain
DEFAULT_FAMILY, DEFAULT_OBJECTIVE = "transformer", "causal"


@dataclass(frozen=True)
class TrainSettings:
    steps: int | None = None  # length of the run in optimizer steps
    epochs: float | None = None  # length in epochs; 1 unless a length is given
    minutes: float | None = None  # length in minutes; the schedule follows the clock
    batch: int = 32  # rows per step, over all processes
    batch_tokens: int | None = None  # tokens per step, instead of rows
    micro_batch: int | None = None  # rows per forward pass and process; gradients accumulate
    length: int | None = None  # tokens per row; the model's context unless given
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices inside blocks, AdamW for the rest
    lr: float = 1e-3  # peak learning rate
    # of the learning rate; inverse_sqrt is that of the 2017 Transformer, range_test that of `lr-find`
    schedule: Literal["cosine", "linear", "trapezoid", "constant", "inverse_sqrt", "range_test"] = "cosine"
    warmup: float = 0.05  # fraction of the run in which the learning rate rises
    cooldown: float = 0.3  # fraction of the run in which a trapezoid falls
    lr_floor: float = 0.0  # final learning rate, as a fraction of lr
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9  # AdamW: decay of the mean gradient
    beta2: float = 0.95  # AdamW: decay of the mean squared gradient
    momentum: float = 0.95  # of Muon
    clip: float = 1.0  # maximum gradient norm; 0: no clipping
    label_smoothing: float = 0.0  # in training only
    layer_decay: float = 1.0  # ratio of a layer's learning rate to that of the layer above
    unfreeze: float | None = None  # epochs between unfreezing one layer and the next, top first; all at once unless set
    patience: int | None = None  # stop after this many validations without improvement
    ema: float = 0.0  # decay of the exponential moving average of the weights; 0: no averaging
    # auto: bfloat16 on CUDA, else float32; float8: bfloat16 with large matrix products in 8 bits
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    # true: torch.compile; replay: CUDA graphs, for small models; both; auto: whichever is faster on a GPU
    compile: Literal["auto", True, False, "replay", "both"] = "auto"
    # several processes (torchrun): ddp has all weights in each, fsdp splits weights and optimizer states among them
    parallel: Literal["ddp", "fsdp"] = config.added("ddp")
    reduce_dtype: Literal["float32", "bfloat16"] = config.added("float32")  # in which fsdp sums gradients
    cpu_offload: bool = config.added(False)  # fsdp: weights and optimizer states wait in main memory, updates run there
    # recompute each block's activations in the backward pass: less memory, about a third more time
    activation_checkpointing: bool = config.added(False)
    vocabulary_multiple: int = 1  # a new model's vocabulary is padded to a multiple of this, for GPU speed
    validate_every: int | None = None  # steps; a tenth of the run unless given
    # maximum tokens per validation; unless given, validations take about 5% of the run's time
    valid_tokens: int | None = None
    # steps; unless given, with a validation, and so that saving takes at most about a tenth of the time
    checkpoint_every: int | None = None
    async_save: bool = config.added(False)  # write checkpoints in a thread, from a copy of the state in main memory
    keep: int = 2  # newest checkpoints to keep, beside the best
    keep_every: int | None = config.added(None)  # also keep the checkpoints of every multiple of this step; 1: all
    mirror: str | None = config.added(None)  # URL that the run folder is copied to after each checkpoint
    weights: Literal["best", "last"] = "best"  # the run's final weights
    log_every: int | None = None  # steps; a fiftieth of the run unless given
    tensorboard: bool = True  # write events to RUN/tensorboard
    # experiment tracker; its server and project are set by its own environment variables
    track: Literal["none", "mlflow", "wandb"] = config.added("none")
    seed: int = 0  # of initial weights, data order and dropout

    def __post_init__(self) -> None:
        problems = out_of_bounds(
            self,
            {
                ABOVE_0: "steps epochs minutes batch batch_tokens micro_batch length unfreeze patience lr layer_decay "
                "vocabulary_multiple validate_every valid_tokens checkpoint_every keep keep_every log_every",
                NOT_NEGATIVE: "weight_decay clip seed",
                FROM_0_TO_1: "warmup cooldown lr_floor label_smoothing layer_decay",
                BELOW_1: "beta1 beta2 momentum ema",
            },
        )
        redact(self, "mirror")
        problems += not_writable(self, "mirror")
        lengths = [name for name in RUN_LENGTHS if getattr(self, name) is not None]
        if len(lengths) > 1:
            problems.append((lengths[1], f"cannot be set together with {lengths[0]}: a run has one length"))
        if self.schedule == "inverse_sqrt" and not self.warmup:
            problems.append(("warmup", "must be above 0 for the schedule inverse_sqrt, which falls from its end on"))
        if self.parallel == "fsdp" and self.unfreeze is not None:
            problems.append(("unfreeze", "conflicts with parallel fsdp, which fixes the trained weights at the start"))
        for name, is_set in (("cpu_offload", self.cpu_offload), ("reduce_dtype", self.reduce_dtype != "float32")):
            if is_set and self.parallel != "fsdp":
                problems.append((name, "is a setting of parallel fsdp"))
        if self.activation_checkpointing and self.compile in ("replay", "both"):
            problems.append(("activation_checkpointing", f"conflicts with compile {self.compile} (CUDA graphs)"))
        if self.activation_checkpointing and self.dtype == "float8":
            problems.append(("activation_checkpointing", "conflicts with dtype float8; use bfloat16"))
        reject(problems)


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

    def plain(self, *, for_key: bool = False) -> dict[str, Any]:
        """All settings by section; `for_key` without those that earlier versions did not have: see `config.added`."""
        tree = {
            "model": {"family": self.family, **config.to_dict(self.model, for_key=for_key)},
            "task": {"name": self.objective, **config.to_dict(self.task, for_key=for_key)},
            **{name: config.to_dict(getattr(self, name), for_key=for_key) for name in sections_of(vars(self))},
        }
        if for_key and self.transfer is not None and self.train.log_every is None:
            tree["train"]["log_every"] = NO_LOG_LINES
        return tree


PRETRAINING: dict[str, type] = {"data": DataSettings, "tokenizer": TokenizerSettings, "train": TrainSettings}
FINETUNING: dict[str, type] = {"data": LabelledSettings, "transfer": TransferSettings, "train": TrainSettings}
FROM_SCRATCH: dict[str, type] = {"tokenizer": TokenizerSettings, **FINETUNING}  # a labelled task without a source run


def sections_of(tree: Mapping[str, Any]) -> dict[str, type]:
    """The sections of a configuration beside model and task; None is a missing section."""
    if tree.get("transfer") is None:
        return PRETRAINING
    return FINETUNING if tree.get("tokenizer") is None else FROM_SCRATCH


def make_config(tree: dict[str, Any]) -> RunConfig:
    """A run's settings from a tree of sections; all problems are reported together."""
    sections = sections_of(tree)
    names = [*sections, "model", "task"]
    problems = [(key, "unknown section" + did_you_mean(key, names)) for key in tree if key not in names]
    model, task = dict(tree.get("model", {})), dict(tree.get("task", {}))
    family, objective = model.pop("family", DEFAULT_FAMILY), task.pop("name", DEFAULT_OBJECTIVE)
    parts = {
        "model": config.collect_problems(BACKBONES.get(family).Config, model, "model", problems),
        "task": config.collect_problems(TASKS.get(objective).Config, task, "task", problems),
    }
    for name, section in sections.items():
        parts[name] = config.collect_problems(section, tree.get(name, {}), name, problems)
    reject(problems)
    return RunConfig(family=family, objective=objective, **parts)


def family_of(tree: Mapping[str, Any]) -> str:
    return tree.get("model", {}).get("family", DEFAULT_FAMILY)


def objective_of(tree: Mapping[str, Any]) -> str:
    return tree.get("task", {}).get("name", DEFAULT_OBJECTIVE)


def setting_names(section: type) -> set[str]:
    return {part.name for part in fields(section)}


def assign_sections(settings: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Assign options such as `depth=4` or `model.depth=4` to sections.

    A bare `vocabulary` is the tokenizer's, which the model follows.
    """
    model, task = BACKBONES.get(family_of(tree)).Config, TASKS.get(objective_of(tree)).Config
    classes = sections_of(tree) | {"model": model, "task": task}
    order = ["tokenizer", "model", "task", "train", "data"]  # the first section with a bare name gets it
    if "transfer" in classes:  # the model exists already, so a bare `dropout` is the head's
        order = ["tokenizer", "transfer", "task", "train", "data", "model"]
    names = {name: setting_names(classes[name]) for name in order if name in classes}
    names["model"].add("family")
    assigned: dict[str, Any] = {}
    problems = []
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if not dot:
            section, name = next((s for s in names if key in names[s]), ""), key
        if section not in names or name not in names[section]:
            settings_names = [*set().union(*names.values()), *(f"{s}.{n}" for s in names for n in names[s])]
            problems.append((key, "unknown setting" + did_you_mean(key, settings_names)))
        else:
            assigned.setdefault(section, {})[name] = value
    reject(problems)
    return assigned


def override_settings(tree: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Merge options over a tree; a new run length replaces the old one, whatever its unit."""
    sections = assign_sections(options, tree)
    return config.merge(tree, sections) | {"train": override_flat(tree.get("train", {}), sections.get("train", {}))}


def override_flat(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge flat settings (`lr` or `train.lr`); a new run length replaces the old one, whatever its unit."""
    lengths = [key for key in settings if key.rpartition(".")[2] in RUN_LENGTHS]
    if any(key.rpartition(".")[2] in RUN_LENGTHS for key in options):
        settings = {key: value for key, value in settings.items() if key not in lengths}
    return {**settings, **options}


@cache
def preset_names() -> tuple[str, ...]:
    folder = resources.files("headstock.model") / "presets"
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")))


def read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        names = ", ".join(preset_names())
        raise UserError(f"no preset called {name!r}{did_you_mean(str(name), preset_names())} (have: {names})")
    return config.read_settings(preset_file(name))


def preset_file(name: str) -> Path:
    return Path(str(resources.files("headstock.model") / "presets" / f"{name}.toml"))
