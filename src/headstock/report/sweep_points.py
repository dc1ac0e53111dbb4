"""The points of a sweep: their names, values and scores as text."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headstock.tasks.text_metrics import format_metric as format_metric
from headstock.tasks.text_metrics import format_range, is_score

Point = dict[str, Any]  # the value of each setting of the grid

MAX_FILE_NAME = 80  # characters; longer names are truncated and get a hash
SMALL_DIFFERENCE = 0.005  # smaller differences of losses are shown with more digits


def canonical(value: Any) -> str:
    """A key for a setting's value or a point: 1 and 1.0 are equal, 1 and true are not."""
    if is_number(value):
        value = float(value)
    return json.dumps({key: canonical(item) for key, item in value.items()} if isinstance(value, dict) else value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def point_label(point: Mapping[str, Any]) -> str:
    """`depth=2 lr=0.001`."""
    return " ".join(f"{key}={format_value(value)}" for key, value in point.items())


def point_file_name(point: Mapping[str, Any]) -> str:
    """`depth=2,lr=0.001`, with a hash if characters had to be replaced or cut."""
    name = ",".join(f"{key}={format_value(value)}" for key, value in point.items())
    safe = re.sub(r"[^A-Za-z0-9=,._+-]+", "_", name)
    if safe == name and len(name) <= MAX_FILE_NAME:
        return name
    return f"{safe[: MAX_FILE_NAME - 9]}-{hashlib.sha256(canonical(dict(point)).encode()).hexdigest()[:8]}"


def values_of(points: Sequence[Point]) -> dict[str, list[Any]]:
    """The distinct values of each setting; numbers are sorted."""
    values: dict[str, dict[str, Any]] = {}
    for point in points:
        for key, value in point.items():
            values.setdefault(key, {}).setdefault(canonical(value), value)
    return {key: sorted_values(list(distinct.values())) for key, distinct in values.items()}


def sorted_values(values: list[Any]) -> list[Any]:
    return sorted(values) if all(is_number(value) for value in values) else values


def missing_score(row: Mapping[str, Any]) -> str:
    """What is shown in place of the score of a point that has none."""
    pruned = row.get("pruned")
    return f"pruned at step {pruned['step']:,}" if pruned else "failed"


def format_interval(metric: str, row: Mapping[str, Any]) -> str:
    """` (70.1 to 72.5)`; empty without an interval."""
    text = format_range(metric, row["low"], row["high"], scale=row.get("score", row.get("mean")))
    return f" ({text})" if text else ""


def format_difference(metric: str, value: float) -> str:
    """`3.1 points` or `0.041` (loss)."""
    if is_score(metric):
        return f"{100 * value:z.1f} points"
    return f"{value:.3f}" if abs(value) >= SMALL_DIFFERENCE else f"{value:.2g}"


def format_difference_range(metric: str, low: float, high: float) -> str:
    """`1.2 to 3.1 points` or `0.012 to 0.041`."""
    return f"{format_difference(metric, low).removesuffix(' points')} to {format_difference(metric, high)}"


def excludes_zero(gap: Mapping[str, Any]) -> bool:
    return gap["low"] is not None and (gap["low"] > 0 or gap["high"] < 0)


def gap_to_best(results: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """`0.041 (0.012 to 0.070)`: how much worse than the best point, paired by seed; empty for the best."""
    gap, metric = row["from_best"], results["metric"]
    if gap is None:
        return ""
    sign = 1 if results["better"] == "lower" else -1
    text = format_difference(metric, sign * gap["mean"])
    if gap["low"] is None:
        return text
    low, high = sorted((sign * gap["low"], sign * gap["high"]))
    return f"{text} ({format_difference_range(metric, low, high).removesuffix(' points')})"


def value_spreads(results: Mapping[str, Any]) -> dict[str, float]:
    """How far apart the mean scores of each setting's values are, the largest spread first."""
    spreads = {}
    for key, rows in results["marginals"].items():
        means = [row["mean"] for row in rows if row["mean"] is not None]
        if len(means) > 1:
            spreads[key] = max(means) - min(means)
    return dict(sorted(spreads.items(), key=lambda item: -item[1]))
