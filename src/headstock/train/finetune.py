"""Fine-tunes a pretrained run for a labelled task, in a run folder of its own."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headstock import config
from headstock.cost.formulas import WeightTensor
from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import flops_per_token, lora_flops_per_token, optimizer_state_bytes
from headstock.data.corpus import read_corpus
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.io import sha256
from headstock.model.lora import is_adapter
from headstock.tasks.auxiliary import TokenDropout
from headstock.tasks.base import Task
from headstock.tasks.calibration import fit_calibration
from headstock.tasks.labelled import LabelledTask, is_labelled, metric_value
from headstock.train.adaptation import adapt, check_adaptation
from headstock.train.callbacks import Callback, run_callbacks
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import ensemble_mean
from headstock.train.fit import EncodedSplits, FitResult, fit, member_configs, model_soup
from headstock.train.labelled_data import LabelledSplits, read_splits
from headstock.train.metrics import metrics_with_intervals
from headstock.train.mirror import mirrored, requested_mirror
from headstock.train.models import (
    average_weights,
    build_lm_objective,
    build_model,
    build_task,
    load_source_weights,
    source_weights,
)
from headstock.train.pretrain import open_or_train_tokenizer
from headstock.train.resolve import (
    labelled_task,
    resolve_finetune_config,
    resolve_with_data,
    with_vocabulary,
)
from headstock.train.run_folder import RunFolder, open_run, tokenizer_fingerprints
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
from headstock.train.trackers import Tracking, tracked

logger = logging.getLogger(__name__)

SOURCE_WEIGHTS = "source_weights"  # key in data.json for the hash of the weights that a run starts from
MIN_CALIBRATION_ROWS = 20  # fewer validation rows do not determine a temperature


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
    """Train a new head on a run's backbone, and the backbone with it, on labelled texts; returns the run's results.

    `init="scratch"` uses the architecture without the weights; `freeze` trains the head alone. Everything else is a
    setting, such as `{"lora": 8, "pool": "mean", "lr": 2e-4, "ensemble": 3}`. Without a run, the model is new and
    follows `preset`, and its tokenizer is trained on the training texts.
    """
    if run is not None and preset is not None:
        raise UserError(f"--preset {preset}: conflicts with the run {run}; name one of them")
    source = None if run is None else open_run(run)
    arguments = {
        **{f"data.{split}": str(file) for split, file in (("train", train), ("valid", valid), ("test", test)) if file},
        "data.columns": [f"{name}={column}" for name, column in columns.items()] if columns else None,
        "data.skip_blank": skip_blank or None,
        "transfer.init": init,
        "transfer.freeze": freeze,
        "transfer.preset": preset,
    }
    options = (settings or {}) | {key: value for key, value in arguments.items() if value is not None}
    if source is not None:
        check_not_source(RunFolder(Path(out)), source)
    mirror = requested_mirror(options, config_file)
    with open_session(out, device=device, resume=resume, overwrite=overwrite, mirror=mirror) as session:
        target, distributed, resuming = session.run, session.distributed, session.resuming
        if resuming:
            run_config = resumed_config(target, options)
            source = source or (open_run(run_config.transfer.run) if run_config.transfer.run else None)
            if source is not None:
                check_same_source(target, source, run_config)
        else:
            run_config = resolve_finetune_config(source, task, config_file, options, preset=preset)
            data, tokenizer_file = run_config.data, run_config.tokenizer.file if run_config.tokenizer else None
            text = run_config.transfer.adapt_text
            check_inputs_outside(target, [data.train, data.valid, data.test, *text, tokenizer_file, config_file])
            if text:
                read_corpus(text)
        task_class, train_settings = labelled_task(run_config.objective), run_config.train
        splits = read_splits(run_config.data, task_class, run_config.task, seed=train_settings.seed)
        if resuming:
            check_same_data(target, splits)
            if distributed.is_main:
                save_data_paths(target, run_config)
        run_config = resolve_with_data(run_config, splits.train)
        if source is None:
            tokenizer = target.tokenizer() if resuming else make_tokenizers(run_config, splits.train)
            run_config = with_vocabulary(run_config, tokenizer)
        else:
            tokenizer = source.tokenizer()
        labelled = build_task(run_config, tokenizer)
        assert is_labelled(labelled)
        weights = check_inputs(source, run_config, labelled, splits)
        url = train_settings.mirror if distributed.is_main else None
        if resuming and target.is_complete():
            with mirrored(target, url), tracked(target, train_settings, distributed) as tracking:
                return tracking.finish(finished_results(target, distributed))
        if distributed.is_main and not resuming:
            # the length as set: inferred from these rows, it would contradict the same options at a resume
            origin = {} if source is None else {SOURCE_WEIGHTS: source_hash(source, run_config)}
            create_run(target, replace(run_config, train=train_settings), tokenizer, splits, **origin)
        distributed.barrier()
        with mirrored(target, url):
            if weights is not None and source is not None and run_config.transfer.adapt_steps:
                adapted = adapt(target, source, run_config, splits.train, distributed, device, callbacks)
                weights = average_weights(weights, adapted, run_config.transfer.adapt_average)
            objective = build_lm_objective(source, run_config)
            with tracked(target, train_settings, distributed) as tracking:
                return train_and_evaluate(
                    session, run_config, labelled, weights, objective, splits, callbacks, tracking
                )


def check_same_data(target: RunFolder, splits: LabelledSplits) -> None:
    if target.data()["fingerprint"] != splits.fingerprint():
        raise UserError(f"{target}: the labelled files have changed since the run was created, so it cannot be resumed")


def check_same_source(target: RunFolder, source: RunFolder, run_config: RunConfig) -> None:
    """Reject a source other than the one a resumed run started from; a copy of it at another path is the same."""
    data, path = target.data(), run_config.transfer.run
    if SOURCE_WEIGHTS in data:
        same = data[SOURCE_WEIGHTS] == source_hash(source, run_config)
        same = same and tokenizer_fingerprints(source.tokenizer()).items() <= data.items()
    else:  # written by an earlier version, or without a source
        same = bool(path) and (str(source) == path or source.path.resolve() == Path(path).resolve())
    if not same and str(source) == path:
        raise UserError(f"{target}: its source {path} has changed since the run was created, so it cannot be resumed")
    if not same:
        origin = f"started from {path}, not {source}" if path else f"has no source, so {source} cannot be its source"
        raise UserError(f"{target}: a resumed run keeps its own source; it {origin}")


def source_hash(source: RunFolder, run_config: RunConfig) -> str | None:
    """The hash of the weights that a run starts from; None if it uses the architecture alone."""
    if run_config.transfer.init == "scratch":
        return None
    source.check_weights_exist()
    return sha256(source.weights_file)


def create_run(
    run: RunFolder, run_config: RunConfig, tokenizer: Tokenizer, splits: LabelledSplits, **origin: str | None
) -> None:
    data = {
        **origin,
        "fingerprint": splits.fingerprint(),
        **tokenizer_fingerprints(tokenizer),
        **splits.describe(labelled_task(run_config.objective)),
    }
    run.create(run_config.plain(), tokenizer, data)


def make_tokenizers(run_config: RunConfig, records: Records) -> Tokenizer:
    """A tokenizer of the training texts; with two tokenizers, that of the sources is its `source_tokenizer`."""
    settings = run_config.tokenizer
    if settings.file or not getattr(run_config.task, "two_tokenizers", False):
        return open_or_train_tokenizer(settings, records.documents)
    tokenizer = open_or_train_tokenizer(settings, records.columns["target"])
    tokenizer.source_tokenizer = open_or_train_tokenizer(settings, records.columns["source"])
    return tokenizer


def check_inputs(
    source: RunFolder | None, run_config: RunConfig, task: LabelledTask, splits: LabelledSplits
) -> dict[str, Tensor] | None:
    """The initial weights; rejects labels and sources that do not fit before anything is written."""
    for records in (splits.train, splits.valid, splits.test):
        if records is not None:
            task.check(records)
    if share := run_config.transfer.token_dropout:
        TokenDropout(share, task.tokenizer)  # rejects a tokenizer without [MASK]
    if source is None:
        return None
    if run_config.transfer.adapt_steps:
        check_adaptation(source, run_config)
    if run_config.transfer.init == "scratch":
        return None
    weights = source_weights(source)
    check_weights_fit(source, run_config, task, weights)
    return weights


def check_weights_fit(source: RunFolder, run_config: RunConfig, task: LabelledTask, weights: dict[str, Tensor]) -> None:
    """Reject model settings that the source's weights do not fit."""
    original = config.to_dict(make_config(source.config()).model)
    changed = {name: value for name, value in config.to_dict(run_config.model).items() if original.get(name) != value}
    if not changed:
        return
    try:
        load_source_weights(build_model(run_config, task), task, weights, source=str(source))
    except UserError:
        changes = ", ".join(f"model.{name}={value} (it has {original.get(name)})" for name, value in changed.items())
        hint = "leave that out, or train from new weights with --init scratch"
        raise UserError(f"{source}: its weights do not fit {changes}; {hint}") from None


def train_and_evaluate(
    session: Session,
    run_config: RunConfig,
    task: LabelledTask,
    weights: dict[str, Tensor] | None,
    objective: Task | None,
    splits: LabelledSplits,
    callbacks: Sequence[Callback],
    tracking: Tracking,
) -> dict[str, Any]:
    """Train one model, or those of an ensemble or a soup with one seed each, evaluate, and write results and card.

    `objective` is the source's, for `lm_loss`.
    """
    began, target, distributed = time.monotonic(), session.run, session.distributed
    data = EncodedSplits(task.prepare(splits.train), task.prepare(splits.valid))
    if length := run_config.train.length or getattr(run_config.model, "context", None):
        for rows in (data.train, data.valid):
            for line in task.reading_warnings(rows, length=length):
                logger.info(line)
    configs = member_configs(run_config)
    fits: list[FitResult] = []
    for index, member in enumerate(configs):
        run = target
        if len(configs) > 1:
            run = target.member(index)
            logger.info(f"model {index + 1} of {len(configs)}, seed {member.train.seed}")
            if distributed.is_main and not run.exists():
                run.create(member.plain(), task.tokenizer, target.data())
            distributed.barrier()
        with run_callbacks(run, [*callbacks, *tracking.callbacks(run)], member.train, distributed) as active:
            fits.append(
                fit(
                    member,
                    task,
                    weights,
                    data,
                    run=run,
                    distributed=distributed,
                    objective=objective,
                    callbacks=active,
                )
            )
    is_soup = run_config.transfer.soup > 1
    models = [model_soup(fits)] if is_soup else fits
    if is_soup and distributed.is_main:
        target.save_weights(models[0].model.tensors())
    seconds = max(time.monotonic() - began, sum(f.state.seconds for f in fits))  # also before an interruption
    results = finetune_results(target, run_config, models, data, splits, distributed, seconds)
    if is_soup:
        results["members"] = member_scores(fits, data.valid, run_config)
    return tracking.finish(finish_run(target, distributed, results))


def member_scores(members: list[FitResult], valid: Any, run_config: RunConfig) -> list[dict[str, Any]]:
    """The seed of each model whose weights were averaged, and its primary metric on the validation rows, alone."""
    task = members[0].task
    scores = [
        metric_value(task.row_metrics(valid, result.outputs(valid, dtype=run_config.train.dtype))[task.primary_metric])
        for result in members
    ]
    return [
        {"seed": member.train.seed, f"valid_{task.primary_metric}": score}
        for member, score in zip(member_configs(run_config), scores, strict=True)
    ]


def finetune_results(
    target: RunFolder,
    run_config: RunConfig,
    fits: list[FitResult],
    data: EncodedSplits,
    splits: LabelledSplits,
    distributed: DistributedContext,
    seconds: float,
) -> dict[str, Any]:
    """The content of results.json: metrics on validation and test rows; unlabelled test rows are predicted."""
    first, task = fits[0], fits[0].task
    valid_outputs = ensemble_outputs(fits, data.valid, run_config)
    metrics = {"valid": metrics_with_intervals(task, data.valid, valid_outputs)}
    if distributed.is_main:
        calibrate_run(target, task, splits.valid, data.valid, valid_outputs)
    if splits.test is not None:
        test = task.prepare(splits.test)
        outputs = ensemble_outputs(fits, test, run_config)
        if distributed.is_main:
            target.write_predictions(task.predictions(test, outputs))
        if test.labels is not None:
            metrics["test"] = metrics_with_intervals(task, test, outputs)
    measured_on = "test" if "test" in metrics else "valid"
    frozen, speed = run_config.transfer.freeze, None
    if frozen:  # the backbone reads each text once, and the head is trained on features rather than tokens
        tokens = int(np.sum(task.examples(data.train, length=first.length).lengths))  # type: ignore[attr-defined]
    else:
        tokens = sum(f.state.tokens for f in fits)
        speed = round(tokens / max(1e-9, sum(f.state.seconds - f.state.overhead_seconds for f in fits)), 1)
    return {
        "kind": "finetune",
        "run": str(target),
        "task": task.name,
        "from": run_config.transfer.run or run_config.transfer.preset,
        "steps": sum(f.state.step for f in fits),
        "best_step": first.state.best_step,
        "best_epoch": first.best_epoch,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": speed,
        "train_loss": first.epochs[-1]["train_loss"] if first.epochs else None,
        "valid_loss": metrics["valid"].get("loss", first.state.valid.get("loss")),
        "perplexity": None,  # undefined where no text is predicted
        "bits_per_byte": None,
        "measured_on": measured_on,
        "metrics": metrics[measured_on],
        **metrics,
        "headline": task.primary_metric,
        "classes": list(getattr(task.config, "classes", ())),
        "epochs": first.epochs,
        "warnings": list(splits.warnings),
        "parameters": parameter_counts(first, frozen=frozen),
        "lora": lora_results(first, run_config),
        **environment_results(distributed),
    }


def calibrate_run(target: RunFolder, task: LabelledTask, valid: Records, data: Any, outputs: list[np.ndarray]) -> None:
    """Fit the temperature of a classifier on the validation rows, which also selected its epoch."""
    if task.predicts_classes and len(outputs) >= MIN_CALIBRATION_ROWS:
        file, fingerprint = valid.source, valid.fingerprint()
        probabilities = np.stack(outputs)
        target.write_calibration(
            fit_calibration(data.labels, probabilities, file=file, fingerprint=fingerprint, selected_epoch=True)
        )


def save_fit(
    run: RunFolder, run_config: RunConfig, result: FitResult, splits: LabelledSplits, distributed: DistributedContext
) -> None:
    """Write a model that was trained without a run folder to one."""
    task = result.task
    create_run(run, run_config, task.tokenizer, splits)
    if result.adapter is not None:
        run.save_adapter(result.adapter, run_config.transfer.adapters)
    run.save_weights(result.model.tensors())
    data = EncodedSplits(task.prepare(splits.train), task.prepare(splits.valid))
    results = finetune_results(run, run_config, [result], data, splits, distributed, result.state.seconds)
    finish_run(run, distributed, results)


def ensemble_outputs(fits: list[FitResult], data: Any, run_config: RunConfig) -> list[np.ndarray]:
    return ensemble_mean([result.outputs(data, dtype=run_config.train.dtype) for result in fits])


def parameter_counts(result: FitResult, *, frozen: bool) -> dict[str, int]:
    """Parameters by part, with the numbers of trainable and frozen ones; `lora` are those of adapters, if any."""
    counts = result.model.parameter_counts()
    if result.adapter is not None:
        adapters = sum(tensor.numel() for name, tensor in result.adapter.items() if is_adapter(name))
        trained = sum(tensor.numel() for tensor in result.adapter.values())
        return counts | {"trainable": trained, "frozen": counts["total"] + adapters - trained, "lora": adapters}
    fixed = counts["base"] if frozen else 0
    return counts | {"trainable": counts["total"] - fixed, "frozen": fixed}


def lora_results(result: FitResult, run_config: RunConfig) -> dict[str, Any] | None:
    """What LoRA saved: the state of the optimizer beside that of full fine-tuning, and the arithmetic of a step."""
    lora, model, state = run_config.transfer.adapters, result.model, result.state
    if lora is None or result.adapter is None:
        return None

    def optimizer_bytes(tensors: Mapping[str, Tensor]) -> int:
        shapes = (WeightTensor(name, tuple(tensor.shape), 1, is_embedding=False) for name, tensor in tensors.items())
        return int(optimizer_state_bytes(shapes, run_config.train.optimizer))

    cost = model_cost(model, result.task, model_dimensions(model, length=result.length))
    return {
        **config.to_dict(lora),
        "optimizer_bytes": optimizer_bytes(result.adapter),
        "full_optimizer_bytes": optimizer_bytes(dict(model.named_parameters())),
        "flops_ratio": round(float(lora_flops_per_token(cost, lora) / flops_per_token(cost, training=True)), 3),
        "step_seconds": round((state.seconds - state.overhead_seconds) / max(1, state.step), 5),
    }
