"""Keeps the state of a training run: on disk, to resume from, or in memory for runs without a folder."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from headstock.errors import WorkError
from headstock.model.model import Model
from headstock.train.checkpoint import (
    capture,
    find_damage,
    newest_valid,
    prune,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from headstock.train.distributed import DistributedContext
from headstock.train.optimizers import EMA
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from headstock.train.state import TrainState

logger = logging.getLogger(__name__)


class Checkpointer(Protocol):
    def resume(self, model: Model, optimizers: list[Optimizer], ema: EMA | None) -> TrainState:
        """Restore the newest checkpoint; the initial state if there is none."""
        ...

    def save(self, model: Model, optimizers: list[Optimizer], ema: EMA | None, state: TrainState) -> None: ...

    def newest(self) -> Path | None:
        """The newest valid checkpoint on disk."""
        ...

    def resume_hint(self, step: int) -> str:
        """How to resume an interrupted run, for its last message."""
        ...

    def finish(self, model: Model, ema: EMA | None, state: TrainState) -> None:
        """Load the final weights into the model: the best, the averaged or the last ones; save them with the run."""
        ...


class DiskCheckpointer:
    """Writes checkpoints to the run folder and resumes from the newest valid one."""

    def __init__(self, run: RunFolder, settings: TrainSettings, distributed: DistributedContext):
        self.run, self.settings, self.distributed = run, settings, distributed

    def newest(self) -> Path | None:
        return newest_valid(self.run.checkpoints)

    def resume_hint(self, step: int) -> str:
        return f", saved in {self.run.checkpoints / f'step-{step}'}; continue with --resume"

    def resume(self, model: Model, optimizers: list[Optimizer], ema: EMA | None) -> TrainState:
        state, path = TrainState(), self.newest()
        if path is not None:
            checkpoint = read_checkpoint(path)
            restore(checkpoint, model, optimizers, ema)
            logger.info(f"resuming from {path}")
            log_changed_environment(checkpoint.state.get("environment", {}), environment(self.distributed))
            state = TrainState.from_dict(checkpoint.state)
        if self.distributed.is_main and (damaged := self.run.rewind_metrics(state.step)):
            logger.warning(f"{self.run.metrics}: {damaged} damaged lines were removed")
        return state

    def save(self, model: Model, optimizers: list[Optimizer], ema: EMA | None, state: TrainState) -> None:
        if self.distributed.is_main:
            folder, values = self.run.checkpoints, asdict(state) | {"environment": environment(self.distributed)}
            try:
                write_checkpoint(folder, capture(model, optimizers, ema, values))
                prune(folder, written=state.step, keep=self.settings.keep, best=state.best_step)
            except OSError as error:
                newest = self.newest()
                last = f"the last good one is {newest}" if newest else "there is none before it"
                reason = f"{error.filename or folder}: {error.strerror or error}"
                raise WorkError(f"step {state.step}: the checkpoint could not be written ({reason}); {last}") from error
        self.distributed.barrier()

    def finish(self, model: Model, ema: EMA | None, state: TrainState) -> None:
        best = self.run.checkpoints / f"step-{state.best_step}"
        use_best = self.settings.weights == "best" and state.best_step not in (None, state.step) and best.is_dir()
        if use_best and (damage := find_damage(best)):
            logger.warning(f"{best} is damaged ({damage}): keeping the weights of the last step instead of the best")
            state.best_step, use_best = state.step, False
        if use_best:
            checkpoint = read_checkpoint(best)
            model.load_tensors(checkpoint.average or checkpoint.model, source=str(best))
        elif ema is not None:
            model.load_tensors(ema.tensors, source="the averaged weights")
        if self.distributed.is_main:
            self.run.save_weights(model.tensors())
        self.distributed.barrier()


class MemoryCheckpointer:
    """Keeps the best weights in memory, for short runs that are repeated rather than resumed."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.best: dict[str, Tensor] | None = None

    def newest(self) -> None:
        return None

    def resume_hint(self, step: int) -> str:
        return ""

    def resume(self, model: Model, optimizers: list[Optimizer], ema: EMA | None) -> TrainState:
        return TrainState()

    def save(self, model: Model, optimizers: list[Optimizer], ema: EMA | None, state: TrainState) -> None:
        if state.best_step == state.step:
            tensors = model.tensors() if ema is None else ema.tensors
            self.best = {name: tensor.clone() for name, tensor in tensors.items()}

    def finish(self, model: Model, ema: EMA | None, state: TrainState) -> None:
        if self.settings.weights == "best" and self.best is not None:
            model.load_tensors(self.best, source="the best weights")
        elif ema is not None:
            model.load_tensors(ema.tensors, source="the averaged weights")


def environment(distributed: DistributedContext) -> dict[str, Any]:
    """What affects the last bits of a result beside settings and seed, through the order of summation."""
    device = distributed.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "threads": torch.get_num_threads(),
        "processes": distributed.size,
        "device": name,
        "torch": torch.__version__,
    }


def log_changed_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log why a resumed run may not be bit-identical. Checkpoints of earlier versions lack some entries."""
    changes = [f"{name} {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]]
    if changes:
        logger.info(f"results may differ from an uninterrupted run in their last digits: {', '.join(changes)}")
