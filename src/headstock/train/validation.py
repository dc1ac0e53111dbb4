"""Validation during training: how often, on how many examples, and which step is the best so far."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.budget import Budget
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import evaluate, swapped_weights
from headstock.train.optimizers import EMA
from headstock.train.settings import TrainSettings
from headstock.train.state import TrainState

VALIDATIONS = 10  # per run, unless set otherwise
VALID_SHARE = 0.05  # of a run's time
FINAL_SHARE = 0.1  # of a run in minutes, at most, for the final evaluation
MAX_VALID_TOKENS = 200_000  # per validation
MIN_VALID_TOKENS = 5_000  # fewer are too noisy
MIN_VALID_TOKENS_IN_MINUTES = 1_000  # of a run in minutes


def validation_tokens(tokens: float, times: float = VALIDATIONS, fewest: int = MIN_VALID_TOKENS) -> int:
    """Tokens of each of `times` validations in a run that trains on `tokens`.

    A token costs a third of what it costs in training. Counting tokens rather than time keeps a resumed run the same.
    """
    tokens = round(3 * VALID_SHARE * tokens / max(1.0, times), -3)
    return int(min(MAX_VALID_TOKENS, max(fewest, tokens)))


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
            times = steps / self.settings.validate_every if self.settings.validate_every else VALIDATIONS
            trained = steps * (self.settings.batch_tokens or self.settings.batch * self.length)
            if self.budget.steps is not None:
                tokens = validation_tokens(trained, times)
            else:
                fewest = MIN_VALID_TOKENS_IN_MINUTES
                tokens = validation_tokens(trained, times, fewest) if on_cpu else MAX_VALID_TOKENS
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


@dataclass
class Validator:
    """Evaluates the weights that would be kept, and updates the state's validation metrics and best step."""

    model: Model
    task: Task
    data: Any
    settings: TrainSettings
    budget: ValidationBudget
    distributed: DistributedContext
    ema: EMA | None
    clock: Callable[[], float]

    def __call__(self, state: TrainState) -> None:
        began = self.clock() if state.seconds_per_valid_example is None else 0.0
        most = self.budget.examples(state, on_cpu=self.distributed.device.type == "cpu")
        examples = self.task.examples(self.data, length=self.budget.length)
        with swapped_weights(self.model, None if self.ema is None else self.ema.tensors):
            state.valid = evaluate(
                self.model,
                self.task,
                examples,
                distributed=self.distributed,
                rows=state.micro_batch or self.settings.batch // self.distributed.size,
                most=most,
                size=self.data.bytes,
                unknown=getattr(self.data, "unknown", None),
                dtype=self.settings.dtype,
            )
        score = self.task.selection_score(state.valid)
        state.validations_since_best += 1
        if score < state.best_score:
            state.best_score, state.best_step, state.validations_since_best = score, state.step, 0
        if state.seconds_per_valid_example is None:
            state.valid_examples = min(most, len(examples))
            state.seconds_per_valid_example = (self.clock() - began) / max(1, state.valid_examples)
