"""The run folder: the only place that knows the names of the files in it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from errno import EACCES, EEXIST, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from headstock import config
from headstock.data.tokenizer import Tokenizer, open_tokenizer
from headstock.errors import UserError, WorkError, suggest_path
from headstock.io import (
    FolderLayout,
    atomic_file,
    atomic_folder,
    check_inputs,
    check_replaceable,
    checksum,
    checksum_mismatch,
    errors_name_path,
    lock_folder,
    rank_and_size,
    remove_layout,
    remove_stale,
    write_json,
    write_text,
)
from headstock.train.checkpoint import MANIFEST, find_damage
from headstock.train.tensors import read_shapes, read_tensors, write_tensors

SECTIONS = {"model", "task", "data", "train"}  # which the config.json of every run has
FILES = ("config", "data", "tokenizer", "source_tokenizer", "results", "manifest")
CHECKPOINTS: FolderLayout = {"step-*": {"*.safetensors": None, "progress.json": None, "manifest.json": None}}
# all that a run folder of ours may hold: a folder with anything else in it is not replaced
LAYOUT: dict[str, FolderLayout | None] = {f"{name}.json": None for name in FILES}
LAYOUT |= {"model.safetensors": None, "metrics.jsonl": None, "predictions.jsonl": None, "adapt.txt": None}
LAYOUT |= {"README.md": None, "report.html": None, "tensorboard": {"events.out.tfevents.*": None}}
LAYOUT |= {"checkpoints": CHECKPOINTS, "adapted": LAYOUT, "members": {"[0-9]*": LAYOUT}}
STOCKS = Path(__file__).parent.parent / "stocks"  # runs that ship with the package, known by their names
NOT_THERE = (ENOENT, ENOTDIR, EEXIST, EACCES, EPERM, ENAMETOOLONG)  # errors of a path where no folder can be made


@dataclass(frozen=True)
class RunFolder:
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
    def adapted(self) -> "RunFolder":
        """The same backbone after more pretraining on the task's own texts, where that was asked for."""
        return RunFolder(self.path / "adapted")

    def member(self, number: int) -> "RunFolder":
        """One model of an ensemble."""
        return RunFolder(self.path / "members" / str(number))

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def create(self, settings: dict[str, Any], tokenizer: Tokenizer, data: dict[str, Any]) -> None:
        """Make the folder, whole and in the place of any before it: what loads and repeats the run is there at once."""
        with atomic_folder(self.path, layout=LAYOUT) as folder:
            beginning = RunFolder(folder)
            beginning.write("config.json", settings)
            beginning.write("data.json", data)
            tokenizer.save(beginning.tokenizer_file)
            beginning.add_to_manifest("tokenizer.json")
            if tokenizer.source_tokenizer is not None:
                tokenizer.source_tokenizer.save(beginning.source_tokenizer_file)
                beginning.add_to_manifest("source_tokenizer.json")

    def has_run_config(self) -> bool:
        """Whether config.json is that of a run: other programs have a file of that name too."""
        try:
            return config.read_settings(self.path / "config.json").keys() >= SECTIONS
        except UserError:
            return False

    def remove(self) -> None:
        """Delete the run; what is not part of one stays."""
        remove_layout(self.path, LAYOUT)

    def remove_checkpoints(self) -> None:
        remove_layout(self.checkpoints, CHECKPOINTS)

    def owns(self, path: Path) -> bool:
        """Whether a file is part of the run; report.html is not, which can be made again at any time."""
        try:
            first = path.resolve().relative_to(self.path.resolve()).parts[0]
        except (ValueError, IndexError):
            return False
        named = (self.weights_file, self.tokenizer_file, self.source_tokenizer_file, self.metrics, self.predictions)
        parts = (
            *named,
            self.model_card,
            self.checkpoints,
            self.adapted.path,
            self.member(0).path.parent,
            self.tensorboard,
        )
        return first in {part.name for part in parts} | {"config.json", "data.json", "results.json", "adapt.txt"}

    def exists(self) -> bool:
        return (self.path / "config.json").is_file()

    def is_finished(self) -> bool:
        return (self.path / "results.json").is_file()

    def is_complete(self) -> bool:
        """Finished, and all weights that it made are still there: nothing is left to do."""
        if not (self.is_finished() and self.exists()):
            return False
        count = self.config().get("transfer", {}).get("ensemble", 1)
        models = [self] if count == 1 else [self.member(number) for number in range(count)]
        return all(model.weights_file.is_file() and not model.find_damage(model.weights_file) for model in models)

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def read(self, name: str) -> dict[str, Any]:
        self.verify(self.path / name)
        return config.read_settings(self.path / name)

    def manifest(self) -> dict[str, Any]:
        """Size and sha256 of the files that must not change; runs of earlier versions have none."""
        path = self.path / MANIFEST
        return config.read_settings(path) if path.is_file() else {}

    def add_to_manifest(self, *names: str) -> None:
        """Put files as they are now into the manifest."""
        self.write(MANIFEST, self.manifest() | {name: checksum(self.path / name) for name in names})

    def find_damage(self, file: Path) -> str | None:
        """How a file differs from what the manifest says of it; None where it does not, or nothing is said."""
        manifest = self.manifest()
        return checksum_mismatch(file, manifest[file.name]) if file.name in manifest else None

    def verify(self, file: Path) -> None:
        """Refuse a file that is not as it was written."""
        if wrong := self.find_damage(file):
            raise UserError(
                f"{file}: is damaged or was replaced: {wrong}; restore it, or, if you changed it yourself, "
                f"delete its entry in {MANIFEST}"
            )

    def config(self) -> dict[str, Any]:
        tree = self.read("config.json")
        missing = [name for name in sorted(SECTIONS) if name not in tree]
        wrong = [name for name in sorted(SECTIONS & tree.keys()) if not isinstance(tree[name], dict)]
        if missing or wrong or "name" not in tree["task"]:
            what = f"no {', '.join(missing)}" if missing else f"{wrong[0]} is no table" if wrong else "no task.name"
            raise UserError(f"{self}: its config.json does not hold the settings of a run: {what}")
        return tree

    def data(self) -> dict[str, Any]:
        return self.read("data.json")

    def results(self) -> dict[str, Any]:
        results = self.read("results.json")
        uncharged = results.get("bits_per_byte") is not None and "unknown" not in results
        if not uncharged or not self.tokenizer_file.is_file() or not self.tokenizer().can_produce_unk:
            return results
        # made when unknown tokens cost nothing, which made a small vocabulary look good
        parts = {name: results[name] for name in ("metrics", "intervals") if name in results}
        for name, part in parts.items():
            parts[name] = {key: value for key, value in part.items() if key != "bits_per_byte"}
        why = "what unknown tokens hide was not counted when this run was made; headstock evaluate measures it anew"
        return results | parts | {"bits_per_byte": None, "bits_per_byte_withheld": why}

    def write_results(self, results: dict[str, Any]) -> None:
        self.write("results.json", results)

    @property
    def model_card(self) -> Path:
        return self.path / "README.md"

    def write_card(self, text: str) -> None:
        write_text(self.model_card, text)

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
        self.verify(self.tokenizer_file)
        found = open_tokenizer(self.tokenizer_file)
        if self.source_tokenizer_file.is_file():
            self.verify(self.source_tokenizer_file)
            found.source_tokenizer = open_tokenizer(self.source_tokenizer_file)
        return found

    def save_weights(self, tensors: dict[str, Tensor]) -> None:
        remove_stale(self.path)
        with atomic_file(self.weights_file) as beside:
            write_tensors(beside, tensors)
            # recorded first: whatever happens next, weights that are not these are refused
            self.write(MANIFEST, self.manifest() | {self.weights_file.name: checksum(beside)})

    def weights(self, *, checked: bool = False) -> dict[str, Tensor]:
        """The run's weights; damaged ones, unless they are `checked` already, and values that are no finite numbers
        are refused."""
        self.check_weights_exist()
        if not checked:
            self.verify(self.weights_file)
        tensors = read_tensors(self.weights_file)
        check_finite(tensors, source=str(self.weights_file))
        return tensors

    def shapes(self) -> dict[str, Size]:
        """The shapes of the run's weights, which take no memory to read; damaged weights are refused."""
        self.check_weights_exist()
        self.verify(self.weights_file)
        return read_shapes(self.weights_file)

    def check_weights_exist(self) -> None:
        if not self.weights_file.is_file():
            if self.member(0).exists():
                raise UserError(f"{self}: is several models; name one of them, such as {self.member(0)}")
            raise UserError(f"{self}: has no model.safetensors yet; finish its training with --resume")

    def add_metrics(self, row: dict[str, Any]) -> None:
        with errors_name_path(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind_metrics(self, step: int) -> int:
        """Forget what was written after `step`, and damaged lines; how many of these there were.

        A last line without an end does not count: it was being written when the run was stopped.
        """
        lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.is_file() else []
        rows = [metrics_row(line) for line in lines]
        kept = [row for row in rows if row is not None and row["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        return sum(row is None and line.endswith(b"\n") for row, line in zip(rows, lines, strict=True))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, without damaged ones."""
        lines = self.metrics.read_bytes().splitlines() if self.metrics.is_file() else []
        return [row for row in map(metrics_row, lines) if row is not None]


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the first of them is also what bytes that are no UTF-8 give
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def check_finite(tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse weights that are not finite numbers: a model with one such value answers nothing of use."""
    wrong = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"{source}: holds values that are not finite numbers, in {wrong[0]}{more}")


def check_output_folder(run: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder for a run that holds something else, or a run that nobody asked to replace or go on with."""
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run}: is a file; a run is a folder")
    if run.path.exists() and not resume and not overwrite:
        raise UserError(f"{run}: exists already; go on with --resume, replace it with --overwrite, or name another")
    if not run.path.exists():
        return
    if not run.exists() and any(run.path.iterdir()):
        raise UserError(f"{run}: is not a run folder (it has no config.json) and not empty, so it is left alone")
    if not resume and run.exists() and not run.has_run_config():
        raise UserError(f"{run}: its config.json is not that of a run, so it is left alone; name another folder")
    if not resume:
        check_replaceable(run.path, LAYOUT)


def check_inputs_outside(run: RunFolder, inputs: Iterable[str | Path | None]) -> None:
    """Refuse to replace a run's folder if one of the inputs of the new run lies in it."""
    if run.path.exists():
        check_inputs(run.path, [path for path in inputs if path])


@dataclass(frozen=True)
class CheckpointRunFolder(RunFolder):
    """A checkpoint used as a run: the weights of that step, and all else from the run it belongs to."""

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path.parent.parent)

    def exists(self) -> bool:
        return self.path.parent == self.run.checkpoints and (self.path / MANIFEST).is_file() and self.run.exists()

    def finished(self) -> bool:
        """The run's results are those of its final weights, not of these."""
        return False

    def read(self, name: str) -> dict[str, Any]:
        return self.run.read(name)

    @property
    def tokenizer_file(self) -> Path:
        return self.run.tokenizer_file

    def tokenizer(self) -> Tokenizer:
        return self.run.tokenizer()

    @property
    def weights_file(self) -> Path:
        """The averaged weights where the run averages them, which are what it keeps in the end."""
        averaged = self.path / "average.safetensors"
        return averaged if averaged.is_file() else self.path / "model.safetensors"

    @property
    def head_only(self) -> bool:
        """With a frozen backbone a checkpoint holds the head alone."""
        return bool(self.config().get("transfer", {}).get("freeze", False))

    def weights(self, *, checked: bool = False) -> dict[str, Tensor]:
        if not checked:
            self.check_whole()
        own = read_tensors(self.weights_file)
        check_finite(own, source=str(self.weights_file))
        return self.run.weights(checked=checked) | own if self.head_only else own

    def shapes(self) -> dict[str, Size]:
        self.check_whole()
        own = read_shapes(self.weights_file)
        return self.run.shapes() | own if self.head_only else own

    def check_whole(self) -> None:
        if wrong := find_damage(self.path):
            raise UserError(f"{self}: is damaged ({wrong}); use another checkpoint or the run itself")


@contextmanager
def locked_run(run: RunFolder) -> Iterator[None]:
    """While this lasts no other process trains in the run's folder; of those that torchrun started, the first asks."""
    if rank_and_size()[0] > 0:
        yield
        return
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(lock_folder(run.path))
        except OSError as wrong:  # it names the file of the claim, which nobody asked for
            kind = UserError if wrong.errno in NOT_THERE else WorkError
            raise kind(f"{run}: cannot be written: {wrong.strerror}") from None
        if not mine:
            raise UserError(f"{run}: another process is at work in this folder")
        yield


def check_resumable(run: RunFolder) -> None:
    """Refuse to resume what is not there; anything else in the folder is left to the checks of a new run."""
    if not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir())):
        raise UserError(f"{run}: nothing to resume there; leave out --resume to begin a new run")


def check_not_source(target: RunFolder, source: RunFolder) -> None:
    """Refuse a folder for a new run that is, by whatever name, the run it comes from, or that one lies in."""
    if source.path.resolve().is_relative_to(target.path.resolve()):
        raise UserError(f"{target}: {source}, which the new run comes from, would be lost; name another folder")


def source_run(run: RunFolder) -> RunFolder | None:
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


def tokenizer_fingerprints(tokenizer: Tokenizer) -> dict[str, str]:
    """By which a run knows its tokenizers again."""
    own = {"tokenizer": tokenizer.fingerprint}
    return (
        own
        if tokenizer.source_tokenizer is None
        else own | {"source_tokenizer": tokenizer.source_tokenizer.fingerprint}
    )


def check_tokenizers(run: RunFolder, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the one the model was trained with."""
    known, own = run.data(), tokenizer_fingerprints(tokenizer)
    for name, found in (("tokenizer", tokenizer), ("source_tokenizer", tokenizer.source_tokenizer)):
        if known.get(name) != own.get(name):
            there = f"({found.vocabulary} entries) does not belong to this run" if found else "is missing"
            raise UserError(f"{run}: its {name}.json {there}: it is not the one the model was trained with")


def bundled_run_names() -> list[str]:
    return sorted(folder.name for folder in STOCKS.glob("*") if RunFolder(folder).exists())


def open_run(path: str | Path) -> RunFolder:
    """A run that is there, a checkpoint of one, or a stock by its name; otherwise says which are."""
    if not str(path):
        raise UserError("no run is named")
    run = RunFolder(Path(path))
    if run.exists():
        return run
    if (checkpoint := CheckpointRunFolder(Path(path))).exists():
        return checkpoint
    if (stock := RunFolder(STOCKS / str(path))).exists():
        return stock
    parent = run.path.parent
    beside = sorted(folder.name for folder in parent.glob("*") if RunFolder(folder).exists()) if parent.is_dir() else []
    if not run.path.exists():
        there = f" (beside it: {', '.join(beside)})" if beside else ""
        hint = suggest_path(run.path.name, [*beside, *bundled_run_names()]) or there
        raise UserError(f"{path}: no such run{hint}")
    raise UserError(f"{path}: is not a run folder, it has no config.json")
