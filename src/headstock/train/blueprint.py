"""A model as its settings describe it, without text and if need be without weights: for those who count or draw it."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from headstock.data.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.pretrain import build_model, resolve_config
from headstock.train.settings import RunConfig, preset_file


def blueprint(chosen: RunConfig, *, weights: bool = False) -> tuple[Model, Task]:
    """The model and its task; without `weights` its tensors have a shape and nothing in it, however large they are."""
    with nullcontext() if weights else torch.device("meta"):
        return build_model(chosen, placeholder_tokenizer())


def describe_preset(name: str) -> dict[str, Any]:
    """What a preset is, with the number of parameters that pretraining would give it."""
    chosen = resolve_config(name, None, {})
    model, _ = blueprint(chosen)
    return {
        "preset": name,
        "family": chosen.family,
        "objective": chosen.objective,
        "parameters": model.parameter_counts()["total"],
        "context": chosen.train.length or getattr(chosen.model, "context", None) or model.backbone.context,
        "vocabulary": chosen.model.vocabulary,
        "about": preset_file(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "),
    }


@cache
def placeholder_tokenizer() -> Tokenizer:
    """A tokenizer of one letter, for tasks that ask which marks there are before any text has come."""
    return train_tokenizer(["a"], TokenizerSettings(kind="char", vocabulary=16, min_frequency=1))
