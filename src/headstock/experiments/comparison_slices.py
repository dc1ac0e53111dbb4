"""The scores of every arm on slices of the evaluation rows, and their paired differences."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from headstock.data.slices import Slice, built_in_slices, make_slices
from headstock.experiments.compare_trials import ExperimentContext
from headstock.experiments.grid import TrialResult
from headstock.experiments.trial_evaluation import row_values
from headstock.intervals import SufficientStatistics, difference, interval

RowValues = tuple[np.ndarray | SufficientStatistics, np.ndarray | None]  # numerators and denominators, (S, N)


def comparison_slices(context: ExperimentContext, specs: Sequence[str]) -> list[Slice]:
    """The slices that were asked for, then the built-in ones."""
    texts = context.task.input_texts(context.eval_records)
    requested = make_slices(specs, context.eval_records, texts)
    names = {part.name for part in requested}
    return requested + [part for part in built_in_slices(texts) if part.name not in names]


def summarize_slices(
    context: ExperimentContext, slices: Sequence[Slice], by_arm: Mapping[str, list[TrialResult]]
) -> list[dict[str, Any]]:
    """For each group of each slice: its rows, and the arms' scores and differences over seeds and rows."""
    values = {arm: row_values(context.task, results, context.task.primary_metric) for arm, results in by_arm.items()}
    return [
        {
            "slice": part.name,
            "groups": [summarize_group(values, name, rows) for name, rows in part.groups.items() if rows.any()],
        }
        for part in slices
    ]


def summarize_group(values: Mapping[str, RowValues], name: str, rows: np.ndarray) -> dict[str, Any]:
    selected = {arm: select_rows(part, rows) for arm, part in values.items()}
    arms = [{"arm": arm, **estimate("score", *interval(*part))} for arm, part in selected.items()]
    pairs = [
        {"a": a, "b": b, **estimate("difference", *difference(first[0], second[0], first[1], second[1]))}
        for (a, first), (b, second) in combinations(selected.items(), 2)
    ]
    return {"value": name, "rows": int(rows.sum()), "arms": arms, "pairs": pairs}


def estimate(name: str, mean: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {name: mean, "low": low, "high": high}


def select_rows(values: RowValues, rows: np.ndarray) -> RowValues:
    numerators, denominators = values
    if isinstance(numerators, SufficientStatistics):
        return numerators.part(rows), None
    return numerators[:, rows], None if denominators is None else denominators[:, rows]
