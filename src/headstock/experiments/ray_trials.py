"""Runs the trials of an experiment as Ray tasks (`--on ray`).

A trial is one task. What it needs travels through Ray's object store: labelled rows and settings with the task, the
files of pretrained runs once per node. It runs in a temporary folder; its result file, and its run folder if it
saves one, travel back and are written by the driver. So no shared disk is needed, unless the trials read inputs of
unknown size themselves (`Trainable.shared_inputs`).
"""

import io
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headstock.cache_use import mark_used
from headstock.errors import UserError
from headstock.experiments.grid import Executor, Outcome, ResultCache, Trainable, Trial, run_here
from headstock.io import PARTIAL, atomic_folder, cache_folder, fingerprint, rank_and_size, sha256, write_bytes
from headstock.ray_cluster import alive_nodes, check_nodes, check_on, connect, import_ray, largest, run_tasks
from headstock.train.distributed import choose_device
from headstock.train.run_folder import LAYOUT as RUN_LAYOUT
from headstock.train.run_folder import CheckpointRunFolder, RunFolder

logger = logging.getLogger(__name__)

SHARED = "; trials that pretrain need their text and --out on a disk that all nodes share, or text at a URL"


class Placement(NamedTuple):
    """Where trials run, and on which device."""

    execute: Executor
    device: torch.device
    is_remote: bool


def place_trials(
    on: str | None, device: str, *, gpus_per_trial: float | None = None, cpus_per_trial: float | None = None
) -> AbstractContextManager[Placement]:
    """In this process, or on the Ray cluster `on`. Options are checked at once, the cluster is joined by `with`."""
    gpus, cpus, problem = gpus_per_trial, cpus_per_trial, None
    if on is None:
        problem = "needs --on ray"
    elif cpus is not None and not cpus == int(cpus) > 0:
        raise UserError(f"--cpus-per-trial {cpus:g}: must be a whole number above 0")
    elif gpus is not None and not (0 <= gpus <= 1 or gpus == int(gpus) > 0):
        raise UserError(f"--gpus-per-trial {gpus:g}: must be a fraction up to 1, or a whole number")
    elif device == "cpu" and gpus:
        problem = "contradicts --device cpu"
    for name, value in (("gpus", gpus), ("cpus", cpus)):
        if problem is not None and value is not None:
            raise UserError(f"--{name}-per-trial {value:g}: {problem}")
    if on is None:
        return nullcontext(Placement(run_here, choose_device(device), is_remote=False))
    if rank_and_size()[1] > 1:
        raise UserError(f"--on {on}: starts its own processes; run the command without torchrun")
    check_on(on)
    return place_on_ray(on, device, gpus, int(cpus or 1))


@contextmanager
def place_on_ray(on: str, device: str, gpus: float | None, cpus: int) -> Iterator[Placement]:
    with connect(on):
        if gpus is None:
            gpus = 1 if device == "cuda" or (device == "auto" and largest("GPU") >= 1) else 0
        kind = "cuda" if gpus else "mps" if device == "mps" else "cpu"
        check_nodes()
        executor = RayExecutor(kind, cpus, gpus)
        logger.info("on Ray: %s", executor.describe())
        yield Placement(executor, torch.device(kind), is_remote=True)


@dataclass(frozen=True)
class RayExecutor:
    """Runs trials as tasks, as many side by side as the cluster has CPUs and GPUs for."""

    device: str
    cpus: int  # per trial, also its threads
    gpus: float  # per trial

    def __call__(self, trainable: Trainable, trials: Sequence[Trial]) -> Iterator[tuple[int, Outcome]]:
        missing = []
        for index, trial in enumerate(trials):
            if (cached := trainable.lookup(trial)) is not None:
                yield index, cached
            else:
                missing.append(index)
        if not missing:
            return
        if trainable.shared_inputs is not None:
            check_shared(trainable.folder, trainable.shared_inputs)
        packer = Packer()
        shared = import_ray().put(packer.dump(trainable))
        cache, run_refs = ResultCache(trainable.folder), packer.copies
        arguments = []
        for index in missing:
            path = cache.path(trials[index])
            cell = path.read_bytes() if path.is_file() else None
            arguments.append((shared, packer.dump(trials[index]), cell, run_refs, self.device, self.cpus))
        names = [trials[index].label for index in missing]
        tasks = run_tasks(run_on_worker, arguments, names=names, cpus=self.cpus, gpus=self.gpus)
        for number, (outcome, files) in tasks:
            write_files(trainable.folder, files)
            yield missing[number], outcome

    def describe(self) -> str:
        """`2 nodes, 8 trials side by side (1 CPU and 0.25 GPUs each)`."""
        nodes = alive_nodes()
        slots = sum(self.slots(node["Resources"]) for node in nodes)
        each = f"{self.cpus:g} CPU{'s' if self.cpus > 1 else ''}" + (f" and {self.gpus:g} GPU" if self.gpus else "")
        count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        return f"{count}, {slots} trial{'s' if slots != 1 else ''} side by side ({each} each)"

    def slots(self, resources: dict[str, float]) -> int:
        """The number of trials that fit on a node."""
        limits = [resources.get("CPU", 0.0) / self.cpus]
        limits += [resources.get("GPU", 0.0) / self.gpus] if self.gpus else []
        return int(min(limits))


def check_shared(folder: Path, inputs: Sequence[Path]) -> None:
    """Check that all nodes see the inputs and the folder, by a new file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-", suffix=PARTIAL) as file:
        file.write(b"?")
        file.flush()
        check_nodes([*inputs, Path(file.name)], why=SHARED)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write what a trial returned: first its run folder, then its result, which says that the trial is complete."""
    runs: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        parts = Path(name).parts
        if parts[0] == "runs":
            runs.setdefault(parts[1], {})[str(Path(*parts[2:]))] = data
    for run, contents in runs.items():
        with atomic_folder(folder / "runs" / run, layout=RUN_LAYOUT) as new:
            unpack(new, contents)
    for name, data in files.items():
        if not name.startswith("runs/"):
            write_bytes(folder / name, data)


# In the worker


def run_on_worker(
    trainable: bytes, trial: bytes, cell: bytes | None, runs: dict[str, Any], device: str, threads: int
) -> tuple[Outcome, dict[str, bytes]]:
    """Run a trial in a temporary folder; returns its outcome and the files it wrote there."""
    torch.set_num_threads(threads)
    for digest, ref in runs.items():
        if not copy_of_run(digest).is_dir():
            with atomic_folder(copy_of_run(digest)) as folder:
                unpack(folder, import_ray().get(ref))
    work, point = pickle.loads(trainable), pickle.loads(trial)
    if work.shared_inputs is not None:
        return work.on_worker(work.folder, device).run(point), {}
    with tempfile.TemporaryDirectory(prefix="headstock-") as name:
        folder = Path(name)
        if cell is not None:
            write_bytes(ResultCache(folder).path(point), cell)
        return work.on_worker(folder, device).run(point), pack(folder)


# Files in the object store


class Packer:
    """Pickles trials. The runs they start from are put into the object store once, in `copies` by their hash."""

    def __init__(self) -> None:
        self.copies: dict[str, Any] = {}
        self.digests: dict[RunFolder, str] = {}

    def dump(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        make_pickler(buffer, self.reduce_run).dump(value)
        return buffer.getvalue()

    def reduce_run(self, run: RunFolder) -> tuple[Any, ...]:
        """How a run is pickled: as a copy with the same name in messages and results."""
        home = run.run if isinstance(run, CheckpointRunFolder) else run
        if run not in self.digests:
            paths = run_files(home, checkpoint=run.path if run != home else None)
            self.digests[run] = fingerprint({name: sha256(path) for name, path in paths.items()})
            files = {name: path.read_bytes() for name, path in paths.items()}
            self.copies[self.digests[run]] = import_ray().put(files)
        return open_copy, (type(run), self.digests[run], run.path.relative_to(home.path).as_posix(), str(run))


def make_pickler(buffer: io.BytesIO, reduce_run: Callable[[RunFolder], tuple[Any, ...]]) -> Any:
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, value: Any) -> Any:
            return reduce_run(value) if isinstance(value, RunFolder) else super().reducer_override(value)

    return Pickler(buffer)


def run_files(run: RunFolder, *, checkpoint: Path | None) -> dict[str, Path]:
    """The files of a run that trials read: those in the folder itself, and of its checkpoints the given one."""
    paths = [*run.path.iterdir(), *(checkpoint.iterdir() if checkpoint else [])]
    return {path.relative_to(run.path).as_posix(): path for path in sorted(paths) if path.is_file()}


def open_copy(kind: type[RunFolder], digest: str, path: str, name: str) -> RunFolder:
    return replace(kind(copy_of_run(digest) / path), name=name)


def copy_of_run(digest: str) -> Path:
    return mark_used(cache_folder() / "ray" / digest[:32])


def pack(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpack(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
