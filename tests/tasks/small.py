"""A very small model for a task, and a text that it learns quickly."""

from pathlib import Path

import torch

from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.model import Model
from headstock.tasks.base import Task

MEALS = {"Anne": "bread", "Ben": "cheese", "Zoë": "apples"}


def write_meals(folder: Path) -> Path:
    """A text in which every name eats its own meal."""
    lines = [f"{name} eats {meal} now. It is day {day}." for day in range(100) for name, meal in MEALS.items()]
    path = folder / "meals.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def model_for(task: Task, *, causal: bool = False, context: int = 64, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    sizes = {"vocabulary": task.tokenizer.vocabulary, "depth": 2, "width": 16, "heads": 2, "hidden": 32}
    segments = task.segments(task.config)
    backbone = Transformer(TransformerConfig(**sizes, context=context, causal=causal, segments=segments))
    return Model(backbone, task.heads(backbone)).eval()
