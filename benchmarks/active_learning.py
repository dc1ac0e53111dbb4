"""Simulates labelling by suggestion: do suggested rows teach a classifier more than random ones?

python benchmarks/active_learning.py --json benchmarks/results/active-learning.json

The pool are quotes of Rotten Tomatoes, the embeddings those of the bundled run reviews-en, the classifier is a logistic
regression on them (a frozen backbone). Every method starts from the same random labels and adds rows in rounds;
differences to random labels are paired by seed. The control is `certain`, the rows that the classifier is surest of.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

import headstock
from headstock.data.records import find_file
from headstock.experiments.trial_evaluation import t_interval
from headstock.inference.suggest import rank_rows
from headstock.rng import generator

METHODS = ("random", "certain", "uncertainty", "entropy", "margin", "diversity", "badge")
SCORES = ("accuracy", "macro_f1")


def read_texts(name: str, rows: int) -> tuple[list[str], np.ndarray]:
    with find_file(f"catalog:rotten-tomatoes/{name}.csv").path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    order = generator(0, "rows").permutation(len(table))[:rows]
    return [table[i]["text"] for i in order], np.array([table[i]["label"] == "positive" for i in order], dtype=int)


def embed(texts: list[str], test_texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around the mean of the pool."""
    vectors, test_vectors = (np.asarray(headstock.load("reviews-en").embed(part)) for part in (texts, test_texts))
    mean = vectors.mean(0)
    return tuple(part / np.linalg.norm(part, axis=1, keepdims=True) for part in (vectors - mean, test_vectors - mean))


def choose(method: str, vectors: np.ndarray, model: Any, labelled: np.ndarray, count: int, seed: int) -> np.ndarray:
    rest = np.setdiff1d(np.arange(len(vectors)), labelled)
    if method == "random":
        return generator(seed, len(labelled), "random").permutation(rest)[:count]
    probabilities = model.predict_proba(vectors[rest])
    if method == "certain":
        return rest[np.argsort(-probabilities.max(1), kind="stable")[:count]]
    rows = rank_rows(
        vectors[rest], probabilities, count, method=method, labelled=vectors[labelled], seed=seed + len(labelled)
    )
    return rest[rows]


def simulate(
    method: str, pool: Any, test: Any, *, start: int, step: int, rounds: int, seed: int
) -> list[dict[str, float]]:
    """The scores after each round."""
    (vectors, labels), (test_vectors, test_labels) = pool, test
    order = generator(seed, "start").permutation(len(labels))
    labelled = order[:start]
    while len(np.unique(labels[labelled])) < 2:  # a first set without the rare class teaches nothing
        order = np.roll(order, -start)
        labelled = order[:start]
    scores = []
    for number in range(rounds + 1):
        model = LogisticRegression(C=10, max_iter=2000, class_weight="balanced").fit(
            vectors[labelled], labels[labelled]
        )
        predicted = model.predict(test_vectors)
        scores.append(
            {
                "accuracy": float((predicted == test_labels).mean()),
                "macro_f1": f1_score(test_labels, predicted, average="macro"),
            }
        )
        if number < rounds:
            labelled = np.concatenate([labelled, choose(method, vectors, model, labelled, step, seed)])
    return scores


def imbalanced(data: Any, share: float) -> Any:
    """All positive rows, and so many negative ones that they are this share of all."""
    vectors, labels = data
    positive, negative = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    rows = np.sort(np.concatenate([positive, negative[: round(len(positive) * share / (1 - share))]]))
    return vectors[rows], labels[rows]


def describe(score: dict[str, float]) -> str:
    gain, low, high = (f"{100 * score[name]:+.1f}" for name in ("gain", "low", "high"))
    return f"{100 * score['mean']:.1f} ({gain}: {low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pool", type=int, default=3000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--start", type=int, default=16)
    parser.add_argument("--step", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    (texts, labels), (test_texts, test_labels) = read_texts("train", options.pool), read_texts("test", options.test)
    vectors, test_vectors = embed(texts, test_texts)
    pools = {"balanced": ((vectors, labels), (test_vectors, test_labels))}
    pools["5% negative"] = (imbalanced(pools["balanced"][0], 0.05), pools["balanced"][1])
    results: list[dict[str, Any]] = []
    for name, (pool, test) in pools.items():
        size = {"start": options.start, "step": options.step, "rounds": options.rounds}
        curves = {
            method: [simulate(method, pool, test, seed=seed, **size) for seed in range(options.seeds)]
            for method in METHODS
        }
        for number in range(1, options.rounds + 1):
            for method in METHODS:
                row: dict[str, Any] = {
                    "pool": name,
                    "rows": len(pool[1]),
                    "labels": options.start + number * options.step,
                }
                row["method"] = method
                for score in SCORES:
                    values = [curve[number][score] for curve in curves[method]]
                    gaps = [value - curve[number][score] for value, curve in zip(values, curves["random"], strict=True)]
                    gap = t_interval(gaps)
                    row[score] = {"mean": float(np.mean(values)), "gain": gap.mean, "low": gap.low, "high": gap.high}
                results.append(row)
                shown = "  ".join(f"{score} {describe(row[score])}" for score in SCORES)
                print(f"{name:12s} {row['labels']:4d} {method:12s} {shown}", flush=True)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(
            json.dumps({"settings": settings, "results": results}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
