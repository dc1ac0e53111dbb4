"""One trial of a sweep: a point of the grid and a seed. An interrupted trial resumes from its run folder."""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from headstock import __version__
from headstock.data.corpus import Corpus
from headstock.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from headstock.data.urls import is_url
from headstock.errors import DivergenceError, UserError
from headstock.experiments.grid import Outcome, ResultCache, Trainable, TrialResult, trial_run
from headstock.experiments.sweep_settings import SweepPlan
from headstock.experiments.trial_evaluation import compact_list, fit_run, serialize_metric
from headstock.io import fingerprint, sha256
from headstock.report.sweep_points import Point, point_file_name, point_label
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.text_metrics import is_score
from headstock.train import resolve
from headstock.train.callbacks import Callback, Event
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.finetune import parameter_counts, save_fit
from headstock.train.labelled_data import LabelledSplits, read_splits
from headstock.train.metrics import metrics_with_intervals
from headstock.train.mirror import reject_mirror
from headstock.train.pretrain import pretrain, read_corpora
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import RunConfig

logger = logging.getLogger(__name__)

MAX_LABEL = 40  # characters of a point in progress lines
FIXED_SETTINGS = {  # settings that a sweep of fine-tuning chooses itself
    "seed": "each trial has its own; the first is --seed",
    "classes": "they come from the training rows",
    "ensemble": "a trial is one model",
    "adapt_steps": "trials start from the run as it is; adapt it with finetune, then sweep from its adapted/",
    "test": "points are ranked on validation rows; evaluate the best run once on the test rows with evaluate",
}


@dataclass(frozen=True)
class SweepTrial:
    point: Point
    seed: int
    fold: int | None = None  # of a cross-validation, whose repeats have a seed each

    @property
    def name(self) -> str:
        return f"{point_file_name(self.point)}-{self.seed}" + ("" if self.fold is None else f"-fold{self.fold}")

    @property
    def label(self) -> str:
        fold = "" if self.fold is None else f"  fold {self.fold + 1}"
        return f"{point_label(self.point)[:MAX_LABEL]}  seed {self.seed}{fold}"


class SweepKind(ABC):
    """What the trials of a sweep share, and how one is trained."""

    lower: bool  # True if lower values of the metric are better
    continues: ClassVar[bool]  # whether a stopped trial continues from a checkpoint instead of starting again
    metric: str  # by which points are ranked
    task: LabelledTask | None = None  # computes metrics per row; None for pretraining
    overlap: float | None = None  # of a cross-validation: the rows that score a model over those that train it

    def __init__(self, plan: SweepPlan, folder: Path, device: torch.device):
        self.plan, self.folder, self.device = plan, folder, device
        self.home: Path | None = None  # the sweep's folder, if `folder` is a temporary one on another machine

    @property
    def shared_inputs(self) -> Sequence[Path] | None:
        """Files that trials on other machines must see, as the sweep's folder too; None if there are none."""
        return None

    def run_folder(self, trial: SweepTrial) -> RunFolder:
        return trial_run(trial.name, folder=self.folder, home=self.home)

    def settings_of(self, point: Point, seed: int, options: dict[str, Any]) -> dict[str, Any]:
        """The settings of a trial: those of every point, those of the point, and `options` that are not empty."""
        # the last of two names of a setting counts, such as train.lr and lr, so the point's come last
        base = {name: value for name, value in self.plan.settings.items() if name not in point}
        return base | point | {"train.seed": seed} | {name: value for name, value in options.items() if value}

    @property
    def curve_metric(self) -> str:
        """The metric of the learning curves."""
        return "loss"

    @abstractmethod
    def configure(self, point: Point, seed: int) -> RunConfig:
        """The settings of a trial, checked without reading any data."""

    @abstractmethod
    def read(self, configs: Sequence[RunConfig]) -> None:
        """Read the data of all trials and check it before anything is trained."""

    @abstractmethod
    def complete(self, config: RunConfig) -> RunConfig:
        """The settings with those inferred from the data."""

    def config_of(self, trial: SweepTrial) -> RunConfig:
        """The complete settings of a trial."""
        return self.complete(self.configure(trial.point, trial.seed))

    @abstractmethod
    def key(self, trial: SweepTrial, config: RunConfig) -> str:
        """A fingerprint of everything that can change the result: settings, data and weights."""

    @abstractmethod
    def train(self, trial: SweepTrial, config: RunConfig, callbacks: Sequence[Callback]) -> TrialResult:
        """Train in the run folder of the trial, which is complete afterwards, and return the result."""

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """The `data` entry of results.json."""


class Stopped(Exception):
    """A trial was stopped early, at the end of its curve of steps and validation losses."""

    def __init__(self, curve: list[list[float]]):
        super().__init__()
        self.curve = curve


def stop_trial_after(validations: int, kind: SweepKind, trial: SweepTrial) -> Callback:
    """Stops a trial after a number of validations, unless that is its end.

    It stops in the next step, because a checkpoint is written after the validation.
    """
    run, name = kind.run_folder(trial), kind.curve_metric
    curve: list[list[float]] | None = None

    def on_event(event: Event) -> None:
        nonlocal curve
        if curve is None:  # at the first event; a resumed trial has earlier validations in its run folder
            rows = [row for row in run.read_metrics() if f"valid_{name}" in row and row["step"] < event.state.step]
            curve = [[row["step"], row[f"valid_{name}"]] for row in rows]
        if event.kind == "step" and len(curve) >= validations:
            raise Stopped(curve)
        if event.kind == "valid":
            curve.append([event.state.step, event.state.valid[name]])

    return on_event


def run_trial(
    kind: SweepKind,
    trial: SweepTrial,
    *,
    keep: bool,
    needs_run: bool = False,
    callbacks: Sequence[Callback],
    stop_after: int | None = None,
    cached_only: bool = False,
) -> Outcome | None:
    """With `needs_run` a cached result needs its run folder too. `keep` marks the run as permanent.

    With `stop_after`, the trial is stopped after that many validations; a later call continues it. With `cached_only`,
    the trial is not trained, and None if it would have to be.
    """
    cache, run = ResultCache(kind.folder), kind.run_folder(trial)
    config = kind.config_of(trial)
    key, cached = kind.key(trial, config), cache.read(trial)
    keep = keep or (cached.get("key") == key and cached["kept"])

    def train() -> TrialResult:
        started = fingerprint([key, config.plain()])
        if cached.get("begun") != started:  # an existing run folder is not a partial run of this trial
            run.remove()
            cache.write(trial, {"begun": started})
        stopping = [stop_trial_after(stop_after, kind, trial)] if stop_after else []
        stopped: TrialResult = {}
        try:
            result = kind.train(trial, config, [*callbacks, *stopping])
            is_finite = math.isfinite(result["metrics"].get("loss", 0.0))
            failure = None if is_finite else "the validation loss is not finite"
        except DivergenceError as error:
            failure = str(error).partition(";")[0]
        except Stopped as stop:
            step, loss = stop.curve[-1]
            # "begun" lets a later call continue from the run folder
            stopped, failure = {"pruned": {"step": int(step), "loss": loss}, "begun": started}, None
            result = {"metrics": {}, "curves": {kind.curve_metric: stop.curve}, "parameters": None, "steps": int(step)}
        if failure is not None:
            result = {"metrics": {}, "curves": {}, "parameters": None, "steps": None}
            run.remove()
        elif not stopped:
            run.remove_checkpoints()
        fold = {} if trial.fold is None else {"fold": trial.fold}
        return {
            "settings": trial.point,
            "seed": trial.seed,
            **fold,
            **result,
            "failed": failure,
            "kept": keep,
            **stopped,
        }

    def is_complete(cached: TrialResult) -> bool:
        if cached.get("pruned"):
            return stop_after is not None and len(cached["curves"][kind.curve_metric]) >= stop_after
        return cached["failed"] or not (keep or needs_run) or run.is_finished()

    outcome = cache.get(trial, key, is_complete=is_complete)
    if outcome is None and cached_only:
        return None
    outcome = outcome or cache.run(trial, key, train)
    result = outcome.result
    if keep and not result["kept"]:
        cache.write(trial, result := result | {"kept": True})
    # a file has all metrics, so that points can be ranked by another one
    scores = {"score": result["metrics"].get(kind.metric), "curve": result["curves"].get(kind.curve_metric, [])}
    return Outcome(result | scores, outcome.is_new)


@dataclass(frozen=True)
class SweepTrainable(Trainable[SweepTrial]):
    """Runs the trials of a sweep, as `run_trial` does with these options."""

    kind: SweepKind
    keep: bool
    needs_run: bool = False
    stop_after: int | None = None
    callbacks: Sequence[Callback] = ()

    @property
    def folder(self) -> Path:
        return self.kind.folder

    @property
    def shared_inputs(self) -> Sequence[Path] | None:
        return self.kind.shared_inputs

    def lookup(self, trial: SweepTrial) -> Outcome | None:
        return self.call(trial, cached_only=True)

    def run(self, trial: SweepTrial) -> Outcome:
        outcome = self.call(trial)
        assert outcome is not None
        return outcome

    def call(self, trial: SweepTrial, *, cached_only: bool = False) -> Outcome | None:
        return run_trial(
            self.kind,
            trial,
            keep=self.keep,
            needs_run=self.needs_run,
            callbacks=self.callbacks,
            stop_after=self.stop_after,
            cached_only=cached_only,
        )

    def on_worker(self, folder: Path, device: str) -> "SweepTrainable":
        kind = copy(self.kind)
        kind.folder, kind.device = folder, choose_device(device)
        kind.home = None if folder == self.folder else self.folder
        return replace(self, kind=kind)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"callbacks": ()}  # which belong to this process


class Pretraining(SweepKind):
    """Trials that each pretrain a language model. All are evaluated on the same validation text.

    Points with the same tokenizer settings share one tokenizer and one token store.
    """

    lower, continues = True, True

    def __init__(self, plan: SweepPlan, folder: Path, device: torch.device):
        super().__init__(plan, folder, device)
        self.metric = "loss" if plan.sweep.by == "auto" else plan.sweep.by
        self.tokenizers: dict[str, tuple[Tokenizer, Path]] = {}
        self.corpora: dict[str, tuple[Corpus, str]] = {}  # by how they are read, with their fingerprints

    @property
    def curve_metric(self) -> str:
        return self.metric

    @property
    def shared_inputs(self) -> Sequence[Path]:
        """The text may be large, and an interrupted trial continues from the checkpoints in its run folder."""
        texts = [file for corpus, _ in self.corpora.values() for file in corpus.data_files]
        files = [file.path for file in texts if not is_url(file.name)]  # a worker downloads URLs itself
        return [*files, *(path for _, path in self.tokenizers.values()), *([self.plan.file] if self.plan.file else [])]

    def preset_and_settings(self, point: Point, seed: int) -> tuple[str | None, dict[str, Any]]:
        """As `pretrain` takes them."""
        sweep, point = self.plan.sweep, dict(point)
        preset = point.pop("preset", self.plan.preset)
        options: dict[str, Any] = {"data.corpus": list(sweep.corpus), "data.valid": list(sweep.valid)}
        options |= {"tokenizer.file": sweep.tokenizer, "task.name": self.plan.objective}
        return preset, {"train.tensorboard": False} | self.settings_of(point, seed, options)

    def configure(self, point: Point, seed: int) -> RunConfig:
        preset, settings = self.preset_and_settings(point, seed)
        resolved = resolve.resolve_pretrain_config(preset, self.plan.file, settings)
        return resolve.require_corpus(reject_mirror(resolved))

    def read(self, configs: Sequence[RunConfig]) -> None:
        fingerprints = {self.tokenizer_of(config)[0].fingerprint for config in configs}
        if self.metric == "loss" and len(fingerprints) > 1:
            reason = "losses of different tokenizers are not comparable"
            if self.plan.sweep.by == "loss":
                raise UserError(f"--by loss: {reason}; rank by bits_per_byte")
            self.metric = "bits_per_byte"
            logger.info("ranking by bits per byte: %s", reason)
        objective = configs[0].objective
        if self.metric == "bits_per_byte" and not TASKS.get(objective).generates:
            reason = f"the objective {objective!r} has no bits per byte"
            raise UserError(f"{reason}, so tokenizers cannot vary and --by must be loss")

    def corpus_of(self, config: RunConfig) -> tuple[Corpus, str]:
        """The corpus and a fingerprint that includes the validation text."""
        data = config.plain()["data"]
        key = json.dumps([data["corpus"], data["valid"], data["documents"], data["column"]])
        if key not in self.corpora:
            corpus, valid = read_corpora(config)
            self.corpora[key] = corpus, corpus.fingerprint() + (valid.fingerprint() if valid else "")
        return self.corpora[key]

    def tokenizer_of(self, config: RunConfig) -> tuple[Tokenizer, Path]:
        """The tokenizer and its file."""
        settings, text = config.tokenizer, self.corpus_of(config)
        key = versioned_fingerprint({"text": text[1], "settings": config.plain()["tokenizer"]})
        if key not in self.tokenizers:
            path = Path(settings.file) if settings.file else self.folder / "tokenizers" / f"{key[:16]}.json"
            if not settings.file and not path.is_file():
                size = f"{settings.vocabulary:,}"
                logger.info("training a %s tokenizer of at most %s entries", settings.kind, size)
                train_tokenizer(text[0].sample_texts(), settings).save(path)
            self.tokenizers[key] = open_tokenizer(path), path
        return self.tokenizers[key]

    def complete(self, config: RunConfig) -> RunConfig:
        tokenizer, _ = self.tokenizer_of(config)
        TASKS.get(config.objective)(config.task, tokenizer)  # refuses a tokenizer without the special tokens it needs
        return resolve.with_vocabulary(config, tokenizer)

    def key(self, trial: SweepTrial, config: RunConfig) -> str:
        settings, paths = config.plain(for_key=True), ("corpus", "valid")
        settings["data"] = {name: value for name, value in settings["data"].items() if name not in paths}
        tokenizer, _ = self.tokenizer_of(config)
        settings["tokenizer"] = tokenizer.fingerprint
        # trials of earlier versions did not charge for unknown tokens
        charged = {"unknown": "charged"} if tokenizer.can_produce_unk else {}
        return versioned_fingerprint({"text": self.corpus_of(config)[1], "settings": settings, **charged})

    def train(self, trial: SweepTrial, config: RunConfig, callbacks: Sequence[Callback]) -> TrialResult:
        run = self.run_folder(trial)
        preset, settings = self.preset_and_settings(trial.point, trial.seed)
        results = pretrain(
            out=run.path,
            preset=preset,
            objective=settings.pop("task.name", None),
            config_file=self.plan.file,
            tokenizer=self.tokenizer_of(config)[1],
            settings=settings,
            resume=True,
            device=self.device.type,
            callbacks=callbacks,
        )
        rows = run.read_metrics()
        return {
            "metrics": results["metrics"],
            "curves": {
                name: [[row["step"], row[f"valid_{name}"]] for row in rows if f"valid_{name}" in row]
                for name in ("loss", "bits_per_byte")
            },
            "parameters": results["parameters"]["total"],
            "steps": results["steps"],
            "seconds": results["seconds"],  # includes the time before an interruption
        }

    def describe_data(self) -> dict[str, Any]:
        return {"text": sorted({name for corpus, _ in self.corpora.values() for name in corpus.names()})}


class Finetuning(SweepKind):
    """Trials that each fine-tune the same run. They are evaluated on validation rows only: test rows stay unseen."""

    lower, continues = False, False

    def __init__(self, plan: SweepPlan, folder: Path, device: torch.device):
        super().__init__(plan, folder, device)
        assert plan.sweep.run is not None
        self.source = open_run(plan.sweep.run)
        self.task_class = resolve.labelled_task(plan.sweep.task)
        self.metric = self.task_class.primary_metric
        self.tokenizer = self.source.tokenizer()
        self.splits: LabelledSplits
        self.weights_hash: str | None = None

    def configure(self, point: Point, seed: int) -> RunConfig:
        sweep = self.plan.sweep
        valid = next(iter(sweep.valid), None)
        options = {"data.train": sweep.train, "data.valid": valid, "data.columns": list(sweep.columns)}
        settings = self.settings_of(point, seed, options)
        return reject_mirror(resolve.resolve_finetune_config(self.source, sweep.task, self.plan.file, settings))

    def read(self, configs: Sequence[RunConfig]) -> None:
        first = configs[0]
        if first.data.test:
            raise UserError(f"data.test: cannot be set: {FIXED_SETTINGS['test']}")
        self.read_rows(first)
        self.task = self.task_class(self.complete(first).task, self.tokenizer)
        self.metric, self.lower = self.task.primary_metric, not is_score(self.task.primary_metric)
        for records in (self.splits.train, self.splits.valid):
            self.task.check(records)
        if any(config.transfer.init != "scratch" for config in configs):
            self.source.check_weights_exist()
            self.weights_hash = sha256(self.source.weights_file)

    def read_rows(self, first: RunConfig) -> None:
        """Read the rows of all trials, by the settings of the first point."""
        self.splits = read_splits(first.data, self.task_class, first.task, seed=self.plan.sweep.seed)

    def splits_of(self, trial: SweepTrial, config: RunConfig) -> LabelledSplits:
        """The rows of a trial: to train on, to validate on, and if they are others, to score it by."""
        return self.splits

    def complete(self, config: RunConfig) -> RunConfig:
        return resolve.resolve_with_data(config, self.splits.train)

    def key(self, trial: SweepTrial, config: RunConfig) -> str:
        settings = config.plain(for_key=True)
        settings.pop("data")  # the rows count, not their path
        settings["transfer"].pop("run")
        weights = None if config.transfer.init == "scratch" else self.weights_hash
        parts = {"tokenizer": self.tokenizer.fingerprint, "weights": weights}
        rows = self.splits_of(trial, config).fingerprint()
        return versioned_fingerprint({"rows": rows, "settings": settings, **parts})

    def train(self, trial: SweepTrial, config: RunConfig, callbacks: Sequence[Callback]) -> TrialResult:
        splits, distributed = self.splits_of(trial, config), DistributedContext(self.device)
        fitted, data = fit_run(
            self.source,
            self.task_class,
            config,
            splits.train,
            splits.valid,
            distributed=distributed,
            callbacks=callbacks,
        )
        task = fitted.task
        scored = data.valid if splits.test is None else task.prepare(splits.test)
        outputs = fitted.outputs(scored, dtype=config.train.dtype)
        metric, metrics = task.primary_metric, metrics_with_intervals(task, scored, outputs)
        if trial.fold is None or self.plan.sweep.keep:
            save_fit(self.run_folder(trial), config, fitted, splits, distributed)
        stored = {}
        if trial.fold is not None and task.predicts_classes:
            stored = {"outputs": [compact_list(row) for row in np.stack(outputs).tolist()]}
        return {
            "metrics": {name: value for name, value in metrics.items() if name != "intervals"},
            "curves": {"loss": [[row["step"], row["valid_loss"]] for row in fitted.epochs]},
            "parameters": parameter_counts(fitted, frozen=config.transfer.freeze)["total"],
            "steps": fitted.state.step,
            "tallies": {metric: serialize_metric(task.row_metrics(scored, outputs)[metric])},
            **stored,
        }

    def describe_data(self) -> dict[str, Any]:
        return self.splits.describe(self.task_class)


def versioned_fingerprint(parts: dict[str, Any]) -> str:
    return fingerprint({"version": __version__, **parts})
