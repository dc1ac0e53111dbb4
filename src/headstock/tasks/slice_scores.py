"""A metric of each group of rows of a slice, with its interval."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from headstock.data.slices import Slice
from headstock.intervals import SufficientStatistics, item_interval


def slice_scores(
    metric: tuple[np.ndarray, np.ndarray] | SufficientStatistics, slices: Iterable[Slice]
) -> list[dict[str, Any]]:
    """For each slice its groups: value, number of rows, and the score of one model with a 95% interval."""
    return [
        {
            "slice": part.name,
            "groups": [group_score(metric, value, rows) for value, rows in part.groups.items() if rows.any()],
        }
        for part in slices
    ]


def group_score(
    metric: tuple[np.ndarray, np.ndarray] | SufficientStatistics, value: str, rows: np.ndarray
) -> dict[str, Any]:
    if isinstance(metric, SufficientStatistics):
        estimate = item_interval(metric.part(rows))
    else:
        numerators, denominators = (part[rows] for part in metric)
        estimate = item_interval(numerators, None if (denominators == 1).all() else denominators)
    return {"value": value, "rows": int(rows.sum()), "score": estimate.mean, "low": estimate.low, "high": estimate.high}
