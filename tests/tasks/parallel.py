"""An artificial language: every word has one translation, and the word order is reversed."""

import random
from pathlib import Path

import torch

from headstock.model.backbones.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from headstock.model.model import Model
from headstock.tasks.base import Task

WHO = {"anne": "ana", "ben": "beni", "zoe": "zoi"}
DOES = {"sees": "vidas", "likes": "amas", "finds": "trovas"}
WHICH = {"the": "la", "a": "un"}
LOOKS = {"red": "ruga", "blue": "blua"}
WHAT = {"cat": "kato", "dog": "hundo", "house": "domo", "tree": "arbo"}
WORDS = WHO | DOES | WHICH | LOOKS | WHAT


def sentences(count: int, name: str) -> list[tuple[str, str]]:
    """Sources and their translations, of four or five words and a full stop."""
    rng, rows = random.Random(name), []
    for _ in range(count):
        parts = (WHO, DOES, WHICH, LOOKS, WHAT) if rng.random() < 0.6 else (WHO, DOES, WHICH, WHAT)
        words = [rng.choice(list(part)) for part in parts]
        rows.append((" ".join([*words, "."]), " ".join([*(WORDS[word] for word in reversed(words)), "."])))
    return rows


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8")
    return path


SMALL = {"depth": 1, "encoder_depth": 1, "width": 32, "heads": 2, "hidden": 64, "context": 32, "model.dropout": 0.0}
QUICK = SMALL | {"vocabulary": 300, "batch_tokens": 400, "lr": 1e-2, "label_smoothing": 0.0}


def model_for(task: Task, *, context: int = 32, seed: int = 0, source: int | None = None) -> Model:
    torch.manual_seed(seed)
    sizes = {"vocabulary": task.tokenizer.vocabulary, "depth": 1, "width": 16, "heads": 2, "hidden": 32}
    backbone = EncoderDecoder(EncoderDecoderConfig(**sizes, source_vocabulary=source, context=context))
    return Model(backbone, task.heads(backbone)).eval()
