"""Texts and files as the task of a run reads them: encoded, or also with the labels of its loss.

B rows, T tokens, S source tokens.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headstock.data.corpus import read_corpus
from headstock.data.formats import PLAIN, detect_format
from headstock.data.labelled_texts import stream_texts
from headstock.data.mask_gaps import MASK, SurfaceForms
from headstock.data.records import Records
from headstock.data.token_store import build_store
from headstock.decoding.batching import batch_from_rows
from headstock.errors import UserError, did_you_mean
from headstock.explain.subject import check_length, check_texts, find_token, row_tokens, source_tokenizer, tokenize
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.base import Examples, Task
from headstock.tasks.class_labels import quote_names
from headstock.tasks.labelled import UNLIMITED, LabelledTask, is_labelled
from headstock.tasks.masked import MaskedLM
from headstock.tasks.special_tokens import special_tokens_for
from headstock.tasks.translate import EncodedPairs, Translate, teacher_forcing_batch
from headstock.train.evaluate import model_outputs
from headstock.train.labelled_data import require_labels
from headstock.train.loop import sequence_length

CHUNK = 16  # texts of a file per batch
MAX_ROWS = 16  # rows of a file that a loss is computed over
MAX_DRAWS = 64  # draws of masked positions until one is masked
HEAD_NAMES = {  # what a head's loss counts, where it is not the head's own name
    "token": "token",
    "forward": "forward token",
    "backward": "backward token",
    "masked": "masked token",
    "causal": "next token",
    "next": "sentence pair",
}


# Encoded texts


@dataclass(frozen=True)
class EncodedInput:
    """One text as a batch of one row, with its tokens as text."""

    batch: Batch
    tokens: list[str]  # T
    source: list[str] = field(default_factory=list)  # S, for an encoder-decoder
    notes: list[str] = field(default_factory=list)  # how the text was read


def encode_input(
    pipeline: Pipeline, texts: Sequence[str], *, target: str | None = None, left_to_right: bool = False
) -> EncodedInput:
    """One text, not truncated; for an encoder-decoder with its own output or `target` as the decoder input."""
    check_texts(pipeline, texts)
    task, backbone = pipeline.task, pipeline.model.backbone
    if target is not None and not backbone.is_encoder_decoder:
        raise UserError(f"{pipeline.run}: has no decoder input, so --target has no meaning")
    if left_to_right and not task.generates:
        raise UserError(f"{pipeline.run}: was not trained to generate, so it never reads --left-to-right")
    notes: list[str] = []
    if is_labelled(task):
        data = task.prepare(Records("text", [1], task.columns_of([task.row_from_texts(texts)])), labelled=False)
        if task.translates:
            notes = add_target(pipeline, cast(Translate, task), data, target)
        batch = task.examples(data, length=UNLIMITED).batch([0])
    elif backbone.is_encoder_decoder:
        batch, notes = denoising_batch(pipeline, texts[0], target)
    else:
        special = special_tokens_for(task, pipeline.tokenizer, left_to_right=left_to_right or backbone.causal)
        batch = Batch(torch.tensor([special.wrap(tokenize_with_masks(pipeline, texts[0]))]))
    if left_to_right and not backbone.causal:
        batch = replace(batch, causal=True)
    for part in filter(None, (batch.source, batch)):
        check_length(pipeline, part.tokens.size(1))
    source = [] if batch.source is None else row_tokens(pipeline, batch.source, source=True)
    return EncodedInput(batch.to(pipeline.model.device), row_tokens(pipeline, batch), source, notes)


def tokenize_with_masks(pipeline: Pipeline, text: str) -> list[int]:
    """The tokens of a text; [MASK] is a mask token where the run was trained to fill it."""
    tokenizer, task = source_tokenizer(pipeline), pipeline.task
    if tokenizer.mask is not None and MASK in text and (task.fills_masks or task.needs_encoder_decoder):
        return SurfaceForms(tokenizer).tokenize(text)[0]
    return tokenize(pipeline, text, tokenizer)


def add_target(pipeline: Pipeline, task: Translate, data: EncodedPairs, target: str | None) -> list[str]:
    """Set the decoder input of a translation to `target`, or to the run's own output; returns notes."""
    check_length(pipeline, len(data.tokens[0]) + 1)
    if target is not None:
        data.targets = [pipeline.tokenizer.encode(target)]
        return ["the decoder reads the given target as if it had generated it"]
    length = sequence_length(pipeline.model, pipeline.config.train)
    (output,) = model_outputs(pipeline.model, task, data, length=length)
    data.targets = [[int(token) for token in output]]
    return [f"its translation: {task.predictions(data, [output])[0]['text']}"]


def denoising_batch(pipeline: Pipeline, text: str, target: str | None) -> tuple[Batch, list[str]]:
    """A text as the source of a denoising encoder-decoder, with the whole text or `target` as the decoder input."""
    if target is None and MASK in text:
        raise UserError(f"{pipeline.run}: the text behind {MASK} is unknown; give the whole text as --target")
    decoder_input = pipeline.tokenizer.encode(text if target is None else target)
    notes = ["this run denoises: the decoder reads the whole text"] if target is None else []
    return forced_batch(pipeline, [(tokenize_with_masks(pipeline, text), decoder_input)], UNLIMITED), notes


def forced_batch(pipeline: Pipeline, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], length: int) -> Batch:
    task: Any = pipeline.task
    special = {"bos": task.bos, "eos": task.eos, "source_eos": task.eos, "filler": task.pad_id}
    sources, targets = zip(*pairs, strict=True)
    return teacher_forcing_batch(sources, targets, **special, length=length)


# Encoded files


def encode_file(pipeline: Pipeline, file: str, *, rows: int | None = None) -> Iterator[Batch]:
    """The rows of a file in batches; long texts are truncated."""
    task, device = pipeline.task, pipeline.model.device
    length = sequence_length(pipeline.model, pipeline.config.train)
    if is_labelled(task):
        for records in read_chunks(pipeline, file, rows):
            has_targets = task.translates and task.target in records.columns
            data = task.prepare(records, labelled=has_targets)
            if task.translates and not has_targets:
                outputs = model_outputs(pipeline.model, task, data, length=length)
                data.targets = [[int(token) for token in row] for row in outputs]
            yield task.examples(data, length=length).batch(range(len(records))).to(device)
        return
    for texts in chunked(islice((text for _, text in stream_texts(file) if text.strip()), rows)):
        yield encode_texts(pipeline, texts, pipeline.model.backbone.context or length).to(device)


def read_chunks(pipeline: Pipeline, file: str, rows: int | None) -> Iterator[Records]:
    """The rows of a labelled task; sentences to translate may also be the lines of a text file."""
    task = pipeline.labelled_task()
    is_text = task.translates and (file == "-" or detect_format(file).format == PLAIN)
    records = (text for _, text in stream_texts(file)) if is_text else pipeline.read_rows(file)
    if isinstance(records, Records):
        indices = range(len(records))[:rows]
        yield from (records.select(indices[start : start + CHUNK]) for start in range(0, len(indices), CHUNK))
        return
    for texts in chunked(islice((text for text in records if text.strip()), rows)):
        yield Records("text", list(range(1, len(texts) + 1)), task.columns_of(texts))


def chunked(texts: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(texts)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk


def encode_texts(pipeline: Pipeline, texts: Sequence[str], length: int) -> Batch:
    """Texts of a language model as one batch, each truncated to the context."""
    tokens = pipeline.tokenizer.encode_batch(texts)
    if pipeline.model.backbone.is_encoder_decoder:
        return forced_batch(pipeline, [(ids, ids) for ids in tokens], length)
    special = special_tokens_for(pipeline.task, pipeline.tokenizer, left_to_right=pipeline.model.backbone.causal)
    capacity = special.capacity(length)
    return batch_from_rows([special.wrap(ids[:capacity]) for ids in tokens], special.pad, pipeline.model.device)


# With labels


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


def class_index(pipeline: Pipeline, label: str, *, option: str = "--label") -> int:
    classes = pipeline.classification_task().config.classes
    if label not in classes:
        hint = f"this run knows {quote_names(classes)}{did_you_mean(label, classes)}"
        raise UserError(f"{pipeline.run}: {option} {label!r} is no class; {hint}")
    return classes.index(label)


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
        (prediction,) = pipeline.iter_predictions([row])
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


def file_examples(
    pipeline: Pipeline, file: str | Path, *, columns: Mapping[str, str] | None = None, rows: int = MAX_ROWS
) -> tuple[Task, Examples]:
    """Labelled rows of a file, at most `rows`, or all its windows of text; long rows are truncated."""
    task, length = pipeline.task, sequence_length(pipeline.model, pipeline.config.train)
    if is_labelled(task):
        records = require_labels(task.read_file(file, config=task.config, columns=columns), task.target, "for a loss")
        records = records.select(range(min(rows, len(records))))
        task.check(records)
        task = task.for_loss()
        return task, task.examples(task.prepare(records), length=length)
    corpus = read_corpus(file, column=pipeline.config.data.column)
    store = build_store(corpus, pipeline.tokenizer, sentences=task.needs_sentences)
    return task, task.examples(store, length=length)


def file_target(pipeline: Pipeline, file: str | Path, *, columns: Mapping[str, str] | None = None) -> ExplainTarget:
    """The first rows of a file with the labels of the run's loss."""
    task, examples = file_examples(pipeline, file, columns=columns)
    notes = [f"{MAX_ROWS} of {len(examples):,} rows are read"] if len(examples) > MAX_ROWS else []
    return make_target(pipeline, task, examples.batch(range(min(MAX_ROWS, len(examples)))), notes)
