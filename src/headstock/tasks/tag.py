"""Token classification: part-of-speech tags or named entities. A word is tagged at its first token.

B sequences, N sentences (one sequence each unless a long one is split), T tokens, W words, C classes, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.records import Records
from headstock.data.tagged import read_tagged
from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import Window, windows
from headstock.data.words import WORD, join_words, word_spans
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, pad
from headstock.model.heads import ClassificationHead
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, cross_entropy
from headstock.tasks.calibration import risk_coverage
from headstock.tasks.class_labels import refuse_unknown
from headstock.tasks.classify import mean_nll
from headstock.tasks.error_analysis import (
    confusions,
    error_record,
    length_analysis,
    most_confident_errors,
    reliability,
)
from headstock.tasks.graph_spec import TAG, GraphSpec
from headstock.tasks.labelled import (
    Attribution,
    EncodedRows,
    HeadConfig,
    LabelledTask,
    Nouns,
    RowExamples,
    RowLocations,
    RowMetrics,
    pad_sequences,
    texts_in,
)
from headstock.tasks.predictions import Prediction
from headstock.tasks.text_metrics import entity_counts, is_entity_scheme
from headstock.tasks.widgets import DisplayPart, coloured_words


@dataclass(frozen=True)
class TagConfig(HeadConfig):
    """Long sentences are split into windows that overlap by half; a word is tagged where it has most context."""

    classes: tuple[str, ...] = ()  # from the training rows unless given
    closed: bool = False  # a separator ends the sentence, as in pretraining


@dataclass
class EncodedSentences(EncodedRows):
    """Sentences as words and tokens; the labels are (W,) class ids for each sentence."""

    words: list[list[str]]
    word_starts: list[np.ndarray]  # (W,) the index of each word's first token


@dataclass(frozen=True, eq=False)
class TagPrediction(Prediction):
    """The tag of every word of a sentence."""

    tokens: list[str]  # the words
    tags: list[str]
    probabilities: list[float]  # of the tags


@TASKS.add("tag")
class Tag(LabelledTask):
    """Predicts a class for every word."""

    Config: ClassVar[type] = TagConfig
    prediction_class: ClassVar[type[Prediction]] = TagPrediction
    target = "tags"
    input_column = "tokens"
    input_columns = ("tokens",)
    example_row: ClassVar[Any] = {"tokens": ["Anne", "likes", "Paris", "."]}
    lens = "tag"
    huggingface_head = "ForTokenClassification"
    title = "word tagger"
    nouns = Nouns(
        "sentence",
        "word",
        "sentence",
        "sentences with a wrong tag",
        "tagging accuracy",
        "Calibration is over words; by length, a sentence is correct if all of its tags are.",
    )
    input_example = "Anne Martin works in Paris for the city."
    row_form = "a text (str), or a list of words such as ['It', 'rains', '.']"

    def __init__(self, config: TagConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.scores_entities = is_entity_scheme(config.classes)
        self.primary_metric = self.selection_metric = "f1" if self.scores_entities else "accuracy"

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        width, mixed = self.head_input(backbone)
        return {"tag": ClassificationHead(width, len(self.config.classes), dropout=self.config.dropout, mixed=mixed)}

    # From records to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_tagged(path, **options)

    def is_row(self, row: Any) -> bool:
        return isinstance(row, str) or texts_in(row) is not None

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """A row is a list of words, or a text that is split into words."""
        self.check_rows(rows)
        words = [[row[a:b] for a, b in word_spans(row)] if isinstance(row, str) else list(row) for row in rows]
        return {"tokens": words, "running": [row if isinstance(row, str) else None for row in rows]}

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        return config if config.classes else replace(config, classes=find_tags(records))

    def check(self, records: Records) -> None:
        if "tags" in records.columns:
            tag_ids(records, self.config.classes)

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedSentences:
        sentences = records.columns["tokens"]
        texts = records.columns.get("running") or [None] * len(sentences)  # of rows that are not lists of words
        joined = [
            join_words(words) if text is None else (text, word_spans(text))
            for words, text in zip(sentences, texts, strict=True)
        ]
        unknown = self.bos if self.tokenizer.unk is None else self.tokenizer.unk  # for words that the tokenizer drops
        tokens, word_starts = [], []
        for (text, spans), ids in zip(joined, self.tokenizer.encode_batch([text for text, _ in joined]), strict=True):
            sentence_tokens, starts = locate_words(ids, self.tokenizer.offsets(text), spans, unknown=unknown)
            tokens.append(sentence_tokens)
            word_starts.append(np.array(starts, dtype=np.int64))
        labels = tag_ids(records, self.config.classes) if labelled and "tags" in records.columns else None
        return EncodedSentences(tokens, labels, RowLocations(records), sentences, word_starts)

    def row_examples(self, data: EncodedSentences, length: int) -> Examples:
        return SentenceExamples(self, data, length)

    # From batches to predictions

    def word_logits(self, model: Model, batch: Batch) -> Tensor:
        """(B, W, C) the logits of every word; at padding, of the first token."""
        positions = batch.labels["word_positions"].clamp(min=0)  # (B, W)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return model.heads["tag"](self.token_features(model, batch)[rows, positions]).float()  # (B, T, D) -> (B, W, D)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        labels, logits = batch.labels["tag"], self.word_logits(model, batch)
        predicted = logits.argmax(-1)
        sums = {"tag": cross_entropy(logits, labels, smoothing=smoothing), "correct": (predicted == labels).sum()}
        if self.scores_entities and not model.training:  # computed on the CPU, so only in validation
            is_word = labels != IGNORE_INDEX
            sizes = words_per_sentence(batch, is_word)
            true_tags, predicted_tags = (
                [part.numpy() for part in values[is_word].cpu().split(sizes)] for values in (labels, predicted)
            )
            numerators, denominators = self.entity_counts(true_tags, predicted_tags)
            sums["f1_numerator"] = labels.new_tensor(numerators.sum())
            sums["f1_denominator"] = labels.new_tensor(denominators.sum())
        return sums

    def entity_counts(
        self, labels: Sequence[np.ndarray], predicted: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(N,) numerators and denominators of the entity F1, from class ids of each sentence."""
        classes = self.config.classes
        true_tags, predicted_tags = ([[classes[i] for i in row] for row in rows] for rows in (labels, predicted))
        return entity_counts(predicted_tags, true_tags)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tag": int((batch.labels["tag"] != IGNORE_INDEX).sum())}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        words = max(1, counts["tag"])
        metrics = {"loss": sums["tag"] / words, "accuracy": sums["correct"] / words}
        if "f1_denominator" in sums:
            metrics["f1"] = sums["f1_numerator"] / max(1.0, sums["f1_denominator"])
        return metrics

    def outputs(self, model: Model, batch: Batch) -> list[Tensor]:
        """(W, C) tag probabilities of each sentence."""
        is_word = batch.labels["word_positions"] != IGNORE_INDEX
        probabilities = self.word_logits(model, batch)[is_word].softmax(-1)
        return list(probabilities.split(words_per_sentence(batch, is_word)))

    def predictions(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Words, tags and the probability of each tag."""
        return [
            {
                "tokens": words,
                "tags": [self.config.classes[i] for i in probabilities.argmax(-1)],
                "probabilities": [round(float(p), 6) for p in probabilities.max(-1)],
            }
            for words, probabilities in zip(data.words, outputs, strict=True)
        ]

    def as_text(self, prediction: dict[str, Any]) -> str:
        """CoNLL format: one word and tag per line."""
        return "".join(f"{word}\t{tag}\n" for word, tag in zip(prediction["tokens"], prediction["tags"], strict=True))

    def display(self, row: Any, prediction: Mapping[str, Any]) -> list[DisplayPart]:
        text, spans = (row, word_spans(row)) if isinstance(row, str) else join_words(row)
        return [coloured_words(text, spans, prediction["tags"], prediction["probabilities"])]

    # Metrics and error analysis

    def row_metrics(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> RowMetrics:
        predicted = [probabilities.argmax(-1) for probabilities in outputs]
        correct = [float((tags == labels).sum()) for tags, labels in zip(predicted, data.labels, strict=True)]
        words = [float(len(labels)) for labels in data.labels]
        metrics = {"accuracy": (np.array(correct), np.array(words))}
        if self.scores_entities:
            metrics["f1"] = self.entity_counts(data.labels, predicted)
        return metrics

    def extra_metrics(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        return {"loss": mean_nll(np.concatenate(outputs), np.concatenate(data.labels))}

    def true_class_ids(self, data: EncodedSentences) -> np.ndarray | None:
        return None if data.labels is None else np.concatenate(data.labels)

    def confidences(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Of every word."""
        probabilities = np.concatenate(outputs)
        return probabilities.max(-1), probabilities.argmax(-1) == np.concatenate(data.labels)

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """Confusion and calibration over words; by length, a sentence is correct if all of its words are."""
        confidence, correct = self.confidences(data, outputs)
        true, predicted = np.concatenate(data.labels), np.concatenate(outputs).argmax(-1)
        sizes = np.array([len(labels) for labels in data.labels])
        starts = np.cumsum(sizes) - sizes  # the first word of each sentence; no sentence is empty
        classes, errors = self.config.classes, []
        for word in most_confident_errors(confidence, correct):
            row = int(np.searchsorted(starts, word, side="right")) - 1
            index = int(word - starts[row])
            text, spans = join_words(data.words[row])
            errors.append(
                error_record(
                    f"{data.locations[row]}, word {index + 1}",
                    text,
                    label=classes[true[word]],
                    predicted=classes[predicted[word]],
                    confidence=confidence[word],
                    marks=[[*spans[index], "said"]],
                    subject=data.words[row][index],
                )
            )
        return {
            **confusions(true, predicted, len(classes)),
            "lengths": length_analysis(sizes, np.logical_and.reduceat(correct, starts), errors=self.nouns.errors),
            "calibration": reliability(confidence, correct),
            "risk_coverage": risk_coverage(confidence, correct),
            "slices": self.built_in_slice_scores(rows, data, outputs),
            "mistakes": errors,
        }

    # Export

    def graph_spec(self) -> GraphSpec:
        return GraphSpec(
            "tagging",
            "Which tag each word of a text has.",
            settings={"classes": list(self.config.classes), "word": f"(?ix){WORD.pattern}"},
            script=TAG,
            needs_offsets=True,
            limits="It reads one row: words beyond its length have no tag, where Headstock reads on in further rows.",
        )

    def graph_outputs(self, model: Model, batch: Batch) -> Tensor:
        """(B, T, C) the scores of every token."""
        return model.heads["tag"](self.token_features(model, batch))


class SentenceExamples(RowExamples):
    """Sentences as sequences of tokens, with the position and tag of each word."""

    data: EncodedSentences

    def __init__(self, task: Tag, data: EncodedSentences, length: int):
        super().__init__(data)
        self.special, self.capacity = task.special, task.special.capacity(length)
        sizes = [[window.size + len(self.special) for window in self.windows(row)] for row in range(len(data))]
        self.lengths = np.array([sum(row) for row in sizes])

    def windows(self, index: int) -> list[Window]:
        """The windows in which a sentence is read; each word is tagged where it has most context."""
        return windows(len(self.data.tokens[index]), self.capacity, centered=True)

    def batch(self, indices: Sequence[int]) -> Batch:
        sequences = [
            [self.special.wrap(self.data.tokens[index][window.start : window.end]) for window in self.windows(index)]
            for index in indices
        ]
        positions, labels = [], []
        for index in indices:
            starts = self.data.word_starts[index]
            for window in self.windows(index):
                words = np.flatnonzero((window.keep_start <= starts) & (starts < window.keep_end))
                positions.append((starts[words] - window.start + len(self.special.prefix)).tolist())
                if self.data.labels is not None:
                    labels.append(self.data.labels[index][words].tolist())
        padded, padding, example_ids = pad_sequences(sequences, self.special.pad)
        word_labels = {"word_positions": positions} | ({"tag": labels} if labels else {})
        padded_labels = {name: pad(rows, IGNORE_INDEX)[0] for name, rows in word_labels.items()}
        return Batch(padded, padding, example_ids=example_ids, labels=padded_labels)


def words_per_sentence(batch: Batch, is_word: Tensor) -> list[int]:
    counts = is_word.sum(1)  # of each sequence
    if batch.example_ids is None:
        return counts.tolist()
    return counts.new_zeros(int(batch.example_ids[-1]) + 1).index_add(0, batch.example_ids, counts).tolist()


def locate_words(
    ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], *, unknown: int
) -> tuple[list[int], list[int]]:
    """A text's tokens, and for each word the index of the token with its first character.

    Two words may share a token. A word that the tokenizer drops gets the token `unknown`.
    """
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64)) if offsets else np.zeros(0)
    first = np.searchsorted(ends, [start for start, _ in spans], side="right").tolist()
    dropped = [i == len(ids) or offsets[i][0] >= end for i, (_, end) in zip(first, spans, strict=True)]
    if not any(dropped):
        return ids, first
    tokens: list[int] = []
    starts, copied = [], 0
    for index, is_dropped in zip(first, dropped, strict=True):
        tokens += ids[copied:index]
        copied = index
        starts.append(len(tokens))
        if is_dropped:
            tokens.append(unknown)
    return tokens + ids[copied:], starts


def find_tags(records: Records) -> tuple[str, ...]:
    """The distinct tags in alphabetical order."""
    names = sorted({tag for tags in records.columns["tags"] for tag in tags})
    if len(names) < 2:
        raise UserError(f"{records.source}: only one tag, {names[0]!r}; there must be at least two")
    return tuple(names)


def tag_ids(records: Records, classes: Sequence[str]) -> list[np.ndarray]:
    """(W,) tag ids of each sentence; unknown tags are refused with their first locations."""
    class_ids = {name: i for i, name in enumerate(classes)}
    unknown: dict[str, str] = {}
    for row, (words, tags) in enumerate(zip(records.columns["tokens"], records.columns["tags"], strict=True)):
        for index, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
            if tag not in class_ids:
                unknown.setdefault(tag, f"{records.location(row)}: tag {tag!r} of word {index}, {word!r}, is new")
    refuse_unknown(list(unknown.items()), classes)
    return [np.array([class_ids[tag] for tag in tags], dtype=np.int64) for tags in records.columns["tags"]]
