"""Makes the tables and the figure of docs/results.md from the committed cells, which hold every right and wrong row.

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


def read(path: str, pretraining: str) -> list[dict[str, Any]]:
    """The cells of one pretraining, and those of TF-IDF, which has none."""
    found = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    return [one for one in found if one["pretraining"] in (pretraining, None)]


def hits(cells: list[dict[str, Any]], family: str | None, arm: str) -> np.ndarray | None:
    """(S, N) 1 where a seed's model was right; None where the rows were not kept."""
    own = [cell for cell in cells if (cell["family"], cell["arm"]) == (family, arm)]
    if not own or any("hits" not in cell for cell in own):
        return None
    return np.array([[int(hit) for hit in cell["hits"]] for cell in sorted(own, key=lambda cell: cell["seed"])])


def tables(of: str, pretraining: str) -> dict[str, Any]:
    cells = read(f"{of}/cells.json", pretraining)
    grown = {name: found for name in NAMES if (found := hits(cells, name, "pretrained")) is not None}
    scratch = {name: found for name in NAMES if (found := hits(cells, name, "scratch")) is not None}
    tfidf = hits(cells, None, TFIDF)
    assert tfidf is not None
    every = grown | {TFIDF: tfidf}
    return {
        "accuracy": {
            name: {
                arm: list(interval(found[name], key=("accuracy",)))
                for arm, found in (("pretrained", every), ("scratch", scratch))
                if name in found
            }
            for name in every
        },
        # in the order in which compare takes the arms, turned round
        "gain": {name: turned(difference(scratch[name], grown[name])) for name in grown if name in scratch},
        "pairs": {f"{a} - {b}": list(difference(every[a], every[b])) for a, b in combinations(every, 2)},
    }


def turned(found: Interval) -> list[float]:
    assert found.low is not None and found.high is not None
    return [0.0 - found.mean, 0.0 - found.high, 0.0 - found.low]


def percent(found: list[float], *, signed: bool = False) -> str:
    mean, low, high = (100 * value for value in found)
    return f"{mean:{'+' if signed else ''}.1f} ({low:.1f} to {high:.1f})"


def paint_figure(path: Path, pretraining: str) -> None:
    """Accuracy by family, a dot for each seed."""
    cells = read("families/cells.json", pretraining)
    bits = {run["family"]: run.get("bits_per_byte") for run in read("families/pretraining.json", pretraining)}
    looks = arm_styles([{"name": kind, "kind": kind} for kind in ("pretrained", "scratch", TFIDF)])

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        for arm, aside in (("pretrained", -0.15), ("scratch", 0.15)):
            own = [cell for cell in cells if cell["arm"] == arm]
            x = [list(NAMES).index(cell["family"]) + aside + 0.08 * (cell["seed"] - 1) for cell in own]
            look = {"color": looks[arm].colour, "marker": looks[arm].marker, "linestyle": ""}
            axes.plot(x, [100 * cell["score"] for cell in own], **look, label=arm)
        (tfidf,) = {100 * cell["score"] for cell in cells if cell["arm"] == TFIDF}
        axes.axhline(tfidf, color=looks[TFIDF].colour, linestyle=(0, (4, 3)), linewidth=1.2, zorder=0)
        axes.text(2.5, tfidf + 0.15, "TF-IDF", color=looks[TFIDF].colour, ha="center", va="bottom", fontsize=10)
        below = {name: f"{bits[name]:.3f}" if bits[name] else "–" for name in NAMES}
        axes.set_xticks(range(6), [f"{said}\n{below[name]}" for name, said in NAMES.items()])
        axes.set(xlabel="bits per byte of held-out text", ylabel="accuracy in %", ylim=(72, 90))
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=2, fontsize=10)

    path.write_text(svg_of(make_figure(paint, 760, 360)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretraining", default="third", help="whose cells: first, second or third")
    parser.add_argument("--figure", type=Path, help="draw the figure of the families to this file")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    found = {of: tables(of, args.pretraining) for of in ("families", "xnli-fr")}
    for of, table in found.items():
        print(f"{of}\n| family | pretrained | scratch | gain |\n|---|---|---|---|")
        for name, arms in table["accuracy"].items():
            scratch = percent(arms["scratch"]) if "scratch" in arms else ""
            gain = percent(table["gain"][name], signed=True) if name in table["gain"] else ""
            print(f"| {name} | {percent(arms['pretrained'])} | {scratch} | {gain} |")
        for pair, gap in table["pairs"].items():
            print(f"{pair}: {percent(gap, signed=True)}{' clear' if gap[1] > 0 or gap[2] < 0 else ''}")
    if args.figure:
        paint_figure(args.figure, args.pretraining)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
