"""What the functions of the API return. Results of runs and experiments are the contents of a results.json."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headstock.errors import UserError
from headstock.report import notebook
from headstock.results import Result, ResultList, html_table, json_value
from headstock.train.lr_finder import LRFinderResult
from headstock.train.run_folder import RunFolder

if TYPE_CHECKING:
    from headstock.inference.pipeline import Pipeline

Better = Literal["higher", "lower"]
ENDS = {"": "mean", "_low": "low", "_high": "high"}  # of an interval, as suffixes of columns
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, eq=False, repr=False)
class SavedResult(Result):
    """The contents of a results.json: `result["key"]` is a value of that file."""

    folder: Path
    content: dict[str, Any] = field(repr=False)

    @property
    def report(self) -> Path:
        """report.html, the page with all results."""
        return self.folder / "report.html"

    @property
    def seconds(self) -> float:
        return float(self.content["seconds"])

    @property
    def device(self) -> str | None:
        """Where it was computed; None where the results do not say so."""
        return self.content.get("device")

    def to_dict(self) -> dict[str, Any]:
        return json_value(self.content)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


@dataclass(frozen=True, eq=False, repr=False)
class RunResult(SavedResult):
    """A finished run: of `pretrain`, `finetune` or `distil`."""

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.4g}" for name, value in list(self.metrics.items())[:3])
        return f"RunResult({str(self.run)!r}, {metrics})"

    @property
    def run(self) -> Path:
        """The run folder, which `headstock.load` opens."""
        return self.folder

    @property
    def task(self) -> str:
        """The labelled task, or the pretraining objective."""
        return str(self.content.get("task") or RunFolder(self.folder).config()["task"]["name"])

    @property
    def steps(self) -> int:
        return int(self.content["steps"])

    @property
    def best_step(self) -> int:
        """The step of the run's weights, unless these are of the last step."""
        return int(self.content["best_step"])

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return int(self.content["tokens"])

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of training; None with a frozen backbone, whose features are computed once."""
        return self.content["tokens_per_second"]

    @property
    def metrics(self) -> dict[str, float]:
        """On the test rows, otherwise on the validation data."""
        return numbers(self.content.get("metrics") or {})

    @property
    def valid(self) -> dict[str, float]:
        """The metrics on the validation data."""
        values = self.content.get("valid")
        return numbers(values) if isinstance(values, dict) else self.metrics

    @property
    def test(self) -> dict[str, float] | None:
        """The metrics on the test rows; None without labelled test rows."""
        values = self.content.get("test")
        return numbers(values) if isinstance(values, dict) else None

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% confidence intervals of `metrics`."""
        values = (self.content.get("metrics") or {}).get("intervals") or {}
        return {name: (low, high) for name, (low, high) in values.items()}

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return int(self.content["parameters"]["total"])

    def load(self, *, device: str = "auto") -> "Pipeline":
        """The run, ready to use: `headstock.load(result.run)`."""
        from headstock.inference.pipeline import load

        return load(self.folder, device=device)

    def _rows(self) -> list[dict[str, Any]]:
        splits = {"valid": self.content.get("valid"), "test": self.content.get("test")}
        measured = {name: values for name, values in splits.items() if isinstance(values, dict)}
        return [
            {"split": split, "metric": name, "value": value, "low": low, "high": high}
            for split, values in (measured or {"valid": self.content.get("metrics") or {}}).items()
            for name, value in numbers(values).items()
            for low, high in [(values.get("intervals") or {}).get(name) or (None, None)]
        ]

    def _repr_html_(self) -> str:
        run = RunFolder(self.folder)
        return notebook.run_html(self.to_dict(), run.read_metrics() if run.exists() else [])


@dataclass(frozen=True, eq=False)
class ArmScore(Result):
    """The mean score of one arm of a comparison, with its 95% interval."""

    arm: str
    labels: int  # training rows
    seeds: int
    score: float
    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False)
class ArmDifference(Result):
    """The score of arm `a` minus that of arm `b`, paired by seed and row, with its 95% interval."""

    labels: int
    a: str
    b: str
    difference: float
    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(SavedResult):
    """The results of `compare`."""

    def __repr__(self) -> str:
        return f"Comparison({str(self.folder)!r}: {' '.join(self.verdicts)})"

    @property
    def task(self) -> str:
        return str(self.content["task"])

    @property
    def metric(self) -> str:
        """The metric of the scores."""
        return str(self.content["metric"])

    @property
    def better(self) -> Better:
        return "higher" if self.content.get("better", "higher") == "higher" else "lower"

    @property
    def arms(self) -> list[str]:
        return [arm["name"] for arm in self.content["arms"]]

    @property
    def labels(self) -> list[int]:
        """The numbers of training rows."""
        return list(self.content["labels"])

    @property
    def verdicts(self) -> list[str]:
        """In words, whether pretraining paid, for each number of labels."""
        return list(self.content.get("verdicts") or [])

    @property
    def notes(self) -> list[str]:
        """What limits these numbers."""
        return list(self.content.get("notes") or [])

    @property
    def scores(self) -> ResultList[ArmScore]:
        """The mean score of every arm and number of labels."""
        return ResultList(make(ArmScore, row) for row in self.content["summary"])

    @property
    def differences(self) -> ResultList[ArmDifference]:
        """The difference of every pair of arms, for each number of labels."""
        return ResultList(make(ArmDifference, row) for row in self.content.get("pairs") or [])

    def score(self, arm: str, labels: int | None = None) -> ArmScore:
        """The score of an arm; without `labels`, with the most of them."""
        count = max(self.labels) if labels is None else labels
        for row in self.scores:
            if (row.arm, row.labels) == (arm, count):
                return row
        have = f"arms: {', '.join(self.arms)}; labels: {', '.join(map(str, self.labels))}"
        raise UserError(f"{self.folder}: no arm {arm!r} with {count} labels ({have})")

    def _rows(self) -> list[dict[str, Any]]:
        names = ("arm", "labels", "seeds", "score", "low", "high")
        return [{name: row[name] for name in names} | row for row in self.content["summary"]]

    def _repr_html_(self) -> str:
        return notebook.comparison_html(self.to_dict())


@dataclass(frozen=True, eq=False)
class SweepPoint(Result):
    """One point of a sweep: its settings and its mean score over seeds, with a 95% interval."""

    settings: dict[str, Any]
    mean: float | None  # None if every trial failed or was stopped
    low: float | None
    high: float | None
    seeds: int
    seconds: float  # of one trial

    def _rows(self) -> list[dict[str, Any]]:
        rest = {name: value for name, value in self.to_dict().items() if name != "settings"}
        return [dict(self.settings) | rest]


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult(SavedResult):
    """The results of `sweep`."""

    def __repr__(self) -> str:
        return f"SweepResult({str(self.folder)!r}: {self.verdict})"

    @property
    def metric(self) -> str:
        """The metric by which points are ranked."""
        return str(self.content["metric"])

    @property
    def better(self) -> Better:
        return "higher" if self.content["better"] == "higher" else "lower"

    @property
    def points(self) -> ResultList[SweepPoint]:
        """All points, the best first."""
        return ResultList(make(SweepPoint, row) for row in self.content["points"])

    @property
    def best(self) -> dict[str, Any] | None:
        """The settings of the best point."""
        return dict(self.content["best"]["settings"]) if self.content.get("best") else None

    @property
    def best_run(self) -> Path | None:
        """The folder of the best run."""
        return Path(self.content["best"]["run"]) if self.content.get("best") else None

    @property
    def verdict(self) -> str:
        return str(self.content["verdict"])

    def _rows(self) -> list[dict[str, Any]]:
        return self.points._rows()

    def _repr_html_(self) -> str:
        return notebook.sweep_html(self.to_dict())


@dataclass(frozen=True, eq=False, repr=False)
class EnsembleResult(SavedResult):
    """The results of `ensemble`."""

    def __repr__(self) -> str:
        return f"EnsembleResult({str(self.folder)!r}: {self.verdict})"

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each member."""
        return {member["name"]: float(member["weight"]) for member in self.content["members"]}

    @property
    def valid(self) -> float:
        """The accuracy on the rows that the weights are fitted on, each scored with weights of the others."""
        return float(self.content["valid"]["ensemble"]["mean"])

    @property
    def test(self) -> float | None:
        """The accuracy on the test rows; None without labelled test rows."""
        return float(self.content["test"]["ensemble"]["mean"]) if "test" in self.content else None

    @property
    def verdict(self) -> str:
        return str(self.content["verdict"])

    def _rows(self) -> list[dict[str, Any]]:
        splits = [split for split in ("valid", "test") if split in self.content]
        together = {split: self.content[split]["ensemble"] for split in splits}
        members = [*self.content["members"], {"name": "together", "kind": "ensemble", "weight": None, **together}]
        return [
            {name: member[name] for name in ("name", "kind", "weight")}
            | {f"{split}{end}": member[split][key] for split in splits for end, key in ENDS.items()}
            for member in members
        ]


@dataclass(frozen=True, eq=False)
class LRCurve(Result, LRFinderResult):
    """The curve of a learning-rate range test and the learning rates it suggests."""

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"suggestion": self.suggestion}

    def _rows(self) -> list[dict[str, Any]]:
        values = zip(self.lrs, self.losses, self.smoothed, strict=True)
        return [{"lr": lr, "loss": loss, "smoothed": smoothed} for lr, loss, smoothed in values]

    def _repr_html_(self) -> str:
        return notebook.lr_html(self)


@dataclass(frozen=True, eq=False)
class Plan(Result):
    """A proposed run and its estimated cost. `pretrain(corpus, out=..., settings=plan.settings)` trains it."""

    settings: dict[str, Any]  # such as {"model.depth": 4}
    parameters: int
    steps: int
    tokens: int
    epochs: float
    seconds: float
    peak_bytes: int
    flops: float
    tokens_per_second: float
    device: str
    probed: bool  # True: the estimate is corrected by measured steps
    content: dict[str, Any] = field(repr=False)  # as `headstock plan --json` prints it

    def to_dict(self) -> dict[str, Any]:
        return json_value(self.content)

    def _rows(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in super().to_dict().items() if name != "content"}]

    def _repr_html_(self) -> str:
        rows = self._rows()[0]
        settings = rows.pop("settings")
        return html_table([{"": name, "value": value} for name, value in (rows | settings).items()])


@dataclass(frozen=True, eq=False)
class Export(Result):
    """An exported run."""

    run: Path
    folder: Path | None  # None if it was only uploaded
    format: str
    content: dict[str, Any] = field(repr=False)  # as `headstock export --json` prints it

    def to_dict(self) -> dict[str, Any]:
        return json_value(self.content)


@dataclass(frozen=True, eq=False)
class ImportedRun(Result):
    """A run made from another program's model."""

    path: Path
    task: str
    family: str

    def load(self, *, device: str = "auto") -> "Pipeline":
        """The run, ready to use: `headstock.load(imported.path)`."""
        from headstock.inference.pipeline import load

        return load(self.path, device=device)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if type(value) in (int, float)}


def make(kind: type[R], row: dict[str, Any]) -> R:
    """A dataclass from the values of a row that are its fields."""
    return kind(**{part.name: row[part.name] for part in fields(kind)})  # type: ignore[arg-type]
