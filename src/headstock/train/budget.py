"""How long a run is, in steps, passes over the data, or minutes, and what is due on the way."""

import math
from dataclasses import dataclass

from headstock.train.settings import TrainSettings
from headstock.train.state import TrainState

VALIDATIONS = 10  # in a run, unless set otherwise
VALID_SHARE = 0.05  # of a run's time goes into validations on the way
FINAL_SHARE = 0.1  # of the minutes of a run, at most, goes into its last measurement
MOST_VALID_TOKENS = 200_000  # in one validation
FEWEST_VALID_TOKENS = 5_000  # where minutes are not counted: fewer say too little
FEWEST_IN_MINUTES = 1_000


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


def valid_tokens_of(tokens: float, times: float = VALIDATIONS, fewest: int = FEWEST_VALID_TOKENS) -> int:
    """Held-out tokens for each of so many validations in a run that trains on `tokens`.

    A token costs a third of what it costs in training. Token counts, not times, keep a resumed run the same.
    """
    wanted = round(3 * VALID_SHARE * tokens / max(1.0, times), -3)
    return int(min(MOST_VALID_TOKENS, max(fewest, wanted)))


@dataclass(frozen=True)
class ValidationBudget:
    """How much a run validates: what its settings say, or about 5% of its time.

    A run in steps or epochs decides by counting tokens. A run in minutes decides once, by its speed up to the first
    validation, and keeps the decision in its progress: all validations read the same examples, so they can be compared.
    """

    settings: TrainSettings
    budget: Budget
    length: int  # tokens in a row

    def examples(self, progress: TrainState, *, on_cpu: bool) -> int:
        """Examples that a validation reads at most. Other devices do not wait for a step, so its time is unknown."""
        tokens = self.settings.valid_tokens or progress.valid_tokens
        if tokens is None:
            steps = self.budget.expected_steps(progress.step, progress.seconds - progress.aside)
            times = steps / self.settings.validate_every if self.settings.validate_every else VALIDATIONS
            trained = steps * (self.settings.batch_tokens or self.settings.batch * self.length)
            if self.budget.steps is not None:
                tokens = valid_tokens_of(trained, times)
            else:
                tokens = valid_tokens_of(trained, times, FEWEST_IN_MINUTES) if on_cpu else MOST_VALID_TOKENS
            progress.valid_tokens = tokens
        return max(1, tokens // self.length)

    def times(self, progress: TrainState) -> int:
        """Validations in the whole run: fewer where the first one took longer than its share of the minutes."""
        if self.budget.seconds is None or progress.valid_pace is None or self.settings.valid_tokens:
            return VALIDATIONS
        took = progress.valid_pace * max(1, progress.valid_examples)
        return max(1, min(VALIDATIONS, math.floor(VALID_SHARE * self.budget.seconds / max(1e-9, took))))

    def final_examples(self, progress: TrainState) -> int | None:
        """Examples of the last measurement, which is reported: all (None), or as many as a run in minutes allows."""
        if self.budget.seconds is None or not progress.valid_pace:
            return None
        return max(progress.valid_examples, int(FINAL_SHARE * self.budget.seconds / progress.valid_pace))


def due(every: int | None, parts: int, *, step: int, before: float, after: float) -> bool:
    """Whether it is time for something: every so many steps, or so many times in the run; always at the run's end."""
    if every is not None:
        return step % every == 0 or after >= 1.0
    return math.floor(after * parts) > math.floor(before * parts)
