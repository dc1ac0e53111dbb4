"""How long a run is (steps, epochs or minutes), what is due after a step, and how much is validated."""

import math
from dataclasses import dataclass

from headstock.train.checkpoint import TrainState
from headstock.train.settings import TrainSettings

VALIDATIONS = 10  # per run, unless set otherwise
VALID_SHARE = 0.05  # of a run's time
FINAL_SHARE = 0.1  # of a run in minutes, at most, for the final evaluation
MAX_VALID_TOKENS = 200_000  # per validation
MIN_VALID_TOKENS = 5_000  # fewer are too noisy
MIN_VALID_TOKENS_IN_MINUTES = 1_000  # of a run in minutes


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
        """The fraction at the middle of a step, which sets its learning rate: so no step has a rate of zero.

        A run in minutes uses the fraction at the start of the step.
        """
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


def validation_tokens(tokens: float, validations: float = VALIDATIONS, least: int = MIN_VALID_TOKENS) -> int:
    """Tokens of each validation in a run that trains on `tokens`.

    A token costs a third of what it costs in training. Counting tokens rather than time keeps a resumed run the same.
    """
    tokens = round(3 * VALID_SHARE * tokens / max(1.0, validations), -3)
    return int(min(MAX_VALID_TOKENS, max(least, tokens)))


@dataclass(frozen=True)
class ValidationBudget:
    """How much a run validates: what its settings say, or about 5% of its time.

    A run in steps or epochs counts tokens. A run in minutes decides once, by its speed up to the first validation, and
    stores the decision in its state: all validations read the same examples, so that they are comparable.
    """

    settings: TrainSettings
    budget: Budget
    length: int  # tokens per row

    def examples(self, state: TrainState, *, on_cpu: bool) -> int:
        """The maximum number of examples per validation. Only on a CPU is the time per step known by then."""
        tokens = self.settings.valid_tokens or state.valid_tokens
        if tokens is None:
            steps = self.budget.expected_steps(state.step, state.seconds - state.overhead_seconds)
            every = self.settings.validate_every
            validations = steps / every if every else VALIDATIONS
            trained = steps * (self.settings.batch_tokens or self.settings.batch * self.length)
            if self.budget.steps is not None:
                tokens = validation_tokens(trained, validations)
            elif on_cpu:
                tokens = validation_tokens(trained, validations, MIN_VALID_TOKENS_IN_MINUTES)
            else:
                tokens = MAX_VALID_TOKENS
            state.valid_tokens = tokens
        return max(1, tokens // self.length)

    def count(self, state: TrainState) -> int:
        """Validations per run: fewer where the first one took longer than its share of the minutes."""
        if self.budget.seconds is None or state.seconds_per_valid_example is None or self.settings.valid_tokens:
            return VALIDATIONS
        seconds = state.seconds_per_valid_example * max(1, state.valid_examples)
        return max(1, min(VALIDATIONS, math.floor(VALID_SHARE * self.budget.seconds / max(1e-9, seconds))))

    def final_examples(self, state: TrainState) -> int | None:
        """Examples of the final evaluation: all (None), or as many as a run in minutes allows."""
        if self.budget.seconds is None or not state.seconds_per_valid_example:
            return None
        return max(state.valid_examples, int(FINAL_SHARE * self.budget.seconds / state.seconds_per_valid_example))
