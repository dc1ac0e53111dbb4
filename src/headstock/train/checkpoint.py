"""Checkpoint folders: tensors, state and a manifest of sizes and hashes. One that does not match is ignored."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from headstock.io import atomic_folder, checksum, checksum_mismatch, remove_folder, remove_stale, write_json
from headstock.model.model import Model
from headstock.train.optimizers import EMA
from headstock.train.tensors import read_tensors, write_tensors

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PARTS = ("model", "optimizer", "average")  # of a checkpoint, each a safetensors file


@dataclass
class Checkpoint:
    """Everything that the next step depends on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    average: dict[str, Tensor]  # the exponential moving average of the weights
    state: dict[str, Any]


def capture(model: Model, optimizers: list[Optimizer], ema: EMA | None, state: dict[str, Any]) -> Checkpoint:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[id(parameter)]}/{key}": value
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    state = state | {"average_steps": 0 if ema is None else ema.steps}
    return Checkpoint(model.tensors(), moments, {} if ema is None else ema.tensors, state)


def restore(checkpoint: Checkpoint, model: Model, optimizers: list[Optimizer], ema: EMA | None) -> None:
    model.load_tensors(checkpoint.model, source="the checkpoint")
    states: dict[str, dict[str, Tensor]] = {}
    for path, value in checkpoint.optimizer.items():
        name, _, key = path.rpartition("/")
        states.setdefault(name, {})[key] = value
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            if name in states and any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in states[name].items()}
    if ema is not None:
        ema.steps = checkpoint.state["average_steps"]
        for name, tensor in checkpoint.average.items():
            ema.tensors[name].copy_(tensor)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-N` atomically; the manifest is the last file."""
    path = folder / f"step-{checkpoint.state['step']}"
    with atomic_folder(path) as inside:
        for part in PARTS:
            if tensors := getattr(checkpoint, part):
                write_tensors(inside / f"{part}.safetensors", tensors)
        write_json(inside / "progress.json", checkpoint.state)
        write_json(inside / MANIFEST, {file.name: checksum(file) for file in sorted(inside.iterdir())})
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    files = {part: path / f"{part}.safetensors" for part in PARTS}
    tensors = {part: read_tensors(file) if file.is_file() else {} for part, file in files.items()}
    return Checkpoint(**tensors, state=json.loads((path / "progress.json").read_text()))


def find_damage(path: Path) -> str | None:
    """How a checkpoint differs from its manifest; None if it does not."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return next(
            filter(None, (checksum_mismatch(path / name, recorded) for name, recorded in manifest.items())), None
        )
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"


def newest_first(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_valid(folder: Path) -> Path | None:
    """The newest undamaged checkpoint; damaged ones are logged."""
    for path in newest_first(folder):
        damage = find_damage(path)
        if damage is None:
            return path
        logger.warning(f"{path} is damaged ({damage}): using the previous checkpoint")
    return None


def prune(folder: Path, *, written: int, keep: int, best: int | None) -> None:
    """Remove checkpoints older than the one just `written`, except the newest `keep` undamaged ones and the best.

    The one just written counts as the first of them. Checkpoints of later steps are damaged ones that a resume
    skipped; the run replaces them when it reaches their steps.
    """
    remove_stale(folder)
    undamaged = 1
    for path in newest_first(folder):
        if step_of(path) >= written:
            continue
        if undamaged < keep and find_damage(path) is None:
            undamaged += 1
        elif step_of(path) != best:
            remove_folder(path)
