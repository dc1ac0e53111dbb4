"""How good a model's predictions are, with the interval that the number of rows allows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock.tasks.labelled import LabelledTask, Statistics
from headstock.train.intervals import item_interval, macro_f1_item_interval


def metrics_of(task: LabelledTask, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """The task's metrics, each with its 95% interval over the rows where one can be had."""
    metrics: dict[str, Any] = {}
    intervals: dict[str, list[float | None]] = {}
    for name, tally in task.tallies(data, outputs).items():
        if isinstance(tally, Statistics):
            found = item_interval(tally)
        else:
            hits, of = tally
            found = item_interval(hits, None if (of == 1).all() else of)
        metrics[name], intervals[name] = found.mean, [found.low, found.high]
    if (numbers := task.class_numbers(data, outputs)) is not None:
        f1 = macro_f1_item_interval(*numbers)
        metrics["macro_f1"], intervals["macro_f1"] = f1.mean, [f1.low, f1.high]
    return {**metrics, **task.extras(data, outputs), "rows": len(outputs), "intervals": intervals}
