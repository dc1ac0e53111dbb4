"""Small runs of every family, head and tokenizer, and texts in many scripts."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstock.data.tokenizer import Tokenizer, train_tokenizer
from headstock.data.tokenizer_training import TokenizerSettings
from headstock.inference.pipeline import Pipeline
from headstock.interop.imported_run import imported_config, write_imported_run
from headstock.model.batch import Batch
from headstock.model.heads import pool
from headstock.train.models import build_model, build_task
from headstock.train.run_folder import RunFolder
from tests.model.small import stir

SIZES = {"context": 24, "depth": 2, "width": 16, "heads": 4, "hidden": 24}
SCRIPTS = {  # letters, and the separator of words
    "latin": ("abcdefghijklmnopqrstuvwxyzéèüßçñåø", " "),
    "greek": ("αβγδεζηθικλμνξοπρστυφχψω", " "),
    "cyrillic": ("абвгдежзийклмнопрстуфхцчшщъыьэюя", " "),
    "arabic": ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", " "),
    "devanagari": ("अआइईउऊएऐओऔकखगघचछजझटठडढणतथदधनपफबभमयरलवशषसह", " "),
    "han": ("的一是不了人我在有他这中大来上国个到说们", ""),
    "hangul": ("가나다라마바사아자차카타파하", " "),
    "emoji": ("😀🎉👩‍🔬🇫🇷é̂", " "),
}
VOCABULARIES = {"bpe": 320, "unigram": 700, "wordpiece": 700, "word": 60, "char": 200}


def some_texts(count: int, *, seed: int = 0) -> list[str]:
    """Random words of several scripts, mixed with digits, punctuation and unusual spaces."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        words = []
        for _ in range(generator.randint(1, 6)):
            letters, space = SCRIPTS[generator.choice(list(SCRIPTS))]
            words.append("".join(generator.choice(letters) for _ in range(generator.randint(1, 7))) + space)
            words.append(generator.choice(["", "", ", ", ". ", "! ", " 42 ", "  ", "\n", "'", "«", "<", "["]))
        text = "".join(words)
        texts.append(generator.choice([text, text.upper(), text.title(), f" {text}"]))
    return texts


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    settings = TokenizerSettings(kind=kind, vocabulary=VOCABULARIES[kind], min_frequency=1)  # type: ignore[arg-type]
    return train_tokenizer(some_texts(200, seed=1), settings)


def small_run(
    path: Path, model: dict[str, Any], task: dict[str, Any], *, kind: str = "bpe", spread: float = 0.2
) -> RunFolder:
    """A run folder with random weights; its model has two more vocabulary entries than its tokenizer."""
    tokenizer = tokenizer_of(kind)
    sizes = SIZES | {"family": "transformer", "vocabulary": tokenizer.vocabulary + 2, "dropout": 0.1}
    config = imported_config(sizes | model, task, source="a test")
    network = build_model(config, build_task(config, tokenizer))
    stir(network, spread=spread)
    return write_imported_run(path, config, tokenizer, network.tensors(), source="a test", notes=())


@torch.no_grad()
def scores(pipeline: Pipeline, inputs: dict[str, Tensor], targets: Tensor | None = None) -> Tensor:
    """The outputs of a run's head for the inputs of a transformers model, padded on the right."""
    tokens, padding = inputs["input_ids"], inputs["attention_mask"] == 0
    batch = Batch(tokens, padding if bool(padding.any()) else None, segments=inputs.get("token_type_ids"))
    if pipeline.task.name == "hybrid":
        batch.causal = True
    if targets is not None:
        batch = Batch(targets, source=batch)
    hidden = pipeline.model(batch).hidden
    if pipeline.task.name in ("classify", "pair", "regress"):
        return pipeline.model.heads["label"](pool(hidden, batch.padding, pipeline.task.config.pool))
    head = {"tag": "tag", "answer": "span", "headless": None}.get(pipeline.task.name, "token")
    return hidden if head is None else pipeline.model.heads[head](hidden)
