"""Metrics of a model's predictions with 95% intervals over the rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headstock.intervals import SufficientStatistics, item_interval, macro_f1_item_interval
from headstock.tasks.labelled import LabelledTask


def metrics_with_intervals(task: LabelledTask, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """The task's metrics, each with its 95% interval over the rows where there is one."""
    metrics: dict[str, Any] = {}
    intervals: dict[str, list[float | None]] = {}
    for name, tally in task.row_metrics(data, outputs).items():
        if isinstance(tally, SufficientStatistics):
            interval = item_interval(tally)
        else:
            hits, of = tally
            interval = item_interval(hits, None if (of == 1).all() else of)
        metrics[name], intervals[name] = interval.mean, [interval.low, interval.high]
    if (numbers := task.true_and_predicted(data, outputs)) is not None:
        f1 = macro_f1_item_interval(*numbers)
        metrics["macro_f1"], intervals["macro_f1"] = f1.mean, [f1.low, f1.high]
    metrics |= task.extra_metrics(data, outputs)
    if "accuracy" in metrics and (truth := task.true_class_ids(data)) is not None and len(truth):
        number, metrics["majority"] = majority_class(truth.tolist())
        metrics["majority_class"] = task.config.classes[number]
    return {**metrics, "rows": len(outputs), "intervals": intervals}


def majority_class(classes: Iterable[Any]) -> tuple[Any, float]:
    """The most frequent class, and the accuracy of always predicting it."""
    counts = Counter(classes)
    name, count = counts.most_common(1)[0]
    return name, count / counts.total()


def majority_warning(metrics: Mapping[str, Any]) -> str | None:
    """A sentence if a model is not clearly better than always predicting the most frequent class."""
    majority = metrics.get("majority")
    if majority is None or "accuracy" not in metrics:
        return None
    accuracy, (low, _) = metrics["accuracy"], (metrics.get("intervals") or {}).get("accuracy") or (None, None)
    always = f"always predicting {metrics['majority_class']!r} ({100 * majority:.1f}%)"
    if accuracy < majority:
        return f"With an accuracy of {100 * accuracy:.1f}% the model is below {always}."
    if accuracy == majority or (low is not None and low <= majority):
        return f"With an accuracy of {100 * accuracy:.1f}% the model is not clearly above {always}."
    return None
