"""Pipelines of tiny models with random weights, built without training or files."""

from pathlib import Path
from typing import Any

from headstock.data.corpus import read_corpus
from headstock.data.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from headstock.inference.pipeline import Pipeline
from headstock.train.models import build_model, build_task
from headstock.train.run_folder import RunFolder
from headstock.train.settings import make_config
from tests.model.small import stir

SIZES = {"context": 24, "depth": 2, "width": 8, "heads": 2, "hidden": 12}
RECURRENT_SIZES = {"context": 24, "depth": 2, "width": 8, "hidden": 12}


def make_tokenizer(corpus: Path) -> Tokenizer:
    return train_tokenizer((d.text for d in read_corpus(corpus)), TokenizerSettings(vocabulary=300))


def make_pipeline(
    tokenizer: Tokenizer, task: str = "causal", *, family: str = "transformer", **settings: Any
) -> Pipeline:
    """A pipeline of a tiny model; settings that start with `task_` are those of the task."""
    own = {key.removeprefix("task_"): value for key, value in settings.items() if key.startswith("task_")}
    sizes = RECURRENT_SIZES if family in ("recurrent", "elmo", "ngram") else SIZES
    model = {"family": family, "vocabulary": tokenizer.vocabulary, **sizes}
    if family == "transformer":
        model["causal"] = task not in ("masked", "hybrid")
    model |= {key: value for key, value in settings.items() if not key.startswith("task_")}
    config = make_config({"model": model, "task": {"name": task, **own}})
    built_task = build_task(config, tokenizer)
    built = build_model(config, built_task)
    stir(built, spread=0.2)
    return Pipeline(RunFolder(Path("runs/tiny")), config, tokenizer, [built.eval()], built_task)


def make_classifier(tokenizer: Tokenizer, **settings: Any) -> Pipeline:
    return make_pipeline(
        tokenizer, "classify", **{"task_classes": ("bad", "fair", "good"), "task_pool": "mean"} | settings
    )
