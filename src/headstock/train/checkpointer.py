"""Where a training run keeps what it must not lose: in its folder's checkpoints, or for a short run in memory."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from headstock.errors import WorkError
from headstock.model.model import Model
from headstock.train import checkpoint as checkpoints
from headstock.train.distributed import DistributedContext
from headstock.train.optimizers import EMA
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from headstock.train.state import TrainState

Say = Callable[[str], None]


def environment(distributed: DistributedContext) -> dict[str, Any]:
    """What decides, beside settings and seed, about the last bits of a result: sums are made in another order."""
    device = (
        str(distributed.device) if distributed.device.type != "cuda" else torch.cuda.get_device_name(distributed.device)
    )
    threads = torch.get_num_threads()
    return {"threads": threads, "processes": distributed.size, "device": device, "torch": torch.__version__}


def changed_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for the user where a resumed run cannot be expected to end in the same bits; checkpoints may lack this."""
    changed = [f"{name} {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]]
    if not changed:
        return []
    return [f"the results may differ in their last digits from those of an uninterrupted run: {', '.join(changed)}"]


class Checkpointer(Protocol):
    def resume(self, model: Model, optimizers: list[Optimizer], average: EMA | None, say: Say) -> TrainState:
        """Go on from what was kept, or begin."""
        ...

    def keep(self, model: Model, optimizers: list[Optimizer], average: EMA | None, progress: TrainState) -> None: ...

    def newest(self) -> Path | None:
        """The newest whole checkpoint, if there is one."""
        ...

    def where(self, step: int) -> str:
        """Words for a user whose run was stopped."""
        ...

    def finish(
        self, model: Model, average: EMA | None, progress: TrainState, settings: TrainSettings, say: Say
    ) -> None:
        """Put the weights that count into the model, and where they are kept."""
        ...


class DiskCheckpointer:
    """Checkpoints in the run's folder: whatever happens, the run goes on from the newest."""

    def __init__(self, run: RunFolder, settings: TrainSettings, distributed: DistributedContext):
        self.run, self.settings, self.distributed = run, settings, distributed

    def newest(self) -> Path | None:
        return checkpoints.newest_whole(self.run.checkpoints, say=lambda line: None)

    def where(self, step: int) -> str:
        return f", saved in {self.run.checkpoints / f'step-{step}'}; go on with --resume"

    def resume(self, model: Model, optimizers: list[Optimizer], average: EMA | None, say: Say) -> TrainState:
        progress = TrainState()
        path = checkpoints.newest_whole(self.run.checkpoints, say)
        if path is not None:
            found = checkpoints.load(path)
            checkpoints.restore(found, model, optimizers, average)
            say(f"going on from {path}")
            for line in changed_environment(found.progress.get("environment", {}), environment(self.distributed)):
                say(line)
            known = {part.name for part in fields(TrainState)}
            progress = TrainState(**{key: value for key, value in found.progress.items() if key in known})
        if self.distributed.is_main and (damaged := self.run.rewind_metrics(progress.step)):
            say(f"{self.run.metrics}: {damaged} damaged lines are left out")
        return progress

    def keep(self, model: Model, optimizers: list[Optimizer], average: EMA | None, progress: TrainState) -> None:
        if self.distributed.is_main:
            try:
                state = asdict(progress) | {"environment": environment(self.distributed)}
                checkpoints.save(self.run.checkpoints, checkpoints.capture(model, optimizers, average, state))
                written, keep = progress.step, self.settings.keep
                checkpoints.prune(self.run.checkpoints, written=written, keep=keep, best=progress.best_step)
            except OSError as wrong:
                good, where = self.newest(), wrong.filename or self.run.checkpoints
                last = f"the last whole one is {good}" if good else "there is none before it"
                why = f"{where}: {wrong.strerror or wrong}"
                raise WorkError(f"step {progress.step}: the checkpoint could not be written ({why}); {last}") from wrong
        self.distributed.barrier()

    def finish(
        self, model: Model, average: EMA | None, progress: TrainState, settings: TrainSettings, say: Say
    ) -> None:
        best = self.run.checkpoints / f"step-{progress.best_step}"
        use_best = settings.weights == "best" and progress.best_step not in (None, progress.step) and best.is_dir()
        if use_best and (wrong := checkpoints.damage(best)):
            say(f"{best} is damaged ({wrong}): the weights of the last step are kept instead of the best ones")
            progress.best_step, use_best = progress.step, False
        if use_best:
            found = checkpoints.load(best)
            model.load_tensors(found.average or found.model, source=str(best))
        elif average is not None:
            model.load_tensors(average.tensors, source="the averaged weights")
        if self.distributed.is_main:
            self.run.save_weights(model.tensors())
        self.distributed.barrier()


class MemoryCheckpointer:
    """The best weights so far and nothing else: for runs so short that they are sooner repeated than resumed."""

    def __init__(self) -> None:
        self.best: dict[str, Tensor] | None = None

    def newest(self) -> None:
        return None

    def where(self, step: int) -> str:
        return ""

    def resume(self, model: Model, optimizers: list[Optimizer], average: EMA | None, say: Say) -> TrainState:
        return TrainState()

    def keep(self, model: Model, optimizers: list[Optimizer], average: EMA | None, progress: TrainState) -> None:
        if progress.best_step == progress.step:
            tensors = model.tensors() if average is None else average.tensors
            self.best = {name: tensor.clone() for name, tensor in tensors.items()}

    def finish(
        self, model: Model, average: EMA | None, progress: TrainState, settings: TrainSettings, say: Say
    ) -> None:
        if settings.weights == "best" and self.best is not None:
            model.load_tensors(self.best, source="the best weights")
        elif average is not None:
            model.load_tensors(average.tensors, source="the averaged weights")
