"""What a run can be asked, and how likely each answer is: a class, a next token, a masked word, a translation.

N texts, C classes, V vocabulary, T tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headstock.data.mask_gaps import MASK, MaskGap, SurfaceForms
from headstock.data.records import Records
from headstock.data.windowing import SpecialTokens
from headstock.decoding.batching import batch_from_rows, token_batches
from headstock.errors import UserError
from headstock.explain.targets import check_fits, check_length, class_number, masks_in
from headstock.inference import attribution
from headstock.inference.attribution import baseline_embedding, integrated_gradients, token_attributions
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.labelled import is_labelled
from headstock.tasks.special_tokens import special_tokens_for
from headstock.train.loop import sequence_length
from headstock.train.outputs import model_outputs


class Case(ABC):
    """One kind of question that a run can be asked."""

    kind: str
    notes: list[str]

    @abstractmethod
    def chances(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        """(N, C) or (N, V): how likely each answer is for each variant of the texts."""

    @abstractmethod
    def choose(self, label: str | None, chances: np.ndarray) -> int:
        """The answer that is explained: the one asked for, or the likeliest."""

    @abstractmethod
    def name(self, number: int) -> str:
        """An answer as people read it."""

    @abstractmethod
    def weights(self, target: int, *, averaged: bool) -> list[tuple[str, float]]:
        """Each token of the texts and its weight."""

    def likeliest(self, chances: np.ndarray, number: int) -> list[int]:
        return np.argsort(-chances, kind="stable")[:number].tolist()

    def closed(self, text: str) -> list[tuple[int, int]]:
        """Characters that are no words of the text, such as a mask."""
        return []


def case_of(loaded: Pipeline, texts: list[str], at: int | None, label: str | None) -> Case:
    task = loaded.task
    if at is not None and not (task.fills_masks and MASK in texts[0]):
        raise UserError(f"{loaded.run}: --at says which {MASK} is explained, and there is none to fill in")
    if is_labelled(task) and task.predicts_classes:
        return Classes(loaded, texts)
    if task.translates:
        return Translation(loaded, texts, label)
    if task.is_labelled:
        able = "classifiers, translators and language models"
        raise UserError(f"{loaded.run}: is a {task.title}; predictions are explained of {able}")
    if task.fills_masks and MASK in texts[0]:
        return Masked(loaded, texts[0], at or 1)
    if task.generates:
        return Next(loaded, texts[0])
    if task.fills_masks:
        raise UserError(f'{loaded.run}: tells hidden words; write {MASK} for one, as in "It was {MASK}."')
    loaded.require("generates", "tell the next token")
    raise AssertionError("what does not generate was refused")


class Classes(Case):
    """Which class a text, or a pair of texts, is of."""

    kind = "class"

    def __init__(self, loaded: Pipeline, texts: list[str]):
        self.loaded, self.task, self.notes = loaded, loaded.classification_task(), []
        self.length = sequence_length(loaded.model, loaded.config.train)
        self.data = self.prepared([texts])
        check_fits(loaded, self.task, self.data)

    def prepared(self, variants: Sequence[Sequence[str]]) -> Any:
        columns = self.task.columns_of([self.task.row_from_texts(texts) for texts in variants])
        return self.task.prepare(Records("text", list(range(1, len(variants) + 1)), columns), labelled=False)

    def chances(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        model, dtype = self.loaded.model, self.loaded.config.train.dtype
        return np.stack(model_outputs(model, self.task, self.prepared(variants), length=self.length, dtype=dtype))

    def choose(self, label: str | None, chances: np.ndarray) -> int:
        return int(chances.argmax()) if label is None else class_number(self.loaded, label)

    def name(self, number: int) -> str:
        return self.task.config.classes[number]

    def weights(self, target: int, *, averaged: bool) -> list[tuple[str, float]]:
        model, task = self.loaded.model, self.task
        return token_attributions(model, task, self.data, 0, target=target, length=self.length, averaged=averaged)


class OfTokens(Case):
    """What a language model puts at one place."""

    causal: bool
    text: str
    marks: SpecialTokens

    def __init__(self, loaded: Pipeline):
        self.loaded, self.model, self.tokenizer, self.notes = loaded, loaded.model, loaded.tokenizer, []
        self.unspoken = loaded.suppressed_tokens()  # entries that are no answer

    @abstractmethod
    def row(self, text: str) -> tuple[list[int], int]:
        """What the model is shown, and the place whose vector tells the answer."""

    @torch.no_grad()
    def chances(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        rows = [self.row(text) for (text,) in variants]
        found = []
        for part in token_batches(rows, lambda row: len(row[0]), self.model.device):
            batch = batch_from_rows([shown for shown, _ in part], self.marks.pad, self.model.device, causal=self.causal)
            places = torch.tensor([place for _, place in part], device=self.model.device)
            hidden = self.model(batch).hidden[torch.arange(len(part), device=self.model.device), places]
            found.append(self.model.heads["token"](hidden).float().softmax(-1).cpu().numpy())  # (n, V)
        return np.concatenate(found)

    def likeliest(self, chances: np.ndarray, number: int) -> list[int]:
        spoken = chances.copy()
        spoken[list(self.unspoken)] = -1.0
        return super().likeliest(spoken, number)

    def choose(self, label: str | None, chances: np.ndarray) -> int:
        if label is None:
            return self.likeliest(chances, 1)[0]
        pieces = self.pieces_of(label)
        if not pieces or self.tokenizer.unk in pieces:
            raise UserError(f"{self.loaded.run}: --label {label!r}: this tokenizer cannot write it")
        if len(pieces) > 1:
            first = display_tokens(self.tokenizer, pieces[:1])[0]
            self.notes.append(f"{label!r} is {len(pieces)} tokens; what is explained is the first, {first!r}")
        return pieces[0]

    @abstractmethod
    def pieces_of(self, word: str) -> list[int]:
        """A word as the tokens that would stand at the place."""

    def name(self, number: int) -> str:
        return display_tokens(self.tokenizer, [number])[0]

    def weights(self, target: int, *, averaged: bool) -> list[tuple[str, float]]:
        steps = attribution.STEPS if averaged else 1
        shown, place = self.row(self.text)
        batch = batch_from_rows([shown] * steps, self.marks.pad, self.model.device, causal=self.causal)
        fixed = torch.zeros_like(batch.tokens, dtype=torch.bool)
        first, last = len(self.marks.prefix), len(shown) - len(self.marks.suffix)
        fixed[:, :first] = fixed[:, last:] = True

        def score(model: Model, batch: Batch) -> Tensor:
            logits = model.heads["token"](model(batch).hidden[:, place])  # (steps, V)
            return logits[:, target] - logits.mean(1)

        blank = baseline_embedding(self.model, self.loaded.task, left_to_right=self.causal)
        (found,) = integrated_gradients(
            self.model, batch, score, blank=blank, steps=steps, fixed=fixed, averaged=averaged
        )
        values = found[first:last].tolist()
        return [
            (self.tokenizer.id_to_token(token), value) for token, value in zip(shown[first:last], values, strict=True)
        ]


class Next(OfTokens):
    """Which token follows a text."""

    kind = "next token"
    causal = True

    def __init__(self, loaded: Pipeline, text: str):
        super().__init__(loaded)
        self.text, self.marks = text, special_tokens_for(loaded.task, loaded.tokenizer, left_to_right=True)
        check_length(loaded, len(self.row(text)[0]))

    def row(self, text: str) -> tuple[list[int], int]:
        shown = self.marks.wrap(self.tokenizer.encode(text))
        return shown, len(shown) - 1

    def pieces_of(self, word: str) -> list[int]:
        before = self.tokenizer.encode(self.text)
        spaced = word if self.text.endswith((" ", "\n")) or word.startswith(" ") else f" {word}"
        whole = self.tokenizer.encode(self.text + spaced)
        return whole[len(before) :] if whole[: len(before)] == before else self.tokenizer.encode(spaced)


class Masked(OfTokens):
    """Which word stands behind a mask; other masks stay masks."""

    kind = "masked word"
    causal = False

    def __init__(self, loaded: Pipeline, text: str, at: int):
        super().__init__(loaded)
        self.text, self.marks, self.spelling = (
            text,
            special_tokens_for(loaded.task, loaded.tokenizer),
            SurfaceForms(loaded.tokenizer),
        )
        if self.tokenizer.eos is not None:
            self.unspoken = [*self.unspoken, self.tokenizer.eos]
        masks = len(masks_in(text, self.spelling.masks))
        if not 1 <= at <= masks:
            raise UserError(f"{loaded.run}: --at {at}: the text has {masks} {MASK}")
        self.at = at - 1
        check_length(loaded, len(self.row(text)[0]))
        if masks > 1:
            self.notes.append(f"explained is {MASK} number {at} of {masks}; the others stay hidden")

    def gap(self, text: str) -> tuple[list[int], MaskGap]:
        ids, gaps = self.spelling.tokenize(text)
        return ids, gaps[self.at]

    def row(self, text: str) -> tuple[list[int], int]:
        ids, gap = self.gap(text)
        return self.marks.wrap(ids), gap.position + len(self.marks.prefix) - self.loaded.task.mask_shift

    def pieces_of(self, word: str) -> list[int]:
        return self.spelling.tokens_at(self.gap(self.text)[1], word)

    def closed(self, text: str) -> list[tuple[int, int]]:
        return masks_in(text, self.spelling.masks)


class Translation(Case):
    """Why a translation, the run's own or a given one, is likely: what the words of its source weigh."""

    kind = "translation"

    def __init__(self, loaded: Pipeline, texts: list[str], label: str | None):
        self.loaded, self.task, self.model = loaded, loaded.translation_task(), loaded.model
        self.length = sequence_length(loaded.model, loaded.config.train)
        self.target = loaded.translate(texts[0])[0] if label is None else label
        if not self.target.strip():
            raise UserError(f"{loaded.run}: says nothing of this text; give a translation with --label")
        self.source = self.prepared([texts])
        check_fits(loaded, self.task, self.source)
        self.notes = ["a translation's probability is the mean of its tokens' (geometric)"]

    def prepared(self, variants: Sequence[Sequence[str]]) -> Any:
        rows = {"source": [text for (text,) in variants], "target": [self.target] * len(variants)}
        return self.task.prepare(Records("text", list(range(1, len(variants) + 1)), rows))

    def likelihoods(self, model: Model, batch: Batch) -> Tensor:
        """(N,) the log-probability of the translation, all its tokens together."""
        labels = batch.labels["token"]
        scores = model.heads["token"](model(batch).hidden).log_softmax(-1)
        told = scores.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return told.masked_fill(labels == IGNORE_INDEX, 0).sum(1)

    @torch.no_grad()
    def chances(self, variants: Sequence[Sequence[str]]) -> np.ndarray:
        examples = self.task.examples(self.prepared(variants), length=self.length)
        found = []
        for part in token_batches(range(len(variants)), lambda row: self.length, self.model.device):
            batch = examples.batch(part).to(self.model.device)
            count = (batch.labels["token"] != IGNORE_INDEX).sum(1)
            found.append((self.likelihoods(self.model, batch) / count).exp().cpu().numpy()[:, None])
        return np.concatenate(found)

    def choose(self, label: str | None, chances: np.ndarray) -> int:
        return 0

    def name(self, number: int) -> str:
        return self.target

    def weights(self, target: int, *, averaged: bool) -> list[tuple[str, float]]:
        steps = attribution.STEPS if averaged else 1
        batch = self.task.examples(self.source, length=self.length).batch([0] * steps).to(self.model.device)
        assert batch.source is not None
        tokens = batch.source.tokens
        fixed = torch.zeros_like(tokens, dtype=torch.bool)
        fixed[:, -1] = True  # the end mark
        blank = cast(EncoderDecoder, self.model.backbone).encoder.tokens.weight.detach().mean(0)
        (found,) = integrated_gradients(
            self.model, batch, self.likelihoods, blank=blank, steps=steps, fixed=fixed, averaged=averaged
        )
        return [
            (self.task.source_tokenizer.id_to_token(token), value)
            for token, value in zip(tokens[0, :-1].tolist(), found[:-1].tolist(), strict=True)
        ]
