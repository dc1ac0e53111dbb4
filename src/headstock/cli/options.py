"""Options that several verbs share, each declared once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from headstock.errors import UserError, did_you_mean

RUN_HELP = "A run folder, a checkpoint (RUN/checkpoints/step-N), the URL of one, a bundled model, or hf://ORG/NAME."
DOCUMENTS_HELP = "What a document is: line, block, file, or auto to guess."
ON_HELP = "Run on a Ray cluster: of this machine (ray), or at ray:auto, ray:HOST:6379 or ray://HOST:10001."
TASK_HELP = "classify, pair, regress, ordinal, tag, answer or translate."

RunPath = Annotated[str, typer.Argument(help=RUN_HELP, show_default=False)]
RunName = Annotated[str | None, typer.Argument(help=RUN_HELP, show_default=False)]
RunOut = Annotated[Path, "Run folder to create, such as runs/mine."]
ExperimentOut = Annotated[Path, "Folder for all results; rerun to resume."]
Corpus = Annotated[list[str] | None, typer.Argument(help="Text to pretrain on: files, folders, globs, URLs, or -.")]
Preset = Annotated[str | None, "A preset instead of a run, with new weights."]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Any setting, such as --set lr=3e-4; repeatable.")]
Documents = Annotated[str, DOCUMENTS_HELP]
SkipBlank = Annotated[bool, "Skip rows with a blank text or label."]
Int8 = Annotated[bool, "Use int8 linear layers on the CPU (about 2x faster, slightly less accurate)."]
SLICE_HELP = "Also score groups of rows: a column, contains:WORD, regex:PATTERN, contrast, negation or length."
Slices = Annotated[list[str] | None, typer.Option("--slice", help=f"{SLICE_HELP} Repeatable.")]
Calibrated = Annotated[bool, "Use the run's calibration: temperature and, if fitted, decision thresholds."]
Overwrite = Annotated[bool, "Replace the folder if it exists."]
Task = Annotated[str | None, TASK_HELP]
LabelWords = Annotated[str | None, "Words of the labels in a prompt: negative=bad|awful,positive=good."]


@dataclass(frozen=True)
class Columns:
    """Names of the columns in tables, by --columns and --column together."""

    columns: Annotated[str | None, "Column names, such as text=review,label=stars."] = None
    column: Annotated[str | None, "Column that holds the text; short for --columns text=NAME."] = None

    def names(self, *, main: str = "text") -> dict[str, str] | None:
        """Our column names to those of the table; `main` is the column that --column names."""
        from headstock.data.records import parse_columns

        names = parse_columns(self.columns) if self.columns else {}
        if self.column is not None and names.get(main, self.column) != self.column:
            raise UserError(f"--column {self.column}: contradicts --columns {main}={names[main]}; give one of the two")
        return (names | ({main: self.column} if self.column is not None else {})) or None

    def text(self) -> str | None:
        """The column that holds the text, for verbs that read no other."""
        names = self.names() or {}
        if other := next((name for name in names if name != "text"), None):
            hint = did_you_mean(other, ["text"])
            raise UserError(f"--columns {other}={names[other]}: only the text column is read here{hint}")
        return names.get("text")


class Setting(OptionInfo):
    """An option that sets the setting `path`: train.layer_decay becomes --layer-decay, unless `flags` name it."""

    def __init__(self, path: str, help: str, *flags: str) -> None:
        name = path.rpartition(".")[2].replace("_", "-")
        super().__init__(default=..., param_decls=flags or (f"--{name}",), help=help)
        self.path = path


@dataclass(frozen=True)
class SettingOptions:
    """Options that set a setting of the run: --set, and the fields of a subclass that are marked with `Setting`."""

    set_: Settings = None

    def to_dict(self) -> dict[str, Any]:
        """The settings by their paths; an option of its own wins over --set."""
        from headstock.config import parse_setting

        settings = dict(parse_setting(text) for text in self.set_ or [])
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            if value is not None:
                settings |= {mark.path: value for mark in get_args(hint) if isinstance(mark, Setting)}
        return settings


@dataclass(frozen=True)
class LengthOptions(SettingOptions):
    """How long to train."""

    steps: Annotated[int | None, Setting("train.steps", "Train for this many steps.")] = None
    epochs: Annotated[float | None, Setting("train.epochs", "Train for this many epochs.")] = None
    minutes: Annotated[float | None, Setting("train.minutes", "Train for this many minutes.")] = None


@dataclass(frozen=True)
class PretrainSettings(LengthOptions):
    documents: Annotated[str | None, Setting("data.documents", DOCUMENTS_HELP)] = None


class ConfigOptions(TypedDict):
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Settings from a TOML file or a run's config.json.")
    ]


class ModelOptions(ConfigOptions):
    """Options of verbs that create a model."""

    preset: Annotated[str | None, "Preset to start from, such as gpt-nano."]
    objective: Annotated[str | None, "causal, masked, hybrid, electra, both-ways or denoise."]
    tokenizer: Annotated[Path | None, "Use this tokenizer instead of training one."]


class FolderOptions(TypedDict):
    """Options of verbs that create a run folder."""

    resume: Annotated[bool, "Resume an interrupted run; fails if there is none."]
    overwrite: Overwrite


class ClusterOptions(TypedDict):
    """Options of verbs whose trials may run on a Ray cluster."""

    on: Annotated[str | None, typer.Option("--on", metavar="ray[:ADDRESS]", help=ON_HELP)]
    gpus_per_trial: Annotated[float | None, "With --on: GPUs of a trial, such as 0.25; 1 if the cluster has any."]
    cpus_per_trial: Annotated[float | None, "With --on: CPUs, and so threads, of a trial; 1."]


class LabelledFileOptions(TypedDict):
    train: Annotated[Path | None, "Labelled texts: .csv, .tsv, .jsonl or .parquet."]
    valid: Annotated[Path | None, "Validation rows, to select the best epoch."]
    test: Annotated[Path | None, "Test rows: measured at the end, or predicted."]
