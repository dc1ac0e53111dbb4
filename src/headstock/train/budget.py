"""How long a run is, in steps, passes over the data, or minutes, and what is due on the way."""

import math
from dataclasses import dataclass

from headstock.train.settings import TrainSettings


@dataclass(frozen=True)
class Budget:
    """The run's length. In minutes the schedule follows the clock, so it ends when the time does."""

    steps: int | None
    seconds: float | None

    @staticmethod
    def of(settings: TrainSettings, steps_per_epoch: int) -> "Budget":
        if settings.minutes is not None:
            return Budget(None, settings.minutes * 60)
        if settings.steps is not None:
            return Budget(settings.steps, None)
        return Budget(max(1, math.ceil((settings.epochs or 1.0) * steps_per_epoch)), None)

    def share(self, step: int, seconds: float) -> float:
        """The share of the run that lies behind, from 0 to 1."""
        done = step / self.steps if self.steps is not None else seconds / (self.seconds or 1.0)
        return min(1.0, done)

    def middle(self, step: int, seconds: float) -> float:
        """The share at the middle of a step, where its learning rate is read: so neither end is wasted on zero."""
        return self.share(step, seconds) if self.steps is None else (step + 0.5) / self.steps

    def expected_steps(self, step: int, seconds: float) -> int:
        """All steps of the run: known, or guessed from the speed so far."""
        if self.steps is not None:
            return self.steps
        return max(step, round(step / max(1e-9, self.share(step, seconds))))

    def expected_seconds(self, step: int, seconds: float) -> float:
        if self.seconds is not None:
            return self.seconds
        return seconds / max(1e-9, self.share(step, seconds))


def due(every: int | None, parts: int, *, step: int, before: float, after: float) -> bool:
    """Whether it is time for something: every so many steps, or so many times in the run; always at the run's end."""
    if every is not None:
        return step % every == 0 or after >= 1.0
    return math.floor(after * parts) > math.floor(before * parts)
