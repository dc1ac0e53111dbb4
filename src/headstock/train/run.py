"""The run folder: the only place that knows the names of the files in it."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headstock import config
from headstock.errors import UserError, did_you_mean
from headstock.files import at_work, sweep, whole_file, whole_folder, write_json, write_text
from headstock.text.tokenizer import Tokenizer, open_tokenizer
from headstock.train.tensors import read_tensors, write_tensors

STOCKS = Path(__file__).parent.parent / "stocks"  # runs that ship with the package, known by their names


@dataclass(frozen=True)
class Run:
    """A folder such as runs/reviews. It holds no absolute paths to itself, so it can be moved."""

    path: Path

    def __str__(self) -> str:
        return self.path.name if self.path.parent == STOCKS else str(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def predictions(self) -> Path:
        return self.path / "predictions.jsonl"

    @property
    def adapted(self) -> "Run":
        """The same backbone after more pretraining on the task's own texts, where that was asked for."""
        return Run(self.path / "adapted")

    def member(self, number: int) -> "Run":
        """One model of an ensemble."""
        return Run(self.path / "members" / str(number))

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def begin(self, settings: dict[str, Any], tokenizer: Tokenizer, data: dict[str, Any]) -> None:
        """Make the folder, whole and in the place of any before it: what loads and repeats the run is there at once."""
        with whole_folder(self.path) as folder:
            beginning = Run(folder)
            beginning.write("config.json", settings)
            beginning.write("data.json", data)
            tokenizer.save(beginning.tokenizer_file)
            if tokenizer.source is not None:
                tokenizer.source.save(beginning.source_tokenizer_file)

    def exists(self) -> bool:
        return (self.path / "config.json").is_file()

    def finished(self) -> bool:
        return (self.path / "results.json").is_file()

    def whole(self) -> bool:
        """Finished, and all weights that it made are still there: nothing is left to do."""
        if not (self.finished() and self.exists()):
            return False
        count = self.config().get("transfer", {}).get("ensemble", 1)
        models = [self] if count == 1 else [self.member(number) for number in range(count)]
        return all(model.weights_file.is_file() for model in models)

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def read(self, name: str) -> dict[str, Any]:
        return config.read_settings(self.path / name)

    def config(self) -> dict[str, Any]:
        return self.read("config.json")

    def data(self) -> dict[str, Any]:
        return self.read("data.json")

    def results(self) -> dict[str, Any]:
        return self.read("results.json")

    def write_results(self, results: dict[str, Any]) -> None:
        self.write("results.json", results)

    @property
    def card(self) -> Path:
        return self.path / "README.md"

    def write_card(self, text: str) -> None:
        write_text(self.card, text)

    def write_report(self, page: str) -> None:
        write_text(self.report, page)

    def write_predictions(self, rows: Iterable[dict[str, Any]]) -> None:
        write_text(self.predictions, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    @property
    def weights_file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def source_tokenizer_file(self) -> Path:
        """There only where what a model reads is cut otherwise than what it writes."""
        return self.path / "source_tokenizer.json"

    def tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file.is_file():
            raise UserError(f"{self}: its tokenizer.json is missing, so its model cannot be used")
        found = open_tokenizer(self.tokenizer_file)
        if self.source_tokenizer_file.is_file():
            found.source = open_tokenizer(self.source_tokenizer_file)
        return found

    def save_weights(self, tensors: dict[str, Tensor]) -> None:
        sweep(self.path)
        with whole_file(self.weights_file) as beside:
            write_tensors(beside, tensors)

    def weights(self) -> dict[str, Tensor]:
        if not self.weights_file.is_file():
            if self.member(0).exists():
                raise UserError(f"{self}: is several models; name one of them, such as {self.member(0)}")
            raise UserError(f"{self}: has no model.safetensors yet; finish its training with --resume")
        return read_tensors(self.weights_file)

    def add_metrics(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Forget what was written after `step`, and a last line that was cut off in the middle."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def read_metrics(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if self.metrics.is_file():
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    break  # only a line being written when the machine stopped can be like this, and it is the last
        return rows


@contextmanager
def alone_in(run: Run) -> Iterator[None]:
    """While this lasts no other process trains in the run's folder; of those that torchrun started, the first asks."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    with at_work(run.path) as mine:
        if not mine:
            raise UserError(f"{run}: another process is at work in this folder")
        yield


def check_apart(target: Run, source: Run) -> None:
    """Refuse a folder for a new run that is, by whatever name, the run it comes from, or that one lies in."""
    if source.path.resolve().is_relative_to(target.path.resolve()):
        raise UserError(f"{target}: {source}, which the new run comes from, would be lost; name another folder")


def origin(run: Run) -> Run | None:
    """The language model at the beginning of a chain of fine-tuned runs; None where a link is gone or names itself."""
    passed: set[Path] = set()
    while "transfer" in (settings := run.config()):
        passed.add(run.path.resolve())
        named = settings["transfer"]["run"]
        try:
            run = open_run(named or "")
        except UserError:
            return None
        if run.path.resolve() in passed:
            return None
    return run


def fingerprints(tokenizer: Tokenizer) -> dict[str, str]:
    """By which a run knows its tokenizers again."""
    own = {"tokenizer": tokenizer.fingerprint}
    return own if tokenizer.source is None else own | {"source_tokenizer": tokenizer.source.fingerprint}


def check_tokenizers(run: Run, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the one the model was trained with."""
    known, own = run.data(), fingerprints(tokenizer)
    for name, found in (("tokenizer", tokenizer), ("source_tokenizer", tokenizer.source)):
        if known.get(name) != own.get(name):
            there = f"({found.vocabulary} entries) does not belong to this run" if found else "is missing"
            raise UserError(f"{run}: its {name}.json {there}: it is not the one the model was trained with")


def stock_names() -> list[str]:
    return sorted(folder.name for folder in STOCKS.glob("*") if Run(folder).exists())


def open_run(path: str | Path) -> Run:
    """A run that is there, or a stock by its name; otherwise says which are."""
    if not str(path):
        raise UserError("no run is named")
    run = Run(Path(path))
    if run.exists():
        return run
    if (stock := Run(STOCKS / str(path))).exists():
        return stock
    parent = run.path.parent
    beside = sorted(folder.name for folder in parent.glob("*") if Run(folder).exists()) if parent.is_dir() else []
    if not run.path.exists():
        there = f" (beside it: {', '.join(beside)})" if beside else ""
        hint = did_you_mean(run.path.name, [*beside, *stock_names()]) or there
        raise UserError(f"{path}: no such run{hint}")
    raise UserError(f"{path}: is not a run folder, it has no config.json")
