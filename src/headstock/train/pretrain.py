"""Pretrains a tokenizer and a language model on raw text, in a run folder."""

import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstock import __version__
from headstock.data.corpus import Corpus, read_corpus, resolve_paths
from headstock.data.token_shards import UnknownTokens
from headstock.data.token_store import SplitStores, build_split_stores
from headstock.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_statistics, train_tokenizer
from headstock.errors import UserError
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.budget import Budget
from headstock.train.callbacks import Callback, run_callbacks
from headstock.train.distributed import DistributedContext, process_group
from headstock.train.evaluate import BatchSums, bootstrap_intervals, evaluate
from headstock.train.loop import sequence_length, train
from headstock.train.model_card import write_card
from headstock.train.models import build_model, build_task, source_weights, transferred_tensors
from headstock.train.peak_memory import PeakMemory
from headstock.train.resolve import (
    require_corpus,
    resolve_pretrain_config,
    resumed_config,
    save_data_paths,
    with_vocabulary,
)
from headstock.train.run_folder import (
    RunFolder,
    check_inputs_outside,
    check_not_source,
    check_output_folder,
    locked_run,
    open_run,
)
from headstock.train.settings import RunConfig, make_config
from headstock.train.state import TrainState
from headstock.train.validation import ValidationBudget

logger = logging.getLogger(__name__)


def pretrain(
    corpus: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path,
    preset: str | None = None,
    objective: str | None = None,
    config_file: str | Path | None = None,
    tokenizer: str | Path | None = None,
    start: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a tokenizer and a language model on text; returns the run's results.

    Settings come from the preset, then the file, then `settings` (`{"depth": 4}` or `{"model.depth": 4}`); the later
    wins. With `resume`, an interrupted run continues as if it had not been interrupted, and a run that does not exist
    is started. `start` is a finished run whose model, tokenizer and weights this run starts from.
    """
    run = RunFolder(Path(out))
    paths = [str(corpus)] if isinstance(corpus, str | Path) else [str(path) for path in corpus]
    options = dict(settings or {})
    options |= {"task.name": objective} if objective else {}
    if "-" in paths:  # standard input is saved to a file, so that the run can be resumed and evaluated
        paths = list(read_corpus(paths, column=options.get("data.column", "text")).paths)
    options |= {"data.corpus": paths} if paths else {}
    options |= {"tokenizer.file": str(tokenizer)} if tokenizer else {}
    if start and not resume:
        check_not_source(run, open_run(start))
    with locked_run(run):
        check_output_folder(run, resume=resume, overwrite=overwrite)
        resuming = resume and run.exists()
        with process_group(device) as distributed:  # waits until every process has checked the folder
            if resuming:
                run_config = resumed_config(run, options)
            else:
                run_config = require_corpus(resolve_pretrain_config(preset, config_file, options, start=start))
                texts = [source.path for source in resolve_paths((*run_config.data.corpus, *run_config.data.valid))]
                check_inputs_outside(run, [*texts, run_config.tokenizer.file, config_file])
            complete = resuming and run.is_complete()
            weights = source_weights(open_run(start)) if start and not complete else None
            setup = None
            if distributed.is_main:
                setup = open_setup(run, run_config) if resuming else create_run(run, run_config, weights)
                save_data_paths(run, run_config)
            distributed.barrier()  # the folder exists now
            if complete:
                return finished_results(run, distributed)
            setup = setup or open_setup(run, make_config(run.config()))
            return train_and_evaluate(run, setup, distributed, callbacks, weights)


@dataclass
class RunSetup:
    """The parts of a run before training."""

    config: RunConfig
    tokenizer: Tokenizer
    task: Task
    stores: SplitStores


def create_run(run: RunFolder, run_config: RunConfig, weights: dict[str, Tensor] | None = None) -> RunSetup:
    """Prepare text, tokenizer and token store, then create the run folder."""
    corpus, valid = read_corpora(run_config)
    if run_config.tokenizer.file:
        tokenizer = open_tokenizer(Path(run_config.tokenizer.file))
    else:
        kind, vocabulary = run_config.tokenizer.kind, run_config.tokenizer.vocabulary
        logger.info(f"training a {kind} tokenizer of at most {vocabulary:,} entries")
        tokenizer = train_tokenizer(corpus.sample_texts(), run_config.tokenizer)
    task = build_task(run_config, tokenizer)  # rejects a tokenizer without the special tokens it needs
    logger.info(tokenizer_line(tokenizer, corpus))
    stores = build_stores(run_config, tokenizer, task, corpus, valid)
    for store in (stores.train, stores.valid):  # rejects text that the task cannot use
        task.examples(store, length=run_config.train.length or getattr(run_config.model, "context", None) or 256)
    run_config = with_vocabulary(run_config, tokenizer)
    if spare := run_config.model.vocabulary - tokenizer.vocabulary:
        logger.info(f"the model's vocabulary is padded to {run_config.model.vocabulary:,}: {spare:,} unused entries")
    if weights is not None:
        load_start(build_model(run_config, tokenizer)[0], weights)  # rejects weights that do not fit
    sources = {"corpus": list(corpus.names()), "how": corpus.describe()}
    data = {"fingerprint": stores.folder.name, "tokenizer": tokenizer.fingerprint, **sources, **stores.summary}
    run.create(run_config.plain(), tokenizer, data)
    return RunSetup(run_config, tokenizer, task, stores)


def open_setup(run: RunFolder, run_config: RunConfig) -> RunSetup:
    """The parts of an existing run."""
    tokenizer = run.tokenizer()
    task = build_task(run_config, tokenizer)
    return RunSetup(run_config, tokenizer, task, reopen_stores(run, run_config, tokenizer, task))


def reopen_stores(run: RunFolder, run_config: RunConfig, tokenizer: Tokenizer, task: Task) -> SplitStores:
    """A run's token stores; rejects text that has changed since the run was created."""
    stores = build_stores(run_config, tokenizer, task, *read_corpora(run_config))
    if stores.folder.name != run.data()["fingerprint"]:
        raise UserError(f"{run}: the corpus has changed since the run was created, so it cannot be resumed")
    return stores


def read_corpora(run_config: RunConfig) -> tuple[Corpus, Corpus | None]:
    data = run_config.data
    read = partial(read_corpus, documents=data.documents, column=data.column)
    return read(data.corpus), read(data.valid) if data.valid else None


def build_stores(
    run_config: RunConfig, tokenizer: Tokenizer, task: Task, corpus: Corpus, valid: Corpus | None
) -> SplitStores:
    data = run_config.data
    return build_split_stores(
        corpus,
        tokenizer,
        valid=valid,
        valid_fraction=data.valid_fraction,
        deduplicate=data.deduplicate,
        sentences=task.needs_sentences,
        seed=data.split_seed,
    )


def tokenizer_line(tokenizer: Tokenizer, corpus: Corpus) -> str:
    texts = corpus.first_texts(200)
    facts = tokenizer_statistics(tokenizer, texts, sample=" ".join(texts[0].split()[:8]))
    return (
        f"tokenizer: {facts['vocabulary']:,} entries, {facts['tokens_per_word']:.2f} tokens per word, "
        f"{facts['unknown_rate']:.2%} unknown; {' '.join(facts['sample'])}"
    )


def load_start(model: Model, weights: dict[str, Tensor]) -> None:
    model.load_tensors(transferred_tensors(model, weights), source="the run to start from")


def train_and_evaluate(
    run: RunFolder,
    setup: RunSetup,
    distributed: DistributedContext,
    callbacks: Sequence[Callback],
    weights: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Train the model, evaluate it on the held-out text, and write results and model card."""
    settings, stores = setup.config.train, setup.stores
    model, task = build_model(setup.config, setup.tokenizer, setup.task)
    if weights is not None:
        load_start(model, weights)
    counts = model.parameter_counts()
    parts = ", ".join(f"{count:,} {name}" for name, count in counts.items() if name != "total" and count)
    logger.info(f"{setup.config.family}: {counts['total']:,} parameters ({parts}) on {distributed.device}")
    peak = PeakMemory(distributed.device)
    with run_callbacks(run, callbacks, settings, distributed) as active:
        state = train(model, task, stores, settings, run=run, distributed=distributed, callbacks=active)
    length = sequence_length(model, settings)
    examples = task.examples(stores.valid, length=length)
    size, unknown, batch_sums = stores.valid.bytes, stores.valid.unknown or UnknownTokens(), BatchSums()
    limit = ValidationBudget(settings, Budget.of(settings, 1), length).final_examples(state)
    most = min(limit or len(examples), len(examples))
    share = most / max(1, len(examples))
    if share < 1:
        logger.info(f"evaluating on {share:.0%} of the held-out text to save time; `evaluate` reads all of it")
    metrics = evaluate(
        model,
        task,
        examples,
        distributed=distributed,
        rows=state.micro_batch or settings.micro_batch or settings.batch // distributed.size,
        size=size,
        dtype=settings.dtype,
        most=most,
        batch_sums=batch_sums,
        unknown=unknown,
    )
    results = pretrain_results(run, state, metrics, counts, distributed)
    results |= {"peak_bytes": peak.bytes(), "measured_share": round(share, 4), "unknown": asdict(unknown)}
    if unknown.tokens and "bits_per_byte" in metrics:
        logger.info(unknown_note(unknown, stores.valid.tokens))
    if distributed.size == 1:  # a process has only its own batches
        results["intervals"] = bootstrap_intervals(task, batch_sums, size=round(size * share), unknown=unknown)
    if distributed.is_main:
        samples = task.samples(model, stores.valid, length=length, seed=settings.seed)
        results["samples"] = [asdict(sample) for sample in samples]
        run.write_results(results)
        write_card(run)
    return results


def unknown_note(unknown: UnknownTokens, tokens: int) -> str:
    return (
        f"{unknown.tokens / tokens:.1%} of the held-out tokens are unknown: bits per byte include 8 bits for each of "
        f"the {unknown.bytes:,} bytes that they replace, and 8 for each unknown token"
    )


def pretrain_results(
    run: RunFolder,
    state: TrainState,
    metrics: dict[str, float],
    parameter_counts: dict[str, int],
    distributed: DistributedContext,
) -> dict[str, Any]:
    """The content of results.json."""
    perplexities = [name for name in metrics if name.endswith("perplexity")]
    top_level = {key: metrics[key] for key in (*perplexities, "bits_per_byte", "next_accuracy") if key in metrics}
    return {
        "run": str(run),
        "steps": state.step,
        "best_step": state.best_step,
        "spikes": state.spikes,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "tokens_per_second": round(state.tokens / max(1e-9, state.seconds - state.overhead_seconds), 1),
        "train_loss": state.loss,
        "valid_loss": metrics["loss"],
        **top_level,
        "metrics": metrics,
        "parameters": parameter_counts,
        **environment_results(distributed),
    }


def environment_results(distributed: DistributedContext) -> dict[str, Any]:
    return {
        "device": str(distributed.device),
        "processes": distributed.size,
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def finished_results(run: RunFolder, distributed: DistributedContext) -> dict[str, Any]:
    """The results of a complete run; writes its model card if it was interrupted just before."""
    logger.info(f"{run} is finished: nothing to resume")
    if distributed.is_main and not run.model_card.is_file():
        write_card(run)
    return run.results()
