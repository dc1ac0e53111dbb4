"""Paints each chart of the reports: scores by labels, training, lengths, calibration, confusion, loss."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.report.render import is_finite
from headstock.report.theme import (
    GRID,
    INK,
    NARROW,
    PAPER,
    RIGHT,
    SMALL,
    SOFT,
    WIDE,
    WRONG,
    ArmStyle,
    make_figure,
    percent_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
Curve = list[tuple[float, float]]


def reach(row: dict[str, Any]) -> tuple[float, float] | None:
    """How far the interval goes below and above; None where there is none."""
    if not (is_finite(row.get("low")) and is_finite(row.get("high"))):
        return None
    return max(0.0, row["score"] - row["low"]), max(0.0, row["high"] - row["score"])


def score_by_labels(
    looks: Sequence[ArmStyle], summary: Rows, labels: list[int], *, wide: bool, metric: str, rows: str
) -> "Figure":
    """One line an arm with its intervals; arms stand a little apart, so that none hides another."""
    spread = max(labels) > 4 * min(labels) and min(labels) > 0
    places = np.log(labels) if spread else np.asarray(labels, dtype=float)
    hidden = any(reach(row) for row in summary if is_finite(row.get("score")))
    gap = min(np.diff(places).min() * min(0.055, 0.3 / len(looks)), 0.02 * np.ptp(places)) if hidden else 0.0

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        ends = []
        for number, style in enumerate(looks):
            mine = [row for row in summary if row["arm"] == style.name and is_finite(row.get("score"))]
            mine.sort(key=lambda row: row["labels"])
            if not mine:
                continue
            x = [places[labels.index(row["labels"])] + gap * (number - (len(looks) - 1) / 2) for row in mine]
            line_with_intervals(axes, style, x, mine)
            ends.append((mine[-1]["score"], style))
        axes.set_xticks(places, [f"{count:,}" for count in labels])
        axes.set_xlabel(f"labelled {rows} for training" + (" (log scale)" if spread else ""))
        axes.set_ylabel(metric)
        percent_axis(axes.yaxis)
        axes.grid(axis="y")
        axes.margins(x=0.06, y=0.08)
        if wide:
            name_ends(figure, axes, ends)
        else:
            figure.legend(loc="outside lower left", ncols=1 if long_names(looks) else 2, fontsize=10.5)

    return make_figure(paint, WIDE if wide else NARROW, 370 if wide else 320 + 16 * len(looks))


def long_names(looks: Sequence[ArmStyle]) -> bool:
    return max(len(style.label) for style in looks) > 16


def line_with_intervals(axes: "Axes", style: ArmStyle, x: list[float], rows: Rows) -> None:
    y = [row["score"] for row in rows]
    reaches = [reach(row) for row in rows]
    with_interval = [i for i, span in enumerate(reaches) if span]
    if with_interval:
        spans = np.array([reaches[i] for i in with_interval]).T
        at = ([x[i] for i in with_interval], [y[i] for i in with_interval])
        axes.errorbar(*at, yerr=spans, fmt="none", ecolor=style.colour, elinewidth=1.5, capsize=3.5, alpha=0.85)
    axes.plot(x, y, color=style.colour, marker=style.marker, markerfacecolor=style.face, label=shorten(style.label, 34))


def shorten(name: str, size: int) -> str:
    return name if len(name) <= size else f"{name[: size - 1]}…"


def name_ends(figure: "Figure", axes: "Axes", ends: list[tuple[float, ArmStyle]]) -> None:
    """Each line's name at its right end, pushed apart where lines end close together."""
    low, high = axes.get_ylim()
    step = (high - low) * 0.062
    ends = sorted(ends, key=lambda end: end[0])
    heights = [height for height, _ in ends]
    for _ in range(200):  # neighbours push each other until all have room
        for i in range(len(heights) - 1):
            short = step - (heights[i + 1] - heights[i])
            if short > 1e-9:
                heights[i] -= short / 2
                heights[i + 1] += short / 2
    for height, (_, style) in zip(heights, ends, strict=True):
        axes.annotate(
            shorten(style.label, 30),
            (1.015, height),
            xycoords=axes.get_yaxis_transform(),
            color=style.colour,
            va="center",
            fontweight="bold",
            fontsize=11,
            annotation_clip=False,
        )


def score_of_arms(looks: Sequence[ArmStyle], summary: Rows, *, wide: bool, metric: str) -> "Figure":
    """With one number of labels: a dot and an interval for each arm."""
    rows = {row["arm"]: row for row in summary if is_finite(row.get("score"))}
    shown = [style for style in looks if style.name in rows]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for height, style in enumerate(reversed(shown)):
            row = rows[style.name]
            span = reach(row)
            axes.errorbar(
                row["score"],
                height,
                xerr=None if span is None else np.array([span]).T,
                color=style.colour,
                marker=style.marker,
                markerfacecolor=style.face,
                markersize=9,
                elinewidth=2,
                capsize=5,
            )
            value = f"{100 * row['score']:.1f}%"
            axes.annotate(value, (row["score"], height), (0, 11), textcoords="offset points", ha="center", color=INK)
        axes.set_yticks(range(len(shown)), [shorten(style.label, 30 if wide else 18) for style in reversed(shown)])
        axes.set_ylim(-0.6, len(shown) - 0.3)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(metric)
        percent_axis(axes.xaxis)
        axes.margins(x=0.15)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")

    return make_figure(paint, WIDE if wide else NARROW, 90 + (58 if wide else 52) * max(1, len(shown)))


def training_panel(axes: "Axes", style: ArmStyle, runs: list[Rows], limits: tuple[float, float]) -> None:
    """Training accuracy dashed, validation accuracy solid; thin lines are single seeds."""
    from matplotlib.ticker import MaxNLocator

    few = max((len(epochs) for epochs in runs), default=0) <= 15
    for key, dashes in (("train_accuracy", "--"), ("valid_accuracy", "-")):
        curves = [curve for curve in (epoch_curve(epochs, key) for epochs in runs) if curve]
        if not curves:
            continue
        if 1 < len(curves) <= 6:
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), dashes, color=style.colour, linewidth=0.8, alpha=0.35)
        marker: dict[str, Any] = {"marker": style.marker if few and dashes == "-" else None}
        axes.plot(
            *zip(*mean_curve(curves), strict=True), dashes, color=style.colour, markersize=5, **marker,
            markerfacecolor=style.face, label="validation" if dashes == "-" else "training",
        )  # fmt: skip
    axes.set_title(shorten(style.label, 34), color=style.colour, fontweight="bold", loc="left")
    axes.set_ylim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    percent_axis(axes.yaxis)
    axes.grid(axis="y")
    axes.set_xlabel("epoch")


def epoch_curve(epochs: Rows, key: str) -> Curve:
    return [(row["epoch"], row[key]) for row in epochs if is_finite(row.get(key)) and is_finite(row.get("epoch"))]


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean where all seeds have a value: an early end of one must not look like a jump of all."""
    tables = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables))) or sorted(tables[0])
    return [(x, float(np.mean([table[x] for table in tables if x in table]))) for x in shared]


def accuracy_limits(runs: list[Rows]) -> tuple[float, float]:
    keys = ("train_accuracy", "valid_accuracy")
    values = [row[key] for epochs in runs for row in epochs for key in keys if is_finite(row.get(key))]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = max(0.02, 0.06 * (high - low))
    return low - room, min(1.0, high) + room


def training(panels: list[tuple[ArmStyle, list[Rows]]], learned: str = "accuracy") -> "Figure":
    """Accuracy by epoch, one panel an arm, all on one scale; `learned` is what it is the accuracy of."""
    limits = accuracy_limits([epochs for _, runs in panels for epochs in runs])

    def paint(figure: "Figure") -> None:
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (style, runs) in zip(grid, panels, strict=True):
            training_panel(axes, style, runs, limits)
        grid[0].set_ylabel(learned)
        grid[-1].legend(loc="best", fontsize=10)

    return make_figure(paint, SMALL * len(panels), 270)


def training_alone(
    style: ArmStyle, runs: list[Rows], limits: tuple[float, float], *, learned: str = "accuracy", size: int = SMALL
) -> "Figure":
    """One arm's panel, on the scale it shares with the others."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        training_panel(axes, style, runs, limits)
        axes.set_ylabel(learned)
        axes.legend(loc="best", fontsize=10)

    return make_figure(paint, size, 270 if size < WIDE else 330)


def lengths(right: list[int], wrong: list[int], unit: str, read: str) -> "Figure":
    """How long what was read is where a prediction is right and where it is wrong: densities, the medians marked."""
    everything = np.array([*right, *wrong], dtype=float)
    low, high = max(1.0, everything.min()), max(2.0, everything.max())
    log = high > 8 * max(1.0, float(np.median(everything)) / 2) and high > 20
    fewest = min(len(values) for values in (right, wrong) if values)
    number = int(np.clip(2.5 * np.cbrt(fewest), 8, 24))  # few texts in narrow bins would show only their chance
    edges = np.geomspace(low * 0.98, high * 1.02, number) if log else np.linspace(low - 0.5, high + 0.5, number)

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        if log:
            axes.set_xscale("log")
        marks = ((right, "right", RIGHT, "-"), (wrong, "wrong", WRONG, (0, (4, 2))))
        for values, word, colour, dashes in marks:
            if not values:
                continue
            # densities of the axis as drawn, so that equal areas are equal shares on a log scale too
            count, _ = np.histogram(np.maximum(values, low), edges)
            width = np.diff(np.log(edges) if log else edges)
            axes.stairs(count / (len(values) * width), edges, fill=True, color=colour, alpha=0.22, linewidth=0)
            axes.stairs(
                count / (len(values) * width), edges, color=colour, linewidth=1.6, label=f"{word} ({len(values):,})"
            )
            axes.axvline(
                float(np.median(values)), color=colour, linewidth=1.6, linestyle=dashes,
                label=f"median {np.median(values):,.0f}",
            )  # fmt: skip
        if log:
            plain_log_ticks(axes, low, high)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel(f"length of the {read} in {unit}" + (" (log scale)" if log else ""))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside upper left", ncols=2, fontsize=10)

    return make_figure(paint, SMALL, 290)


def plain_log_ticks(axes: "Axes", low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    steps = [m * 10**e for e in range(7) for m in (1, 2, 5) if low <= m * 10**e <= high]
    if len(steps) > 6:
        steps = [step for step in steps if str(step)[0] == "1"] if high > 1000 * low else steps[::2]
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def reliability(bins: Rows, style: ArmStyle, judged: str) -> "Figure":
    """How often the model is right when it says how sure it is, above the counts behind each point."""
    shown = [
        row for row in bins if row.get("count") and is_finite(row.get("confidence")) and is_finite(row["accuracy"])
    ]

    def paint(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        low = min([row["low"] for row in shown], default=0.0)
        above.plot([low, 1], [low, 1], color=GRID, linewidth=1.2, linestyle=(0, (4, 3)))
        above.plot(
            [row["confidence"] for row in shown], [row["accuracy"] for row in shown],
            color=style.colour, marker=style.marker, markerfacecolor=style.face,
        )  # fmt: skip
        above.set_ylabel("share right")
        percent_axis(above.yaxis)
        above.grid()
        middles = [(row["low"] + row["high"]) / 2 for row in shown]
        widths = [0.9 * (row["high"] - row["low"]) for row in shown]
        below.bar(middles, [row["count"] for row in shown], widths, color=style.colour, alpha=0.55)
        for middle, row in zip(middles, shown, strict=True):
            below.annotate(
                f"{row['count']:,}", (middle, row["count"]), (0, 2), textcoords="offset points", ha="center",
                fontsize=8 if len(shown) > 7 else 9, color=SOFT,
            )  # fmt: skip
        below.set_yticks([])
        below.spines["left"].set_visible(False)
        below.set_ylabel(f"{judged}s")
        below.margins(y=0.3)
        below.set_xlabel("confidence of the prediction")
        percent_axis(below.xaxis)

    return make_figure(paint, SMALL, 350)


def confusion(matrix: list[list[int]], classes: list[str]) -> "Figure":
    """Counts and shares of each true class; without the figures in the cells where there are too many to read."""
    counts = np.array(matrix, dtype=float)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    side = min(640, max(300, 62 * len(classes) + 90))

    def paint(figure: "Figure") -> None:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("slate", ["#ffffff", RIGHT]), vmin=0, vmax=1)
        names = [shorten(name, 16) for name in classes]
        many = len(classes) > 30
        axes.set_xticks([] if many else range(len(names)), [] if many else names, rotation=45, ha="right")
        axes.set_yticks([] if many else range(len(names)), [] if many else names)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if len(classes) <= 20:
            for i, j in np.ndindex(counts.shape):
                colour = PAPER if shares[i, j] > 0.6 else INK
                said = f"{counts[i, j]:,.0f}\n{100 * shares[i, j]:.0f}%"
                axes.text(j, i, said, ha="center", va="center", color=colour, fontsize=9)

    return make_figure(paint, side, side)


def loss(train: Curve, valid: Curve, *, wide: bool) -> "Figure":
    """Training loss dashed and validation loss solid, by step."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        if train:
            axes.plot(*zip(*train, strict=True), linestyle="--", color=RIGHT, linewidth=1.4, label="training")
        if valid:
            axes.plot(*zip(*valid, strict=True), marker="o", markersize=5, color=WRONG, label="validation")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", nbins=8 if wide else 5)
        axes.grid(axis="y")
        axes.legend(loc="upper right")

    return make_figure(paint, WIDE if wide else NARROW, 330 if wide else 270)
