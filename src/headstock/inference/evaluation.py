"""Data and metrics for evaluating a finished run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstock.data.corpus import read_corpus
from headstock.data.records import Records
from headstock.data.token_store import TokenStore, build_store
from headstock.errors import UserError
from headstock.inference.inputs import resolve_columns
from headstock.logs import muted
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.tasks.labelled import LabelledTask
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import evaluate
from headstock.train.labelled_data import read_splits, require_labels
from headstock.train.pretrain import reopen_stores
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

BATCH_SIZE = 16


def held_out_records(run: RunFolder, config: RunConfig, task: LabelledTask) -> Records:
    """The run's test rows, or if it has none its validation rows."""
    with muted():
        splits = read_splits(config.data, type(task), task.config, seed=config.train.seed)
    if splits.fingerprint() != run.data()["fingerprint"]:
        raise UserError(f"{run}: its labelled files have changed since training; pass the file to evaluate on")
    return splits.test if splits.test is not None and splits.test.has_labels else splits.valid


def labelled_records(
    config: RunConfig,
    task: LabelledTask,
    files: Sequence[str | Path],
    columns: dict[str, str] | None,
    *,
    skip_blank: bool,
) -> Records:
    """The rows of one labelled file."""
    if len(files) > 1:
        raise UserError(f"a {task.title} is evaluated on one labelled file at a time, not on {len(files)}")
    names = resolve_columns(config, files[0], columns)
    records = task.read_file(files[0], config=task.config, columns=names, skip_blank=skip_blank)
    return require_labels(records, task.target, "to measure by")


def evaluation_store(
    run: RunFolder,
    config: RunConfig,
    task: Task,
    corpus: str | Path | Sequence[str | Path],
    *,
    documents: str,
    column: str | None,
) -> TokenStore:
    """A corpus as tokens; by default the run's validation split."""
    if not corpus:
        with muted():
            return reopen_stores(run, config, task).valid
    text = read_corpus(corpus, documents=documents, column=column or config.data.column)  # type: ignore[arg-type]
    return build_store(text, task.tokenizer, sentences=task.needs_sentences)


def evaluate_store(model: Model, task: Task, store: TokenStore, *, length: int, dtype: str) -> dict[str, Any]:
    """The metrics of a language model on a corpus, and the size of the corpus."""
    metrics = evaluate(
        model,
        task,
        task.examples(store, length=length),
        distributed=DistributedContext(model.device),
        batch_size=BATCH_SIZE,
        size=store.bytes,
        dtype=dtype,
        unknown=store.unknown,
    )
    sizes = {"tokens": store.tokens, "documents": store.documents, "bytes": store.bytes}
    if store.unknown is not None and store.unknown.tokens:
        sizes |= {"unknown_tokens": store.unknown.tokens, "unknown_bytes": store.unknown.bytes}
    return metrics | sizes
