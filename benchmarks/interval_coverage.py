"""Measures by simulation how often the 95% intervals over seeds and test rows contain the true value.

    python benchmarks/interval_coverage.py --json benchmarks/results/interval-coverage.json

Each trial draws test rows and trained models from a population whose true score is known, computes the interval that
`headstock compare` would show, and checks whether it contains the truth and whether it calls a difference clear.

Shapes: S seeds, N rows, R resamples, B trials of a block.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr

from headstock.intervals import RESAMPLES, TAILS, crossed_interval

SEEDS = (2, 3, 5, 10)
ROWS = (50, 100, 400, 2000)
CORRELATIONS = {"independent": 0.0, "correlated": 0.8, "nearly tied": 0.98}  # of two seeds' answers to one row
SPREADS = (0.0, 0.2, 0.5)  # standard deviation of the seed effect, on the logit scale
QUANTITIES = {"score": 0.0, "no difference": 0.0, "difference": 0.4}  # true advantage of the first arm, in logits
EASE, ROW_SPREAD, ARM_SPREAD = 1.5, 2.0, 1.0  # logit of an average row; spread over rows; of rows within one arm
NARROW = 1.05  # times the width of the interval over rows alone


@dataclass(frozen=True)
class Design:
    """One cell of the simulation."""

    what: str  # a key of QUANTITIES
    seeds: int
    rows: int
    correlation: str  # a key of CORRELATIONS
    spread: float


def designs() -> Iterator[Design]:
    for what, seeds, rows, correlation, spread in itertools.product(QUANTITIES, SEEDS, ROWS, CORRELATIONS, SPREADS):
        yield Design(what, seeds, rows, correlation, spread)


def true_score(advantage: float, spread: float) -> float:
    """Mean of the logistic function over a normal logit: the accuracy over all rows and seeds of the population."""
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    total = (ROW_SPREAD**2 + ARM_SPREAD**2 + spread**2) ** 0.5
    return float(weights @ (1 / (1 + np.exp(-(EASE + advantage + total * points)))) / weights.sum())


def draw_correct(
    random: np.random.Generator, design: Design, shared: np.ndarray, advantage: float, trials: int
) -> np.ndarray:
    """(B, S, N) 1 where a model answers a row correctly; `shared` (B, 1, N) is how easy a row is for both arms."""
    logits = EASE + advantage + shared + random.normal(0, ARM_SPREAD, (trials, 1, design.rows))
    logits = logits + random.normal(0, design.spread, (trials, design.seeds, 1))
    correlation = CORRELATIONS[design.correlation]
    common = random.normal(size=(trials, 1, design.rows))
    individual = random.normal(size=(trials, design.seeds, design.rows))
    luck = ndtr(correlation**0.5 * common + (1 - correlation) ** 0.5 * individual)  # uniform, correlated between seeds
    return (luck < 1 / (1 + np.exp(-logits))).astype(np.float32)


def draw_values(random: np.random.Generator, design: Design, trials: int) -> np.ndarray:
    """(B, S, N): hits of one arm, or their difference between two arms that are tested on the same rows."""
    shared = random.normal(0, ROW_SPREAD, (trials, 1, design.rows))
    first = draw_correct(random, design, shared, QUANTITIES[design.what], trials)
    return first if design.what == "score" else first - draw_correct(random, design, shared, 0.0, trials)


def simulate(design: Design, *, trials: int, seed: int, block: int = 250) -> dict[str, Any]:
    """Coverage and false-clear rates of one design, of all trials and of those that could mislead."""
    random = np.random.default_rng([seed, *map(ord, "".join(map(str, asdict(design).values())))])
    truth = true_score(QUANTITIES[design.what], design.spread)
    if design.what != "score":
        truth -= true_score(0.0, design.spread)
    bounds = (0.0, 1.0) if design.what == "score" else (-1.0, 1.0)
    facts: list[tuple[bool, bool, bool, float, bool]] = []
    for start in range(0, trials, block):
        count = min(block, trials - start)
        values = draw_values(random, design, count)
        weights = random.multinomial(design.rows, np.full(design.rows, 1 / design.rows), RESAMPLES).astype(np.float32)
        # one set of resamples for a block of trials, so that one matrix product scores them all
        resampled = weights @ values.reshape(-1, design.rows).T / np.float32(design.rows)
        for trial, of_seeds in enumerate(np.split(resampled, count, axis=1)):
            scores = values[trial].mean(1)
            estimate = crossed_interval(scores, of_seeds, items=design.rows, bounds=bounds, key=(start + trial,))
            assert estimate.low is not None and estimate.high is not None
            low, high = np.quantile(of_seeds.mean(1), TAILS)
            ratio = (estimate.high - estimate.low) / max(float(high - low), 1e-9)
            contains = estimate.low <= truth <= estimate.high
            facts.append(
                (
                    contains,
                    bool(low <= truth <= high),
                    estimate.low > 0 or estimate.high < 0,
                    ratio,
                    bool(np.ptp(scores) == 0),
                )
            )
    inside, rows_only, clear, width, tied = (np.array(column) for column in zip(*facts, strict=True))
    result: dict[str, Any] = {**asdict(design), "trials": trials, "truth": round(truth, 4)}
    result |= {"coverage": float(inside.mean()), "coverage_rows_only": float(rows_only.mean())}
    result |= {"width_ratio_least": float(width.min()), "width_ratio_median": float(np.median(width))}
    if design.what != "score":
        result |= {"clear": float(clear.mean())}
    for name, selected in (("narrow", width < NARROW), ("tied", tied)):
        result |= {f"{name}_trials": int(selected.sum()), f"{name}_inside": int(inside[selected].sum())}
        if design.what != "score":
            result |= {f"{name}_clear": int(clear[selected].sum())}
    return result


def summarise(results: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Coverage and false-clear rates over all designs that share the values of `names`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result[name] for name in names), []).append(result)
    rows = []
    for values, cells in groups.items():
        coverage = [cell["coverage"] for cell in cells]
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        row |= {"designs": len(cells), "coverage": ratio_or_none(sum(coverage), len(cells))}
        row |= {"coverage_least": min(coverage), "coverage_most": max(coverage)}
        row |= {"outside_93_97": sum(not 0.93 <= value <= 0.97 for value in coverage)}
        row |= {"width_ratio_least": min(cell["width_ratio_least"] for cell in cells)}
        null = [cell for cell in cells if cell["what"] == "no difference"]
        row |= {"false_clear": ratio_or_none(sum(cell["clear"] for cell in null), len(null))}
        for name in ("narrow", "tied"):
            trials = sum(cell[f"{name}_trials"] for cell in cells)
            row |= {f"{name}_trials": trials}
            row |= {f"{name}_coverage": ratio_or_none(sum(cell[f"{name}_inside"] for cell in cells), trials)}
            null_trials = sum(cell[f"{name}_trials"] for cell in null)
            row |= {f"{name}_false_clear": ratio_or_none(sum(cell[f"{name}_clear"] for cell in null), null_trials)}
        rows.append(row)
    return rows


def ratio_or_none(part: float, total: int) -> float | None:
    return round(part / total, 4) if total else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500, help="trials of each design")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every design's result to this file")
    args = parser.parse_args()
    results = [simulate(design, trials=args.trials, seed=args.seed) for design in designs()]
    groupings = (("seeds",), ("rows",), ("what",), ("correlation",), ("spread",), ("seeds", "spread"))
    summaries = {" x ".join(names): summarise(results, *names) for names in groupings}
    columns = ("coverage", "coverage_least", "coverage_most", "false_clear", "narrow_coverage", "narrow_false_clear")
    for names, rows in summaries.items():
        print(f"{names:<24}" + "".join(f"{name:>20}" for name in columns) + "   %, narrowest/rows-only")
        for row in rows:
            values = " ".join(str(row[name]) for name in names.split(" x "))
            cells = "".join(f"{percent(row[name]):>20}" for name in columns)
            print(f"{values:<24}{cells}   {row['width_ratio_least']:.2f}")
    if args.json:
        settings = {"trials": args.trials, "seed": args.seed, "narrow": NARROW, "resamples": RESAMPLES}
        lines = ",\n".join("  " + json.dumps(round_floats(result)) for result in results)
        head = json.dumps({"settings": settings, "summaries": summaries}, indent=1)[:-2]
        args.json.write_text(f'{head},\n "designs": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def round_floats(result: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


if __name__ == "__main__":
    main()
