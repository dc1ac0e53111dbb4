"""Checkpoints that are whole or ignored: a manifest of sizes and hashes, checked before anything is believed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from headstock.files import PARTIAL, sha256, whole_folder, write_json
from headstock.model.model import Model
from headstock.train.optim import Average
from headstock.train.tensors import read_tensors, write_tensors

MANIFEST = "manifest.json"


@dataclass
class Checkpoint:
    """Everything that the next step depends on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    average: dict[str, Tensor]
    progress: dict[str, Any]


def capture(model: Model, optimizers: list[Optimizer], average: Average | None, progress: dict[str, Any]) -> Checkpoint:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[id(parameter)]}/{key}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    progress = progress | {"average_steps": 0 if average is None else average.steps}
    return Checkpoint(model.tensors(), moments, {} if average is None else average.tensors, progress)


def restore(checkpoint: Checkpoint, model: Model, optimizers: list[Optimizer], average: Average | None) -> None:
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
    with whole_folder(path) as inside:
        for part in ("model", "optimizer", "average"):
            tensors = getattr(checkpoint, part)
            if tensors:
                write_tensors(inside / f"{part}.safetensors", tensors)
        write_json(inside / "progress.json", checkpoint.progress)
        files = {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in sorted(inside.iterdir())}
        write_json(inside / MANIFEST, files)
    return path


def load(path: Path) -> Checkpoint:
    parts = {part: path / f"{part}.safetensors" for part in ("model", "optimizer", "average")}
    tensors = {part: read_tensors(file) if file.is_file() else {} for part, file in parts.items()}
    return Checkpoint(**tensors, progress=json.loads((path / "progress.json").read_text()))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, wanted in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != wanted["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, wanted {wanted['bytes']}"
            if sha256(file) != wanted["sha256"]:
                return f"{name} is not what was written (its sha256 differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as wrong:
        return f"{MANIFEST} cannot be read ({wrong})"
    return None


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


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best."""
    for path in by_age(folder)[keep:]:
        if step_of(path) != best:
            leaving = path.with_name(f".{path.name}.0{PARTIAL}")  # a half-removed one must not look like a damaged one
            path.rename(leaving)
            shutil.rmtree(leaving, ignore_errors=True)
