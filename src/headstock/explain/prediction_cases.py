"""The kinds of predictions that can be explained: a class, a next token, a masked word, a translation.

N variants of a text, C classes, V vocabulary, T tokens.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headstock.data.mask_gaps import MASK, MaskGap, SurfaceForms
from headstock.data.records import Records
from headstock.data.windowing import SpecialTokens
from headstock.decoding.batching import batch_from_rows, token_batches
from headstock.errors import UserError
from headstock.explain.inputs import class_index
from headstock.explain.subject import check_length
from headstock.inference import attribution
from headstock.inference.attribution import baseline_embedding, integrated_gradients, token_attributions
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.labelled import is_labelled
from headstock.tasks.special_tokens import special_tokens_for
from headstock.train.evaluate import model_outputs
from headstock.train.loop import sequence_length


class PredictionCase(ABC):
    """One kind of prediction of a run."""

    kind: str

    def __init__(self, pipeline: Pipeline):
        self.pipeline, self.model, self.tokenizer = pipeline, pipeline.model, pipeline.tokenizer
        self.length = sequence_length(pipeline.model, pipeline.config.train)
        self.notes: list[str] = []

    @abstractmethod
    def probabilities(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        """(N, C) or (N, V): the probability of every answer for each variant of the texts."""

    @abstractmethod
    def select(self, label: str | None, probabilities: np.ndarray, *, option: str = "--label") -> int:
        """The answer to explain: `label`, which `option` names, or the most probable one."""

    @abstractmethod
    def name(self, answer: int) -> str: ...

    @abstractmethod
    def weights(self, answer: int, *, averaged: bool) -> list[tuple[str, float]]:
        """Each token of the texts and its weight: integrated gradients, or plain gradient x input."""

    def top(self, probabilities: np.ndarray, count: int) -> list[int]:
        return np.argsort(-probabilities, kind="stable")[:count].tolist()

    def excluded_spans(self, text: str) -> list[tuple[int, int]]:
        """Characters that are not words of the text, such as a mask."""
        return []


def case_of(pipeline: Pipeline, texts: list[str], at: int | None, label: str | None) -> PredictionCase:
    task = pipeline.task
    if at is not None and not (task.fills_masks and MASK in texts[0]):
        raise UserError(f"{pipeline.run}: --at selects a {MASK}, and there is none to fill in")
    if is_labelled(task) and task.predicts_classes:
        return ClassCase(pipeline, texts)
    if task.translates:
        return TranslationCase(pipeline, texts, label)
    if task.is_labelled:
        supported = "classifiers, translators and language models"
        raise UserError(f"{pipeline.run}: is a {task.title}; predictions are explained for {supported}")
    if task.fills_masks and MASK in texts[0]:
        return MaskedWordCase(pipeline, texts[0], at or 1)
    if task.fills_masks and not task.generates:
        raise UserError(f'{pipeline.run}: predicts masked words; write {MASK} for one, as in "It was {MASK}."')
    pipeline.require("generates", "predict the next token")
    return NextTokenCase(pipeline, texts[0])


class ClassCase(PredictionCase):
    """The class of a text or of a pair of texts."""

    kind = "class"

    def __init__(self, pipeline: Pipeline, texts: list[str]):
        super().__init__(pipeline)
        self.task = pipeline.classification_task()
        self.data = self.encode([texts])
        check_length(pipeline, self.task.row_length(self.data))

    def encode(self, variants: Sequence[Sequence[str]]) -> Any:
        columns = self.task.columns_of([self.task.row_from_texts(texts) for texts in variants])
        return self.task.prepare(Records("text", list(range(1, len(variants) + 1)), columns), labelled=False)

    def probabilities(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        dtype = self.pipeline.config.train.dtype
        outputs = model_outputs(self.model, self.task, self.encode(variants), length=self.length, dtype=dtype)
        return np.stack(outputs)

    def select(self, label: str | None, probabilities: np.ndarray, *, option: str = "--label") -> int:
        return int(probabilities.argmax()) if label is None else class_index(self.pipeline, label, option=option)

    def name(self, answer: int) -> str:
        return self.task.config.classes[answer]

    def weights(self, answer: int, *, averaged: bool) -> list[tuple[str, float]]:
        return token_attributions(
            self.model, self.task, self.data, 0, target=answer, length=self.length, averaged=averaged
        )


class TokenCase(PredictionCase):
    """The prediction of a language model at one position."""

    causal: bool
    text: str
    special: SpecialTokens

    def __init__(self, pipeline: Pipeline):
        super().__init__(pipeline)
        self.suppressed = pipeline.suppressed_tokens()  # entries that are no answer

    @abstractmethod
    def row(self, text: str) -> tuple[list[int], int]:
        """The tokens that the model reads, and the position that predicts the answer."""

    @abstractmethod
    def tokenize_answer(self, word: str) -> list[int]:
        """A word as the tokens it would have at the position."""

    @torch.no_grad()
    def probabilities(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        rows = [self.row(text) for (text,) in variants]
        parts = []
        for part in token_batches(rows, lambda row: len(row[0]), self.model.device):
            batch = self.batch([tokens for tokens, _ in part])
            positions = torch.tensor([position for _, position in part], device=self.model.device)
            hidden = self.model(batch).hidden[torch.arange(len(part), device=self.model.device), positions]
            parts.append(self.model.heads["token"](hidden).float().softmax(-1).cpu().numpy())  # (n, V)
        return np.concatenate(parts)

    def batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        return batch_from_rows(rows, self.special.pad, self.model.device, causal=self.causal)

    def top(self, probabilities: np.ndarray, count: int) -> list[int]:
        allowed = probabilities.copy()
        allowed[list(self.suppressed)] = -1.0
        return super().top(allowed, count)

    def select(self, label: str | None, probabilities: np.ndarray, *, option: str = "--label") -> int:
        if label is None:
            return self.top(probabilities, 1)[0]
        tokens = self.tokenize_answer(label)
        if not tokens or self.tokenizer.unk in tokens:
            raise UserError(f"{self.pipeline.run}: {option} {label!r}: this tokenizer cannot encode it")
        if len(tokens) > 1:
            self.notes.append(f"{label!r} has {len(tokens)} tokens; explained is the first, {self.name(tokens[0])!r}")
        return tokens[0]

    def name(self, answer: int) -> str:
        return display_tokens(self.tokenizer, [answer])[0]

    def weights(self, answer: int, *, averaged: bool) -> list[tuple[str, float]]:
        tokens, position = self.row(self.text)

        def score(model: Model, batch: Batch) -> Tensor:
            logits = model.heads["token"](model(batch).hidden[:, position])  # (steps, V)
            return logits[:, answer] - logits.mean(1)

        span = slice(len(self.special.prefix), len(tokens) - len(self.special.suffix))
        baseline = baseline_embedding(self.model, self.pipeline.task, left_to_right=self.causal)
        weights = span_weights(self.model, lambda steps: self.batch([tokens] * steps), score, span, baseline, averaged)
        return [(self.tokenizer.id_to_token(token), weight) for token, weight in weights]


class NextTokenCase(TokenCase):
    """The token after a text."""

    kind = "next token"
    causal = True

    def __init__(self, pipeline: Pipeline, text: str):
        super().__init__(pipeline)
        self.text, self.special = text, special_tokens_for(pipeline.task, pipeline.tokenizer, left_to_right=True)
        check_length(pipeline, len(self.row(text)[0]))

    def row(self, text: str) -> tuple[list[int], int]:
        tokens = self.special.wrap(self.tokenizer.encode(text))
        return tokens, len(tokens) - 1

    def tokenize_answer(self, word: str) -> list[int]:
        spaced = word if self.text.endswith((" ", "\n")) or word.startswith(" ") else f" {word}"
        tokens = self.tokens_after_text(spaced)
        return tokens if self.tokenizer.unk not in tokens else self.tokens_after_text(word)  # a text without spaces

    def tokens_after_text(self, word: str) -> list[int]:
        text = self.tokenizer.encode(self.text)
        continued = self.tokenizer.encode(self.text + word)
        return continued[len(text) :] if continued[: len(text)] == text else self.tokenizer.encode(word)


class MaskedWordCase(TokenCase):
    """The word behind one mask; other masks stay masked."""

    kind = "masked word"
    causal = False

    def __init__(self, pipeline: Pipeline, text: str, at: int):
        super().__init__(pipeline)
        self.text, self.special = text, special_tokens_for(pipeline.task, pipeline.tokenizer)
        self.forms = SurfaceForms(pipeline.tokenizer)
        if self.tokenizer.eos is not None:
            self.suppressed = [*self.suppressed, self.tokenizer.eos]
        count = len(self.excluded_spans(text))
        if not 1 <= at <= count:
            raise UserError(f"{pipeline.run}: --at {at}: the text has {count} {MASK}")
        self.index = at - 1
        check_length(pipeline, len(self.row(text)[0]))
        if count > 1:
            self.notes.append(f"explained is {MASK} number {at} of {count}; the others stay masked")

    def gap(self, text: str) -> tuple[list[int], MaskGap]:
        ids, gaps = self.forms.tokenize(text)
        return ids, gaps[self.index]

    def row(self, text: str) -> tuple[list[int], int]:
        ids, gap = self.gap(text)
        return self.special.wrap(ids), gap.position + len(self.special.prefix) - self.pipeline.task.mask_shift

    def tokenize_answer(self, word: str) -> list[int]:
        return self.forms.tokens_at(self.gap(self.text)[1], word)

    def excluded_spans(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(self.forms.mask_pattern, text)]


class TranslationCase(PredictionCase):
    """A translation, the run's own or a given one, explained by the words of its source."""

    kind = "translation"

    def __init__(self, pipeline: Pipeline, texts: list[str], label: str | None):
        super().__init__(pipeline)
        self.task = pipeline.translation_task()
        self.target = pipeline.translate(texts[0])[0] if label is None else label
        if not self.target.strip():
            raise UserError(f"{pipeline.run}: translates this text to nothing; give a translation with --label")
        self.source = self.encode([texts])
        check_length(pipeline, self.task.row_length(self.source))
        self.notes = ["the probability of a translation is the geometric mean over its tokens"]

    def encode(self, variants: Sequence[Sequence[str]]) -> Any:
        rows = {"source": [text for (text,) in variants], "target": [self.target] * len(variants)}
        return self.task.prepare(Records("text", list(range(1, len(variants) + 1)), rows))

    def log_likelihood(self, model: Model, batch: Batch) -> Tensor:
        """(N,) the log-probability of the translation."""
        labels = batch.labels["token"]
        scores = model.heads["token"](model(batch).hidden).log_softmax(-1)
        of_labels = scores.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return of_labels.masked_fill(labels == IGNORE_INDEX, 0).sum(1)

    @torch.no_grad()
    def probabilities(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        examples = self.task.examples(self.encode(variants), length=self.length)
        parts = []
        for part in token_batches(range(len(variants)), lambda row: self.length, self.model.device):
            batch = examples.batch(part).to(self.model.device)
            count = (batch.labels["token"] != IGNORE_INDEX).sum(1)
            parts.append((self.log_likelihood(self.model, batch) / count).exp().cpu().numpy()[:, None])
        return np.concatenate(parts)

    def select(self, label: str | None, probabilities: np.ndarray, *, option: str = "--label") -> int:
        return 0

    def name(self, answer: int) -> str:
        return self.target

    def weights(self, answer: int, *, averaged: bool) -> list[tuple[str, float]]:
        examples = self.task.examples(self.source, length=self.length)
        baseline = cast(EncoderDecoder, self.model.backbone).encoder.tokens.weight.detach().mean(0)
        span = slice(0, -1)  # without EOS
        weights = span_weights(
            self.model, lambda steps: examples.batch([0] * steps), self.log_likelihood, span, baseline, averaged
        )
        return [(self.task.source_tokenizer.id_to_token(token), weight) for token, weight in weights]


def span_weights(
    model: Model,
    make_batch: Callable[[int], Batch],
    score: Callable[[Model, Batch], Tensor],
    span: slice,
    baseline: Tensor,
    averaged: bool,
) -> list[tuple[int, float]]:
    """The tokens in `span` with their integrated gradients, or plain gradient x input; the others stay fixed.

    `make_batch` repeats the row; of an encoder-decoder the tokens are those of the source.
    """
    steps = attribution.STEPS if averaged else 1
    batch = make_batch(steps).to(model.device)
    tokens = (batch.source or batch).tokens
    fixed = torch.ones_like(tokens, dtype=torch.bool)
    fixed[:, span] = False
    (weights,) = integrated_gradients(model, batch, score, blank=baseline, steps=steps, fixed=fixed, averaged=averaged)
    return list(zip(tokens[0, span].tolist(), weights[span].tolist(), strict=True))
