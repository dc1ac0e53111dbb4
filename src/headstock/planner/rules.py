"""How large a model, how long, from how much text: the rules of a plan, each with its reason."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headstock.train.settings import read_preset

# what to read of each rule: its reason, as a plan tells it
REASONS = {
    "objective": "left to right learns from every token but knows a text by heart after about four passes; "
    "hiding tokens goes on improving for ten and more",
    "size": "ten tokens or more are read for each weight outside the embedding: the recipe that did best on reviews "
    "read nine",
    "passes": "a pass over the same text is worth about as much as new text up to four times left to right, "
    "and up to sixteen times where tokens are hidden anew each time",
    "vocabulary": "32 entries for each number of the width keep the table as dear as a few layers; "
    "and a thousand bytes of text for each entry, or most are never learned",
    "context": "rows of 256 tokens did well in every recipe; 128 where nine documents in ten fit, 512 where most "
    "documents do not fit and the model is wide enough to use them",
    "batch": "about 2,500 steps of a power of two rows: fewer leave the schedule no room",
    "valid_tokens": "ten validations that together take about a twentieth of the time",
    "lr": "Muon's rate falls with the root of the width: 4e-3 at 128, 2e-3 at 512 (recipes)",
    "dropout": "needed left to right beyond three passes (recipes/french-causal.toml), not where tokens are hidden",
}

SIZES = (
    (2, 64),
    (3, 96),
    (4, 128),
    (5, 192),
    (6, 256),
    (8, 384),
    (10, 512),
    (12, 640),
    (12, 768),
    (16, 1024),
    (20, 1280),
    (24, 1536),
    (32, 2048),
)  # depth and width, which grow together
PRESETS = ("nano", "mini", "small", "base")  # the sizes of families that are not planned by depth and width
FAMILIES = {"both-ways": "elmo", "denoise": "seq2seq"}  # objectives that want another family than the Transformer
MOST_PASSES = {"causal": 4, "both-ways": 4, "hybrid": 10, "masked": 16, "denoise": 16}
READ_TWICE = ("hybrid",)  # objectives whose held-out text is read once hidden and once left to right
READ_OFTEN = "hybrid"  # what is best learned from a text that is read as often as it pays
TOKENS_PER_WEIGHT = 10
STEPS = 2500
MODERN: dict[str, Any] = {"norm": "pre", "norm_kind": "rms", "positions": "rotary", "activation": "swiglu"}
MODERN |= {"bias": False, "tied": True, "qk_norm": True}


@dataclass(frozen=True)
class Text:
    """What a plan must know of the text."""

    bytes: int
    documents: int
    tokens: float  # for training, in the vocabulary that is planned
    nine_in_ten: float  # tokens in a document that is longer than nine in ten
    middle: float  # tokens in the middle one


@dataclass(frozen=True)
class Size:
    """A model by what makes it large or small."""

    label: str
    tree: dict[str, Any]  # the sections tokenizer, model and task


def vocabulary(width: int, size: int) -> int:
    """Entries for a model so wide that reads `size` bytes of text."""
    return max(500, min(round(32 * width, -3), int(round(size / 1000, -2)), 32_000))


def context(text: Text, width: int) -> int:
    if text.nine_in_ten <= 96:
        return 128
    return 512 if text.middle > 512 and width >= 512 else 256


def sizes(objective: str, text: Text) -> Iterable[Size]:
    """All sizes for an objective, from the smallest to the largest."""
    if objective in FAMILIES:
        for name in PRESETS:
            preset = read_preset(f"{FAMILIES[objective]}-{name}")
            entries = min(preset["tokenizer"]["vocabulary"], vocabulary(1024, text.bytes))
            preset |= {"tokenizer": preset["tokenizer"] | {"vocabulary": entries}, "task": {"name": objective}}
            yield Size(f"{FAMILIES[objective]}-{name}", preset)
        return
    for depth, width in SIZES:
        heads = width // (64 if width >= 256 else 32)
        hidden = math.ceil(8 * width / 3 / 64) * 64
        shape = {"context": context(text, width), "depth": depth, "width": width, "heads": heads, "hidden": hidden}
        tree = {
            "tokenizer": {"kind": "bpe", "vocabulary": vocabulary(width, text.bytes)},
            "task": task_of(objective),
            "model": {"family": "transformer", **shape, **MODERN},
            "train": {"optimizer": "muon", "schedule": "trapezoid", "warmup": 0.02, "lr": lr_of(width)},
        }
        yield Size(f"{depth} x {width}", tree)


def task_of(objective: str) -> dict[str, Any]:
    if objective in ("masked", "hybrid"):  # many hidden at first: more to learn from a pass (recipes/reviews-fr.toml)
        return {"name": objective, "fraction_start": 0.5, "fraction": 0.2}
    return {"name": objective}


def lr_of(width: int) -> float:
    """To one digit: more would pretend to know more."""
    return float(f"{4e-3 * math.sqrt(128 / width):.0e}")


def dropout_of(objective: str, passes: float) -> float:
    return 0.1 if objective == "causal" and passes > 3 else 0.0


def rows_of(tokens: float, length: int) -> int:
    """Rows of a step, a power of two."""
    wanted = tokens / STEPS / length
    return 2 ** max(3, min(10, round(math.log2(max(1.0, wanted)))))


def held_out(objective: str, tokens: float) -> float:
    """Tokens that a validation would read if it read all of the text that is held out."""
    return tokens * (2 if objective in READ_TWICE else 1)
