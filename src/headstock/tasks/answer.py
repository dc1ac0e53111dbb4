"""Extractive question answering: the start and end of an answer in a context.

B sequences, N questions (several sequences each where the context is long), S sequences of one question, T tokens,
W context tokens in a sequence. A sequence is [CLS] question [SEP] window of the context [SEP].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.data.qa import read_questions
from headstock.data.records import Records
from headstock.data.windowing import Window, windows
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import SpanHead
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples
from headstock.tasks.error_analysis import error_record
from headstock.tasks.graph_spec import ANSWER, GraphSpec
from headstock.tasks.graph_spec import NO_ANSWER as ANSWER_OR_NONE
from headstock.tasks.labelled import (
    EncodedRows,
    HeadConfig,
    LabelledTask,
    Nouns,
    RowExamples,
    RowLocations,
    RowMetrics,
    pad_sequences,
)
from headstock.tasks.predictions import Prediction
from headstock.tasks.special_tokens import PAIR_SPECIAL_TOKENS
from headstock.tasks.text_metrics import answer_f1, exact_match
from headstock.tasks.widgets import DisplayPart, Highlight, InputField

EXCERPT_CHARACTERS = 240  # of a context on either side of an answer, in a report
NO_ANSWER = "(no answer)"
MIN_CONTEXT = 8  # tokens in a sequence

TokenSpan = tuple[int, int]  # first and last token of an answer


@dataclass(frozen=True)
class AnswerConfig(HeadConfig):
    longest_question: int = 64  # tokens; longer questions are truncated
    longest_answer: int = 30  # tokens
    stride: int | None = None  # between the windows of a long context; half a window unless given
    unanswerable: bool = False  # some questions have no answer; inferred from the training rows
    threshold: float = 0.0  # margin in log-probability by which "no answer" must exceed the best answer

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        for name in ("longest_question", "longest_answer", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append((name, f"must be 1 or more, not {value}"))
        return problems


@dataclass(frozen=True)
class Passage:
    """A context with the characters of each of its tokens."""

    text: str
    tokens: list[int]
    offsets: np.ndarray  # (T, 2) first character, one past the last

    @cached_property
    def blank(self) -> np.ndarray:
        """(T,) True for tokens that are only white space, which an answer cannot start or end with."""
        return np.array([not self.text[start:end].strip() for start, end in self.offsets.tolist()], dtype=bool)

    def token_span(self, start: int, end: int) -> TokenSpan | None:
        """The tokens that overlap these characters."""
        tokens = np.flatnonzero((self.offsets[:, 0] < end) & (self.offsets[:, 1] > start))
        return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """The characters from one token to another, stripped of white space."""
        start, end = int(self.offsets[first : last + 1, 0].min()), int(self.offsets[first : last + 1, 1].max())
        text = self.text[start:end]
        return start + len(text) - len(text.lstrip()), start + len(text.rstrip())


@dataclass
class EncodedQuestions(EncodedRows):
    """Tokenized questions; those about the same context share its Passage. The labels are all reference answers."""

    passages: list[Passage]  # one per question
    answer_spans: list[TokenSpan | None]  # of the first answer; None without an answer
    ids: list[str]


@dataclass(frozen=True, eq=False)
class AnswerPrediction(Prediction):
    """The answer to a question: a span of the context."""

    answer: str  # empty if the context has none
    start: int | None  # of its characters in the context
    end: int | None
    score: float  # its probability
    id: str | None = None  # of the question


@TASKS.add("answer")
class Answer(LabelledTask):
    """Predicts the span of a context that answers a question, or that there is none.

    Every context token is scored as start and as end of the answer; the scores of the first token mean "not in this
    window". In a causal model the first token sees nothing, so that "no answer" is a fixed threshold.
    """

    Config: ClassVar[type] = AnswerConfig
    prediction_class: ClassVar[type[Prediction]] = AnswerPrediction
    target = "answers"
    input_column = "question"
    input_columns = ("question", "context")
    example_row: ClassVar[Any] = {"question": "Who came?", "context": "Anne came home. Ben stayed."}
    prediction_settings: ClassVar[dict[str, tuple[float, float]]] = {"threshold": (-100.0, 100.0)}
    answers_questions = True
    texts_per_row = 2
    row_description = "a question and its context"
    row_form = '{"question": "Who came?", "context": "Anne came."}'
    primary_metric = "f1"
    selection_metric = "accuracy"  # of spans
    huggingface_head = "ForQuestionAnswering"
    title = "question answering model"
    nouns = Nouns(
        "question",
        "question",
        "context",
        "contexts of wrong answers",
        "share of exact spans",
        "An answer counts as correct here if it equals one of the true answers.",
    )

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        width, mixed = self.head_input(backbone)
        return {"span": SpanHead(width, dropout=self.config.dropout, mixed=mixed)}

    def weight(self, head: str) -> float:
        return 0.5  # start and end share one loss

    # From records to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_questions(path, **options)

    def is_row(self, row: Any) -> bool:
        return isinstance(row, Mapping) and all(isinstance(row.get(name), str) for name in ("question", "context"))

    def row_from_texts(self, texts: Sequence[str]) -> dict[str, str]:
        return {"question": texts[0], "context": texts[1]}

    def row_from_columns(self, columns: Mapping[str, Any]) -> Any:
        own = {name: value for name, value in columns.items() if name != "id"}
        return super().row_from_columns(own) | ({"id": columns["id"]} if "id" in columns else {})

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        self.check_rows(rows)
        for name in ("question", "context"):
            if not all(row[name].strip() for row in rows):
                raise UserError(f"the {name} is empty")
        ids = [str(row.get("id", number)) for number, row in enumerate(rows, 1)]
        return {name: [row[name] for row in rows] for name in ("context", "question")} | {"id": ids}

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        return replace(config, unanswerable=config.unanswerable or not all(records.columns["answers"]))

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedQuestions:
        """The reader has already checked that answers occur in their contexts."""
        contexts, locations = records.columns["context"], RowLocations(records)
        answers = records.columns.get("answers") if labelled else None
        distinct = list(dict.fromkeys(contexts))
        passages = {
            text: Passage(text, tokens, np.array(self.tokenizer.offsets(text), dtype=np.int64).reshape(-1, 2))
            for text, tokens in zip(distinct, self.tokenizer.encode_batch(distinct), strict=True)
        }
        questions = self.tokenizer.encode_batch(records.columns["question"])
        return EncodedQuestions(
            tokens=[question[: self.config.longest_question] for question in questions],
            labels=None if answers is None else [[answer["text"] for answer in row] for row in answers],
            locations=locations,
            passages=[passages[text] for text in contexts],
            answer_spans=[
                passages[text].token_span(row[0]["start"], row[0]["start"] + len(row[0]["text"])) if row else None
                for text, row in zip(contexts, answers or [[]] * len(contexts), strict=True)
            ],
            ids=records.columns.get("id", list(locations)),
        )

    def row_examples(self, data: EncodedQuestions, length: int) -> Examples:
        return QuestionExamples(self, data, length)

    def windows(self, context_length: int, capacity: int) -> list[Window]:
        """The windows over a context, for sequences that have room for `capacity` of its tokens."""
        return windows(context_length, capacity, stride=self.config.stride)

    # From batches to predictions

    def log_probabilities(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, T, 2) log-probabilities of start and end at each token, and (B, T) True at context tokens."""
        assert batch.segments is not None
        is_context = (batch.segments == 1) & (batch.tokens != self.separator)
        if batch.padding is not None:
            is_context &= ~batch.padding
        allowed = is_context.clone()
        allowed[:, 0] = True  # "not in this window"
        logits = model.heads["span"](self.token_features(model, batch)).float()
        return logits.masked_fill(~allowed[..., None], -torch.inf).log_softmax(1), is_context

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        scores, is_context = self.log_probabilities(model, batch)
        with torch.no_grad():
            correct, questions = self.count_correct(scores, is_context, batch)
        return {
            "start": span_loss(scores[..., 0], batch.labels["start"], smoothing),
            "end": span_loss(scores[..., 1], batch.labels["end"], smoothing),
            "correct": correct,
            "questions": questions,
        }

    def count_correct(self, scores: Tensor, is_context: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The number of questions whose predicted span is exactly the first answer, and the number of questions."""
        start, end = batch.labels["start"], batch.labels["end"]
        questions = torch.arange(len(start), device=start.device) if batch.example_ids is None else batch.example_ids
        zeros = scores.new_zeros(len(start))  # (B,): there are at most as many questions as sequences

        def any_sequence(condition: Tensor) -> Tensor:
            """Whether a condition (B,) holds in any sequence of a question."""
            return zeros.index_add(0, questions, condition.float()) > 0

        context_scores = scores.masked_fill(~is_context[..., None], -torch.inf)
        first, last, best = best_spans(context_scores, self.config.longest_answer)
        highest = (zeros - torch.inf).scatter_reduce(0, questions, best, "amax")
        correct = any_sequence((first == start) & (last == end) & (best == highest[questions]))
        is_real = any_sequence(start != IGNORE_INDEX)
        if self.config.unanswerable:
            none = (zeros + torch.inf).scatter_reduce(0, questions, scores[:, 0].sum(-1), "amin")
            has_no_answer = is_real & ~any_sequence(start > 0)
            correct = torch.where(none - highest > self.config.threshold, has_no_answer, correct)
        return correct.sum(), is_real.sum()

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sum(self.weight(head) * sums[head] / max(1, counts[head]) for head in ("start", "end"))
        return {"loss": loss, "accuracy": sums["correct"] / max(1.0, sums["questions"])}

    def outputs(self, model: Model, batch: Batch) -> list[Tensor]:
        """(S, 1 + W, 2) for each question the log-probabilities of no answer, then of each context token.

        Sequences with fewer context tokens end in -inf. W is the capacity of a sequence, or the length of a context
        that fits into one, so that the shape determines the windows.
        """
        scores, is_context = self.log_probabilities(model, batch)
        assert batch.segments is not None
        starts, counts = (batch.segments == 0).sum(1).tolist(), is_context.sum(1).tolist()
        example_ids = range(len(scores)) if batch.example_ids is None else batch.example_ids.tolist()
        sequences: dict[int, list[Tensor]] = {}  # of each question
        for row, example in enumerate(example_ids):
            context_scores = scores[row, starts[row] : starts[row] + counts[row]]
            sequences.setdefault(example, []).append(torch.cat([scores[row, :1], context_scores]))
        return [
            nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-torch.inf) for parts in sequences.values()
        ]

    def predictions(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """The most likely span, its characters in the context, and its probability."""
        return [
            {"id": question_id, **self.prediction(passage, torch.from_numpy(scores))}
            for question_id, passage, scores in zip(data.ids, data.passages, outputs, strict=True)
        ]

    def prediction(self, passage: Passage, scores: Tensor) -> dict[str, Any]:
        none, best, (start, end) = self.best_answer(passage, scores)
        if best == -math.inf or (self.config.unanswerable and none - best > self.config.threshold):
            return {"answer": "", "start": None, "end": None, "score": probability(none)}
        return {"answer": passage.text[start:end], "start": start, "end": end, "score": probability(best)}

    @property
    def input_fields(self) -> tuple[InputField, ...]:
        context = "The Eiffel Tower was built in Paris from 1887 to 1889 by the company of the engineer Gustave Eiffel."
        question = InputField("question", "Question", "line", "When was the tower built?")
        return question, InputField("context", "Context", example=context)

    def display(self, row: Any, prediction: Mapping[str, Any]) -> list[DisplayPart]:
        start, end = prediction["start"], prediction["end"]
        return [Highlight(row["context"], start, end, prediction["answer"] or NO_ANSWER, prediction["score"])]

    def best_answer(self, passage: Passage, scores: Tensor) -> tuple[float, float, tuple[int, int]]:
        """The log-probabilities of no answer and of the best one, and the characters of the latter."""
        none = float(scores[:, 0].sum(-1).min())  # every window must lack the answer
        if passage.blank.all():
            return none, -math.inf, (0, 0)
        context_scores = scores[:, 1:].clone()  # (S, W, 2)
        windows = self.windows(len(passage.tokens), context_scores.size(1))
        for row, window in enumerate(windows):
            blank = torch.from_numpy(passage.blank[window.start : window.end])
            context_scores[row, : window.size][blank] = -torch.inf
        first, last, best = best_spans(context_scores, self.config.longest_answer)
        row = int(best.argmax())
        start = windows[row].start
        return none, float(best[row]), passage.characters(int(first[row]) + start, int(last[row]) + start)

    def predicted_target(self, prediction: Mapping[str, Any]) -> list[dict[str, Any]]:
        if prediction["start"] is None:
            return []
        return [{"text": prediction["answer"], "start": prediction["start"]}]

    # Metrics and error analysis

    def row_metrics(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> RowMetrics:
        scores = [
            (exact_match(row["answer"], answers), answer_f1(row["answer"], answers))
            for row, answers in zip(self.predictions(data, outputs), data.labels, strict=True)
        ]
        matches, f1 = np.array(scores, dtype=float).reshape(-1, 2).T
        return {"exact_match": (matches, np.ones(len(f1))), "f1": (f1, np.ones(len(f1)))}

    def extra_metrics(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        """With unanswerable questions, the best F1 on these rows and the threshold that gives it."""
        if not self.config.unanswerable or data.labels is None:
            return {}
        margins, f1_changes = [], []  # of "no answer" over the best answer; by giving that answer
        f1_without = [answer_f1("", references) for references in data.labels]
        for passage, scores, references, without in zip(data.passages, outputs, data.labels, f1_without, strict=True):
            none, best, (start, end) = self.best_answer(passage, torch.from_numpy(scores))
            margins.append(none - best)
            f1_changes.append(answer_f1(passage.text[start:end], references) - without)
        order = np.argsort(margins, kind="stable")  # questions with a margin up to the threshold are answered
        totals = sum(f1_without) + np.concatenate([[0.0], np.cumsum(np.array(f1_changes)[order])])
        thresholds = np.concatenate([[min(margins) - 1], np.array(margins)[order]])
        best_index = int(totals.argmax())
        return {
            "best_f1": float(totals[best_index] / len(margins)),
            "best_threshold": float(thresholds[best_index]),
        }

    def confidences(self, data: EncodedQuestions, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        predictions = self.predictions(data, outputs)
        matches = [exact_match(row["answer"], answers) for row, answers in zip(predictions, data.labels, strict=True)]
        return np.array([row["score"] for row in predictions]), np.array(matches) == 1

    def input_texts(self, rows: Records) -> list[str]:
        return rows.columns["context"]

    def describe_error(
        self, rows: Records, row: int, prediction: Mapping[str, Any], confidence: float
    ) -> dict[str, Any]:
        answers = rows.columns["answers"][row]
        references = [answer["text"] for answer in answers]
        text, spans = excerpt(rows.columns["context"][row], prediction, answers)
        return error_record(
            rows.location(row),
            text,
            label="; ".join(dict.fromkeys(references)) or NO_ANSWER,
            predicted=prediction["answer"] or NO_ANSWER,
            confidence=confidence,
            question=rows.columns["question"][row],
            marks=spans,
            f1=round(answer_f1(prediction["answer"], references), 5),
        )

    # Export

    def graph_spec(self) -> GraphSpec:
        config = self.config
        settings = {"longest_question": config.longest_question, "longest_answer": config.longest_answer}
        return GraphSpec(
            "answering",
            "Where in a text the answer to a question is.",
            ("start_logits", "end_logits"),
            settings=settings | ({"threshold": config.threshold} if config.unanswerable else {}),
            script=ANSWER.replace("ANSWER", ANSWER_OR_NONE if config.unanswerable else "answer"),
            segment_start="first_token",
            arguments="a question and a text",
            needs_offsets=True,
            limits="It reads one row: what is beyond its length is not read, where Headstock reads on in further rows.",
        )

    def graph_outputs(self, model: Model, batch: Batch) -> tuple[Tensor, ...]:
        """(B, T) twice: the score of every token as start and as end; those of position 0 mean "not here"."""
        start, end = model.heads["span"](self.token_features(model, batch)).unbind(-1)
        return start, end


class QuestionExamples(RowExamples):
    """Questions as sequences of tokens, one per window of the context."""

    data: EncodedQuestions

    def __init__(self, task: Answer, data: EncodedQuestions, length: int):
        super().__init__(data)
        self.task = task
        self.windows: list[list[Window]] = []
        for tokens, passage, location in zip(data.tokens, data.passages, data.locations, strict=True):
            capacity = length - PAIR_SPECIAL_TOKENS - len(tokens)
            if capacity < min(MIN_CONTEXT, len(passage.tokens)):
                problem = f"a row of {length} tokens leaves {max(0, capacity)} for the context"
                hint = "make rows longer (train.length, model.context) or cut questions (task.longest_question)"
                raise UserError(f"{location}: {problem} beside a question of {len(tokens)}; {hint}")
            self.windows.append(task.windows(len(passage.tokens), capacity))
        self.lengths = np.array(
            [
                sum(PAIR_SPECIAL_TOKENS + len(tokens) + window.size for window in windows)
                for tokens, windows in zip(data.tokens, self.windows, strict=True)
            ]
        )

    def sequence(self, index: int, window: Window) -> list[int]:
        question, context = self.data.tokens[index], self.data.passages[index].tokens[window.start : window.end]
        return [self.task.bos, *question, self.task.separator, *context, self.task.separator]

    def label(self, index: int, window: Window) -> TokenSpan:
        """The positions of start and end: 0 unless the window contains the whole answer."""
        span, shift = self.data.answer_spans[index], len(self.data.tokens[index]) + 2 - window.start
        if span is None or span[0] < window.start or span[1] >= window.end:
            return 0, 0
        return span[0] + shift, span[1] + shift

    def batch(self, indices: Sequence[int]) -> Batch:
        sequences = [[self.sequence(index, window) for window in self.windows[index]] for index in indices]
        tokens, padding, example_ids = pad_sequences(sequences, self.task.pad_id)
        rows = [(index, window) for index in indices for window in self.windows[index]]
        context_starts = torch.tensor([len(self.data.tokens[index]) + 2 for index, _ in rows])
        segments = (torch.arange(tokens.size(1))[None] >= context_starts[:, None]).long()
        labels = {}
        if self.data.labels is not None:
            start, end = torch.tensor([self.label(*row) for row in rows]).unbind(1)
            labels = {"start": start.clone(), "end": end.clone()}
        return Batch(tokens, padding, segments=segments, example_ids=example_ids, labels=labels)


def excerpt(text: str, prediction: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> tuple[str, list[list]]:
    """The context around the predicted answer, or else around the true one, and the spans of both in it."""
    spans = [] if prediction["start"] is None else [(prediction["start"], prediction["end"], "said")]
    spans += [(answer["start"], answer["start"] + len(answer["text"]), "true") for answer in answers[:1]]
    if not spans:
        return text[: 2 * EXCERPT_CHARACTERS], []
    (first, last, _), *_ = spans
    start, end = max(0, first - EXCERPT_CHARACTERS), min(len(text), last + EXCERPT_CHARACTERS)
    if start:  # at the start of a word
        start = min(first, text.find(" ", start) + 1 or start)
    if end < len(text):
        end = max(last, text.rfind(" ", 0, end))
    before, after = "… " if start else "", " …" if end < len(text) else ""
    shift = len(before) - start
    inside = [[a + shift, b + shift, kind] for a, b, kind in spans if start <= a and b <= end]
    return f"{before}{text[start:end]}{after}", inside


def best_spans(scores: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) start, end and score of the most likely span of at most `longest` tokens, from scores (B, T, 2)."""
    start_scores, end_scores = scores[..., 0], scores[..., 1]
    ends = F.pad(end_scores, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # (B, T) -> (B, T, longest)
    end_score, offset = ends.max(-1)  # the best end for every start
    best, start = (start_scores + end_score).max(1)
    return start, start + offset.gather(1, start[:, None]).squeeze(1), best


def span_loss(scores: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of (B, T) log-probabilities, summed over labelled rows; impossible positions are -inf."""
    loss = -scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    if smoothing:  # over possible positions only
        allowed = scores.isfinite()
        uniform = -scores.masked_fill(~allowed, 0).sum(1) / allowed.sum(1)
        loss = (1 - smoothing) * loss + smoothing * uniform
    return (loss * (labels != IGNORE_INDEX).float()).sum()


def probability(log_probability: float) -> float:
    return float(np.clip(np.exp(log_probability), np.finfo(np.float32).tiny, 1.0))  # never 0
