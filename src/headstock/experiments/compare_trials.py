"""One trial of a comparison: an arm, a number of labels and a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstock import __version__, config
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.compare_settings import Arm
from headstock.experiments.grid import Outcome, ResultCache, TrialResult
from headstock.io import fingerprint, sha256
from headstock.report.theme import arm_label
from headstock.tasks.labelled import LabelledTask
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext
from headstock.train.labelled_data import LabelledSplits, subset
from headstock.train.resolve import resolve_finetune_config, resolve_with_data
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


def run_trial(context: ExperimentContext, callbacks: Sequence[Callback], point: GridPoint) -> Outcome:
    train, valid = context.rows(point.labels, point.seed)
    run_config = trial_config(context, point, train)

    def run() -> TrialResult:
        result = ARM_KINDS.get(point.arm.kind).run_trial(context, point, run_config, train, valid, callbacks)
        position = {"arm": point.arm.name, "labels": point.labels, "seed": point.seed}
        return result | {"shown": point.analyze_errors} | position

    return ResultCache(context.folder).get_or_run(
        point,
        trial_key(context, point, run_config, train, valid),
        run,
        is_complete=lambda cached: cached["shown"] or not point.analyze_errors,
    )


def trial_config(context: ExperimentContext, point: GridPoint, train: Records) -> RunConfig | None:
    """The fine-tuning config of a trial; None if its arm is not fine-tuned."""
    if point.arm.run is None or not ARM_KINDS.get(point.arm.kind).is_finetuned:
        return None
    settings = {**point.arm.options(context.settings), "train.seed": point.seed}
    shared = {name: getattr(context.task.config, name, None) for name in context.task.shared_settings}
    settings |= {f"task.{name}": config.to_dict(value) for name, value in shared.items() if value not in (None, ())}
    settings |= {"data.train": context.splits.train.source, "data.columns": list(context.columns)}
    run_config = resolve_finetune_config(point.arm.run, context.task.name, None, settings)
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
            "task": [context.task.name, config.to_dict(context.task.config)],
            "settings": settings,
            "tokenizer": run.data()["tokenizer"] if run else None,
            "weights": sha256(run.weights_file) if run and ARM_KINDS.get(point.arm.kind).uses_weights else None,
        }
    )
