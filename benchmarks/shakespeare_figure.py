"""Draws docs/figures/shakespeare.svg from the committed results of the two Shakespeare sweeps."""

import json
from math import exp
from pathlib import Path

from headstock.report.theme import GRID, PAPER, arm_styles, make_figure, svg_of

names = {"shakespeare": "Transformer", "shakespeare-lstm": "LSTM"}
styles = arm_styles([{"name": "shakespeare", "kind": "pretrained"}, {"name": "shakespeare-lstm", "kind": "scratch"}])


def read_cells(name, split, key="cells"):
    """The results of a sweep, best first."""
    return json.loads(Path("recipes/results", name, f"{split}.json").read_text())[key]


def draw(figure):
    left, right = figure.subplots(1, 2)
    for name, family in names.items():
        style, runs = styles[name], read_cells(name, "by-lines")
        for cell in runs:
            line_style = {"label": family, "zorder": 3} if cell is runs[0] else {"linewidth": 0.8, "alpha": 0.45}
            passes, perplexity = zip(*[(step / 143, exp(loss)) for step, loss in cell["curve"]], strict=True)
            left.plot(passes, perplexity, color=style.colour, **line_style)
    left.axhline(463, color=GRID, linestyle=(0, (4, 3)), linewidth=1.2)
    left.text(12, 472, "counting words: 463", ha="right", va="bottom", fontsize=10)
    left.set(xlabel="passes over the text", ylabel="perplexity of held-out text", yscale="log", ylim=(80, 560))
    left.set(xlim=(0, 12.4), xticks=[1, 2, 4, 6, 8, 10, 12])
    left.set_title("by lines, all 27 at 1e-3; the best in front", loc="left", fontsize=11)

    def plot_by_rate(name, cells, line="none", at=(1e-3, 100), label="", side="left", **options):
        colour, points = styles[name].colour, [(cell["settings"].get("lr", 1e-3), exp(cell["score"])) for cell in cells]
        right.plot(
            *zip(*sorted(points), strict=True), color=colour, marker=styles[name].marker, linestyle=line, **options
        )
        right.text(*at, label, color=colour, ha=side, va="center", fontsize=10)

    for name in names:
        plot_by_rate(name, [*read_cells(name, "by-works"), *read_cells(name, "by-works", "other_seeds")], alpha=0.45)
    runs = [read_cells("shakespeare", "by-works")[0], *read_cells("shakespeare", "by-works", "rates")]
    plot_by_rate("shakespeare", runs, "-", (1.9e-3, 95.5), "best Transformer", "right", zorder=3)
    runs = read_cells("shakespeare-lstm", "by-works", "muon")
    plot_by_rate(
        "shakespeare-lstm", runs, "-", (9e-3, 76.6), "LSTM by Muon, dropout 0.2", "right", markerfacecolor=PAPER
    )
    runs = [*read_cells("shakespeare-lstm", "by-works"), *read_cells("shakespeare-lstm", "by-works", "rates")]
    for depth, dropout, line, at, label in (
        (1, 0.0, ":", (4.5e-3, 98.6), "LSTM, no dropout"),
        (1, 0.2, "-", (2.5e-3, 86.4), "LSTM, dropout 0.2"),
        (1, 0.5, "--", (4.5e-3, 102.2), "LSTM, dropout 0.5"),
        (2, 0.0, ":", (4.5e-3, 109.9), "2 layers, no dropout"),
        (2, 0.2, "-", (4.5e-3, 105.9), "2 layers, dropout 0.2"),
        (2, 0.5, "--", (4.5e-3, 115.4), "2 layers, dropout 0.5"),
    ):
        selected = [
            cell for cell in runs if cell["settings"]["depth"] == depth and cell["settings"]["dropout"] == dropout
        ]
        plot_by_rate("shakespeare-lstm", selected, line, at, label, alpha=1 if depth == 1 else 0.45)
    right.set(xlabel="learning rate", xscale="log", xlim=(4.5e-4, 2.4e-2), yscale="log", ylim=(72, 165))
    right.set_title("by works, all 46, at the best step", loc="left", fontsize=11)
    for axes, ticks, end in ((left, [100, 150, 200, 300, 400], 12), (right, [80, 90, 100, 110, 120, 140, 160], 4e-3)):
        axes.minorticks_off()
        axes.set_yticks(ticks, ticks)
        axes.hlines(ticks, axes.get_xlim()[0], end, color=GRID, alpha=0.28, linewidth=0.7, zorder=0)
    right.set_xticks([5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 2e-2], ["5e-4", "1e-3", "2e-3", "4e-3", "8e-3", "2e-2"])
    figure.legend(loc="outside upper left", ncols=2, fontsize=10)


Path("docs/figures/shakespeare.svg").write_text(svg_of(make_figure(draw, 760, 330)))
