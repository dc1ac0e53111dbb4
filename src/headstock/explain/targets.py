"""What the loss of an explanation is computed over: a text or a file as the run's own task reads it.

B rows, T tokens.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headstock.data.corpus import read_corpus
from headstock.data.mask_gaps import MASK
from headstock.data.records import Records
from headstock.data.token_store import build_store
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError, did_you_mean
from headstock.inference.pipeline import Pipeline, load
from headstock.inference.translate import display_tokens
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.base import Examples, Task
from headstock.tasks.class_labels import quote_names
from headstock.tasks.labelled import LabelledTask, is_labelled
from headstock.tasks.masked import MaskedLM
from headstock.tasks.special_tokens import special_tokens_for
from headstock.train.labelled_data import require_labels
from headstock.train.loop import sequence_length

MAX_ROWS = 16  # rows of a file that are read
MAX_DRAWS = 64  # draws of masked positions until one is masked
HEAD_NAMES = {  # what a head's loss counts, where it is not the head's own name
    "token": "token",
    "forward": "forward token",
    "backward": "backward token",
    "masked": "masked token",
    "causal": "next token",
    "next": "sentence pair",
}


@dataclass(frozen=True)
class ExplainTarget:
    """A batch with the labels that its loss is computed against."""

    task: Task
    batch: Batch
    description: str  # what the loss is computed over
    notes: list[str] = field(default_factory=list)  # how the text was read

    def loss(self, model: Model) -> Tensor:
        """The loss as in training: the mean of each head, weighted as by the task."""
        sums = self.task.losses(model, self.batch)
        counts = self.task.counts(self.batch)
        return torch.stack([self.task.weight(head) * sums[head] / max(1, n) for head, n in counts.items()]).sum()


def make_target(pipeline: Pipeline, task: Task, batch: Batch, notes: Sequence[str] = ()) -> ExplainTarget:
    counts = task.counts(batch)
    parts = [f"{count:,} {HEAD_NAMES.get(head, head)}{'s' * (count != 1)}" for head, count in counts.items()]
    return ExplainTarget(task, batch.to(pipeline.model.device), " and ".join(parts), list(notes))


# Checks


def open_single_run(run: str | Path, *, device: str = "auto") -> Pipeline:
    """A run that is one model; an ensemble is refused."""
    pipeline = load(run, device=device)
    if len(pipeline.models) > 1:
        raise UserError(f"{pipeline.run}: is an ensemble; name one of its models, such as {pipeline.run.member(0)}")
    return pipeline


def check_length(pipeline: Pipeline, count: int) -> None:
    """Refuse a text that the run cannot read whole."""
    limit = pipeline.model.backbone.context
    if is_labelled(pipeline.task):
        limit = sequence_length(pipeline.model, pipeline.config.train)
    if limit is not None and count > limit:
        problem = f"the text has {count:,} tokens with special tokens, and this run reads {limit:,}"
        raise UserError(f"{pipeline.run}: {problem}")


def check_texts(pipeline: Pipeline, texts: Sequence[str]) -> None:
    """As many texts as a row of the run's task has, none of them empty."""
    if len(texts) != pipeline.task.texts_per_row:
        raise UserError(f"{pipeline.run}: expects {pipeline.task.row_description}, found {len(texts)}")
    if not all(text.strip() for text in texts):
        raise UserError(f"{pipeline.run}: the text is empty")


def tokenize(pipeline: Pipeline, text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    if not (ids := (tokenizer or pipeline.tokenizer).encode(text)):
        raise UserError(f"{pipeline.run}: the tokenizer returns no tokens for the text")
    return ids


def source_tokenizer(pipeline: Pipeline) -> Tokenizer:
    return pipeline.tokenizer.source_tokenizer or pipeline.tokenizer


def row_tokens(pipeline: Pipeline, batch: Batch, *, source: bool = False) -> list[str]:
    """The tokens of the first row as text; `source` if it is the source of an encoder-decoder."""
    return display_tokens(source_tokenizer(pipeline) if source else pipeline.tokenizer, batch.tokens[0].tolist())


def find_token(tokens: Sequence[str], word: str) -> int | None:
    """The index of a token; a number is a position, counted from 1."""
    if word in tokens:
        return tokens.index(word)
    return int(word) - 1 if word.isdecimal() and 1 <= int(word) <= len(tokens) else None


def class_index(pipeline: Pipeline, label: str) -> int:
    classes = pipeline.classification_task().config.classes
    if label not in classes:
        hint = f"this run knows {quote_names(classes)}{did_you_mean(label, classes)}"
        raise UserError(f"{pipeline.run}: --label {label!r} is no class; {hint}")
    return classes.index(label)


# Targets


def training_target(
    pipeline: Pipeline, texts: Sequence[str], *, label: str | None = None, visible: str | None = None
) -> ExplainTarget:
    """One text with the labels of the run's objective; a labelled task uses `label`, or its own prediction.

    `visible` is a token, or its position from 1, that a masked objective must not mask.
    """
    check_texts(pipeline, texts)
    task = pipeline.task
    if is_labelled(task):
        return labelled_target(pipeline, texts, label)
    if label is not None:
        raise UserError(f"{pipeline.run}: is a language model, whose loss needs no --label")
    (text,) = texts
    if task.fills_masks and MASK in text:
        raise UserError(f"{pipeline.run}: the token behind {MASK} is unknown; give the whole text")
    ids = tokenize(pipeline, text)
    if task.fills_masks and not task.generates:
        return masked_target(pipeline, cast(MaskedLM, task), ids, visible)
    check_length(pipeline, len(ids) + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8")
        store = build_store(read_corpus(path, documents="file"), pipeline.tokenizer, cache=Path(folder))
        examples = task.examples(store, length=max(2, store.tokens))
        return make_target(pipeline, task, examples.batch(range(len(examples))))


def masked_target(pipeline: Pipeline, task: MaskedLM, ids: Sequence[int], visible: str | None) -> ExplainTarget:
    """One text masked by the objective, but not at `visible`; drawn again until a token is masked."""
    tokenizer = pipeline.tokenizer
    row = special_tokens_for(task, tokenizer).wrap(ids)
    check_length(pipeline, len(row))
    tokens = torch.tensor([row]).numpy()
    allowed = ((tokens != task.bos) & (tokens != tokenizer.sep)).astype(bool)
    if visible is not None and (position := find_token(display_tokens(tokenizer, row), visible)) is not None:
        allowed[0, position] = False
        if not allowed.any():
            raise UserError(f"{pipeline.run}: no token but --word {visible} could be masked; give a longer text")
    fraction = task.masker.fraction(1.0)
    for draw in range(MAX_DRAWS):
        masked, labels = task.masker.mask_tokens(
            tokens, allowed, 0 * tokens, key=("explain", draw), rows=[0], fraction=fraction
        )
        if (labels != IGNORE_INDEX).any():
            break
    else:
        raise UserError(f"{pipeline.run}: no token was masked in {MAX_DRAWS} draws; give a longer text")
    batch = Batch(torch.from_numpy(masked), labels={"token": torch.from_numpy(labels)})
    target = make_target(pipeline, task, batch)
    if task.config.nsp:
        target.batch.labels["next"] = torch.tensor([IGNORE_INDEX], device=pipeline.model.device)
        target.notes.append("there is one text, so the next-sentence head has no label")
    return target


def labelled_target(pipeline: Pipeline, texts: Sequence[str], label: str | None) -> ExplainTarget:
    """One row of a labelled task with `label`, or with the run's own prediction."""
    task = pipeline.labelled_task()
    row = task.row_from_texts(texts)
    notes = []
    if label is None:
        (prediction,) = pipeline.predict([row])
        value = task.predicted_target(prediction)
        notes.append(f"no label was given; the run's prediction is used: {task.as_text(prediction).strip()}")
    else:
        value = parse_label(pipeline, task, label)
    data = task.prepare(Records("text", [1], task.columns_of([row]) | {task.target: [value]}))
    check_length(pipeline, task.row_length(data))
    task = task.for_loss()
    batch = task.examples(data, length=sequence_length(pipeline.model, pipeline.config.train)).batch([0])
    return make_target(pipeline, task, batch, notes)


def parse_label(pipeline: Pipeline, task: LabelledTask, label: str) -> Any:
    """A class of the run, or a translation."""
    if task.predicts_classes:
        class_index(pipeline, label)
    elif not task.translates:
        problem = f"a {task.title} has no single label per text; name labelled rows with --file"
        raise UserError(f"{pipeline.run}: {problem}")
    return label


def file_target(pipeline: Pipeline, file: str | Path, *, columns: Mapping[str, str] | None = None) -> ExplainTarget:
    """The first rows of a file: labelled rows, or windows of text; long rows are truncated."""
    task, length = pipeline.task, sequence_length(pipeline.model, pipeline.config.train)
    examples: Examples
    if is_labelled(task):
        rows = require_labels(task.read_file(file, config=task.config, columns=columns), task.target, "for a loss")
        rows = rows.select(range(min(MAX_ROWS, len(rows))))
        task.check(rows)
        task = task.for_loss()
        examples = task.examples(task.prepare(rows), length=length)
    else:
        corpus = read_corpus(file, column=pipeline.config.data.column)
        store = build_store(corpus, pipeline.tokenizer, sentences=task.needs_sentences)
        examples = task.examples(store, length=length)
    notes = [f"{MAX_ROWS} of {len(examples):,} rows are read"] if len(examples) > MAX_ROWS else []
    return make_target(pipeline, task, examples.batch(range(min(MAX_ROWS, len(examples)))), notes)
