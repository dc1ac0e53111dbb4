"""Checkpoints that are whole or ignored: a manifest of sizes and hashes, checked before anything is believed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from headstock.io import atomic_folder, checksum, checksum_mismatch, remove_folder, remove_stale, write_json
from headstock.model.model import Model
from headstock.train.optimizers import EMA
from headstock.train.tensors import read_tensors, write_tensors

MANIFEST = "manifest.json"


@dataclass
class Checkpoint:
    """Everything that the next step depends on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    average: dict[str, Tensor]
    progress: dict[str, Any]


def capture(model: Model, optimizers: list[Optimizer], average: EMA | None, progress: dict[str, Any]) -> Checkpoint:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[id(parameter)]}/{key}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    progress = progress | {"average_steps": 0 if average is None else average.steps}
    return Checkpoint(model.tensors(), moments, {} if average is None else average.tensors, progress)


def restore(checkpoint: Checkpoint, model: Model, optimizers: list[Optimizer], average: EMA | None) -> None:
    model.load_tensors(checkpoint.model, source="the checkpoint")
    states: dict[str, dict[str, Tensor]] = {}
    for path, value in checkpoint.optimizer.items():
        name, _, key = path.rpartition("/")
        states.setdefault(name, {})[key] = value
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            if name in states and any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in states[name].items()}
    if average is not None:
        average.steps = checkpoint.progress["average_steps"]
        for name, tensor in checkpoint.average.items():
            average.tensors[name].copy_(tensor)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write beside, flush, rename; the manifest is the last file to be written."""
    path = folder / f"step-{checkpoint.progress['step']}"
    with atomic_folder(path) as inside:
        for part in ("model", "optimizer", "average"):
            tensors = getattr(checkpoint, part)
            if tensors:
                write_tensors(inside / f"{part}.safetensors", tensors)
        write_json(inside / "progress.json", checkpoint.progress)
        write_json(inside / MANIFEST, {file.name: checksum(file) for file in sorted(inside.iterdir())})
    return path


def load(path: Path) -> Checkpoint:
    parts = {part: path / f"{part}.safetensors" for part in ("model", "optimizer", "average")}
    tensors = {part: read_tensors(file) if file.is_file() else {} for part, file in parts.items()}
    return Checkpoint(**tensors, progress=json.loads((path / "progress.json").read_text()))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return next(
            filter(None, (checksum_mismatch(path / name, recorded) for name, recorded in manifest.items())), None
        )
    except (OSError, ValueError, AttributeError, RecursionError) as wrong:
        return f"{MANIFEST} cannot be read ({wrong})"


def by_age(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that can be believed; damaged ones before it are named."""
    for path in by_age(folder):
        wrong = damage(path)
        if wrong is None:
            return path
        say(f"{path} is damaged ({wrong}): going back to the one before")
    return None


def prune(folder: Path, *, written: int, keep: int, best: int | None) -> None:
    """Remove checkpoints older than the one just `written`, except the newest `keep` undamaged ones and the best.

    The one just written counts as the first of them. Later steps come from before a resume, which passed them over
    because they are damaged; the run replaces each when it reaches that step.
    """
    remove_stale(folder)
    undamaged = 1
    for path in by_age(folder):
        if step_of(path) >= written:
            continue
        if undamaged < keep and damage(path) is None:
            undamaged += 1
        elif step_of(path) != best:
            remove_folder(path)
