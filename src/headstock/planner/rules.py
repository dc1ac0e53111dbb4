"""The planner's rules for model size, training length and hyperparameters, each with its reason."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headstock.tasks.base import TASKS, PlanDefaults
from headstock.train.settings import read_preset

REASONS = {
    "objective": "causal LM learns from every token but memorizes a text after about four epochs; masked LM keeps "
    "improving for ten or more",
    "size": "at least ten training tokens per non-embedding parameter; the best recipe on reviews used nine",
    "passes": "repeating text is worth about as much as new text for up to four epochs of causal LM, and up to sixteen "
    "where other tokens are masked each time",
    "vocabulary": "32 entries per unit of width, so that the embedding costs as much as a few layers, and at least a "
    "thousand bytes of text per entry, so that most entries are learned",
    "context": "256 tokens did well in every recipe; 128 if nine in ten documents fit; 512 if most documents are "
    "longer and the model is wide enough to use them",
    "batch": "a power of two that gives about 2,500 steps; fewer leave no room for the schedule",
    "valid_tokens": "ten validations that together take about a twentieth of the time",
    "lr": "Muon's learning rate falls with the square root of the width: 4e-3 at 128, 2e-3 at 512 (recipes)",
    "dropout": "needed for causal LM beyond three epochs (recipes/french-causal.toml), not for masked LM",
}

SIZES = (  # (depth, width)
    (2, 64), (3, 96), (4, 128), (5, 192), (6, 256), (8, 384), (10, 512), (12, 640), (12, 768), (16, 1024),
    (20, 1280), (24, 1536), (32, 2048),
)  # fmt: skip
PRESETS = ("nano", "mini", "small", "base")  # sizes of the families that are not planned by depth and width
REPEATED_TEXT_OBJECTIVE = "hybrid"  # learns most from text that is repeated as often as it pays
TOKENS_PER_PARAMETER = 10
TARGET_STEPS = 2500
ARCHITECTURE: dict[str, Any] = {
    "norm": "pre",
    "norm_kind": "rms",
    "positions": "rotary",
    "activation": "swiglu",
    "bias": False,
    "tied": True,
    "qk_norm": True,
}


@dataclass(frozen=True)
class TextStatistics:
    bytes: int
    documents: int
    tokens: float  # training tokens, in the planned vocabulary
    p90_length: float  # 90th percentile of document lengths, in tokens
    median_length: float


@dataclass(frozen=True)
class ModelSize:
    label: str
    sections: dict[str, Any]  # settings of tokenizer, task, model and train


def vocabulary_size(width: int, text_bytes: int) -> int:
    return max(500, min(round(32 * width, -3), int(round(text_bytes / 1000, -2)), 32_000))


def context_length(text: TextStatistics, width: int) -> int:
    if text.p90_length <= 96:
        return 128
    return 512 if text.median_length > 512 and width >= 512 else 256


def model_sizes(objective: str, text: TextStatistics) -> Iterable[ModelSize]:
    """All model sizes for an objective, smallest first."""
    family = plan_defaults(objective).family
    if family != "transformer":
        for name in PRESETS:
            preset = read_preset(f"{family}-{name}")
            vocabulary = min(preset["tokenizer"]["vocabulary"], vocabulary_size(1024, text.bytes))
            preset |= {"tokenizer": preset["tokenizer"] | {"vocabulary": vocabulary}, "task": {"name": objective}}
            yield ModelSize(f"{family}-{name}", preset)
        return
    for depth, width in SIZES:
        model = {
            "family": "transformer",
            "context": context_length(text, width),
            "depth": depth,
            "width": width,
            "heads": width // (64 if width >= 256 else 32),
            "hidden": math.ceil(8 * width / 3 / 64) * 64,
            **ARCHITECTURE,
        }
        sections = {
            "tokenizer": {"kind": "bpe", "vocabulary": vocabulary_size(width, text.bytes)},
            "task": task_settings(objective),
            "model": model,
            "train": {"optimizer": "muon", "schedule": "trapezoid", "warmup": 0.02, "lr": learning_rate(width)},
        }
        yield ModelSize(f"{depth} x {width}", sections)


def task_settings(objective: str) -> dict[str, Any]:
    return {"name": objective, **plan_defaults(objective).settings}


def planned_objectives() -> list[str]:
    return [name for name in TASKS.names() if TASKS.get(name).plan is not None]


def plan_defaults(objective: str) -> PlanDefaults:
    plan = TASKS.get(objective).plan
    assert plan is not None
    return plan


def max_epochs(objective: str) -> int:
    """The number of epochs after which more of the same text gains nothing."""
    return plan_defaults(objective).max_epochs


def learning_rate(width: int) -> float:
    """One significant digit: the rule is no more precise."""
    return float(f"{4e-3 * math.sqrt(128 / width):.0e}")


def dropout(objective: str, epochs: float) -> float:
    return plan_defaults(objective).repeated_dropout if epochs > 3 else 0.0


def batch_size(tokens: float, length: int) -> int:
    """Rows per step, a power of two."""
    rows = tokens / TARGET_STEPS / length
    return 2 ** max(3, min(10, round(math.log2(max(1.0, rows)))))


def validation_tokens(objective: str, tokens: float) -> float:
    """Tokens that a validation on all held-out text reads."""
    return tokens * plan_defaults(objective).validation_passes
