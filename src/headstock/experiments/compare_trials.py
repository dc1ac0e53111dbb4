"""One trial of a comparison: an arm, a number of labels and a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headstock import __version__, config
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.compare_settings import Arm
from headstock.experiments.grid import Outcome, ResultCache, Trainable, TrialResult, trial_run
from headstock.io import fingerprint, sha256
from headstock.report.theme import arm_label
from headstock.tasks.labelled import LabelledTask
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.labelled_data import LabelledSplits, subset
from headstock.train.mirror import reject_mirror
from headstock.train.resolve import resolve_finetune_config, resolve_with_data
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig


@dataclass(frozen=True)
class ExperimentContext:
    """What all trials of a comparison share: data, task and settings."""

    task: LabelledTask  # without a tokenizer: computes metrics of any model's predictions
    splits: LabelledSplits
    eval_records: Records  # the test rows, or the validation rows if the test file has no labels
    settings: dict[str, Any]  # of every fine-tuned arm
    folder: Path
    distributed: DistributedContext
    columns: tuple[str, ...] = ()  # column names in the files
    home: Path | None = None  # the experiment's folder, if `folder` is a temporary one on another machine

    @property
    def unlabelled_test(self) -> Records | None:
        """Test rows without labels, to be predicted."""
        test = self.splits.test
        return test if test is not None and not test.has_labels else None

    @property
    def evaluates_on_valid(self) -> bool:
        return self.splits.test is None or not self.splits.test.has_labels

    @property
    def unit(self) -> str:
        """What the number of training rows counts, in the singular: label or pair."""
        return self.task.nouns.unit

    def run_folder(self, name: str) -> RunFolder:
        """The run that a trial saves."""
        return trial_run(name, folder=self.folder, home=self.home)

    def rows(self, labels: int, seed: int) -> tuple[Records, Records]:
        """Training and validation rows, the same for every arm; at most `labels` validation rows, also labelled."""
        return self.subset(self.splits.train, labels, seed), self.subset(self.splits.valid, labels, seed)

    def subset(self, records: Records, count: int, seed: int) -> Records:
        """`count` rows or all of them, stratified as the task says."""
        return subset(records, min(count, len(records)), seed=seed, strata=self.task.strata(records))


@dataclass(frozen=True)
class GridPoint:
    """The coordinates of a trial."""

    arm: Arm
    labels: int
    seed: int
    analyze_errors: bool = False  # also save the model and analyse its errors
    unit: str = "label"

    @property
    def run_name(self) -> str:
        return f"{self.arm.name}-{self.labels}".replace(" ", "-").replace("/", "-")

    @property
    def name(self) -> str:
        return f"{self.run_name}-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.labels:6,} {self.unit}s  seed {self.seed}  {arm_label(self.arm.name):14s}"


@dataclass(frozen=True)
class ComparisonTrainable(Trainable[GridPoint]):
    """Runs the trials of a comparison. All they read travels with it, so a cluster needs no shared disk."""

    context: ExperimentContext
    callbacks: Sequence[Callback] = ()

    @property
    def folder(self) -> Path:
        return self.context.folder

    def lookup(self, trial: GridPoint) -> Outcome | None:
        return self.prepare(trial).lookup()

    def run(self, trial: GridPoint) -> Outcome:
        prepared = self.prepare(trial)
        return prepared.lookup() or prepared.run(self.callbacks)

    def prepare(self, trial: GridPoint) -> "PreparedTrial":
        train, valid = self.context.rows(trial.labels, trial.seed)
        run_config = trial_config(self.context, trial, train)
        key = trial_key(self.context, trial, run_config, train, valid)
        return PreparedTrial(self.context, trial, run_config, train, valid, key)

    def on_worker(self, folder: Path, device: str) -> "ComparisonTrainable":
        distributed = DistributedContext(choose_device(device))
        return ComparisonTrainable(replace(self.context, folder=folder, home=self.folder, distributed=distributed))

    def __getstate__(self) -> dict[str, Any]:
        return {"context": self.context, "callbacks": ()}  # callbacks belong to this process


@dataclass(frozen=True)
class PreparedTrial:
    """A trial with its rows, its fine-tuning config and the key of its result."""

    context: ExperimentContext
    point: GridPoint
    run_config: RunConfig | None
    train: Records
    valid: Records
    key: str

    def lookup(self) -> Outcome | None:
        point = self.point
        return ResultCache(self.context.folder).get(
            point, self.key, is_complete=lambda cached: cached["shown"] or not point.analyze_errors
        )

    def run(self, callbacks: Sequence[Callback]) -> Outcome:
        return ResultCache(self.context.folder).run(self.point, self.key, partial(self.train_and_evaluate, callbacks))

    def train_and_evaluate(self, callbacks: Sequence[Callback]) -> TrialResult:
        point, kind = self.point, ARM_KINDS.get(self.point.arm.kind)
        result = kind.run_trial(self.context, point, self.run_config, self.train, self.valid, callbacks)
        position = {"arm": point.arm.name, "labels": point.labels, "seed": point.seed}
        return result | {"shown": point.analyze_errors} | position


def trial_config(context: ExperimentContext, point: GridPoint, train: Records) -> RunConfig | None:
    """The fine-tuning config of a trial; None if its arm is not fine-tuned."""
    if point.arm.run is None or not ARM_KINDS.get(point.arm.kind).is_finetuned:
        return None
    settings = {**point.arm.options(context.settings), "train.seed": point.seed}
    shared = {name: getattr(context.task.config, name, None) for name in context.task.shared_settings}
    settings |= {f"task.{name}": config.to_dict(value) for name, value in shared.items() if value not in (None, ())}
    settings |= {"data.train": context.splits.train.source, "data.columns": list(context.columns)}
    run_config = reject_mirror(resolve_finetune_config(point.arm.run, context.task.name, None, settings))
    if bool(run_config.transfer.lora) != ("lora" in ARM_KINDS.get(point.arm.kind).defaults):
        rank = run_config.transfer.lora
        raise UserError(f"arms.{point.arm.name}: an arm of the kind {point.arm.kind!r} cannot have lora={rank}")
    return resolve_with_data(run_config, train)


def trial_key(
    context: ExperimentContext, point: GridPoint, run_config: RunConfig | None, train: Records, valid: Records
) -> str:
    """A fingerprint of everything that can change the result: rows, settings and weights."""
    run, settings = point.arm.run, point.arm.settings or None
    if run_config is not None:
        settings = run_config.plain(for_key=True)
        settings["transfer"].pop("run")  # the weights count, not the path
        settings["data"].pop("train")  # likewise the rows
        settings["data"].pop("columns")
    return fingerprint(
        {
            "version": __version__,
            "rows": LabelledSplits(train, valid, context.eval_records).fingerprint(),
            "unlabelled": context.unlabelled_test.columns if context.unlabelled_test else None,
            "task": [context.task.name, config.to_dict(context.task.config, for_key=True)],
            "settings": settings,
            "tokenizer": run.data()["tokenizer"] if run else None,
            "weights": sha256(run.weights_file) if run and ARM_KINDS.get(point.arm.kind).uses_weights else None,
        }
    )
