"""The run folder: its files, their integrity, and opening runs by path or name."""

import importlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Size, Tensor

from headstock import config
from headstock.data import urls
from headstock.data.tokenizer import Tokenizer, open_tokenizer
from headstock.errors import UserError, suggest_path
from headstock.io import (
    FolderLayout,
    atomic_file,
    atomic_folder,
    cache_folder,
    checksum,
    checksum_mismatch,
    errors_name_path,
    remove_layout,
    remove_stale,
    write_json,
    write_text,
)
from headstock.model.lora import LoRAConfig, is_adapter, replace_adapter
from headstock.tasks.auxiliary import LM_HEAD
from headstock.tasks.calibration import Calibration
from headstock.train.checkpoint_files import PROGRESS, is_sharded, read_checkpoint_shapes, read_part, tensors_of
from headstock.train.remote_run import fetch_run, url_of
from headstock.train.tensors import MANIFEST, check_finite, find_damage, read_shapes, read_tensors, write_tensors

SECTIONS = {"model", "task", "data", "train"}  # of every run's config.json
FILES = ("config", "data", "tokenizer", "source_tokenizer", "results", "manifest", "calibration", "tracking")
STEP = "step-"  # followed by the number of the step: the folder of a checkpoint
CHECKPOINTS: FolderLayout = {f"{STEP}*": {"*.safetensors": None, PROGRESS: None, MANIFEST: None}}
# everything that a run folder may contain: a folder with anything else in it is not replaced
LAYOUT: dict[str, FolderLayout | None] = {f"{name}.json": None for name in FILES}
LAYOUT |= {"model.safetensors": None, "adapter.safetensors": None, "metrics.jsonl": None, "predictions.jsonl": None}
LAYOUT |= {"README.md": None, "report.html": None, "tensorboard": {"events.out.tfevents.*": None}}
LAYOUT |= {"adapt.txt": None, "adapt.jsonl": None}
LAYOUT |= {"checkpoints": CHECKPOINTS, "adapted": LAYOUT, "members": {"[0-9]*": LAYOUT}}
MAX_NAME = 255  # bytes of a file name on the usual file systems
MAX_ENSEMBLE = 1000  # models; more are a damaged config.json
BUNDLED_RUNS = Path(__file__).parent.parent / "stocks"  # pretrained runs that ship with the package, opened by name
Value = TypeVar("Value")
HUB = "headstock.interop.hub"  # opens hf:// names; it is above this package, so it is imported when one is used


@dataclass(frozen=True)
class RunFolder:
    """A folder such as runs/reviews. It contains no absolute paths to itself, so it can be moved."""

    path: Path
    name: str = ""  # of the run that this is a copy of

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.path.is_relative_to(hub_runs()):
            return f"hf://{self.path.relative_to(hub_runs()).as_posix()}"
        if url := url_of(self.path):
            return url
        return self.path.name if self.path.parent == BUNDLED_RUNS else str(self.path)

    @property
    def title(self) -> str:
        """What tables, charts and model cards call it."""
        return run_title(str(self))

    @property
    def step(self) -> int | None:
        """The training step of a checkpoint that is used as a run; None for a run itself."""
        return None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def whole_checkpoints(self) -> list[str]:
        """The names of the checkpoints that were written to the end, the earliest first."""
        names = [path.parent.name for path in self.checkpoints.glob(f"{STEP}*/{MANIFEST}")]
        return sorted((name for name in names if is_step(name)), key=lambda name: int(name.removeprefix(STEP)))

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def predictions(self) -> Path:
        return self.path / "predictions.jsonl"

    @property
    def calibration_file(self) -> Path:
        return self.path / "calibration.json"

    @property
    def adapted(self) -> "RunFolder":
        """The backbone after further pretraining on the task's own texts (`adapt_steps`)."""
        return RunFolder(self.path / "adapted")

    def member(self, number: int) -> "RunFolder":
        """One model of an ensemble."""
        return RunFolder(self.path / "members" / str(number))

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def tracking_file(self) -> Path:
        """The run's id at its experiment tracker, and what was sent there."""
        return self.path / "tracking.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def model_card(self) -> Path:
        return self.path / "README.md"

    @property
    def weights_file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def adapter_file(self) -> Path:
        """Adapters and heads of a run with LoRA; its weights contain them already."""
        return self.path / "adapter.safetensors"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def source_tokenizer_file(self) -> Path:
        """Exists only for encoder-decoders with separate source and target tokenizers."""
        return self.path / "source_tokenizer.json"

    def create(self, settings: dict[str, Any], tokenizer: Tokenizer, data: dict[str, Any]) -> None:
        """Create the folder atomically, replacing any previous one, with everything needed to load the run."""
        with atomic_folder(self.path, layout=LAYOUT) as folder:
            new = RunFolder(folder)
            new.write("config.json", settings)
            new.write("data.json", data)
            tokenizer.save(new.tokenizer_file)
            names = [new.tokenizer_file.name]
            if tokenizer.source_tokenizer is not None:
                tokenizer.source_tokenizer.save(new.source_tokenizer_file)
                names.append(new.source_tokenizer_file.name)
            new.add_to_manifest(*names)

    def has_run_config(self) -> bool:
        """Whether config.json is that of a run: other programs use the name too."""
        try:
            return config.read_settings(self.path / "config.json").keys() >= SECTIONS
        except UserError:
            return False

    def remove(self) -> None:
        """Delete the run's files; others in the folder stay."""
        remove_layout(self.path, LAYOUT)

    def remove_checkpoints(self) -> None:
        remove_layout(self.checkpoints, CHECKPOINTS)

    def owns(self, path: Path) -> bool:
        """Whether a path is part of the run; report.html is not, because it can be made again."""
        try:
            name = path.resolve().relative_to(self.path.resolve()).parts[0]
        except (ValueError, IndexError):
            return False
        return name in LAYOUT and name != self.report.name

    def exists(self) -> bool:
        return (self.path / "config.json").is_file()

    def is_finished(self) -> bool:
        return (self.path / "results.json").is_file()

    def is_complete(self) -> bool:
        """Whether the run is finished and all its weights are present and undamaged."""
        if not (self.is_finished() and self.exists()):
            return False
        return all(run.weights_file.is_file() and not run.find_damage(run.weights_file) for run in self.model_runs())

    def model_runs(self) -> list["RunFolder"]:
        """The run itself, or the members of an ensemble."""
        count = self.config().get("transfer", {}).get("ensemble", 1)
        if not isinstance(count, int) or not 0 < count <= MAX_ENSEMBLE:
            raise UserError(f"{self}: config.json says transfer.ensemble {count!r:.40}, expected 1 to {MAX_ENSEMBLE}")
        return [self] if count == 1 else [self.member(number) for number in range(count)]

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def read(self, name: str) -> dict[str, Any]:
        self.verify(self.path / name)
        return config.read_settings(self.path / name)

    def manifest(self) -> dict[str, Any]:
        """Size and SHA-256 of the files that must not change; runs of earlier versions have none."""
        path = self.path / MANIFEST
        return config.read_settings(path) if path.is_file() else {}

    def add_to_manifest(self, *names: str) -> None:
        """Record the current size and hash of files."""
        self.write(MANIFEST, self.manifest() | {name: checksum(self.path / name) for name in names})

    def find_damage(self, file: Path) -> str | None:
        """How a file differs from its manifest entry; None if it does not or has no entry."""
        manifest = self.manifest()
        return checksum_mismatch(file, manifest[file.name]) if file.name in manifest else None

    def verify(self, file: Path) -> None:
        """Reject a file that differs from its manifest entry."""
        if damage := self.find_damage(file):
            raise UserError(
                f"{file}: is damaged or was replaced: {damage}; restore it, or, if you changed it yourself, "
                f"delete its entry in {MANIFEST}"
            )

    def config(self) -> dict[str, Any]:
        tree = self.read("config.json")
        problems = [f"no {name}" for name in sorted(SECTIONS - tree.keys())]
        tables = [name for name in tree if isinstance(tree[name], dict)]
        problems += [f"{name} is not a table" for name in sorted((SECTIONS & tree.keys()) - set(tables))]
        if problems or "name" not in tree["task"]:
            raise UserError(f"{self}: its config.json is not that of a run: {', '.join(problems) or 'no task.name'}")
        return tree

    def data(self) -> dict[str, Any]:
        return self.read("data.json")

    def results(self) -> dict[str, Any]:
        results = self.read("results.json")
        uncharged = results.get("bits_per_byte") is not None and "unknown" not in results
        if not uncharged or not self.tokenizer_file.is_file() or not self.tokenizer().can_produce_unk:
            return results
        # written by a version that did not charge for unknown tokens, which favored small vocabularies
        parts = {name: results[name] for name in ("metrics", "intervals") if isinstance(results.get(name), dict)}
        for name, part in parts.items():
            parts[name] = {key: value for key, value in part.items() if key != "bits_per_byte"}
        why = "this run was measured without charging for unknown tokens; headstock evaluate measures it again"
        return results | parts | {"bits_per_byte": None, "bits_per_byte_withheld": why}

    def calibration(self) -> Calibration | None:
        """How the run's probabilities are calibrated; None for a run that is not."""
        if not self.calibration_file.is_file():
            return None
        return config.from_dict(Calibration, self.read("calibration.json"), prefix=str(self.calibration_file))

    def write_calibration(self, calibration: Calibration) -> None:
        self.write("calibration.json", config.to_dict(calibration))

    def write_results(self, results: dict[str, Any]) -> None:
        self.write("results.json", results)

    def write_report(self, page: str) -> None:
        write_text(self.report, page)

    def write_predictions(self, rows: Iterable[dict[str, Any]]) -> None:
        write_text(self.predictions, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file.is_file():
            raise UserError(f"{self}: its tokenizer.json is missing")
        self.verify(self.tokenizer_file)
        tokenizer = open_tokenizer(self.tokenizer_file)
        if self.source_tokenizer_file.is_file():
            self.verify(self.source_tokenizer_file)
            tokenizer.source_tokenizer = open_tokenizer(self.source_tokenizer_file)
        return tokenizer

    def save_weights(self, tensors: dict[str, Tensor]) -> None:
        self.save_tensors(self.weights_file, tensors)

    def save_adapter(self, tensors: dict[str, Tensor], lora: LoRAConfig) -> None:
        # one entry: the library writes several in random order, and equal runs have equal files
        metadata = {"lora": json.dumps(config.to_dict(lora))}
        self.save_tensors(self.adapter_file, tensors, metadata=metadata)

    def save_tensors(self, file: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
        remove_stale(self.path)
        with atomic_file(file, in_folder=True) as temporary:
            write_tensors(temporary, tensors, metadata=metadata)
            # recorded before the rename: after a crash in between, the old weights are rejected
            self.write(MANIFEST, self.manifest() | {file.name: checksum(temporary)})

    def adapter(self) -> dict[str, Tensor]:
        if not self.adapter_file.is_file():
            raise UserError(f"{self}: its adapter.safetensors is missing; finish its training with --resume")
        self.verify(self.adapter_file)
        return read_tensors(self.adapter_file)

    def weights(self, *, checked: bool = False) -> dict[str, Tensor]:
        """The run's weights. Damaged files (unless already `checked`) and values that are not finite are rejected."""
        self.check_weights_exist()
        if not checked:
            self.verify(self.weights_file)
        tensors = read_tensors(self.weights_file)
        check_finite(tensors, source=str(self.weights_file))
        return tensors

    def shapes(self) -> dict[str, Size]:
        """The shapes of the run's weights, from the file header; damaged weights are rejected."""
        self.check_weights_exist()
        self.verify(self.weights_file)
        return read_shapes(self.weights_file)

    def check_weights_exist(self) -> None:
        if not self.weights_file.is_file():
            if self.member(0).exists():
                raise UserError(f"{self}: is an ensemble; name one of its models, such as {self.member(0)}")
            raise UserError(f"{self}: has no model.safetensors yet; finish its training with --resume")

    def add_metrics(self, row: dict[str, Any]) -> None:
        with errors_name_path(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind_metrics(self, step: int) -> int:
        """Remove rows after `step` and damaged lines; returns the number of damaged ones.

        An incomplete last line does not count: it was being written when the run stopped.
        """
        lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.is_file() else []
        rows = [metrics_row(line) for line in lines]
        earlier = [row for row in rows if row is not None and row["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in earlier))
        return sum(row is None and line.endswith(b"\n") for row, line in zip(rows, lines, strict=True))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The undamaged rows of metrics.jsonl."""
        lines = self.metrics.read_bytes().splitlines() if self.metrics.is_file() else []
        return [row for row in map(metrics_row, lines) if row is not None]


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # ValueError includes invalid UTF-8
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


@dataclass(frozen=True)
class CheckpointRunFolder(RunFolder):
    """A checkpoint used as a run: its weights, and everything else from the run it belongs to."""

    @classmethod
    def at(cls, path: Path) -> "CheckpointRunFolder":
        """The checkpoint at a path, which may be relative to its run or to the checkpoint itself."""
        return cls(path if path.parent.name == "checkpoints" else Path(os.path.abspath(path)))

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path.parent.parent)

    @property
    def title(self) -> str:
        return f"{self.run.title}, step {self.step}"

    @property
    def step(self) -> int:
        return int(self.path.name.removeprefix(STEP))

    def is_named(self) -> bool:
        """Whether the path is that of a checkpoint of some run, whole or not."""
        return self.path.parent.name == "checkpoints" and is_step(self.path.name) and self.run.exists()

    def exists(self) -> bool:
        return self.is_named() and (self.path / MANIFEST).is_file()

    def is_finished(self) -> bool:
        return self.run.is_finished()

    def read(self, name: str) -> dict[str, Any]:
        return self.run.read(name)

    def results(self) -> dict[str, Any]:
        """The results of the run with those of this step's validation in place of the final ones."""
        results, progress = super().results(), config.read_settings(self.path / PROGRESS)
        metrics = progress["valid"]
        if "valid" in results:  # of a fine-tuned run
            results["valid"] = metrics | {"rows": results["valid"]["rows"], "intervals": {}}
        for name in ("intervals", "samples", "test", "details"):  # of the final weights
            results.pop(name, None)
        own = {"steps": self.step, "tokens": progress["tokens"], "seconds": progress["seconds"], "metrics": metrics}
        own |= {name: metrics[name] for name in ("perplexity", "bits_per_byte") if name in metrics}
        total, read = self.data().get("valid_tokens"), progress.get("valid_tokens")
        return results | own | ({"measured_share": min(1.0, read / total)} if total and read else {})

    @property
    def tokenizer_file(self) -> Path:
        return self.run.tokenizer_file

    def tokenizer(self) -> Tokenizer:
        return self.run.tokenizer()

    @property
    def weights_file(self) -> Path:
        """The averaged weights if the run has them, because they become the final ones.

        Of a sharded checkpoint, the manifest: it has the hash of every shard.
        """
        if is_sharded(self.path):
            return self.path / MANIFEST
        averaged = self.path / "average.safetensors"
        return averaged if averaged.is_file() else self.path / "model.safetensors"

    @property
    def has_backbone(self) -> bool:
        """Checkpoints of a run with a frozen backbone or with LoRA contain only what is trained."""
        transfer = self.config().get("transfer", {})
        return not transfer.get("freeze") and not transfer.get("lora")

    def weights(self, *, checked: bool = False) -> dict[str, Tensor]:
        if not checked:
            self.verify_checkpoint()
        own = self.without_lm_head(read_part(self.path, "average") or read_part(self.path, "model"))
        check_finite(own, source=str(self.weights_file))
        if self.has_backbone:
            return own
        weights, transfer = self.run.weights(checked=checked), self.config()["transfer"]
        if rank := transfer.get("lora"):
            return replace_adapter(weights, self.run.adapter(), own, scale=transfer["lora_alpha"] / rank)
        return weights | own

    def shapes(self) -> dict[str, Size]:
        self.verify_checkpoint()
        shapes = read_checkpoint_shapes(self.path)
        own = self.without_lm_head(tensors_of("average", shapes) or tensors_of("model", shapes))
        if self.has_backbone:
            return own
        return self.run.shapes() | {name: shape for name, shape in own.items() if not is_adapter(name)}

    def without_lm_head(self, tensors: dict[str, Value]) -> dict[str, Value]:
        """Leave out the head that a fine-tuned run with `lm_loss` trains, but does not keep."""
        if not self.config().get("transfer", {}).get("lm_loss"):
            return tensors
        return {name: value for name, value in tensors.items() if not name.startswith(f"heads.{LM_HEAD}.")}

    def verify_checkpoint(self) -> None:
        if damage := find_damage(self.path):
            raise UserError(f"{self}: is damaged ({damage}); use another checkpoint or the run itself")


def is_step(name: str) -> bool:
    """Whether a folder is named like a checkpoint."""
    return name.startswith(STEP) and name.removeprefix(STEP).isdecimal()


def source_run(run: RunFolder) -> RunFolder | None:
    """The pretrained run at the start of a chain of fine-tuned runs; None if a link is missing or circular."""
    visited: set[Path] = set()
    settings = run.config()
    while "transfer" in settings:
        visited.add(run.path.resolve())
        try:
            run = open_run(settings["transfer"]["run"] or "", download=False)
            settings = run.config()  # an imported run names what it was imported from, which is no run
        except UserError:
            return None
        if run.path.resolve() in visited:
            return None
    return run


def tokenizer_fingerprints(tokenizer: Tokenizer) -> dict[str, str]:
    """The fingerprints of a run's tokenizers, for data.json."""
    tokenizers = {"tokenizer": tokenizer, "source_tokenizer": tokenizer.source_tokenizer}
    return {name: part.fingerprint for name, part in tokenizers.items() if part is not None}


def check_tokenizers(run: RunFolder, tokenizer: Tokenizer) -> None:
    """Reject a tokenizer that the model was not trained with."""
    expected = run.data()
    for name, own in (("tokenizer", tokenizer), ("source_tokenizer", tokenizer.source_tokenizer)):
        if expected.get(name) != (own.fingerprint if own else None):
            entries = f"({own.vocabulary} entries) does not belong to this run" if own else "is missing"
            raise UserError(f"{run}: its {name}.json {entries}: it is not the one the model was trained with")


def bundled_run_names() -> list[str]:
    return sorted(folder.name for folder in BUNDLED_RUNS.glob("*") if RunFolder(folder).exists())


def hub_runs() -> Path:
    """The folder of the runs that were imported because a command named them as hf://ORG/NAME."""
    return cache_folder() / "hub"


def is_hub_name(name: str | Path) -> bool:
    return str(name).startswith("hf:/")  # one slash: pathlib drops the other


def run_title(name: str) -> str:
    """A short name for tables and charts: the last part of a path, and of a model of the Hub without its commit."""
    title = name.rpartition("/")[2]
    return title.partition("@")[0] if is_hub_name(name) else title


def open_run(path: str | Path, *, download: bool = True) -> RunFolder:
    """Open a run folder, a checkpoint, a bundled run by its name, a model of the Hugging Face Hub (hf://ORG/NAME), or
    any of the first two by URL.

    What is not on this machine is downloaded into the cache if `download` allows it. Errors suggest similar names.
    """
    if not str(path):
        raise UserError("no run is named")
    if is_hub_name(path):
        opened: RunFolder = importlib.import_module(HUB).open_hub_run(path, download=download)
        return opened
    if urls.is_url(path):
        path = fetch_run(urls.normalize(path), download=download)
    if len(os.fsencode(path)) > MAX_NAME and not os.path.exists(path):  # which is False for names that are too long
        raise UserError(f"{str(path)[:60]}...: no such run; name the run before the text")
    run, checkpoint = RunFolder(Path(path)), CheckpointRunFolder.at(Path(path))
    for candidate in (run, checkpoint, RunFolder(BUNDLED_RUNS / str(path))):
        if candidate.exists():
            return candidate
    if checkpoint.is_named():
        problem = f"is incomplete: it has no {MANIFEST}" if run.path.exists() else "no such checkpoint"
        whole = ", ".join(checkpoint.run.whole_checkpoints()) or "no whole one"
        raise UserError(f"{path}: {problem} ({checkpoint.run} has {whole})")
    if names := RunFolder(run.path.parent).whole_checkpoints() if run.path.name == "checkpoints" else []:
        raise UserError(f"{path}: holds the checkpoints of a run; name one of them: {', '.join(names)}")
    if run.path.exists():
        raise UserError(f"{path}: is not a run folder: it has no config.json")
    parent = run.path.parent
    siblings = sorted(folder.name for folder in parent.glob("*") if RunFolder(folder).exists())
    in_parent = f" (in {parent}: {', '.join(siblings)})" if siblings else ""
    hint = suggest_path(run.path.name, [*siblings, *bundled_run_names()]) or in_parent
    raise UserError(f"{path}: no such run{hint}")
