"""Texts as a run reads them, with the marks of its task, for those who want to see what it does with them.

B rows, T tokens, S tokens of the source.
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
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.batching import batch_from_rows
from headstock.errors import UserError
from headstock.explain.targets import check_length, check_texts
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.batch import Batch
from headstock.tasks.labelled import UNLIMITED, is_labelled
from headstock.tasks.special_tokens import special_tokens_for
from headstock.tasks.teacher_forcing import teacher_forcing_batch
from headstock.tasks.translate import EncodedPairs, Translate
from headstock.train.loop import sequence_length
from headstock.train.outputs import model_outputs

AT_ONCE = 16  # texts of a file that are read together


@dataclass(frozen=True)
class EncodedInput:
    """One text as a row, and its tokens as a person reads them."""

    batch: Batch
    tokens: list[str]  # T
    source: list[str] = field(default_factory=list)  # S, of an encoder-decoder
    notes: list[str] = field(default_factory=list)  # what a reader should know of how the text was read


def encode_input(
    loaded: Pipeline, texts: Sequence[str], *, target: str | None = None, left_to_right: bool = False
) -> EncodedInput:
    """One text, whole; an encoder-decoder's beside what it writes, or beside `target`."""
    check_texts(loaded, texts)
    task, backbone = loaded.task, loaded.model.backbone
    if target is not None and not backbone.is_encoder_decoder:
        raise UserError(f"{loaded.run}: reads one text and writes none beside it, so --target has no meaning")
    if left_to_right and not task.generates:
        raise UserError(f"{loaded.run}: did not learn to generate, so it never reads a text with --left-to-right")
    if is_labelled(task):
        data = task.prepare(Records("text", [1], task.columns_of([task.row_from_texts(texts)])), labelled=False)
        notes = written(loaded, cast(Translate, task), data, target) if task.translates else []
        batch = task.examples(data, length=UNLIMITED).batch([0])
    elif backbone.is_encoder_decoder:
        batch, notes = repaired(loaded, texts[0], target)
    else:
        around = special_tokens_for(task, loaded.tokenizer, left_to_right=left_to_right or backbone.causal)
        batch, notes = Batch(torch.tensor([around.wrap(cut(loaded, texts[0]))])), []
    if left_to_right and not backbone.causal:
        batch = replace(batch, causal=True)
    for part in filter(None, (batch.source, batch)):
        check_length(loaded, part.tokens.size(1))
    named = display_tokens(loaded.tokenizer, batch.tokens[0].tolist())
    source = [] if batch.source is None else display_tokens(reader(loaded), batch.source.tokens[0].tolist())
    return EncodedInput(batch.to(loaded.model.device), named, source, notes)


def reader(loaded: Pipeline) -> Tokenizer:
    """What cuts the texts that an encoder-decoder reads."""
    return loaded.tokenizer.source_tokenizer or loaded.tokenizer


def cut(loaded: Pipeline, text: str) -> list[int]:
    """A text as tokens; [MASK] is one where the run learned to fill it."""
    tokenizer = reader(loaded)
    if tokenizer.mask is not None and MASK in text and (loaded.task.fills_masks or loaded.task.needs_encoder_decoder):
        return SurfaceForms(tokenizer).tokenize(text)[0]
    if not (ids := tokenizer.encode(text)):
        raise UserError(f"{loaded.run}: the tokenizer leaves nothing of the text")
    return ids


def written(loaded: Pipeline, task: Translate, data: EncodedPairs, target: str | None) -> list[str]:
    """Put beside a source what is to be written: as given, or as the run itself translates it."""
    check_length(loaded, len(data.sources[0]) + 1)
    if target is not None:
        data.targets = [loaded.tokenizer.encode(target)]
        return ["the target was given, so the decoder reads it as if it had written it"]
    (found,) = model_outputs(loaded.model, task, data, length=sequence_length(loaded.model, loaded.config.train))
    data.targets = [[int(token) for token in found]]
    return [f"its translation: {task.predictions(data, [found])[0]['text']}"]


def repaired(loaded: Pipeline, text: str, target: str | None) -> tuple[Batch, list[str]]:
    """A text to be repaired beside the whole one, for an encoder-decoder that learned nothing else yet."""
    task: Any = loaded.task
    if target is None and MASK in text:
        raise UserError(f"{loaded.run}: what stands behind {MASK} is not known; give the whole text as --target")
    wanted = loaded.tokenizer.encode(text if target is None else target)
    marks = {"start": task.bos, "end": task.eos, "source_end": task.eos, "filler": task.pad_id}
    notes = ["this run repairs texts: the decoder is shown the whole text"] if target is None else []
    return teacher_forcing_batch([(cut(loaded, text), wanted)], **marks, length=UNLIMITED), notes


# A whole file


def encode_file(loaded: Pipeline, file: str, *, rows: int | None = None) -> Iterator[Batch]:
    """The rows of a file, some at a time; of a text that does not fit into a row, what the run reads of it."""
    task, length = loaded.task, sequence_length(loaded.model, loaded.config.train)
    if is_labelled(task):
        for records in labelled_rows(loaded, file, rows):
            translated = task.translates and task.target in records.columns
            data = task.prepare(records, labelled=translated)
            if task.translates and data.targets is None:
                found = model_outputs(loaded.model, task, data, length=length)
                data.targets = [[int(token) for token in row] for row in found]
            yield task.examples(data, length=length).batch(range(len(records))).to(loaded.model.device)
        return
    for texts in in_parts(islice((text for _, text in stream_texts(file) if text.strip()), rows)):
        yield together(loaded, texts, loaded.model.backbone.context or length)


def labelled_rows(loaded: Pipeline, file: str, rows: int | None) -> Iterator[Records]:
    """The rows of a file as the run's task has them; sentences to be translated may stand there one a line."""
    task, known = loaded.labelled_task(), detect_format(Path(file))
    lines = task.translates and (file == "-" or (known is not None and known.format == PLAIN))
    found = (text for _, text in stream_texts(file)) if lines else loaded.read_rows(file)
    if isinstance(found, Records):
        some = range(len(found))[:rows]
        yield from (found.select(some[at : at + AT_ONCE]) for at in range(0, len(some), AT_ONCE))
        return
    for part in in_parts(islice((text for text in found if text.strip()), rows)):
        yield Records("text", list(range(1, len(part) + 1)), task.columns_of(part))


def in_parts(texts: Iterable[Any]) -> Iterator[list[Any]]:
    waiting = iter(texts)
    while part := list(islice(waiting, AT_ONCE)):
        yield part


def together(loaded: Pipeline, texts: Sequence[str], length: int) -> Batch:
    """Texts of a language model as one batch, each cut to what fits."""
    task: Any = loaded.task
    cuts = loaded.tokenizer.encode_batch(texts)
    if loaded.model.backbone.is_encoder_decoder:
        marks = {"start": task.bos, "end": task.eos, "source_end": task.eos, "filler": task.pad_id}
        return teacher_forcing_batch([(ids, ids) for ids in cuts], **marks, length=length).to(loaded.model.device)
    marks_around = special_tokens_for(task, loaded.tokenizer, left_to_right=loaded.model.backbone.causal)
    room = marks_around.capacity(length)
    return batch_from_rows([marks_around.wrap(ids[:room]) for ids in cuts], marks_around.pad, loaded.model.device)
