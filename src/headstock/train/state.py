"""The state of a training run, which every checkpoint contains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# fields as checkpoints of earlier versions name them
FORMER_NAMES = {
    "aside": "overhead_seconds",
    "best_merit": "best_score",
    "worse": "validations_since_best",
    "valid_pace": "seconds_per_valid_example",
    "at_once": "micro_batch",
}


@dataclass
class TrainState:
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainState":
        """Read a checkpoint's state, also one of an earlier version; unknown keys are ignored."""
        names = {part.name for part in fields(cls)}
        renamed = {FORMER_NAMES.get(key, key): value for key, value in values.items()}
        return cls(**{key: value for key, value in renamed.items() if key in names})
