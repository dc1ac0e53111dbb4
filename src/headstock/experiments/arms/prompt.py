"""The prompt arm: a language model scores label words in a template, zero-shot or with examples in the context."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock import config
from headstock.data.records import Records
from headstock.experiments.arms.base import ARM_KINDS, ArmKind
from headstock.experiments.compare_trials import ExperimentContext, GridPoint
from headstock.experiments.grid import TrialResult
from headstock.experiments.trial_evaluation import evaluate_probabilities, primary_score
from headstock.inference.pipeline import Pipeline, load
from headstock.inference.prompt import PromptSettings
from headstock.io import sha256
from headstock.train.callbacks import Callback
from headstock.train.labelled_data import stratified_order
from headstock.train.resolve import labelled_task
from headstock.train.settings import RunConfig

if TYPE_CHECKING:
    from headstock.experiments.compare_settings import CompareSettings


@ARM_KINDS.add("prompt")
class PromptArm(ArmKind):
    """Nothing is trained. With `shots`, training rows become examples; without, labels and seeds change nothing."""

    title = "prompting"

    @classmethod
    def unsupported(cls, settings: "CompareSettings") -> str | None:
        task = labelled_task(settings.task)
        if task.texts_per_row > 1:
            return f"asks about one text and does not apply to {settings.task}"
        if settings.separator is not None:
            return "does not support several labels per text"
        if not task.predicts_classes:
            return f"predicts one class per text and does not apply to {settings.task}"
        return None

    @classmethod
    def check_settings(cls, name: str, table: Mapping[str, Any]) -> None:
        config.from_dict(PromptSettings, dict(table), prefix=f"arms.{name}").words_by_label()

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
        run = point.arm.run
        assert run is not None
        settings = config.from_dict(PromptSettings, point.arm.settings, prefix=f"arms.{point.arm.name}")
        order = stratified_order(train.strata, seed=point.seed)[: settings.shots]
        examples = tuple((train.display_texts[row], train.columns["label"][row]) for row in order)
        weights = sha256(run.weights_file)  # a run may be trained again at the same path
        device, classes = str(context.distributed.device), context.task.config.classes

        def probabilities(records: Records) -> np.ndarray:
            texts = tuple(records.display_texts)
            return prompt_probabilities(str(run.path), weights, device, settings, classes, examples, texts)

        return evaluate_probabilities(
            context.task,
            context.eval_records,
            probabilities,
            unlabelled=context.unlabelled_test,
            analyze_errors=point.analyze_errors,
            valid_score=primary_score(context.task, valid, probabilities(valid)),
            chosen=None,
        )


@lru_cache(maxsize=2)
def cached_pipeline(run: str, weights: str, device: str) -> Pipeline:
    return load(run, device=device)


@lru_cache(maxsize=8)
def prompt_probabilities(
    run: str,
    weights: str,
    device: str,
    settings: PromptSettings,
    classes: tuple[str, ...],
    examples: tuple[tuple[str, str], ...],
    texts: tuple[str, ...],
) -> np.ndarray:
    """(N, C); cached, since all zero-shot trials are the same."""
    return cached_pipeline(run, weights, device).prompted(settings, classes, examples).probabilities(texts)
