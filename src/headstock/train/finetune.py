"""From a pretrained run and a few labels to a model of a task in a run folder of its own."""

import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock import __version__, config
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from headstock.errors import UserError
from headstock.io import write_text
from headstock.model.model import Model
from headstock.tasks.labelled import is_labelled
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext, process_group
from headstock.train.finetune_config import labelled_task, resolve_finetune_config, resolve_with_data
from headstock.train.fit import FitResult, LabelledData, fit_run, load_weights
from headstock.train.labelled_data import LabelledSplits, read_splits
from headstock.train.metrics import metrics_with_intervals
from headstock.train.model_card import write_card
from headstock.train.outputs import ensemble_mean
from headstock.train.pretrain import (
    build_model,
    check_same_settings,
    finished_results,
    pretrain,
    save_data_paths,
    source_settings,
    source_weights,
    with_vocabulary,
)
from headstock.train.run_folder import (
    RunFolder,
    check_inputs_outside,
    check_not_source,
    check_output_folder,
    locked_run,
    open_run,
    tokenizer_fingerprints,
)
from headstock.train.settings import RunConfig, make_config

logger = logging.getLogger(__name__)


def finetune(
    run: str | Path | None = None,
    *,
    preset: str | None = None,
    train: str | Path | None = None,
    out: str | Path,
    task: str = "classify",
    valid: str | Path | None = None,
    test: str | Path | None = None,
    columns: dict[str, str] | None = None,
    skip_blank: bool = False,
    init: str | None = None,
    freeze: bool | None = None,
    config_file: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Put a new head on a run's backbone and train both on labelled texts; returns the new run's results.

    `init="scratch"` takes the architecture without the weights, `freeze` trains the head alone. All else is a
    setting, such as `{"pool": "mean", "lr": 2e-4, "layer_decay": 0.8, "ensemble": 3}`.

    Without a run, `preset` says what a new model is made like, and its tokenizer is learned from the training texts.
    """
    if run is not None and preset is not None:
        raise UserError(f"--preset {preset}: the model is that of {run}; name a run or a preset")
    target, source = RunFolder(Path(out)), None if run is None else open_run(run)
    files = {"data.train": train, "data.valid": valid, "data.test": test}
    given = {key: str(value) for key, value in files.items() if value is not None} | (settings or {})
    given |= {"data.columns": [f"{ours}={theirs}" for ours, theirs in columns.items()]} if columns else {}
    given |= {"data.skip_blank": True} if skip_blank else {}
    given |= {"transfer.init": init} if init else {}
    given |= {"transfer.freeze": freeze} if freeze is not None else {}
    given |= {"transfer.preset": preset} if preset is not None else {}
    if source is not None:
        check_not_source(target, source)
    with locked_run(target):
        check_output_folder(target, resume=resume, overwrite=overwrite)
        going_on = resume and target.exists()
        # joining waits for all processes: each has looked at the folder before one makes it
        with process_group(device) as distributed:
            if going_on:
                asked = make_config(check_same_settings(target, given, moved=True))
                source = source or (open_run(asked.transfer.run) if asked.transfer.run else None)
            else:
                asked = resolve_finetune_config(source, task, config_file, given, preset=preset)
                data, tokenizer_file = asked.data, asked.tokenizer.file if asked.tokenizer else None
                check_inputs_outside(target, [data.train, data.valid, data.test, tokenizer_file, config_file])
            splits = read_splits(asked.data, labelled_task(asked.objective), asked.task, seed=asked.train.seed)
            chosen = resolve_with_data(asked, splits.train)
            if source is None:
                tokenizer = target.tokenizer() if going_on else learn_tokenizers(chosen, splits.train)
                chosen = with_vocabularies(chosen, tokenizer)
            else:
                tokenizer = source.tokenizer()
            weights = check(source, chosen, tokenizer, splits)
            if going_on and target.data()["fingerprint"] != splits.fingerprint():
                changed = "the labelled files are not what they were when the run began"
                raise UserError(f"{target}: {changed}, so it cannot go on")
            if going_on and distributed.is_main:
                save_data_paths(target, asked)
            if going_on and target.is_complete():
                return finished_results(target, distributed)
            if distributed.is_main and not going_on:
                card = {"fingerprint": splits.fingerprint(), **tokenizer_fingerprints(tokenizer), **splits.describe()}
                # the length as it was asked for: settled for these rows, it would contradict the same words at a resume
                target.create(replace(chosen, train=asked.train).plain(), tokenizer, card)
            distributed.barrier()
            if chosen.transfer.adapt_steps and source is not None:
                weights = adapt(target, source, chosen, splits.train, device, callbacks)
            return work(target, chosen, tokenizer, weights, splits, distributed, callbacks)


def learn_tokenizers(chosen: RunConfig, records: Records) -> Tokenizer:
    """A tokenizer of the training texts; where the two sides have their own, that of the sources is its `source`."""
    settings = chosen.tokenizer
    if settings.file:
        return open_tokenizer(Path(settings.file))
    logger.info(f"training a {settings.kind} tokenizer of at most {settings.vocabulary:,} entries")
    if not getattr(chosen.task, "two_tokenizers", False):
        return train_tokenizer(records.documents, settings)
    found = train_tokenizer(records.columns["target"], settings)
    found.source_tokenizer = train_tokenizer(records.columns["source"], settings)
    return found


def with_vocabularies(chosen: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """A new model has the vocabulary of its tokenizer, and of its second one where there are two."""
    chosen = with_vocabulary(chosen, tokenizer)
    if tokenizer.source_tokenizer is None:
        return chosen
    return replace(chosen, model=replace(chosen.model, source_vocabulary=tokenizer.source_tokenizer.vocabulary))


def check(
    source: RunFolder | None, chosen: RunConfig, tokenizer: Tokenizer, splits: LabelledSplits
) -> dict[str, Tensor] | None:
    """The weights to begin with; what is wrong with the source or with a label is found before anything is made."""
    task = labelled_task(chosen.objective)(chosen.task, tokenizer)
    for records in (splits.train, splits.valid, splits.test):
        if records is not None:
            task.check(records)
    if source is None:
        return None
    if chosen.transfer.adapt_steps:
        source_settings(source)
    if chosen.transfer.init == "scratch":
        return None
    weights = source_weights(source)
    check_fit(source, chosen, tokenizer, weights)
    return weights


def check_fit(source: RunFolder, chosen: RunConfig, tokenizer: Tokenizer, weights: dict[str, Tensor]) -> None:
    """Refuse settings of the model that the source's weights do not fit, before a folder is made."""
    theirs = make_config(source.config()).model
    own = config.to_dict(theirs)
    changed = {name: value for name, value in config.to_dict(chosen.model).items() if own.get(name) != value}
    if not changed:  # the sizes are the source's: there is no need to build a model for it
        return
    model, task = build_model(chosen, tokenizer)
    assert is_labelled(task)
    try:
        load_weights(model, task, weights, source=str(source))
    except UserError:
        told = ", ".join(f"model.{name}={value} (it has {own.get(name)})" for name, value in changed.items())
        hint = "leave that out, or begin from new weights with --init scratch"
        raise UserError(f"{source}: its weights do not fit {told}; {hint}") from None


def adapt(
    target: RunFolder,
    source: RunFolder,
    chosen: RunConfig,
    records: Records,
    device: str,
    callbacks: Sequence[Callback],
) -> dict[str, Tensor]:
    """Go on pretraining on the task's own texts, in a run folder inside the new one; returns the new weights."""
    inner = target.adapted
    if not inner.is_complete():
        logger.info(f"adapting to the {len(records):,} training texts for {chosen.transfer.adapt_steps:,} steps")
        texts = target.path / "adapt.txt"
        write_text(texts, "\n".join(" ".join(text.split()) for text in records.documents) + "\n")
        own = source.config()["train"]["lr"]
        settings = {"train.steps": chosen.transfer.adapt_steps, "train.lr": chosen.transfer.adapt_lr or own / 3}
        settings |= {"train.seed": chosen.train.seed, "data.documents": "line", "train.tensorboard": False}
        if "nsp" in source.config()["task"]:  # a labelled text is often a single sentence, which has none to follow it
            settings |= {"task.nsp": False}
        pretrain(
            texts,
            out=inner.path,
            start=source.path,
            settings=settings,
            resume=True,
            device=device,
            callbacks=callbacks,
        )
    return inner.weights()


def work(
    target: RunFolder,
    chosen: RunConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor] | None,
    splits: LabelledSplits,
    distributed: DistributedContext,
    callbacks: Sequence[Callback],
) -> dict[str, Any]:
    """Train one model, or several from as many seeds, measure them together, and write down what came out."""
    began = time.monotonic()
    task = labelled_task(chosen.objective)(chosen.task, tokenizer)
    data = LabelledData(task.prepare(splits.train), task.prepare(splits.valid))
    if length := chosen.train.length or getattr(chosen.model, "context", None):
        for line in [
            *task.reading_warnings(data.train, length=length),
            *task.reading_warnings(data.valid, length=length),
        ]:
            logger.info(line)
    count = chosen.transfer.ensemble
    fitted: list[FitResult] = []
    for number in range(count):
        run, member = target, chosen
        if count > 1:
            run = target.member(number)
            member = replace(chosen, train=replace(chosen.train, seed=chosen.train.seed + number))
            member = replace(member, transfer=replace(chosen.transfer, ensemble=1))
            logger.info(f"model {number + 1} of {count}, seed {member.train.seed}")
            if distributed.is_main and not run.exists():
                run.create(member.plain(), tokenizer, target.data())
            distributed.barrier()
        fitted.append(fit_run(run, member, tokenizer, weights, data, distributed, callbacks))
    seconds = max(time.monotonic() - began, sum(f.state.seconds for f in fitted))  # also before an interruption
    results = describe(target, chosen, fitted, data, splits, distributed, seconds)
    if distributed.is_main:
        target.write_results(results)
        write_card(target)
    return results


def describe(
    target: RunFolder,
    chosen: RunConfig,
    fitted: list[FitResult],
    data: LabelledData,
    splits: LabelledSplits,
    distributed: DistributedContext,
    seconds: float,
) -> dict[str, Any]:
    """Metrics on the validation and test rows, of all models together; unlabelled test rows are predicted."""
    first, task = fitted[0], fitted[0].task
    valid = metrics_with_intervals(task, data.valid, all_outputs(fitted, data.valid, chosen))
    measured = {"valid": valid}
    if splits.test is not None:
        test = task.prepare(splits.test)
        found = all_outputs(fitted, test, chosen)
        if distributed.is_main:
            target.write_predictions(task.predictions(test, found))
        if test.labels is not None:
            measured["test"] = metrics_with_intervals(task, test, found)
    on = "test" if "test" in measured else "valid"
    frozen, speed = chosen.transfer.freeze, None
    if frozen:  # the backbone read each text once, and what the head learned from are not tokens
        tokens = int(np.sum(task.examples(data.train, length=first.length).lengths))  # type: ignore[attr-defined]
    else:
        tokens = sum(f.state.tokens for f in fitted)
        speed = round(tokens / max(1e-9, sum(f.state.seconds - f.state.overhead_seconds for f in fitted)), 1)
    return {
        "kind": "finetune",
        "run": str(target),
        "task": task.name,
        "from": chosen.transfer.run or chosen.transfer.preset,
        "steps": sum(f.state.step for f in fitted),
        "best_step": first.state.best_step,
        "best_epoch": first.best_epoch,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": speed,
        "train_loss": first.epochs[-1]["train_loss"] if first.epochs else None,
        "valid_loss": valid.get("loss", first.state.valid.get("loss")),
        "perplexity": None,  # not defined where no text is predicted
        "bits_per_byte": None,
        "measured_on": on,
        "metrics": measured[on],
        **measured,
        "headline": task.primary_metric,
        "classes": list(getattr(task.config, "classes", ())),
        "epochs": first.epochs,
        "warnings": list(splits.warnings),
        "parameters": sizes(first.model, frozen=frozen),
        "device": str(distributed.device),
        "processes": distributed.size,
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def save_fit(
    run: RunFolder,
    chosen: RunConfig,
    tokenizer: Tokenizer,
    fitted: FitResult,
    splits: LabelledSplits,
    distributed: DistributedContext,
) -> None:
    """Make a run folder of a model that was trained without one."""
    card = {"fingerprint": splits.fingerprint(), **tokenizer_fingerprints(tokenizer), **splits.describe()}
    run.create(chosen.plain(), tokenizer, card)
    run.save_weights(fitted.model.tensors())
    data = LabelledData(fitted.task.prepare(splits.train), fitted.task.prepare(splits.valid))
    run.write_results(describe(run, chosen, [fitted], data, splits, distributed, fitted.state.seconds))
    write_card(run)


def all_outputs(fitted: list[FitResult], data: Any, chosen: RunConfig) -> list[np.ndarray]:
    """What all models together give."""
    return ensemble_mean([f.outputs(data, dtype=chosen.train.dtype) for f in fitted])


def sizes(model: Model, *, frozen: bool) -> dict[str, int]:
    """Parameters by part, and how many of them learn."""
    counted = model.parameter_counts()
    still = counted["base"] if frozen else 0
    return counted | {"trainable": counted["total"] - still, "frozen": still}
