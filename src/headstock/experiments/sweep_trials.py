"""One trial of a sweep: a point of the grid and a seed. An interrupted trial resumes from its run folder."""

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headstock import __version__
from headstock.data.corpus import Corpus
from headstock.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from headstock.errors import DivergenceError, UserError
from headstock.experiments.compare_trials import serialize_metric
from headstock.experiments.grid import ResultCache, TrialResult
from headstock.experiments.sweep_settings import SweepPlan
from headstock.io import fingerprint, sha256
from headstock.logs import muted
from headstock.report.sweep_points import Point, point_file_name, point_label
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.train import resolve
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.finetune import parameter_counts, save_fit
from headstock.train.fit import LabelledData, fit
from headstock.train.labelled_data import LabelledSplits, read_splits
from headstock.train.metrics import metrics_with_intervals
from headstock.train.models import source_weights
from headstock.train.pretrain import pretrain, read_corpora
from headstock.train.resolve import require_corpus, resolve_pretrain_config, with_vocabulary
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import RunConfig

logger = logging.getLogger(__name__)

MAX_LABEL = 40  # characters of a point in progress lines


@dataclass(frozen=True)
class SweepTrial:
    point: Point
    seed: int

    @property
    def name(self) -> str:
        return f"{point_file_name(self.point)}-{self.seed}"

    @property
    def label(self) -> str:
        return f"{point_label(self.point)[:MAX_LABEL]}  seed {self.seed}"


class SweepKind(Protocol):
    """What the trials of a sweep share, and how one is trained. Pretraining and fine-tuning implement it."""

    folder: Path
    metric: str
    lower: bool  # True if lower values of the metric are better
    overridden: set[str]  # settings of every point that the grid also sets
    task: LabelledTask | None  # computes metrics per row; None for pretraining

    @property
    def curve_metric(self) -> str: ...

    def configure(self, point: Point, seed: int) -> RunConfig:
        """The settings of a trial, checked without reading any data."""
        ...

    def read(self, configs: Sequence[RunConfig]) -> None:
        """Read the data of all trials and check it before anything is trained."""
        ...

    def complete(self, config: RunConfig) -> RunConfig:
        """The settings with those inferred from the data."""
        ...

    def key(self, config: RunConfig) -> str:
        """A fingerprint of everything that can change the result: settings, data and weights."""
        ...

    def train(self, trial: SweepTrial, config: RunConfig, run: RunFolder, callbacks: Sequence[Callback]) -> TrialResult:
        """Train in the folder `run`, which is complete afterwards, and return the result."""
        ...

    def describe_data(self) -> dict[str, Any]:
        """The `data` entry of results.json."""
        ...


def run_folder_of(folder: Path, trial: SweepTrial) -> RunFolder:
    return RunFolder(folder / "runs" / trial.name)


def run_trial(
    kind: SweepKind, trial: SweepTrial, *, keep: bool, needs_run: bool = False, callbacks: Sequence[Callback]
) -> tuple[TrialResult, bool]:
    """The result of a trial and whether it is new (not from the cache).

    With `needs_run` its run folder must exist too, otherwise it is trained again. `keep` marks the run as permanent.
    """
    cache, run = ResultCache(kind.folder), run_folder_of(kind.folder, trial)
    config = kind.complete(kind.configure(trial.point, trial.seed))
    key, cached = kind.key(config), cache.read(trial)
    is_cached = cached.get("key") == key
    keep = keep or (is_cached and cached["kept"])
    if is_cached and (cached["failed"] or not (keep or needs_run) or run.is_finished()):
        if keep and not cached["kept"]:
            cache.write(trial, cached := cached | {"kept": True})
        return with_score(kind, cached), False
    started = fingerprint([key, config.plain()])
    if is_cached or cached.get("begun") != started:  # an existing run folder is not a partial run of this trial
        run.remove()
        cache.write(trial, {"begun": started})
    start = time.monotonic()
    try:
        with muted():
            result = kind.train(trial, config, run, callbacks)
        loss = result["metrics"].get("loss", 0.0)
        failed = None if math.isfinite(loss) else "the validation loss is not finite"
    except DivergenceError as error:
        failed = str(error).partition(";")[0]
    if failed is not None:
        result = {"metrics": {}, "curves": {}, "parameters": None, "steps": None}
        run.remove()
    else:
        run.remove_checkpoints()
    result = {"settings": trial.point, "seed": trial.seed, "seconds": round(time.monotonic() - start, 3)} | result
    result |= {"failed": failed, "kept": keep, "key": key}
    cache.write(trial, result)
    return with_score(kind, result), True


def with_score(kind: SweepKind, result: TrialResult) -> TrialResult:
    """A result with the score and curve of the ranking metric; the file has all metrics, so the ranking may change."""
    return result | {"score": result["metrics"].get(kind.metric), "curve": result["curves"].get(kind.curve_metric, [])}


class Pretraining:
    """Trials that each pretrain a language model. All are evaluated on the same validation text.

    Points with the same tokenizer settings share one tokenizer and one token store.
    """

    lower = True

    def __init__(self, plan: SweepPlan, folder: Path, device: str):
        self.plan, self.folder, self.device = plan, folder, device
        self.metric: str = "loss" if plan.sweep.by == "auto" else plan.sweep.by
        self.task: LabelledTask | None = None
        self.tokenizers: dict[str, Tokenizer] = {}
        self.corpora: dict[str, tuple[Corpus, str]] = {}  # by how they are read, with their fingerprints
        self.overridden: set[str] = set()

    @property
    def curve_metric(self) -> str:
        return self.metric

    def settings_of(self, point: Point, seed: int) -> tuple[str | None, dict[str, Any]]:
        """The preset and the settings of a trial, as `pretrain` takes them."""
        sweep, point = self.plan.sweep, dict(point)
        preset = point.pop("preset", self.plan.preset)
        base = {name: value for name, value in self.plan.settings.items() if name not in self.overridden}
        settings = {"train.tensorboard": False} | base | point | {"train.seed": seed}
        settings |= {"data.corpus": list(sweep.corpus)} if sweep.corpus else {}
        settings |= {"data.valid": list(sweep.valid)} if sweep.valid else {}
        settings |= {"tokenizer.file": sweep.tokenizer} if sweep.tokenizer else {}
        settings |= {"task.name": self.plan.objective} if self.plan.objective else {}
        return preset, settings

    def configure(self, point: Point, seed: int) -> RunConfig:
        preset, settings = self.settings_of(point, seed)
        return require_corpus(resolve_pretrain_config(preset, self.plan.file, settings))

    def read(self, configs: Sequence[RunConfig]) -> None:
        for config in configs:
            self.corpus_of(config)
            if self.tokenizer_key(config) not in self.tokenizers:
                self.tokenizers[self.tokenizer_key(config)] = self.tokenizer_of(config)
        if self.metric == "loss" and len({tokenizer.fingerprint for tokenizer in self.tokenizers.values()}) > 1:
            reason = "losses of different tokenizers are not comparable"
            if self.plan.sweep.by == "loss":
                raise UserError(f"--by loss: {reason}; rank by bits_per_byte")
            self.metric = "bits_per_byte"
            logger.info("ranking by bits per byte: %s", reason)
        objective = configs[0].objective
        if self.metric == "bits_per_byte" and not TASKS.get(objective).generates:
            raise UserError(
                f"the objective {objective!r} has no bits per byte, so tokenizers cannot vary and --by must be loss"
            )

    def corpus_of(self, config: RunConfig) -> tuple[Corpus, str]:
        """The corpus and a fingerprint that includes the validation text."""
        data = config.plain()["data"]
        key = json.dumps([data["corpus"], data["valid"], data["documents"], data["column"]])
        if key not in self.corpora:
            corpus, valid = read_corpora(config)
            self.corpora[key] = corpus, corpus.fingerprint() + (valid.fingerprint() if valid else "")
        return self.corpora[key]

    def tokenizer_key(self, config: RunConfig) -> str:
        return versioned_fingerprint({"text": self.corpus_of(config)[1], "settings": config.plain()["tokenizer"]})

    def tokenizer_file(self, config: RunConfig) -> Path:
        file = config.tokenizer.file
        return Path(file) if file else self.folder / "tokenizers" / f"{self.tokenizer_key(config)[:16]}.json"

    def tokenizer_of(self, config: RunConfig) -> Tokenizer:
        path = self.tokenizer_file(config)
        if not config.tokenizer.file and not path.is_file():
            kind, size = config.tokenizer.kind, config.tokenizer.vocabulary
            logger.info("training a %s tokenizer with at most %s entries", kind, f"{size:,}")
            train_tokenizer(self.corpus_of(config)[0].sample_texts(), config.tokenizer).save(path)
        return open_tokenizer(path)

    def complete(self, config: RunConfig) -> RunConfig:
        tokenizer = self.tokenizers[self.tokenizer_key(config)]
        TASKS.get(config.objective)(config.task, tokenizer)  # refuses a tokenizer without the special tokens it needs
        return with_vocabulary(config, tokenizer)

    def key(self, config: RunConfig) -> str:
        settings, paths = config.plain(), ("corpus", "valid")
        settings["data"] = {name: value for name, value in settings["data"].items() if name not in paths}
        tokenizer = self.tokenizers[self.tokenizer_key(config)]
        settings["tokenizer"] = tokenizer.fingerprint
        # trials of earlier versions did not charge for unknown tokens
        charged = {"unknown": "charged"} if tokenizer.can_produce_unk else {}
        return versioned_fingerprint({"text": self.corpus_of(config)[1], "settings": settings, **charged})

    def train(self, trial: SweepTrial, config: RunConfig, run: RunFolder, callbacks: Sequence[Callback]) -> TrialResult:
        preset, settings = self.settings_of(trial.point, trial.seed)
        objective = settings.pop("task.name", None)
        results = pretrain(
            out=run.path,
            preset=preset,
            objective=objective,
            config_file=self.plan.file,
            tokenizer=self.tokenizer_file(config),
            settings=settings,
            resume=True,
            device=self.device,
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


FIXED_SETTINGS = {  # settings that a sweep of fine-tuning chooses itself
    "seed": "each trial has its own; the first is --seed",
    "classes": "they come from the training rows",
    "ensemble": "a trial is one model",
    "adapt_steps": "trials start from the run as it is; adapt it with finetune, then sweep from its adapted/",
    "test": "points are ranked on validation rows; evaluate the best run once on the test rows with evaluate",
}


class Finetuning:
    """Trials that each fine-tune the same run. They are evaluated on validation rows only: test rows stay unseen."""

    lower = False

    def __init__(self, plan: SweepPlan, folder: Path, device: str):
        self.plan, self.folder = plan, folder
        assert plan.sweep.run is not None
        self.source, self.distributed = open_run(plan.sweep.run), DistributedContext(choose_device(device))
        self.task_class = resolve.labelled_task(plan.sweep.task)
        self.metric = self.task_class.primary_metric
        self.tokenizer = self.source.tokenizer()
        self.overridden: set[str] = set()
        self.splits: LabelledSplits
        self.task: LabelledTask | None = None
        self.weights_hash: str | None = None

    @property
    def curve_metric(self) -> str:
        return "loss"

    def configure(self, point: Point, seed: int) -> RunConfig:
        sweep = self.plan.sweep
        base = {name: value for name, value in self.plan.settings.items() if name not in self.overridden}
        settings = base | point | {"train.seed": seed}
        settings |= {"data.train": sweep.train} if sweep.train else {}
        settings |= {"data.valid": sweep.valid[0]} if sweep.valid else {}
        settings |= {"data.columns": list(sweep.columns)} if sweep.columns else {}
        return resolve.resolve_finetune_config(self.source, sweep.task, self.plan.file, settings)

    def read(self, configs: Sequence[RunConfig]) -> None:
        first = configs[0]
        if first.data.test:
            raise UserError(f"data.test: cannot be set: {FIXED_SETTINGS['test']}")
        self.splits = read_splits(first.data, self.task_class, first.task, seed=self.plan.sweep.seed)
        self.task = self.task_class(self.complete(first).task, self.tokenizer)
        for records in (self.splits.train, self.splits.valid):
            self.task.check(records)
        if any(config.transfer.init != "scratch" for config in configs):
            self.source.check_weights_exist()
            self.weights_hash = sha256(self.source.weights_file)

    def complete(self, config: RunConfig) -> RunConfig:
        return resolve.resolve_with_data(config, self.splits.train)

    def key(self, config: RunConfig) -> str:
        settings = config.plain()
        settings.pop("data")  # the rows count, not their path
        settings["transfer"].pop("run")
        weights = None if config.transfer.init == "scratch" else self.weights_hash
        parts = {"tokenizer": self.tokenizer.fingerprint, "weights": weights}
        return versioned_fingerprint({"rows": self.splits.fingerprint(), "settings": settings, **parts})

    def train(self, trial: SweepTrial, config: RunConfig, run: RunFolder, callbacks: Sequence[Callback]) -> TrialResult:
        task = self.task_class(config.task, self.tokenizer)
        data = LabelledData(task.prepare(self.splits.train), task.prepare(self.splits.valid))
        weights = None if config.transfer.init == "scratch" else source_weights(self.source)
        fitted = fit(config, self.tokenizer, weights, data, run=None, distributed=self.distributed, callbacks=callbacks)
        outputs = fitted.outputs(data.valid, dtype=config.train.dtype)
        metric, metrics = task.primary_metric, metrics_with_intervals(task, data.valid, outputs)
        splits = LabelledSplits(self.splits.train, self.splits.valid, None)
        save_fit(run, config, self.tokenizer, fitted, splits, self.distributed)
        return {
            "metrics": {name: value for name, value in metrics.items() if name != "intervals"},
            "curves": {"loss": [[row["step"], row["valid_loss"]] for row in fitted.epochs]},
            "parameters": parameter_counts(fitted.model, frozen=config.transfer.freeze)["total"],
            "steps": fitted.state.step,
            "tallies": {metric: serialize_metric(task.row_metrics(data.valid, outputs)[metric])},
        }

    def describe_data(self) -> dict[str, Any]:
        return self.splits.describe()


def versioned_fingerprint(parts: dict[str, Any]) -> str:
    return fingerprint({"version": __version__, **parts})
