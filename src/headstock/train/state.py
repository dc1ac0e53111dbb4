"""How far a training run is."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """How far a run is; a checkpoint carries it."""

    step: int = 0
    tokens: int = 0  # padding not counted
    seconds: float = 0.0
    aside: float = 0.0  # seconds of them that went into validation and checkpoints
    loss: float = math.nan  # mean over the steps since the line before
    best_merit: float = math.inf  # what the task chooses by; less is better
    best_step: int | None = None
    worse: int = 0  # validations since the best one
    train: dict[str, float] = field(default_factory=dict)  # as seen in training since the validation before
    valid: dict[str, float] = field(default_factory=dict)
    window: dict[str, Any] = field(default_factory=dict)  # running sums of the next log line and validation
    valid_tokens: int | None = None  # that a validation reads, once that is decided
    valid_examples: int = 0  # that the first validation read,
    valid_pace: float | None = None  # and the seconds it took for each
    spikes: int = 0  # steps whose loss or gradient norm was far above those before
    at_once: int | None = None  # examples that a process read at once in the last step; None: its whole share
