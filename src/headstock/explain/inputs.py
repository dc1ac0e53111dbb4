"""Texts and files encoded as a run reads them, with the special tokens of its task.

B rows, T tokens, S source tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from headstock.data.formats import PLAIN, detect_format
from headstock.data.labelled_texts import stream_texts
from headstock.data.mask_gaps import MASK, SurfaceForms
from headstock.data.records import Records
from headstock.decoding.batching import batch_from_rows
from headstock.errors import UserError
from headstock.explain.targets import check_length, check_texts, row_tokens, source_tokenizer, tokenize
from headstock.inference.pipeline import Pipeline
from headstock.model.batch import Batch
from headstock.tasks.labelled import UNLIMITED, is_labelled
from headstock.tasks.special_tokens import special_tokens_for
from headstock.tasks.translate import EncodedPairs, Translate, teacher_forcing_batch
from headstock.train.evaluate import model_outputs
from headstock.train.loop import sequence_length

CHUNK = 16  # texts of a file per batch


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


# Files


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
    task, detected = pipeline.labelled_task(), detect_format(Path(file))
    is_text = task.translates and (file == "-" or (detected is not None and detected.format == PLAIN))
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
