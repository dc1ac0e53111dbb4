"""A model for a task, so small that a test can read a whole corpus with it."""

import torch

from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.model import Model
from headstock.tasks.base import Task


def model_for(task: Task, *, causal: bool = False, context: int = 64, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    sizes = {"vocabulary": task.tokenizer.vocabulary, "depth": 2, "width": 16, "heads": 2, "hidden": 32}
    segments = task.segments(task.config)
    backbone = Transformer(TransformerConfig(**sizes, context=context, causal=causal, segments=segments))
    return Model(backbone, task.heads(backbone)).eval()
