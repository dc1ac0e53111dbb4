"""Sweeps that learn from earlier trials: TPE (of Optuna) proposes points, ASHA stops the worse ones early.

Nothing is stored beside the results of trials. The proposals of a seed depend on earlier results alone, so a repeated
command makes the same proposals, finds their results in the cache, and continues where it was interrupted.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headstock.errors import UserError
from headstock.experiments.sweep_settings import Range, Values, check_sample
from headstock.report.sweep_points import Point, canonical
from headstock.train.budget import VALIDATIONS

MAX_STARTUP, MIN_STARTUP = 10, 4  # random points before TPE has a model, within these a third of all points
MAX_REPEATS = 50  # proposals in a row that were tried before, after which the search ends
MIN_SURVIVORS = 2  # of successive halving, so that the best has a second to be compared with
MIN_IMPORTANCE_POINTS = 8  # fewer complete points say little about importance


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("--method tpe needs the package optuna: pip install 'headstock[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


# TPE


def tpe_search(
    grid: Mapping[str, Values],
    *,
    sample: int,
    seed: int,
    evaluate: Callable[[list[Point]], Sequence[float | None]],
    is_valid: Callable[[Point], bool] = lambda point: True,
) -> list[Point]:
    """Propose up to `sample` distinct points and minimize what `evaluate` returns for them; None is a failure.

    The first points are random and evaluated together, the others one by one. Points that are not valid are passed
    over. The search ends early when it proposes nothing new.
    """
    optuna = import_optuna()
    check_sample(grid, sample)
    startup = max(MIN_STARTUP, min(MAX_STARTUP, sample // 3))
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup))
    distributions = {key: distribution(values) for key, values in grid.items()}
    points: dict[str, Point] = {}
    values: dict[str, float | None] = {}  # also of points that are not valid
    repeats = 0
    while len(points) < sample and repeats < MAX_REPEATS:
        trials = [study.ask(distributions) for _ in range(min(startup, sample) if not values else 1)]
        proposals = [point_of(grid, trial.params) for trial in trials]
        new = {canonical(point): point for point in proposals if canonical(point) not in values}
        repeats = 0 if new else repeats + 1
        valid = {name: point for name, point in new.items() if is_valid(point)}
        points |= valid
        values |= dict.fromkeys(new, None)
        values |= dict(zip(valid, evaluate(list(valid.values())) if valid else [], strict=True))
        for trial, point in zip(trials, proposals, strict=True):
            value = values[canonical(point)]
            if value is None:  # TPE ranks pruned trials below all others, but would ignore failed ones
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, value)
    return list(points.values())


def distribution(values: Values) -> Any:
    """A range as in random search; listed values are categories, by their index because a value may be a list."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(list(range(len(values))))
    if values.is_integer:
        return IntDistribution(int(values.low), int(values.high), log=values.low > 0)
    return FloatDistribution(values.low, values.high, log=values.low > 0)


def point_of(grid: Mapping[str, Values], parameters: Mapping[str, Any]) -> Point:
    return {
        key: values.rounded(parameters[key]) if isinstance(values, Range) else values[parameters[key]]
        for key, values in grid.items()
    }


# ASHA


def rung_validations(reduction: int) -> list[int]:
    """After how many validations points are compared: 1 and 3 of a run's ten with a reduction factor of 3."""
    rungs = [1]
    while rungs[-1] * reduction <= VALIDATIONS // 2:
        rungs.append(rungs[-1] * reduction)
    return rungs


def successive_halving(
    count: int, *, reduction: int, evaluate: Callable[[list[int], int], Sequence[float | None]]
) -> list[int]:
    """The points, of `count`, that reach the end. At each rung one in `reduction` goes on, but at least two.

    `evaluate` trains the given points up to a number of validations and returns their losses, None for a failure. All
    points of a rung are compared at once, which is what asynchronous successive halving (Li et al. 2020) approximates.
    """
    remaining = list(range(count))
    for validations in rung_validations(reduction):
        values = dict(zip(remaining, evaluate(remaining, validations), strict=True))
        ranked = sorted((value, number) for number, value in values.items() if value is not None)
        survivors = max(MIN_SURVIVORS, math.ceil(len(remaining) / reduction))
        remaining = sorted(number for _, number in ranked[:survivors])
    return remaining


# Importance


def setting_importances(
    grid: Mapping[str, Values], points: Sequence[Point], scores: Sequence[float | None]
) -> dict[str, float] | None:
    """Each setting's share of the variance of the scores (fANOVA), the largest first; None with too few points."""
    optuna = import_optuna()
    distributions = {key: distribution(values) for key, values in grid.items() if len_of(values) > 1}
    complete = [(point, score) for point, score in zip(points, scores, strict=True) if score is not None]
    if len(distributions) < 2 or len(complete) < MIN_IMPORTANCE_POINTS or len({score for _, score in complete}) < 2:
        return None
    study = optuna.create_study()
    for point, score in complete:
        parameters = {key: parameter_of(grid[key], point[key]) for key in distributions}
        study.add_trial(optuna.create_trial(params=parameters, distributions=distributions, value=score))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: round(float(share), 4) for key, share in shares.items()}


def len_of(values: Values) -> float:
    return values.size if isinstance(values, Range) else len(values)


def parameter_of(values: Values, value: Any) -> Any:
    if isinstance(values, Range):
        return min(max(value, values.low), values.high)  # a rounded number may lie just outside
    return [canonical(item) for item in values].index(canonical(value))
