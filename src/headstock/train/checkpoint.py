"""The state of a training run, and its checkpoints: on disk to resume from, or in memory for runs without a folder."""

import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from headstock.config import read_settings
from headstock.errors import UserError, WorkError
from headstock.io import remove_folder, remove_stale
from headstock.model.model import Model
from headstock.train.checkpoint_files import (
    PARTS,
    PROGRESS,
    copy_to_host,
    load_checkpoint,
    read_checkpoint_shapes,
    read_part,
    tensors_of,
    write_checkpoint,
    write_sharded_checkpoint,
)
from headstock.train.distributed import DistributedContext, timeout
from headstock.train.mirror import checkpoint_saved
from headstock.train.optimizers import EMA
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from headstock.train.sharding import full_tensors, is_dtensor, shard_tensors
from headstock.train.tensors import find_damage

logger = logging.getLogger(__name__)

FAST_SAVE, MAX_SAVE_SHARE = 1.0, 0.1  # seconds; of a run's time

# fields of the state as checkpoints of earlier versions name them
FORMER_NAMES = {
    "aside": "overhead_seconds",
    "best_merit": "best_score",
    "worse": "validations_since_best",
    "valid_pace": "seconds_per_valid_example",
    "at_once": "micro_batch",
}


@dataclass
class TrainState:
    """The progress of a run, which every checkpoint contains."""

    step: int = 0
    tokens: int = 0  # without padding
    seconds: float = 0.0
    overhead_seconds: float = 0.0  # part of `seconds` spent on validation and checkpoints
    loss: float = math.nan  # mean over the last log window
    best_score: float = math.inf  # the task's selection score; lower is better
    best_step: int | None = None
    validations_since_best: int = 0
    train: dict[str, float] = field(default_factory=dict)  # metrics of the training batches since the last validation
    valid: dict[str, float] = field(default_factory=dict)
    window: dict[str, Any] = field(default_factory=dict)  # running sums towards the next log line and validation
    valid_tokens: int | None = None  # read by each validation, once decided
    valid_examples: int = 0  # read by the first validation
    seconds_per_valid_example: float | None = None  # of the first validation
    spikes: int = 0  # steps whose loss or gradient norm was far above those before
    micro_batch: int | None = None  # examples per micro-batch and process in the last step; None: all
    validation_due: bool = False  # a signal stopped the validation after the last step

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainState":
        """Read a checkpoint's state, also one of an earlier version; unknown keys are ignored."""
        names = {part.name for part in fields(cls)}
        renamed = {FORMER_NAMES.get(key, key): value for key, value in values.items()}
        state = cls(**{key: value for key, value in renamed.items() if key in names})
        for name, default in vars(cls()).items():
            value, numbers = getattr(state, name), int if type(default) is int else int | float
            expected: Any = numbers if default is None or isinstance(default, int | float) else type(default)
            if not isinstance(value, expected) and (value is not None or default is not None):
                raise UserError(f"the checkpoint's {name} is {value!r:.60}, expected {type(default).__name__}")
        return state


@dataclass
class Checkpoint:
    """Everything that the next step depends on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    average: dict[str, Tensor]  # the exponential moving average of the weights
    state: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """The whole tensors, also of a sharded checkpoint."""
        tensors = {part: read_part(path, part) for part in PARTS}
        return cls(**tensors, state=read_settings(path / PROGRESS))

    def tensors(self) -> dict[str, Tensor]:
        return {f"{part}/{name}": tensor for part in PARTS for name, tensor in getattr(self, part).items()}

    def write(self, path: Path) -> None:
        """Write a folder atomically; the manifest is the last file."""
        write_checkpoint(path, self.tensors(), self.state)


@dataclass
class Checkpointer:
    """Keeps the best weights in memory, for short runs that are repeated rather than resumed."""

    model: Model
    optimizers: list[Optimizer]
    ema: EMA | None
    settings: TrainSettings
    best: dict[str, Tensor] | None = None

    def newest(self) -> Path | None:
        """The newest valid checkpoint on disk."""
        return None

    def resume(self) -> TrainState:
        """Restore the newest checkpoint; the initial state if there is none."""
        return TrainState()

    def resume_hint(self, step: int) -> str:
        """How to resume an interrupted run, for its last message."""
        return ""

    def is_affordable(self) -> bool:
        """Whether saving now leaves training most of the time."""
        return True

    def save(self, state: TrainState) -> None:
        if state.best_step == state.step and self.settings.weights == "best":
            tensors = self.model.tensors() if self.ema is None else self.ema.tensors
            self.best = {name: tensor.clone() for name, tensor in tensors.items()}

    def check(self) -> None:
        """Raise the error of a save in the background that has failed."""

    def wait(self) -> None:
        """Wait for a save in the background, and raise its error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for a save in the background, also when the run ends with an error."""
        try:
            self.wait()
        except WorkError as problem:
            if error is None:
                raise
            logger.warning(str(problem))

    def finish(self, state: TrainState) -> None:
        """Load the final weights into the model: the best, the averaged or the last ones."""
        if self.settings.weights == "best" and self.best is not None:
            self.model.load_tensors(shard_tensors(self.best, self.model.tensors()), source="the best weights")
        elif self.ema is not None:
            self.model.load_tensors(self.ema.tensors, source="the averaged weights")


@dataclass
class DiskCheckpointer(Checkpointer):
    """Writes checkpoints to the run folder and resumes from the newest valid one.

    With `async_save`, training continues while a thread writes a copy of the state; at most one save is in progress.
    """

    run: RunFolder = field(kw_only=True)
    distributed: DistributedContext = field(kw_only=True)
    group: Any = None  # of the processes that write shards; None: rank 0 writes whole tensors
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    saving: Future[None] | None = None  # the save in progress
    buffers: dict[str, Tensor] = field(default_factory=dict)  # for the copies of asynchronous saves
    save_seconds: float = 0.0  # that the last save took
    saved_at: float = 0.0  # when it ended

    def newest(self) -> Path | None:
        return newest_valid(self.run.checkpoints)

    def resume_hint(self, step: int) -> str:
        return f", saved in {self.run.checkpoints / f'step-{step}'}; continue with --resume"

    def resume(self) -> TrainState:
        state, path = TrainState(), self.newest()
        if path is not None:
            values = read_settings(path / PROGRESS)
            self.restore(path, values)
            logger.info(f"resuming from {path}")
            log_changed_environment(values.get("environment", {}), environment(self.distributed))
            state = TrainState.from_dict(values)
        if self.distributed.is_main and (damaged := self.run.rewind_metrics(state.step)):
            logger.warning(f"{self.run.metrics}: {damaged} damaged lines were removed")
        return state

    def is_affordable(self) -> bool:
        """After a slow save, wait so long that saves take at most a tenth of the time.

        Several processes must save together, so they do not decide it by their clocks.
        """
        is_fast = self.save_seconds < FAST_SAVE or self.distributed.size > 1
        return is_fast or time.monotonic() - self.saved_at >= self.save_seconds / MAX_SAVE_SHARE

    def save(self, state: TrainState) -> None:
        self.wait()
        checkpoint = self.capture(state)
        if self.group is None and any(map(is_dtensor, checkpoint.model.values())):
            # of its own: a thread may use it at the same time as training uses the other, which may be on GPUs
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout()))
        write = partial(self.write, values=checkpoint.state, step=state.step, best=state.best_step)
        if not self.settings.async_save:
            write(checkpoint.tensors())
            self.distributed.barrier()
        elif self.group is not None or self.distributed.is_main:
            self.saving = self.thread.submit(write, copy_to_host(checkpoint.tensors(), self.buffers))

    def check(self) -> None:
        if self.saving is not None and self.saving.done():
            self.wait()

    def wait(self) -> None:
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def write(self, tensors: Mapping[str, Tensor], values: dict[str, Any], step: int, best: int | None) -> None:
        folder, start = self.run.checkpoints, time.monotonic()
        try:
            if self.group is not None:
                write_sharded_checkpoint(folder / f"step-{step}", tensors, values, self.group)
            elif self.distributed.is_main:
                write_checkpoint(folder / f"step-{step}", tensors, values)
            if self.distributed.is_main:
                keep, every = self.settings.keep, self.settings.keep_every
                prune(folder, written=step, keep=keep, best=best, keep_every=every)
                checkpoint_saved(self.run)
            self.saved_at = time.monotonic()
            self.save_seconds = self.saved_at - start
        except OSError as error:
            newest = self.newest()
            last = f"the last good one is {newest}" if newest else "there is none before it"
            reason = f"{error.filename or folder}: {error.strerror or error}"
            raise WorkError(f"step {step}: the checkpoint could not be written ({reason}); {last}") from error

    def finish(self, state: TrainState) -> None:
        best = self.run.checkpoints / f"step-{state.best_step}"
        if self.settings.weights == "best" and state.best_step not in (None, state.step) and best.is_dir():
            if damage := find_damage(best):
                logger.warning(f"{best} is damaged ({damage}): keeping the weights of the last step instead")
                state.best_step = state.step
            else:
                self.best = read_part(best, "average") or read_part(best, "model")
        super().finish(state)
        weights = full_tensors(self.model.tensors())
        if self.distributed.is_main:
            self.run.save_weights(weights)
        self.distributed.barrier()

    def capture(self, state: TrainState) -> Checkpoint:
        """The state of now, in the tensors that training goes on to change."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        moments = {
            f"{names[id(parameter)]}/{key}": value
            for optimizer in self.optimizers
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
        }
        steps = 0 if self.ema is None else self.ema.steps
        values = asdict(state) | {"environment": environment(self.distributed), "average_steps": steps}
        return Checkpoint(self.model.tensors(), moments, {} if self.ema is None else self.ema.tensors, values)

    def restore(self, path: Path, values: Mapping[str, Any]) -> None:
        shapes = read_checkpoint_shapes(path)
        self.model.check_shapes(tensors_of("model", shapes), source=str(path))
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        trained = {names[id(p)]: (p, o) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        for moment, shape in tensors_of("optimizer", shapes).items():
            name, _, key = moment.rpartition("/")
            if name in trained:
                parameter, optimizer = trained[name]
                # all but the step count have the shape of the parameter
                value = torch.zeros_like(parameter) if shape else torch.zeros((), device=parameter.device)
                optimizer.state[parameter][key] = value
        if self.ema is not None:
            self.ema.steps = values["average_steps"]
        load_checkpoint(path, self.capture(TrainState()).tensors())


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


def prune(folder: Path, *, written: int, keep: int, best: int | None, keep_every: int | None = None) -> None:
    """Remove checkpoints older than the one just `written`, except the newest `keep` undamaged ones and the best.

    Those of steps that are multiples of `keep_every` stay, too.
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
        elif step_of(path) != best and (keep_every is None or step_of(path) % keep_every):
            remove_folder(path)


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
