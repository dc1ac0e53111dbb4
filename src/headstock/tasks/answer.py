"""Extractive question answering: the start and end of an answer in a context.

B sequences, N questions (several sequences each where the context is long), R sequences of one question, T tokens,
W context tokens in a sequence. A sequence is [CLS] question [SEP] window of the context [SEP].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.data.qa import read_questions
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import windows
from headstock.errors import ConfigError, UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, pad
from headstock.model.heads import SpanHead
from headstock.model.layer_features import feature_width
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples
from headstock.tasks.error_analysis import length_analysis, most_confident_errors, reliability
from headstock.tasks.graph_spec import ANSWER, GraphSpec
from headstock.tasks.graph_spec import NO_ANSWER as ABSTAIN
from headstock.tasks.labelled import Attribution, CachedFeatures, LabelledTask, RowMetrics, separator_id
from headstock.tasks.squad_metrics import exact_match, f1
from headstock.tasks.wording import Nouns

MARKS = 3  # the first token, and a separator after question and context
EXCERPT = 240  # characters of a context that a report shows on either side of an answer
NO_ANSWER = "(no answer)"
LEAST_ROOM = 8  # fewest context tokens in a sequence


@dataclass(frozen=True)
class AnswerConfig:
    layers: str = "last"  # features to score: last, sum4, concat4, mix, or a layer's number
    dropout: float = 0.1  # before the head
    opening: Literal["start", "cls"] = "start"  # the first special token, as in pretraining
    longest_question: int = 64  # tokens; longer questions are truncated
    longest_answer: int = 30  # tokens
    stride: int | None = None  # between the windows of a long context; half a window unless given
    unanswerable: bool = False  # some questions have no answer; inferred from the training rows
    threshold: float = 0.0  # margin in log-probability by which "no answer" must exceed the best answer

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.dropout < 1:
            problems.append(("dropout", f"must be from 0 to below 1, not {self.dropout}"))
        for name in ("longest_question", "longest_answer", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append((name, f"must be 1 or more, not {value}"))
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Passage:
    """A context with the characters of each of its tokens."""

    text: str
    tokens: list[int]
    spans: np.ndarray  # (T, 2) first character, one past the last

    @cached_property
    def blank(self) -> np.ndarray:
        """(T,) True for tokens that are only white space, which an answer cannot start or end with."""
        return np.array([not self.text[begin:end].strip() for begin, end in self.spans.tolist()], dtype=bool)

    def tokens_of(self, begin: int, end: int) -> tuple[int, int] | None:
        """The first and last token that overlap these characters."""
        found = np.flatnonzero((self.spans[:, 0] < end) & (self.spans[:, 1] > begin))
        return (int(found[0]), int(found[-1])) if len(found) else None

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """The characters from one token to another, stripped of white space."""
        begin, end = int(self.spans[first : last + 1, 0].min()), int(self.spans[first : last + 1, 1].max())
        text = self.text[begin:end]
        return begin + len(text) - len(text.lstrip()), begin + len(text.rstrip())


@dataclass
class EncodedQuestions:
    """Tokenized questions; those about the same context share its Passage."""

    tokens: list[list[int]]
    passages: list[Passage]  # one per question
    gold: list[tuple[int, int] | None]  # first and last token of the first answer; None for none
    labels: list[list[str]] | None  # all reference answers; empty where there is none
    ids: list[str]
    places: list[str]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        return sum(len(passage.text.encode()) for passage in {id(p): p for p in self.passages}.values())

    def select(self, rows: Sequence[int]) -> "EncodedQuestions":
        def chosen(values: list[Any]) -> list[Any]:
            return [values[i] for i in rows]

        labels = None if self.labels is None else chosen(self.labels)
        texts = chosen(self.tokens), chosen(self.passages), chosen(self.gold)
        return EncodedQuestions(*texts, labels, chosen(self.ids), chosen(self.places))


@TASKS.add("answer")
class Answer(LabelledTask):
    """Predicts the span of a context that answers a question, or that there is none.

    Every context token is scored as start and as end of the answer; the scores of the first token mean "not in this
    window". In a causal model the first token sees nothing, so that "no answer" is a fixed threshold.
    """

    Config: ClassVar[type] = AnswerConfig
    target = "answers"
    input_column = "question"
    answers_questions = True
    texts_per_row = 2
    row_description = "a question and its context"
    row_form = '{"question": "Who came?", "context": "Anne came."}'
    primary_metric = "f1"
    huggingface_head = "ForQuestionAnswering"
    title = "model that answers questions"
    nouns = Nouns(
        "question",
        "question",
        "context",
        "contexts of wrong answers",
        "share of answers found exactly",
        "An answer is right here if it is just what one of the true answers is.",
    )

    def __init__(self, config: AnswerConfig, tokenizer: Tokenizer | None):
        super().__init__(config, tokenizer)
        if tokenizer is not None:
            self.separator = separator_id(tokenizer)

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        mixed = backbone.depth + 1 if self.config.layers == "mix" else None
        width = feature_width(backbone.width, self.config.layers)
        return {"span": SpanHead(width, dropout=self.config.dropout, mixed=mixed)}

    def weight(self, head: str) -> float:
        return 0.5  # start and end share one loss

    # From records to batches

    @classmethod
    def read_rows(cls, path: str | Path, config: Any, **options: Any) -> Records:
        return read_questions(path, **options)

    @staticmethod
    def is_row(row: Any) -> bool:
        return isinstance(row, Mapping) and all(isinstance(row.get(name), str) for name in ("question", "context"))

    def row_from_texts(self, texts: Sequence[str]) -> dict[str, str]:
        return {"question": texts[0], "context": texts[1]}

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        self.check_rows(rows)
        for row in rows:
            for name in ("question", "context"):
                if not row[name].strip():
                    raise UserError(f"the {name} is empty")
        ids = [str(row.get("id", number)) for number, row in enumerate(rows, 1)]
        return {name: [row[name] for row in rows] for name in ("context", "question")} | {"id": ids}

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        some_without = not all(records.columns["answers"])
        return replace(config, unanswerable=config.unanswerable or some_without)

    def check(self, records: Records) -> None:
        """The reader has already checked that answers occur in their contexts."""

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedQuestions:
        contexts, answers = records.columns["context"], records.columns.get("answers") if labelled else None
        distinct = list(dict.fromkeys(contexts))
        passages = {
            text: Passage(text, tokens, np.array(self.tokenizer.offsets(text), dtype=np.int64).reshape(-1, 2))
            for text, tokens in zip(distinct, self.tokenizer.encode_batch(distinct), strict=True)
        }
        about = [passages[text] for text in contexts]
        tokens = self.tokenizer.encode_batch(records.columns["question"])
        places = [records.location(i) for i in range(len(records))]
        return EncodedQuestions(
            [ids[: self.config.longest_question] for ids in tokens],
            about,
            [gold_tokens(*row) for row in zip(about, answers or [[]] * len(about), strict=True)],
            None if answers is None else [[answer["text"] for answer in given] for given in answers],
            records.columns.get("id", places),
            places,
        )

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if isinstance(data, CachedFeatures):
            return self.with_features(self.examples(data.data, length=length), data)
        return QuestionExamples(self, data, length)

    def windows(self, count: int, room: int) -> list[tuple[int, int]]:
        """The windows over `count` context tokens for sequences with room for `room` of them."""
        return [(window.start, window.end) for window in windows(count, room, stride=self.config.stride)]

    # From batches to numbers

    def scores(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, T, 2) log-probabilities of start and end at each token, and (B, T) True at context tokens."""
        assert batch.segments is not None
        context = (batch.segments == 1) & (batch.tokens != self.separator)
        if batch.padding is not None:
            context &= ~batch.padding
        allowed = context.clone()
        allowed[:, 0] = True  # the opening mark, for "not here"
        scores = model.heads["span"](self.token_features(model, batch)).float()
        return scores.masked_fill(~allowed[..., None], -torch.inf).log_softmax(1), context

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        scores, context = self.scores(model, batch)
        with torch.no_grad():
            hits, questions = self.hits(scores, context, batch)
        start, end = (
            span_loss(scores[..., i], batch.labels[head], smoothing) for i, head in enumerate(("start", "end"))
        )
        return {"start": start, "end": end, "correct": hits, "questions": questions}

    def hits(self, scores: Tensor, context: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The number of questions whose predicted span is exactly the first answer, and the number of questions."""
        start, end = batch.labels["start"], batch.labels["end"]
        owners = torch.arange(len(start), device=start.device) if batch.example_ids is None else batch.example_ids
        nobody = scores.new_zeros(len(start))  # (B,): no fewer places than questions
        first, last, best = best_spans(scores.masked_fill(~context[..., None], -torch.inf), self.config.longest_answer)
        highest = (nobody - torch.inf).scatter_reduce(0, owners, best, "amax")
        found = (first == start) & (last == end) & (best == highest[owners])
        right = nobody.index_add(0, owners, found.float()) > 0
        real = nobody.index_add(0, owners, (start != IGNORE_INDEX).float()) > 0
        if self.config.unanswerable:
            lowest = (nobody + torch.inf).scatter_reduce(0, owners, scores[:, 0].sum(-1), "amin")
            without = real & (nobody.index_add(0, owners, (start > 0).float()) == 0)
            right = torch.where(lowest - highest > self.config.threshold, without, right)
        return right.sum(), real.sum()

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sum(self.weight(head) * sums[head] / max(1, counts[head]) for head in ("start", "end"))
        return {"loss": loss, "accuracy": sums["correct"] / max(1.0, sums["questions"])}

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        """Exact spans first; the loss breaks ties."""
        return -metrics["accuracy"] + 1e-7 * metrics["loss"] / (1 + metrics["loss"])

    def outputs(self, model: Model, batch: Batch) -> list[Tensor]:
        """(R, 1 + W, 2) by row of a question its log-probabilities: of no answer, then of each context token.

        Rows that read fewer tokens end in -inf. W is the room that a row had, or else the whole context: so the shape
        alone tells which tokens these are.
        """
        scores, context = self.scores(model, batch)
        begins, counts = (batch.segments == 0).sum(1).tolist(), context.sum(1).tolist()  # type: ignore[union-attr]
        owners = list(range(len(scores))) if batch.example_ids is None else batch.example_ids.tolist()
        rows_of: dict[int, list[int]] = {}
        for row, owner in enumerate(owners):
            rows_of.setdefault(owner, []).append(row)
        made = []
        for rows in rows_of.values():
            one = scores.new_full((len(rows), 1 + max(counts[row] for row in rows), 2), -torch.inf)
            for place, row in enumerate(rows):
                one[place, 0] = scores[row, 0]
                one[place, 1 : 1 + counts[row]] = scores[row, begins[row] : begins[row] + counts[row]]
            made.append(one)
        return made

    def predictions(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """The most likely span, its characters in the context, and its probability."""
        return [
            {"id": name, **self.predicted(passage, torch.from_numpy(scores))}
            for name, passage, scores in zip(data.ids, data.passages, outputs, strict=True)
        ]

    def predicted(self, passage: Passage, scores: Tensor) -> dict[str, Any]:
        nothing, best, (begin, end) = self.found(passage, scores)
        if best == -math.inf or (self.config.unanswerable and nothing - best > self.config.threshold):
            return {"answer": "", "start": None, "end": None, "score": probability(nothing)}
        return {"answer": passage.text[begin:end], "start": begin, "end": end, "score": probability(best)}

    def found(self, passage: Passage, scores: Tensor) -> tuple[float, float, tuple[int, int]]:
        """The log-probabilities of no answer and of the best one, and the characters of the latter."""
        nothing = float(scores[:, 0].sum(-1).min())  # every window must lack the answer
        if passage.blank.all():
            return nothing, -math.inf, (0, 0)
        likely = scores[:, 1:].clone()  # (R, W, 2)
        windows = self.windows(len(passage.tokens), likely.size(1))
        for row, (begin, end) in enumerate(windows):
            likely[row, : end - begin][torch.from_numpy(passage.blank[begin:end])] = -torch.inf
        firsts, lasts, bests = best_spans(likely, self.config.longest_answer)
        row = int(bests.argmax())
        offset = windows[row][0]
        return nothing, float(bests[row]), passage.characters(int(firsts[row]) + offset, int(lasts[row]) + offset)

    def graph_spec(self) -> GraphSpec:
        config = self.config
        settings = {"longest_question": config.longest_question, "longest_answer": config.longest_answer}
        return GraphSpec(
            "answering",
            "Where in a text the answer to a question is.",
            ("start_logits", "end_logits"),
            settings=settings | ({"threshold": config.threshold} if config.unanswerable else {}),
            script=ANSWER.replace("ANSWER", ABSTAIN if config.unanswerable else "answer"),
            segment_start="lead",
            arguments="a question and a text",
            needs_offsets=True,
            limits="It reads one row: what is beyond its length is not read, where Headstock reads on in further rows.",
        )

    def graph_outputs(self, model: Model, batch: Batch) -> tuple[Tensor, ...]:
        """(B, T) twice: the score of every token as the start and as the end; those of position 0 mean "not here"."""
        start, end = model.heads["span"](self.token_features(model, batch)).unbind(-1)
        return start, end

    def predicted_target(self, prediction: Mapping[str, Any]) -> list[dict[str, Any]]:
        if prediction["start"] is None:
            return []
        return [{"text": prediction["answer"], "start": prediction["start"]}]

    def confidences(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        assert data.labels is not None
        predictions = self.predictions(data, outputs)
        exact = [exact_match(row["answer"], gold) for row, gold in zip(predictions, data.labels, strict=True)]
        return np.array([row["score"] for row in predictions]), np.array(exact) == 1

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """Calibration against exact matches, context lengths, and the most confident wrong answers."""
        confidence, correct = self.confidences(data, outputs)
        words = np.array([len(passage.text.split()) for passage in data.passages])
        mistakes = []
        for row in most_confident_errors(confidence, correct):
            (prediction,) = self.predictions(data.select([row]), [outputs[row]])
            text, marks = excerpt(data.passages[row].text, prediction, rows.columns["answers"][row])
            mistakes.append(
                {
                    "place": data.places[row],
                    "question": rows.columns["question"][row],
                    "text": text,
                    "marks": marks,
                    "label": "; ".join(dict.fromkeys(data.labels[row])) or NO_ANSWER,
                    "predicted": prediction["answer"] or NO_ANSWER,
                    "confidence": round(prediction["score"], 5),
                    "f1": round(f1(prediction["answer"], data.labels[row]), 5),
                    "tokens": [],
                }
            )
        return {
            "lengths": length_analysis(words, correct, called=self.nouns.wrong),
            "calibration": reliability(confidence, correct),
            "mistakes": mistakes,
        }

    def extra_metrics(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        """For unanswerable questions, the best F1 on these rows and the threshold that gives it."""
        if not self.config.unanswerable or data.labels is None:
            return {}
        every = [self.found(*row) for row in zip(data.passages, map(torch.from_numpy, outputs), strict=True)]
        margins = np.array([nothing - best for nothing, best, _ in every])
        said = [passage.text[slice(*where)] for passage, (_, _, where) in zip(data.passages, every, strict=True)]
        answered = np.array([f1(*row) for row in zip(said, data.labels, strict=True)])
        silent = np.array([f1("", gold) for gold in data.labels])
        order = np.argsort(margins, kind="stable")  # questions below the threshold are answered
        totals = silent.sum() + np.concatenate([[0.0], np.cumsum((answered - silent)[order])])
        best = int(totals.argmax())
        edges = np.concatenate([[margins.min() - 1], margins[order]])
        return {"best_f1": float(totals[best] / len(said)), "best_threshold": float(edges[best])}

    def row_metrics(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> RowMetrics:
        assert data.labels is not None
        said = [row["answer"] for row in self.predictions(data, outputs)]
        each = {"exact_match": exact_match, "f1": f1}
        return {
            name: (np.array([score(*row) for row in zip(said, data.labels, strict=True)], float), np.ones(len(said)))
            for name, score in each.items()
        }


class QuestionExamples:
    """Questions as sequences of tokens, one per window of the context."""

    def __init__(self, task: Answer, data: EncodedQuestions, length: int):
        self.task, self.data = task, data
        self.rooms = [length - MARKS - len(tokens) for tokens in data.tokens]
        for i, (room, passage) in enumerate(zip(self.rooms, data.passages, strict=True)):
            if room < min(LEAST_ROOM, len(passage.tokens)):
                row = f"a row of {length} tokens leaves {max(0, room)} for the context"
                hint = "make rows longer (train.length, model.context) or cut questions (task.longest_question)"
                raise UserError(f"{data.places[i]}: {row} beside a question of {len(data.tokens[i])}; {hint}")
        self.lengths = np.array([sum(map(self.row_length, self.rows(i))) for i in range(len(data))])

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, index: int) -> list[tuple[int, int, int]]:
        """The windows of a question: its index, and the first and last context token."""
        count = len(self.data.passages[index].tokens)
        return [(index, begin, end) for begin, end in self.task.windows(count, self.rooms[index])]

    def row_length(self, row: tuple[int, int, int]) -> int:
        index, begin, end = row
        return MARKS + len(self.data.tokens[index]) + end - begin

    def row(self, index: int, begin: int, end: int) -> list[int]:
        question, context = self.data.tokens[index], self.data.passages[index].tokens[begin:end]
        return [self.task.bos, *question, self.task.separator, *context, self.task.separator]

    def label(self, index: int, begin: int, end: int) -> tuple[int, int]:
        """The positions of start and end: 0 unless the window contains the whole answer."""
        gold, before = self.data.gold[index], len(self.data.tokens[index]) + 2 - begin
        if gold is None or gold[0] < begin or gold[1] >= end:
            return 0, 0
        return gold[0] + before, gold[1] + before

    def batch(self, indices: Sequence[int]) -> Batch:
        of_each = [self.rows(index) for index in indices]
        rows = [row for rows in of_each for row in rows]
        tokens, padding = pad([self.row(*row) for row in rows], self.task.pad_id)
        contexts = torch.tensor([len(self.data.tokens[index]) + 2 for index, _, _ in rows])
        segments = (torch.arange(tokens.size(1))[None] >= contexts[:, None]).long()
        owners = None
        if len(rows) > len(of_each):
            owners = torch.repeat_interleave(torch.tensor([len(rows) for rows in of_each]))
        labels = {}
        if self.data.labels is not None:
            start, end = torch.tensor([self.label(*row) for row in rows]).unbind(1)
            labels = {"start": start.clone(), "end": end.clone()}
        return Batch(tokens, padding, segments=segments, example_ids=owners, labels=labels)

    def name(self, index: int) -> str:
        return self.data.places[index]


def excerpt(text: str, prediction: Mapping[str, Any], gold: Sequence[Mapping[str, Any]]) -> tuple[str, list[list]]:
    """The context around the predicted answer, or else around the true one, and the spans of both in it."""
    spans = [] if prediction["start"] is None else [(prediction["start"], prediction["end"], "said")]
    spans += [(answer["start"], answer["start"] + len(answer["text"]), "true") for answer in gold[:1]]
    if not spans:
        return text[: 2 * EXCERPT], []
    begin, end = max(0, spans[0][0] - EXCERPT), min(len(text), spans[0][1] + EXCERPT)
    if begin:  # words stay whole
        begin = min(spans[0][0], text.find(" ", begin) + 1 or begin)
    if end < len(text):
        end = max(spans[0][1], text.rfind(" ", 0, end))
    before, after = "… " if begin else "", " …" if end < len(text) else ""
    shift = len(before) - begin
    inside = [[first + shift, last + shift, kind] for first, last, kind in spans if begin <= first and last <= end]
    return f"{before}{text[begin:end]}{after}", inside


def gold_tokens(passage: Passage, answers: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    if not answers:
        return None
    return passage.tokens_of(answers[0]["start"], answers[0]["start"] + len(answers[0]["text"]))


def best_spans(scores: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) start, end and score of the most likely span of at most `longest` tokens, from scores (B, T, 2)."""
    starts, ends = scores[..., 0], scores[..., 1]
    within_reach = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # (B, T) -> (B, T, longest)
    end, more = within_reach.max(-1)  # the best end for every start
    best, first = (starts + end).max(1)
    return first, first + more.gather(1, first[:, None]).squeeze(1), best


def span_loss(scores: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of (B, T) log-probabilities, summed over labelled rows; impossible positions are -inf."""
    counts = (labels != IGNORE_INDEX).float()
    loss = -scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    if smoothing:  # smoothing spreads over possible positions only
        allowed = scores.isfinite()
        spread = -scores.masked_fill(~allowed, 0).sum(1) / allowed.sum(1)
        loss = (1 - smoothing) * loss + smoothing * spread
    return (loss * counts).sum()


def probability(logarithm: float) -> float:
    return float(np.clip(np.exp(logarithm), np.finfo(np.float32).tiny, 1.0))  # never 0
