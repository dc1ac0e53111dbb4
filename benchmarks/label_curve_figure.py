"""Draws docs/figures/label-curves.svg from the committed results of recipes/labels-*.toml."""

import json
from pathlib import Path
from typing import Any

from headstock.report.theme import arm_styles, make_figure, svg_of

QUOTES, SST2, BOOKS = "labels-rotten-tomatoes", "labels-sst2", "labels-cls-books"
PANELS = {  # the results of each line, and the arm's name in them
    "quotes of critics (Rotten Tomatoes)": {
        "own model, fine-tuned": [
            (QUOTES, "pretrained reviews-hybrid-en"),
            (f"{QUOTES}-800", "pretrained reviews-hybrid-en"),
            (f"{QUOTES}-1600", "pretrained"),
        ],
        "MiniLM, fine-tuned": [(QUOTES, "pretrained minilm"), (f"{QUOTES}-800", "pretrained minilm")],
        "MiniLM, SetFit": [(f"{QUOTES}-minilm", "setfit")],
        "TF-IDF": [(f"{QUOTES}-minilm", "tfidf")],
    },
    "film sentences (SST-2)": {
        "own model, fine-tuned": [(SST2, "pretrained")],
        "TF-IDF": [(SST2, "tfidf")],
    },
    "French book reviews (CLS)": {
        "own model, fine-tuned": [(BOOKS, "pretrained")],
        "own model, SetFit": [(BOOKS, "setfit")],
        "TF-IDF": [(BOOKS, "tfidf")],
    },
}
KINDS = {
    "own model, fine-tuned": "pretrained",
    "MiniLM, fine-tuned": "pretrained",
    "MiniLM, SetFit": "setfit",
    "own model, SetFit": "setfit",
    "TF-IDF": "tfidf",
}


def read_arm(results: str, arm: str) -> list[dict[str, Any]]:
    """The summaries of an arm, by number of labels."""
    summary = json.loads(Path("recipes/results", results, "results.json").read_text())["summary"]
    return [row for row in summary if row["arm"] == arm]


def draw(figure: Any) -> None:
    styles = arm_styles([{"name": name, "kind": kind} for name, kind in KINDS.items()])
    for axes, (title, lines) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        for label, sources in lines.items():
            rows, style = [row for source in sources for row in read_arm(*source)], styles[label]
            counts = [row["labels"] for row in rows]
            axes.plot(counts, [100 * row["score"] for row in rows], label=label, **style.line)
            low, high = ([100 * row[side] for row in rows] for side in ("low", "high"))
            axes.fill_between(counts, low, high, color=style.colour, alpha=0.15, linewidth=0)
        axes.set(xscale="log", xlabel="labels", xticks=[50, 100, 200, 400, 800, 1600])
        axes.set_xticks([], minor=True)
        axes.set_xticklabels(["50", "100", "200", "400", "800", "1,600"])
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend(loc="lower right", fontsize=9)
    figure.axes[0].set_ylabel("accuracy (%), 95% intervals")


if __name__ == "__main__":
    Path("docs/figures/label-curves.svg").write_text(svg_of(make_figure(draw, 1080, 340)), encoding="utf-8")
