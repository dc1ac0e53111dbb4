"""Token classification: part-of-speech tags or named entities. A word is tagged at its first token.

B sequences, N sentences (one sequence each unless a long one is split), T tokens, W words, C classes, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.records import Records
from headstock.data.tagged import read_tagged
from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import Window, windows
from headstock.data.words import WORD, join_words, word_spans
from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, pad
from headstock.model.heads import ClassificationHead
from headstock.model.layer_features import feature_width
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, cross_entropy
from headstock.tasks.class_labels import listed
from headstock.tasks.entities import entity_counts as entity_tallies
from headstock.tasks.entities import is_entity_scheme
from headstock.tasks.error_analysis import calibration, class_errors, confusions, length_analysis
from headstock.tasks.graph_spec import TAG, GraphSpec
from headstock.tasks.labelled import Attribution, CachedFeatures, LabelledTask, RowMetrics, texts_in
from headstock.tasks.wording import Nouns

LEAST = 1e-12  # lower bound of probabilities in logarithms


@dataclass(frozen=True)
class TagConfig:
    """Long sentences are split into windows that overlap by half; a word is tagged where it has most context."""

    classes: tuple[str, ...] = ()  # from the training rows unless given
    layers: str = "last"  # features to read: last, sum4, concat4, mix, or a layer's number
    dropout: float = 0.1  # before the head
    opening: Literal["start", "cls"] = "start"  # the first special token, as in pretraining
    closed: bool = False  # a separator ends the sentence, as in pretraining

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigError([("dropout", f"must be from 0 to below 1, not {self.dropout}")])


@dataclass
class EncodedSentences:
    """Sentences as words and tokens, with their tags as class ids where they have any."""

    words: list[list[str]]
    pieces: list[list[int]]
    starts: list[list[int]]  # the index of each word's first token
    labels: list[np.ndarray] | None  # (W,) each
    places: list[str]
    bytes: int

    def __len__(self) -> int:
        return len(self.words)

    def select(self, rows: Sequence[int]) -> "EncodedSentences":
        labels = None if self.labels is None else [self.labels[i] for i in rows]
        words, places = [self.words[i] for i in rows], [self.places[i] for i in rows]
        pieces, starts = [self.pieces[i] for i in rows], [self.starts[i] for i in rows]
        return EncodedSentences(words, pieces, starts, labels, places, self.bytes)


@TASKS.add("tag")
class Tag(LabelledTask):
    """Predicts a class for every word."""

    Config: ClassVar[type] = TagConfig
    target = "tags"
    input_column = "tokens"
    lens = "tag"
    huggingface_head = "ForTokenClassification"
    title = "tagger of words"
    nouns = Nouns(
        "sentence",
        "word",
        "sentence",
        "sentences with a wrong tag",
        "share of words tagged right",
        "Calibration looks at each word; of lengths, a sentence is right if all its tags are.",
    )
    row_form = "a text (str), or a list of words such as ['It', 'rains', '.']"

    def __init__(self, config: TagConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.entities = is_entity_scheme(config.classes)
        self.primary_metric = "f1" if self.entities else "accuracy"

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        width = feature_width(backbone.width, self.config.layers)
        mixed = backbone.depth + 1 if self.config.layers == "mix" else None
        return {"tag": ClassificationHead(width, len(self.config.classes), dropout=self.config.dropout, mixed=mixed)}

    # From records to batches

    @classmethod
    def read_rows(cls, path: str | Path, config: Any, **options: Any) -> Records:
        return read_tagged(path, **options)

    @staticmethod
    def is_row(row: Any) -> bool:
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
            tag_numbers(records, self.config.classes)

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedSentences:
        words = records.columns["tokens"]
        running = records.columns.get("running") or [None] * len(words)
        joined = [
            join_words(sentence) if text is None else (text, word_spans(text))
            for sentence, text in zip(words, running, strict=True)
        ]
        pieces, starts = [], []
        for (text, spans), ids in zip(joined, self.tokenizer.encode_batch([text for text, _ in joined]), strict=True):
            found = with_starts(ids, self.tokenizer.offsets(text), spans, missing=self.missing)
            pieces.append(found[0])
            starts.append(found[1])
        labels = None
        if labelled and "tags" in records.columns:
            labels = tag_numbers(records, self.config.classes)
        places = [records.location(i) for i in range(len(records))]
        return EncodedSentences(words, pieces, starts, labels, places, sum(len(text.encode()) for text, _ in joined))

    @property
    def missing(self) -> int:
        """The token for a word that the tokenizer drops."""
        return self.bos if self.tokenizer.unk is None else self.tokenizer.unk

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if isinstance(data, CachedFeatures):
            return self.with_features(SentenceExamples(self, data.data, length), data)
        return SentenceExamples(self, data, length)

    # From batches to numbers

    def read(self, model: Model, batch: Batch) -> Tensor:
        """(B, W, C) the logits of every word; at padding, of the first token."""
        places = batch.labels["places"].clamp(min=0)  # (B, W)
        rows = torch.arange(len(places), device=places.device)[:, None]
        return model.heads["tag"](self.token_features(model, batch)[rows, places]).float()  # (B, T, D) -> (B, W, D)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        labels, scores = batch.labels["tag"], self.read(model, batch)
        chosen = scores.argmax(-1)
        sums = {"tag": cross_entropy(scores, labels, smoothing=smoothing), "correct": (chosen == labels).sum()}
        if self.entities and not model.training:  # computed on the CPU, so only in validation
            wanted = labels != IGNORE_INDEX
            sizes = words_of_each(batch, wanted)
            hits, either = self.entity_counts(by_sentence(labels[wanted], sizes), by_sentence(chosen[wanted], sizes))
            sums |= {"found": labels.new_tensor(hits.sum()), "either": labels.new_tensor(either.sum())}
        return sums

    def entity_counts(
        self, labels: Sequence[np.ndarray], chosen: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(N,) twice the correct entities, and (N,) the sum of true and predicted ones."""
        names = self.config.classes
        true, said = ([[names[i] for i in row] for row in rows] for rows in (labels, chosen))
        return entity_tallies(said, true)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tag": int((batch.labels["tag"] != IGNORE_INDEX).sum())}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        words = max(1, counts["tag"])
        metrics = {"loss": sums["tag"] / words, "accuracy": sums["correct"] / words}
        if "either" in sums:
            metrics["f1"] = sums["found"] / max(1.0, sums["either"])
        return metrics

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        """The primary metric first; the loss breaks ties."""
        return -metrics[self.primary_metric] + 1e-7 * metrics["loss"] / (
            1 + metrics["loss"]
        )  # below the weight of one word in a million

    def outputs(self, model: Model, batch: Batch) -> list[Tensor]:
        """(W, C) tag probabilities of each sentence."""
        wanted = batch.labels["places"] != IGNORE_INDEX
        likely = self.read(model, batch)[wanted].softmax(-1)
        return list(likely.split(words_of_each(batch, wanted)))

    def predictions(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Words, tags and the probability of each tag."""
        return [
            {
                "tokens": words,
                "tags": [self.config.classes[i] for i in likely.argmax(-1)],
                "probabilities": [round(float(p), 6) for p in likely.max(-1)],
            }
            for words, likely in zip(data.words, outputs, strict=True)
        ]

    def as_text(self, prediction: dict[str, Any]) -> str:
        """CoNLL format: one word and tag per line."""
        return "".join(f"{word}\t{tag}\n" for word, tag in zip(prediction["tokens"], prediction["tags"], strict=True))

    def row_metrics(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> RowMetrics:
        assert data.labels is not None
        chosen = [likely.argmax(-1) for likely in outputs]
        hits = [float((one == labels).sum()) for one, labels in zip(chosen, data.labels, strict=True)]
        tallies = {"accuracy": (np.array(hits), np.array([float(len(labels)) for labels in data.labels]))}
        if self.entities:
            tallies["f1"] = self.entity_counts(data.labels, chosen)
        return tallies

    def true_class_ids(self, data: EncodedSentences) -> np.ndarray | None:
        return None if data.labels is None else np.concatenate(data.labels)

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

    def confidences(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Of every word."""
        assert data.labels is not None
        probabilities = np.concatenate(outputs)
        return probabilities.max(-1), probabilities.argmax(-1) == np.concatenate(data.labels)

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """Confusion and calibration over words; by length, a sentence is correct if all of its words are."""
        probabilities, true = np.concatenate(outputs), np.concatenate(data.labels)  # (words, C), (words,)
        sizes = np.array([len(labels) for labels in data.labels])
        correct = [bool((one.argmax(-1) == labels).all()) for one, labels in zip(outputs, data.labels, strict=True)]
        return {
            **confusions(true, probabilities.argmax(1), len(self.config.classes)),
            "lengths": length_analysis(sizes, np.array(correct), called=self.nouns.wrong),
            "calibration": calibration(probabilities, true),
            "mistakes": self.wrong_words(data, probabilities, true, sizes),
        }

    def wrong_words(
        self, data: EncodedSentences, probabilities: np.ndarray, true: np.ndarray, sizes: np.ndarray
    ) -> list[dict[str, Any]]:
        """The most confident ones, each in its sentence, where `marks` gives its characters."""
        mistakes, begins = [], np.cumsum(sizes) - sizes
        for at in class_errors(probabilities, true):
            row = int(np.searchsorted(begins, at, side="right")) - 1  # no sentence is empty
            word = int(at - begins[row])
            text, spans = join_words(data.words[row])
            mistakes.append(
                {
                    "place": f"{data.places[row]}, word {word + 1}",
                    "text": text,
                    "marks": [[*spans[word], "said"]],
                    "subject": data.words[row][word],
                    "label": self.config.classes[true[at]],
                    "predicted": self.config.classes[int(probabilities[at].argmax())],
                    "confidence": round(float(probabilities[at].max()), 5),
                    "tokens": [],
                }
            )
        return mistakes

    def extra_metrics(self, data: EncodedSentences, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        assert data.labels is not None
        labels = np.concatenate(data.labels)
        likely = np.concatenate(outputs)[np.arange(len(labels)), labels]
        return {"loss": float(-np.log(np.maximum(likely, LEAST)).mean())}


class SentenceExamples:
    """Sentences as sequences of tokens, with the position and tag of each word."""

    def __init__(self, task: Tag, data: EncodedSentences, length: int):
        self.task, self.data = task, data
        marks = 1 + len(task.suffix)
        self.room = max(1, length - marks)
        self.lengths = np.array([sum(window.size + marks for window in self.windows(i)) for i in range(len(data))])

    def __len__(self) -> int:
        return len(self.data)

    def windows(self, index: int) -> list[Window]:
        """The windows in which a sentence is read; each word is tagged where most is around its first piece."""
        return windows(len(self.data.pieces[index]), self.room, centered=True)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows, places, labels, owners = [], [], [], []
        for owner, index in enumerate(indices):
            starts = np.asarray(self.data.starts[index], dtype=np.int64)
            for window in self.windows(index):
                mine = np.flatnonzero((window.keep_start <= starts) & (starts < window.keep_end))
                pieces = self.data.pieces[index][window.start : window.end]
                rows.append([self.task.bos, *pieces, *self.task.suffix])
                places.append((starts[mine] - window.start + 1).tolist())
                if self.data.labels is not None:
                    labels.append(self.data.labels[index][mine].tolist())
                owners.append(owner)
        tokens, padding = pad(rows, self.task.pad_id)
        told = {"places": pad_labels(places)} | ({"tag": pad_labels(labels)} if labels else {})
        several = torch.tensor(owners) if len(rows) > len(indices) else None
        return Batch(tokens, padding, example_ids=several, labels=told)

    def name(self, index: int) -> str:
        return self.data.places[index]


def pad_labels(rows: list[list[int]]) -> Tensor:
    return pad(rows, IGNORE_INDEX)[0]


def words_of_each(batch: Batch, wanted: Tensor) -> list[int]:
    """The number of words of each sentence in a batch."""
    by_row = wanted.sum(1)
    if batch.example_ids is None:
        return by_row.tolist()
    return by_row.new_zeros(int(batch.example_ids[-1]) + 1).index_add(0, batch.example_ids, by_row).tolist()


def by_sentence(values: Tensor, sizes: list[int]) -> list[np.ndarray]:
    return [part.numpy() for part in values.cpu().split(sizes)]


def with_starts(
    ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], *, missing: int
) -> tuple[list[int], list[int]]:
    """A text's tokens, and for each word the index of the token with its first character.

    Two words may share a token. A word that the tokenizer drops gets the token `missing`.
    """
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64)) if offsets else np.zeros(0)
    first = np.searchsorted(ends, [begin for begin, _ in spans], side="right").tolist()
    lost = [at == len(ids) or offsets[at][0] >= end for at, (_, end) in zip(first, spans, strict=True)]
    if not any(lost):
        return ids, first
    pieces: list[int] = []
    starts, taken = [], 0
    for at, gone in zip(first, lost, strict=True):
        pieces += ids[taken:at]
        taken = at
        starts.append(len(pieces))
        if gone:
            pieces.append(missing)
    return pieces + ids[taken:], starts


def find_tags(records: Records) -> tuple[str, ...]:
    """The distinct tags in alphabetical order."""
    names = sorted({tag for tags in records.columns["tags"] for tag in tags})
    if len(names) < 2:
        raise UserError(f"{records.source}: one tag only, {names[0]!r}; there must be at least two to tell apart")
    return tuple(names)


def tag_numbers(records: Records, classes: Sequence[str]) -> list[np.ndarray]:
    """(W,) tag ids of each sentence; unknown tags are refused with their first locations."""
    number = {name: i for i, name in enumerate(classes)}
    new: dict[str, str] = {}
    found = []
    for i, (words, tags) in enumerate(zip(records.columns["tokens"], records.columns["tags"], strict=True)):
        for place, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
            if tag not in number:
                new.setdefault(tag, f"{records.location(i)}: tag {tag!r} of word {place}, {word!r}, is new")
        found.append(np.array([number.get(tag, IGNORE_INDEX) for tag in tags], dtype=np.int64))
    if new:
        told = [f"{what}; training has {listed(classes)}{did_you_mean(tag, classes)}" for tag, what in new.items()]
        raise UserError("; ".join([*told[:5], *([f"and {len(told) - 5} more"] if len(told) > 5 else [])]))
    return found
