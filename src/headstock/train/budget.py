"""How long a run is (steps, epochs or minutes), and what is due after a step."""

import math
from dataclasses import dataclass

from headstock.train.settings import TrainSettings
from headstock.train.state import TrainState


@dataclass(frozen=True)
class Budget:
    """A run's length in steps or in seconds. In seconds, the learning-rate schedule follows the clock."""

    steps: int | None
    seconds: float | None

    @staticmethod
    def of(settings: TrainSettings, steps_per_epoch: int) -> "Budget":
        if settings.minutes is not None:
            return Budget(None, settings.minutes * 60)
        if settings.steps is not None:
            return Budget(settings.steps, None)
        return Budget(max(1, math.ceil((settings.epochs or 1.0) * steps_per_epoch)), None)

    def fraction(self, step: int, seconds: float) -> float:
        """The completed fraction of the run, from 0 to 1."""
        done = step / self.steps if self.steps is not None else seconds / (self.seconds or 1.0)
        return min(1.0, done)

    def midpoint(self, step: int, seconds: float) -> float:
        """The fraction at the middle of a step, which sets its learning rate: so no step has a rate of zero."""
        return self.fraction(step, seconds) if self.steps is None else (step + 0.5) / self.steps

    def expected_steps(self, step: int, seconds: float) -> int:
        """The run's number of steps, estimated from the speed so far where the budget is in minutes."""
        if self.steps is not None:
            return self.steps
        return max(step, round(step / max(1e-9, self.fraction(step, seconds))))

    def expected_seconds(self, step: int, seconds: float) -> float:
        if self.seconds is not None:
            return self.seconds
        return seconds / max(1e-9, self.fraction(step, seconds))


class Milestones:
    """Decides after each step what is due.

    The completed fraction is computed once per step, so that nothing is skipped between two readings of the clock.
    """

    def __init__(self, budget: Budget, state: TrainState):
        self.budget, self.step = budget, state.step
        self.before = self.done = budget.fraction(state.step, state.seconds)

    def advance(self, state: TrainState) -> None:
        self.step, self.before = state.step, self.done
        self.done = self.budget.fraction(state.step, state.seconds)

    def due(self, every: int | None, times: int) -> bool:
        """True every `every` steps, or `times` times in the run if `every` is None; always true at the end."""
        if every is not None:
            return self.step % every == 0 or self.done >= 1.0
        return math.floor(self.done * times) > math.floor(self.before * times)
