"""The quality of generated text beside human text: continuations of held-out text, and the measures of each set.

The protocol is that of open-ended generation (Holtzman et al., 2020): the beginnings of held-out passages are
continued by the model, and the continuations are measured beside the true ones.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.sampling import Sampling
from headstock.errors import UserError, did_you_mean
from headstock.inference.mauve import mauve
from headstock.inference.pipeline import Pipeline
from headstock.inference.text_quality import (
    CopyDetector,
    distinct,
    longest_repeat,
    mean_interval,
    repetition,
    self_bleu,
    split_words,
    zipf_coefficient,
)
from headstock.intervals import Interval, jackknife_interval
from headstock.rng import generator

LOOP = 4  # words that the control of repetition repeats
DEFAULT_DECODING = ("greedy", "temperature=0.7", "top_k=40", "top_p=0.9", "sample")
NAMED_DECODING = {"greedy": {"temperature": 0.0}, "sample": {}}  # sample: from the whole distribution


@dataclass(frozen=True)
class Passage:
    """A text in two parts; only the continuation is measured."""

    prompt: str
    continuation: str

    @property
    def text(self) -> str:
        return self.prompt + self.continuation


@dataclass(frozen=True)
class TextSet:
    """Texts of one origin, such as one way of sampling."""

    name: str
    passages: list[Passage]
    words: list[list[str]] = field(init=False)  # of the continuations

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", [split_words(passage.continuation) for passage in self.passages])


@dataclass(frozen=True)
class QualityReport:
    """The measures of a set of texts."""

    name: str
    texts: int
    measures: dict[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        values = {name: {"value": m.mean, "low": m.low, "high": m.high} for name, m in self.measures.items()}
        return {"name": self.name, "texts": self.texts, "measures": values}


@dataclass(frozen=True)
class QualityJudge:
    """What texts are measured against; measures without their part are left out."""

    reference: TextSet | None = None  # human text, for MAUVE
    judge: Pipeline | None = None  # for perplexity
    embedder: Pipeline | None = None  # for MAUVE
    training: Sequence[str] | None = None  # documents, for copies

    def measure(self, texts: TextSet) -> QualityReport:
        words = texts.words
        measures = {f"rep_{n}": mean_interval([repetition(w, n) for w in words], key=f"rep-{n}") for n in (2, 3, 4)}
        measures["longest_repeat"] = mean_interval([longest_repeat(w) for w in words], key="longest-repeat")
        for n in (1, 2, 3):
            measures[f"distinct_{n}"] = jackknife_interval(lambda part, n=n: distinct(part, n), words)
        measures["self_bleu"] = mean_interval(self_bleu(words), key="self-bleu")
        measures["zipf"] = jackknife_interval(zipf_coefficient, words)
        measures["vocabulary"] = Interval(float(len({word for text in words for word in text})), None, None)
        measures["words"] = mean_interval([len(w) for w in words], key="words")
        if self.judge is not None:
            measures["perplexity"] = judged_perplexity(self.judge, texts.passages)
        if self.embedder is not None and self.reference is not None:
            vectors = [
                np.stack(list(self.embedder.iter_embeddings(passage.text for passage in part.passages)))
                for part in (self.reference, texts)
            ]
            measures["mauve"] = mauve(*vectors)
        if self.training is not None:
            longest, shares = CopyDetector(words, self.training).measure()
            measures["longest_copy"] = mean_interval(longest, key="longest-copy")
            measures["copied"] = mean_interval(shares, [len(w) for w in words], key="copied")
        return QualityReport(texts.name, len(texts.passages), measures)


def judged_perplexity(judge: Pipeline, passages: Sequence[Passage]) -> Interval:
    """The perplexity per token of the continuations, given their prompts; pseudo-perplexity for a masked model."""
    losses, counts = [], []
    for passage, score in zip(passages, judge.score([passage.text for passage in passages]), strict=True):
        spans = judge.tokenizer.offsets(passage.text)
        values = [v for (_, v), (start, _) in zip(score.tokens, spans, strict=True) if start >= len(passage.prompt)]
        losses.append(-sum(values) / max(1, len(values)))
        counts.append(len(values))
    loss = mean_interval(losses, counts, key="perplexity")
    return Interval(*(None if value is None else math.exp(min(value, 700)) for value in loss))  # type: ignore[arg-type]


# Sets of texts


def held_out_passages(
    tokenizer: Tokenizer, store: TokenStore, *, prompt_tokens: int, max_tokens: int, count: int
) -> list[Passage]:
    """At most `count` passages of a text, evenly spaced; the last of a document may be shorter."""
    size = prompt_tokens + max_tokens
    least = prompt_tokens + max(1, max_tokens // 2)
    starts = [
        (int(begin) + first, min(int(end) - 1, int(begin) + first + size))
        for begin, end in zip(store.offsets[:-1], store.offsets[1:], strict=True)
        for first in range(0, int(end - begin) - 1, size)
        if int(end - begin) - 1 - first >= least
    ]
    picked = np.unique(np.linspace(0, len(starts) - 1, min(count, len(starts))).astype(int)) if starts else ()
    return [make_passage(tokenizer, store.slice(*starts[i]).tolist(), prompt_tokens) for i in picked]


def make_passage(tokenizer: Tokenizer, ids: list[int], prompt_tokens: int) -> Passage:
    prompt, text = tokenizer.decode(ids[:prompt_tokens]), tokenizer.decode(ids)
    return Passage(prompt, text[len(prompt) :] if text.startswith(prompt) else tokenizer.decode(ids[prompt_tokens:]))


def continue_passages(pipeline: Pipeline, passages: Sequence[Passage], decoding: str, **options: Any) -> TextSet:
    """The model's own continuations of the same prompts."""
    rows = pipeline.generate([passage.prompt for passage in passages], **parse_decoding(decoding), **options)
    return TextSet(
        decoding, [Passage(p.prompt, row.text[len(p.prompt) :]) for p, row in zip(passages, rows, strict=True)]
    )


def parse_decoding(text: str) -> dict[str, Any]:
    """Sampling options: `greedy`, `sample`, or settings such as `top_p=0.9,temperature=0.8`."""
    if text in NAMED_DECODING:
        return dict(NAMED_DECODING[text])
    known = {part.name for part in fields(Sampling)}
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in known or not equals:
            names = [*NAMED_DECODING, *(f"{name}=N" for name in sorted(known))]
            raise UserError(f"--decoding {part.strip()}: must be {', '.join(names)}{did_you_mean(name, sorted(known))}")
        try:
            options[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            raise UserError(f"--decoding {part.strip()}: expected a number") from None
    Sampling(**options)  # refuses values out of range
    return options


def control_sets(human: TextSet, training: Iterable[Passage] = ()) -> list[TextSet]:
    """Texts made from human ones that must fail a measure: word order, repetition, diversity, copying."""
    random = generator("text-quality", "controls")
    shuffled = [" ".join(random.permutation(words).tolist()) for words in human.words]
    looped = [" ".join((words[:LOOP] * len(words))[: len(words)]) for words in human.words]
    prompts = [passage.prompt for passage in human.passages]
    same = [human.passages[0].continuation.strip()] * len(prompts)
    sets = [
        TextSet(name, [Passage(prompt, f" {text}") for prompt, text in zip(prompts, texts, strict=True)])
        for name, texts in (("shuffled words", shuffled), ("looped words", looped), ("one text", same))
    ]
    copies = list(training)
    return [*sets, TextSet("training text", copies)] if copies else sets
