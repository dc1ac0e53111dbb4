"""A text as a run's own task reads it, together with what the run must say of it.

B rows, T tokens.
"""

import re
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
from headstock.errors import UserError, did_you_mean
from headstock.inference.pipeline import Pipeline, load
from headstock.inference.translate import display_tokens
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.base import Examples, Task
from headstock.tasks.class_labels import listed
from headstock.tasks.labelled import LabelledTask, is_labelled
from headstock.tasks.masked import MaskedLM
from headstock.tasks.special_tokens import special_tokens_for
from headstock.train.labelled_data import require_labels
from headstock.train.loop import sequence_length

ROWS = 16  # of a file that are read
TRIES = 64  # draws of what is hidden, until something is


@dataclass(frozen=True)
class ExplainTarget:
    """What a run reads and what is wanted of it there."""

    task: Task
    batch: Batch
    description: str  # what the loss is that of, in words
    notes: list[str] = field(default_factory=list)  # what a reader should know of how the text was read

    def loss(self, model: Model) -> Tensor:
        """The loss as in training: each head's mean, weighed as the task weighs it."""
        sums = self.task.losses(model, self.batch)
        counts = self.task.counts(self.batch)
        return torch.stack([self.task.weight(head) * sums[head] / max(1, n) for head, n in counts.items()]).sum()


def open_single_run(run: str | Path, *, device: str = "auto") -> Pipeline:
    """A run that is one model; what is looked into cannot be several at once."""
    loaded = load(run, device=device)
    if len(loaded.models) > 1:
        raise UserError(f"{loaded.run}: is several models; name one of them, such as {loaded.run.member(0)}")
    return loaded


def limit_of(loaded: Pipeline) -> int | None:
    """How many tokens with its marks a text may have."""
    if is_labelled(loaded.task):
        return sequence_length(loaded.model, loaded.config.train)
    return loaded.model.backbone.context


def find_token(tokens: Sequence[str], word: str) -> int | None:
    """Where a word stands, from 0; a number is a place, counted from 1; None where it is no token."""
    if word in tokens:
        return tokens.index(word)
    return int(word) - 1 if word.isdecimal() and 1 <= int(word) <= len(tokens) else None


def check_length(loaded: Pipeline, count: int) -> None:
    limit = limit_of(loaded)
    if limit is not None and count > limit:
        raise UserError(f"{loaded.run}: the text is {count:,} tokens with its marks, and this run reads {limit:,}")


def check_texts(loaded: Pipeline, texts: Sequence[str]) -> None:
    """As many texts as the run's task reads together, and none of them empty."""
    if len(texts) != loaded.task.texts_per_row:
        raise UserError(f"{loaded.run}: wanted {loaded.task.row_description}, {len(texts)} came")
    if not all(text.strip() for text in texts):
        raise UserError(f"{loaded.run}: the text is empty")


# A text or a file to learn from


def training_target(
    loaded: Pipeline, texts: Sequence[str], *, label: str | None = None, visible: str | None = None
) -> ExplainTarget:
    """One text with what the run's objective or its labels ask of it; a run with labels takes its own unless given.

    `shown` is a word, or its place from 1, that a masked objective must not mask.
    """
    check_texts(loaded, texts)
    if is_labelled(loaded.task):
        return labelled_target(loaded, texts, label)
    if label is not None:
        raise UserError(f"{loaded.run}: is a language model, whose loss needs no --label")
    (text,) = texts
    if loaded.task.fills_masks and MASK in text:
        raise UserError(f"{loaded.run}: what stands behind {MASK} is not known; give the whole text, some is hidden")
    ids = loaded.tokenizer.encode(text)
    if not ids:
        raise UserError(f"{loaded.run}: the tokenizer leaves nothing of the text")
    if loaded.task.fills_masks and not loaded.task.generates:
        return masked_target(loaded, cast(MaskedLM, loaded.task), ids, visible)
    check_length(loaded, len(ids) + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8")
        store = build_store(read_corpus(path, documents="file"), loaded.tokenizer, cache=Path(folder))
        examples = loaded.task.examples(store, length=max(2, store.tokens))
        batch = examples.batch(range(len(examples)))
    return ExplainTarget(loaded.task, batch.to(loaded.model.device), *told(loaded.task, batch))


def masked_target(loaded: Pipeline, task: MaskedLM, ids: Sequence[int], word: str | None = None) -> ExplainTarget:
    """One text of which the objective hides some tokens but not `word`, drawn again until there is one."""
    row = special_tokens_for(task, loaded.tokenizer).wrap(ids)
    check_length(loaded, len(row))
    shown = torch.tensor([row]).numpy()
    allowed = ((shown != task.bos) & (shown != loaded.tokenizer.sep)).astype(bool)
    if word is not None and (place := find_token(display_tokens(loaded.tokenizer, row), word)) is not None:
        allowed[0, place] = False
        if not allowed.any():
            raise UserError(f"{loaded.run}: nothing but --word {word} could be masked; give a longer text")
    for draw in range(TRIES):
        key = ("explain", draw)
        tokens, labels = task.masker.mask_tokens(
            shown, allowed, 0 * shown, key=key, rows=[0], fraction=task.masker.fraction(1.0)
        )
        if (labels != IGNORE_INDEX).any():
            break
    else:
        raise UserError(f"{loaded.run}: nothing of so short a text was hidden in {TRIES} draws; give a longer one")
    batch = Batch(torch.from_numpy(tokens), labels={"token": torch.from_numpy(labels)})
    wanted, notes = told(task, batch)
    if task.config.nsp:
        batch.labels["next"] = torch.tensor([IGNORE_INDEX])
        notes = [*notes, "whether a sentence follows is not asked: there is one text"]
    return ExplainTarget(task, batch.to(loaded.model.device), wanted, notes)


def labelled_target(loaded: Pipeline, texts: Sequence[str], label: str | None) -> ExplainTarget:
    task = loaded.labelled_task()
    row = task.row_from_texts(texts)
    notes = []
    if label is None:
        (said,) = loaded.predict([row])
        columns = task.columns_of([row]) | {task.target: [task.predicted_target(said)]}
        notes.append(f"no label was given, so what the run itself says is taken: {task.as_text(said).strip()}")
    else:
        columns = task.columns_of([row]) | {task.target: [checked_label(loaded, label)]}
    data = task.prepare(Records("text", [1], columns))
    check_fits(loaded, task, data)
    task = task.for_loss()
    batch = task.examples(data, length=sequence_length(loaded.model, loaded.config.train)).batch([0])
    wanted, more = told(task, batch)
    return ExplainTarget(task, batch.to(loaded.model.device), wanted, [*notes, *more])


def file_target(loaded: Pipeline, file: str | Path, *, columns: Mapping[str, str] | None = None) -> ExplainTarget:
    """The first rows of a file as the run reads them: labelled rows, or text in windows; what is too long is cut."""
    task, length = loaded.task, sequence_length(loaded.model, loaded.config.train)
    examples: Examples
    if is_labelled(task):
        rows = require_labels(task.read_file(file, config=task.config, columns=columns), task.target, "for a loss")
        rows = rows.select(range(min(ROWS, len(rows))))
        task.check(rows)
        task = task.for_loss()
        examples = task.examples(task.prepare(rows), length=length)
    else:
        corpus = read_corpus(file, column=loaded.config.data.column)
        store = build_store(corpus, loaded.tokenizer, sentences=task.needs_sentences)
        examples = task.examples(store, length=length)
    batch = examples.batch(range(min(ROWS, len(examples))))
    wanted, notes = told(task, batch)
    if len(examples) > ROWS:
        notes = [*notes, f"{ROWS} of {len(examples):,} rows are read"]
    return ExplainTarget(task, batch.to(loaded.model.device), wanted, notes)


def told(task: Task, batch: Batch) -> tuple[str, list[str]]:
    """What the loss of a batch is that of, and what should be known of it."""
    counts = {head: count for head, count in task.counts(batch).items() if head != "places"}
    ways = {"forward": " read forward", "backward": " read backward"}
    names = dict.fromkeys(("token", *ways), "token")
    names |= {"masked": "hidden token", "causal": "following token", "next": "sentence pair"}
    parts = [
        f"{count:,} {names.get(head, head)}{'s' * (count != 1)}{ways.get(head, '')}" for head, count in counts.items()
    ]
    return " and ".join(parts), []


def checked_label(loaded: Pipeline, label: str) -> str:
    """A label the run knows, or a translation to be learned."""
    task = loaded.labelled_task()
    if task.translates:
        return label
    if not task.predicts_classes:
        raise UserError(f"{loaded.run}: a {task.title} has no one label a text; name labelled rows with --file")
    class_number(loaded, label)
    return label


def class_number(loaded: Pipeline, label: str) -> int:
    classes = loaded.classification_task().config.classes
    if label not in classes:
        known = f"this run knows {listed(classes)}{did_you_mean(label, classes)}"
        raise UserError(f"{loaded.run}: --label {label!r} is no class; {known}")
    return classes.index(label)


def check_fits(loaded: Pipeline, task: LabelledTask, data: Any) -> None:
    """Refuse what the run would read only in part."""
    check_length(loaded, task.row_length(data))


def masks_in(text: str, pattern: str) -> list[tuple[int, int]]:
    """Where a text has a mask, as a person writes it or as the tokenizer spells it."""
    return [found.span() for found in re.finditer(pattern, text)]
