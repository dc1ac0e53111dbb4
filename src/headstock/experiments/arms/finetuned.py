"""Arms that the training loop fine-tunes: from pretrained weights, from scratch, or the head alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headstock.data.records import Records
from headstock.experiments.arms.base import ARM_KINDS, ArmKind
from headstock.experiments.compare_trials import ExperimentContext, GridPoint
from headstock.experiments.grid import TrialResult
from headstock.experiments.trial_evaluation import attribution_for, evaluate_outputs, fit_run
from headstock.tasks.labelled import metric_value
from headstock.train.callbacks import Callback
from headstock.train.finetune import parameter_counts, save_fit
from headstock.train.fit import FitResult
from headstock.train.labelled_data import LabelledSplits
from headstock.train.resolve import labelled_task
from headstock.train.settings import RunConfig

if TYPE_CHECKING:
    from headstock.experiments.compare_settings import CompareSettings


class FinetunedArm(ArmKind):
    """The base of arms that differ in their fine-tuning settings."""

    is_finetuned = True

    @classmethod
    def run_trial(
        cls,
        context: ExperimentContext,
        point: GridPoint,
        run_config: RunConfig | None,
        train: Records,
        valid: Records,
        callbacks: Sequence[Callback],
    ) -> TrialResult:
        """Fine-tune and evaluate a model; save it and analyse its errors where the grid point says so."""
        assert run_config is not None and point.arm.run is not None
        distributed, dtype = context.distributed, run_config.train.dtype
        fitted, data = fit_run(
            point.arm.run, type(context.task), run_config, train, valid, distributed=distributed, callbacks=callbacks
        )
        task, frozen = fitted.task, run_config.transfer.freeze
        eval_data = task.prepare(context.eval_records)
        outputs = fitted.outputs(eval_data, dtype=dtype)
        predicted = None
        if context.unlabelled_test is not None:
            rows = task.prepare(context.unlabelled_test)
            predicted = task.predictions(rows, fitted.outputs(rows, dtype=dtype))
        # in units of all training rows, so that the losses of arms and label counts compare
        result = {
            **evaluate_outputs(context.task if task.predicts_values else task, eval_data, outputs),
            "valid_score": valid_score(fitted, data.valid, dtype),
            "best_epoch": fitted.best_epoch,
            "tokens_per_second": None if frozen else tokens_per_second(fitted),  # frozen features are computed once
            "chosen": None,
            "epochs": fitted.epochs,
            "parameters": parameter_counts(fitted, frozen=frozen),
            "predicted": predicted,
        }
        if point.analyze_errors:
            attribute = attribution_for(fitted.model, task, eval_data, length=fitted.length)
            result["told"] = task.error_analysis(context.eval_records, eval_data, outputs, attribute=attribute)
            run, splits = context.run_folder(point.run_name), LabelledSplits(train, valid, None)
            save_fit(run, run_config, fitted, splits, distributed)
        return result


@ARM_KINDS.add("pretrained")
class PretrainedArm(FinetunedArm):
    """Full fine-tuning of the pretrained weights."""

    title = "the pretrained model"


@ARM_KINDS.add("scratch")
class ScratchArm(FinetunedArm):
    """The architecture with new weights."""

    title = "the model trained from scratch"
    uses_weights = False
    options: ClassVar[Mapping[str, Any]] = {"transfer.init": "scratch"}
    ignored: ClassVar[frozenset[str]] = frozenset({"linear_probe"})


@ARM_KINDS.add("frozen")
class FrozenArm(FinetunedArm):
    """A new head on the frozen weights."""

    title = "the frozen backbone"
    options: ClassVar[Mapping[str, Any]] = {"transfer.freeze": True}
    ignored: ClassVar[frozenset[str]] = frozenset({"linear_probe", "token_dropout"})

    @classmethod
    def unsupported(cls, settings: "CompareSettings") -> str | None:
        can_freeze = labelled_task(settings.task).can_freeze_backbone
        return None if can_freeze else f"needs a head that can be trained alone, which {settings.task} does not have"


def valid_score(fitted: FitResult, valid: Any, dtype: str) -> float:
    """The primary metric of the fitted weights on the validation rows."""
    for row in fitted.epochs:
        if row["step"] == fitted.state.best_step and fitted.task.primary_metric == "accuracy":
            return row["valid_accuracy"]
    outputs = fitted.outputs(valid, dtype=dtype)
    return metric_value(fitted.task.row_metrics(valid, outputs)[fitted.task.primary_metric])


def tokens_per_second(fitted: FitResult) -> float:
    return round(fitted.state.tokens / max(1e-9, fitted.state.seconds - fitted.state.overhead_seconds), 1)
