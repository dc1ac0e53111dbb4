"""Makes the tables and the figure of docs/evidence/results.md from the committed results of every test row.

    python benchmarks/family_tables.py [--pretraining third] [--figure docs/figures/families.svg] [--json FILE]

Prints accuracies, gains over scratch, and every pair of pretrained families and TF-IDF, in % with 95% intervals.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from headstock.intervals import Interval, difference, interval
from headstock.report.theme import arm_styles, make_figure, svg_of

RESULTS = Path(__file__).parents[1] / "recipes" / "results"
NAMES = {name: name for name in ("causal", "hybrid", "masked")}
NAMES |= {"nsp": "masked + next", "lstm": "LSTM", "elmo": "ELMo"}
TFIDF = "tfidf"


def read_cells(path: str, pretraining: str) -> list[dict[str, Any]]:
    """The cells of one pretraining, and those of TF-IDF, which has none."""
    cells = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    return [cell for cell in cells if cell["pretraining"] in (pretraining, None)]


def correct_rows(cells: list[dict[str, Any]], family: str | None, arm: str) -> np.ndarray | None:
    """(S, N) 1 where the model of a seed predicts a row correctly; None if the results have no rows."""
    matching = [cell for cell in cells if (cell["family"], cell["arm"]) == (family, arm)]
    if not matching or any("hits" not in cell for cell in matching):
        return None
    matching.sort(key=lambda cell: cell["seed"])
    return np.array([[int(digit) for digit in cell["hits"]] for cell in matching])


def tables(experiment: str, pretraining: str) -> dict[str, Any]:
    cells = read_cells(f"{experiment}/cells.json", pretraining)
    pretrained = {name: values for name in NAMES if (values := correct_rows(cells, name, "pretrained")) is not None}
    scratch = {name: values for name in NAMES if (values := correct_rows(cells, name, "scratch")) is not None}
    tfidf = correct_rows(cells, None, TFIDF)
    assert tfidf is not None
    models = pretrained | {TFIDF: tfidf}
    return {
        "accuracy": {
            name: {
                arm: list(interval(values[name], key=("accuracy",)))
                for arm, values in (("pretrained", models), ("scratch", scratch))
                if name in values
            }
            for name in models
        },
        # negated, so that the random resamples are those of `compare`
        "gain": {name: negated(difference(scratch[name], pretrained[name])) for name in pretrained if name in scratch},
        "pairs": {f"{a} - {b}": list(difference(models[a], models[b])) for a, b in combinations(models, 2)},
    }


def negated(result: Interval) -> list[float]:
    assert result.low is not None and result.high is not None
    return [0.0 - result.mean, 0.0 - result.high, 0.0 - result.low]


def percent(values: list[float], *, signed: bool = False) -> str:
    mean, low, high = (100 * value for value in values)
    return f"{mean:{'+' if signed else ''}.1f} ({low:.1f} to {high:.1f})"


def write_figure(path: Path, pretraining: str) -> None:
    """Accuracy by family, a dot for each seed."""
    cells = read_cells("families/cells.json", pretraining)
    bits = {run["family"]: run.get("bits_per_byte") for run in read_cells("families/pretraining.json", pretraining)}
    styles = arm_styles([{"name": kind, "kind": kind} for kind in ("pretrained", "scratch", TFIDF)])

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for arm, offset in (("pretrained", -0.15), ("scratch", 0.15)):
            matching = [cell for cell in cells if cell["arm"] == arm]
            x = [list(NAMES).index(cell["family"]) + offset + 0.08 * (cell["seed"] - 1) for cell in matching]
            style = {"color": styles[arm].colour, "marker": styles[arm].marker, "linestyle": ""}
            axes.plot(x, [100 * cell["score"] for cell in matching], **style, label=arm)
        (tfidf,) = {100 * cell["score"] for cell in cells if cell["arm"] == TFIDF}
        axes.axhline(tfidf, color=styles[TFIDF].colour, linestyle=(0, (4, 3)), linewidth=1.2, zorder=0)
        axes.text(2.5, tfidf + 0.15, "TF-IDF", color=styles[TFIDF].colour, ha="center", va="bottom", fontsize=10)
        bits_labels = {name: f"{bits[name]:.3f}" if bits[name] else "–" for name in NAMES}
        axes.set_xticks(range(6), [f"{label}\n{bits_labels[name]}" for name, label in NAMES.items()])
        axes.set(xlabel="bits per byte of held-out text", ylabel="accuracy in %", ylim=(72, 90))
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=2, fontsize=10)

    path.write_text(svg_of(make_figure(draw, 760, 360)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretraining", default="third", help="first, second or third")
    parser.add_argument("--figure", type=Path, help="SVG file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    args = parser.parse_args()
    results = {experiment: tables(experiment, args.pretraining) for experiment in ("families", "xnli-fr")}
    for experiment, table in results.items():
        print(f"{experiment}\n| family | pretrained | scratch | gain |\n|---|---|---|---|")
        for name, arms in table["accuracy"].items():
            scratch = percent(arms["scratch"]) if "scratch" in arms else ""
            gain = percent(table["gain"][name], signed=True) if name in table["gain"] else ""
            print(f"| {name} | {percent(arms['pretrained'])} | {scratch} | {gain} |")
        for pair, values in table["pairs"].items():
            clear = values[1] > 0 or values[2] < 0
            print(f"{pair}: {percent(values, signed=True)}{' clear' if clear else ''}")
    if args.figure:
        write_figure(args.figure, args.pretraining)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
