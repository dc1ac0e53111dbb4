"""Pretrains a tokenizer and a language model on raw text, in a run folder."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from headstock.data.corpus import Corpus, read_corpus, resolve_paths
from headstock.data.token_shards import UnknownTokens
from headstock.data.token_store import SplitStores, build_split_stores
from headstock.data.tokenizer import Tokenizer, TokenizerSettings, open_tokenizer, tokenizer_statistics, train_tokenizer
from headstock.data.urls import is_url
from headstock.errors import UserError
from headstock.ray_cluster import check_on
from headstock.tasks.base import Task
from headstock.train.budget import Budget, ValidationBudget
from headstock.train.callbacks import Callback, run_callbacks
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import BatchSums, bootstrap_intervals, evaluate
from headstock.train.loop import sequence_length, train
from headstock.train.memory import PeakMemory
from headstock.train.mirror import mirrored, requested_mirror
from headstock.train.models import build_model, build_task, load_backbone_and_shared_heads, source_weights
from headstock.train.resolve import require_corpus, resolve_pretrain_config, with_vocabulary
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.session import (
    Session,
    check_inputs_outside,
    check_not_source,
    environment_results,
    finish_run,
    finished_results,
    open_session,
    resumed_config,
    save_data_paths,
)
from headstock.train.settings import RunConfig, make_config
from headstock.train.trackers import tracked

logger = logging.getLogger(__name__)

START = "the run to start from"


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
    on: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a tokenizer and a language model on text; returns the run's results.

    Settings come from the preset, then the file, then `settings` (`{"depth": 4}` or `{"model.depth": 4}`); the later
    wins. With `resume`, an interrupted run continues as if it had not been interrupted, and a run that does not exist
    is started. `start` is a finished run whose model, tokenizer and weights this run starts from. With `on="ray"` or
    `"ray:ADDRESS"` a Ray cluster builds the token store; the model is trained here.
    """
    if on is not None:
        check_on(on, as_client=False)
    paths = [str(corpus)] if isinstance(corpus, str | Path) else [str(path) for path in corpus]
    options = dict(settings or {})
    options |= {"task.name": objective} if objective else {}
    if "-" in paths:  # standard input is saved to a file, so that the run can be resumed and evaluated
        paths = list(read_corpus(paths, column=options.get("data.column", "text")).paths)
    options |= {"data.corpus": paths} if paths else {}
    options |= {"tokenizer.file": str(tokenizer)} if tokenizer else {}
    if start and not resume:
        check_not_source(RunFolder(Path(out)), open_run(start))
    mirror = requested_mirror(options, config_file)
    with open_session(out, device=device, resume=resume, overwrite=overwrite, mirror=mirror) as session:
        run = session.run
        if session.resuming:
            run_config = resumed_config(run, options)
        else:
            run_config = require_corpus(resolve_pretrain_config(preset, config_file, options, start=start))
            local = [path for path in (*run_config.data.corpus, *run_config.data.valid) if not is_url(path)]
            texts = [source.path for source in resolve_paths(local)]
            check_inputs_outside(run, [*texts, run_config.tokenizer.file, config_file])
        complete = session.resuming and run.is_complete()
        weights = source_weights(open_run(start)) if start and not complete else None
        setup = None
        if session.distributed.is_main:
            if session.resuming:
                setup = open_setup(run, run_config, on)
            else:
                setup = create_run(run, run_config, weights, on, start=None if start is None else str(open_run(start)))
            save_data_paths(run, run_config)
        session.distributed.barrier()  # the folder exists now
        url = run_config.train.mirror if session.distributed.is_main else None
        with mirrored(run, url), tracked(run, run_config.train, session.distributed) as tracking:
            if complete:
                return tracking.finish(finished_results(run, session.distributed))
            setup = setup or open_setup(run, make_config(run.config()))
            return tracking.finish(train_and_evaluate(session, setup, [*callbacks, *tracking.callbacks(run)], weights))


@dataclass
class RunSetup:
    """The parts of a run before training."""

    config: RunConfig
    task: Task
    stores: SplitStores


def create_run(
    run: RunFolder,
    run_config: RunConfig,
    weights: dict[str, Tensor] | None = None,
    on: str | None = None,
    *,
    start: str | None = None,
) -> RunSetup:
    """Prepare text, tokenizer and token store, then create the run folder."""
    corpus, valid = read_corpora(run_config)
    tokenizer = open_or_train_tokenizer(run_config.tokenizer, corpus.sample_texts())
    task = build_task(run_config, tokenizer)  # rejects a tokenizer without the special tokens it needs
    logger.info(tokenizer_line(tokenizer, corpus))
    stores = build_stores(run_config, task, corpus, valid, on)
    for store in (stores.train, stores.valid):  # rejects text that the task cannot use
        task.examples(store, length=run_config.train.length or getattr(run_config.model, "context", None) or 256)
    run_config = with_vocabulary(run_config, tokenizer)
    if spare := run_config.model.vocabulary - tokenizer.vocabulary:
        logger.info(f"the model's vocabulary is padded to {run_config.model.vocabulary:,}: {spare:,} unused entries")
    if weights is not None:  # rejects weights that do not fit
        load_backbone_and_shared_heads(build_model(run_config, task), weights, source=START)
    sources = {"corpus": list(corpus.names()), "how": corpus.describe()}
    data = {"fingerprint": stores.folder.name, "tokenizer": tokenizer.fingerprint, **sources, **stores.summary}
    run.create(run_config.plain(), tokenizer, data if start is None else {**data, "start": start})
    return RunSetup(run_config, task, stores)


def open_setup(run: RunFolder, run_config: RunConfig, on: str | None = None) -> RunSetup:
    """The parts of an existing run."""
    task = build_task(run_config, run.tokenizer())
    return RunSetup(run_config, task, reopen_stores(run, run_config, task, on))


def reopen_stores(run: RunFolder, run_config: RunConfig, task: Task, on: str | None = None) -> SplitStores:
    """A run's token stores; rejects text that has changed since the run was created."""
    stores = build_stores(run_config, task, *read_corpora(run_config), on)
    if stores.folder.name != run.data()["fingerprint"]:
        raise UserError(f"{run}: the corpus has changed since the run was created, so it cannot be resumed")
    return stores


def read_corpora(run_config: RunConfig) -> tuple[Corpus, Corpus | None]:
    data = run_config.data
    read = partial(read_corpus, documents=data.documents, column=data.column)
    return read(data.corpus), read(data.valid) if data.valid else None


def build_stores(
    run_config: RunConfig, task: Task, corpus: Corpus, valid: Corpus | None, on: str | None = None
) -> SplitStores:
    data = run_config.data
    return build_split_stores(
        corpus,
        task.tokenizer,
        valid=valid,
        valid_fraction=data.valid_fraction,
        deduplicate=data.deduplicate,
        sentences=task.needs_sentences,
        seed=data.split_seed,
        on=on,
        shared=data.stores,
    )


def open_or_train_tokenizer(settings: TokenizerSettings, texts: Iterable[str]) -> Tokenizer:
    if settings.file:
        return open_tokenizer(Path(settings.file))
    logger.info(f"training a {settings.kind} tokenizer of at most {settings.vocabulary:,} entries")
    return train_tokenizer(texts, settings)


def tokenizer_line(tokenizer: Tokenizer, corpus: Corpus) -> str:
    texts = corpus.first_texts(200)
    facts = tokenizer_statistics(tokenizer, texts, sample=" ".join(texts[0].split()[:8]))
    return (
        f"tokenizer: {facts['vocabulary']:,} entries, {facts['tokens_per_word']:.2f} tokens per word, "
        f"{facts['unknown_rate']:.2%} unknown; {' '.join(facts['sample'])}"
    )


def train_and_evaluate(
    session: Session, setup: RunSetup, callbacks: Sequence[Callback], weights: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """Train the model, evaluate it on the held-out text, and write results and model card."""
    run, distributed = session.run, session.distributed
    task, stores, settings = setup.task, setup.stores, setup.config.train
    model = build_model(setup.config, task)
    if weights is not None:
        load_backbone_and_shared_heads(model, weights, source=START)
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
    max_examples = min(limit or len(examples), len(examples))
    share = max_examples / max(1, len(examples))
    if share < 1:
        logger.info(f"evaluating on {share:.0%} of the held-out text to save time; `evaluate` reads all of it")
    metrics = evaluate(
        model,
        task,
        examples,
        distributed=distributed,
        batch_size=state.micro_batch or settings.micro_batch or settings.batch // distributed.size,
        size=size,
        dtype=settings.dtype,
        max_examples=max_examples,
        batch_sums=batch_sums,
        unknown=unknown,
    )
    if unknown.tokens and "bits_per_byte" in metrics:
        logger.info(
            f"{unknown.tokens / stores.valid.tokens:.1%} of the held-out tokens are unknown: bits per byte include "
            f"8 bits for each of the {unknown.bytes:,} bytes that they replace, and 8 for each unknown token"
        )
    results = pretrain_results(run, state, metrics, counts, distributed)
    results |= {"peak_bytes": peak.bytes(), "measured_share": round(share, 4), "unknown": asdict(unknown)}
    if distributed.size == 1:  # a process has only its own batches
        results["intervals"] = bootstrap_intervals(task, batch_sums, size=round(size * share), unknown=unknown)
    if distributed.is_main:
        samples = task.samples(model, stores.valid, length=length, seed=settings.seed)
        results["samples"] = [asdict(sample) for sample in samples]
    return finish_run(run, distributed, results)


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
