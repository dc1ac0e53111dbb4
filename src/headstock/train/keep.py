"""Where a training run keeps what it must not lose: in its folder's checkpoints, or for a short run in memory."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from headstock.errors import WorkError
from headstock.model.model import Model
from headstock.train import checkpoint as checkpoints
from headstock.train.optim import Average
from headstock.train.progress import Progress
from headstock.train.run import Run
from headstock.train.settings import TrainSettings
from headstock.train.world import World

Say = Callable[[str], None]


class Keeper(Protocol):
    def resume(self, model: Model, optimizers: list[Optimizer], average: Average | None, say: Say) -> Progress:
        """Go on from what was kept, or begin."""
        ...

    def keep(self, model: Model, optimizers: list[Optimizer], average: Average | None, progress: Progress) -> None: ...

    def newest(self) -> Path | None:
        """The newest whole checkpoint, if there is one."""
        ...

    def where(self, step: int) -> str:
        """Words for a user whose run was stopped."""
        ...

    def finish(self, model: Model, average: Average | None, progress: Progress, settings: TrainSettings) -> None:
        """Put the weights that count into the model, and where they are kept."""
        ...


class OnDisk:
    """Checkpoints in the run's folder: whatever happens, the run goes on from the newest."""

    def __init__(self, run: Run, settings: TrainSettings, world: World):
        self.run, self.settings, self.world = run, settings, world

    def newest(self) -> Path | None:
        return checkpoints.newest_whole(self.run.checkpoints, say=lambda line: None)

    def where(self, step: int) -> str:
        return f", saved in {self.run.checkpoints / f'step-{step}'}; go on with --resume"

    def resume(self, model: Model, optimizers: list[Optimizer], average: Average | None, say: Say) -> Progress:
        progress = Progress()
        path = checkpoints.newest_whole(self.run.checkpoints, say)
        if path is not None:
            found = checkpoints.load(path)
            checkpoints.restore(found, model, optimizers, average)
            say(f"going on from {path}")
            progress = Progress(**{key: value for key, value in found.progress.items() if key != "average_steps"})
        if self.world.leads:
            self.run.rewind_metrics(progress.step)
        return progress

    def keep(self, model: Model, optimizers: list[Optimizer], average: Average | None, progress: Progress) -> None:
        if self.world.leads:
            try:
                checkpoints.save(
                    self.run.checkpoints, checkpoints.capture(model, optimizers, average, asdict(progress))
                )
                checkpoints.prune(self.run.checkpoints, keep=self.settings.keep, best=progress.best_step)
            except OSError as wrong:
                good = self.newest()
                last = f"the last whole one is {good}" if good else "there is none before it"
                raise WorkError(
                    f"step {progress.step}: the checkpoint could not be written ({wrong}); {last}"
                ) from wrong
        self.world.wait()

    def finish(self, model: Model, average: Average | None, progress: Progress, settings: TrainSettings) -> None:
        best = self.run.checkpoints / f"step-{progress.best_step}"
        if settings.weights == "best" and progress.best_step not in (None, progress.step) and best.is_dir():
            found = checkpoints.load(best)
            model.load_tensors(found.average or found.model, source=str(best))
        elif average is not None:
            model.load_tensors(average.tensors, source="the averaged weights")
        if self.world.leads:
            self.run.save_weights(model.tensors())
        self.world.wait()


class InMemory:
    """The best weights so far and nothing else: for runs so short that they are sooner repeated than resumed."""

    def __init__(self) -> None:
        self.best: dict[str, Tensor] | None = None

    def newest(self) -> None:
        return None

    def where(self, step: int) -> str:
        return ""

    def resume(self, model: Model, optimizers: list[Optimizer], average: Average | None, say: Say) -> Progress:
        return Progress()

    def keep(self, model: Model, optimizers: list[Optimizer], average: Average | None, progress: Progress) -> None:
        if progress.best_step == progress.step:
            tensors = model.tensors() if average is None else average.tensors
            self.best = {name: tensor.clone() for name, tensor in tensors.items()}

    def finish(self, model: Model, average: Average | None, progress: Progress, settings: TrainSettings) -> None:
        if settings.weights == "best" and self.best is not None:
            model.load_tensors(self.best, source="the best weights")
        elif average is not None:
            model.load_tensors(average.tensors, source="the averaged weights")
