"""The charts of the reports: scores, training curves, lengths, calibration, confusion matrix, loss."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.report.format import is_finite
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
    arm_styles,
    make_figure,
    percent_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
Curve = list[tuple[float, float]]

RUN_OFFSET = 0.2  # vertical distance between the dots of one run


def error_bar(row: dict[str, Any]) -> tuple[float, float] | None:
    """The distances from the score to the ends of its interval; None without an interval."""
    if not (is_finite(row.get("low")) and is_finite(row.get("high"))):
        return None
    return max(0.0, row["score"] - row["low"]), max(0.0, row["high"] - row["score"])


def score_by_labels(
    styles: Sequence[ArmStyle], summary: Rows, labels: list[int], *, wide: bool, metric: str, rows: str
) -> "Figure":
    """One line per arm with intervals, slightly offset so that none hides another."""
    is_log = max(labels) > 4 * min(labels) and min(labels) > 0
    positions = np.log(labels) if is_log else np.asarray(labels, dtype=float)
    has_intervals = any(error_bar(row) for row in summary if is_finite(row.get("score")))
    offset = (
        min(np.diff(positions).min() * min(0.055, 0.3 / len(styles)), 0.02 * np.ptp(positions))
        if has_intervals
        else 0.0
    )

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        ends = []
        for number, style in enumerate(styles):
            rows_of_arm = [row for row in summary if row["arm"] == style.name and is_finite(row.get("score"))]
            rows_of_arm.sort(key=lambda row: row["labels"])
            if not rows_of_arm:
                continue
            x = [
                positions[labels.index(row["labels"])] + offset * (number - (len(styles) - 1) / 2)
                for row in rows_of_arm
            ]
            line_with_intervals(axes, style, x, rows_of_arm)
            ends.append((rows_of_arm[-1]["score"], style))
        axes.set_xticks(positions, [f"{count:,}" for count in labels])
        axes.set_xlabel(f"labelled {rows} for training" + (" (log scale)" if is_log else ""))
        axes.set_ylabel(metric)
        percent_axis(axes.yaxis)
        axes.grid(axis="y")
        axes.margins(x=0.06, y=0.08)
        if wide:
            label_line_ends(figure, axes, ends)
        else:
            figure.legend(loc="outside lower left", ncols=1 if has_long_names(styles) else 2, fontsize=10.5)

    return make_figure(paint, WIDE if wide else NARROW, 370 if wide else 320 + 16 * len(styles))


def has_long_names(styles: Sequence[ArmStyle]) -> bool:
    return max(len(style.label) for style in styles) > 16


def line_with_intervals(axes: "Axes", style: ArmStyle, x: list[float], rows: Rows) -> None:
    y = [row["score"] for row in rows]
    error_bars = [error_bar(row) for row in rows]
    with_interval = [i for i, span in enumerate(error_bars) if span]
    if with_interval:
        spans = np.array([error_bars[i] for i in with_interval]).T
        at = ([x[i] for i in with_interval], [y[i] for i in with_interval])
        axes.errorbar(*at, yerr=spans, fmt="none", ecolor=style.colour, elinewidth=1.5, capsize=3.5, alpha=0.85)
    axes.plot(x, y, color=style.colour, marker=style.marker, markerfacecolor=style.face, label=shorten(style.label, 34))


def shorten(name: str, size: int) -> str:
    return name if len(name) <= size else f"{name[: size - 1]}…"


def label_line_ends(figure: "Figure", axes: "Axes", ends: list[tuple[float, ArmStyle]]) -> None:
    """Label each line at its right end; labels of close lines are pushed apart."""
    low, high = axes.get_ylim()
    step = (high - low) * 0.062
    ends = sorted(ends, key=lambda end: end[0])
    heights = [height for height, _ in ends]
    for _ in range(200):
        for i in range(len(heights) - 1):
            overlap = step - (heights[i + 1] - heights[i])
            if overlap > 1e-9:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
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


def score_by_arm(styles: Sequence[ArmStyle], summary: Rows, *, wide: bool, metric: str) -> "Figure":
    """For one number of labels: a dot with an interval for each arm."""
    rows = {row["arm"]: row for row in summary if is_finite(row.get("score"))}
    shown = [style for style in styles if style.name in rows]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for height, style in enumerate(reversed(shown)):
            row = rows[style.name]
            span = error_bar(row)
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
    """Training accuracy (dashed) and validation accuracy (solid); thin lines are single seeds."""
    from matplotlib.ticker import MaxNLocator

    has_markers = max((len(epochs) for epochs in runs), default=0) <= 15
    for key, dashes in (("train_accuracy", "--"), ("valid_accuracy", "-")):
        curves = [curve for curve in (epoch_curve(epochs, key) for epochs in runs) if curve]
        if not curves:
            continue
        if 1 < len(curves) <= 6:
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), dashes, color=style.colour, linewidth=0.8, alpha=0.35)
        marker: dict[str, Any] = {"marker": style.marker if has_markers and dashes == "-" else None}
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
    """The mean over seeds at steps that all of them have, so that a seed that stops early causes no jump."""
    tables = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables))) or sorted(tables[0])
    return [(x, float(np.mean([table[x] for table in tables if x in table]))) for x in shared]


def accuracy_limits(runs: list[Rows]) -> tuple[float, float]:
    keys = ("train_accuracy", "valid_accuracy")
    values = [row[key] for epochs in runs for row in epochs for key in keys if is_finite(row.get(key))]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = max(0.02, 0.06 * (high - low))
    return low - margin, min(1.0, high) + margin


def training(panels: list[tuple[ArmStyle, list[Rows]]], metric_name: str = "accuracy") -> "Figure":
    """Accuracy by epoch, one panel per arm, on a common scale."""
    limits = accuracy_limits([epochs for _, runs in panels for epochs in runs])

    def paint(figure: "Figure") -> None:
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (style, runs) in zip(grid, panels, strict=True):
            training_panel(axes, style, runs, limits)
        grid[0].set_ylabel(metric_name)
        grid[-1].legend(loc="best", fontsize=10)

    return make_figure(paint, SMALL * len(panels), 270)


def training_of_arm(
    style: ArmStyle, runs: list[Rows], limits: tuple[float, float], *, metric_name: str = "accuracy", size: int = SMALL
) -> "Figure":
    """The panel of one arm, on the common scale."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        training_panel(axes, style, runs, limits)
        axes.set_ylabel(metric_name)
        axes.legend(loc="best", fontsize=10)

    return make_figure(paint, size, 270 if size < WIDE else 330)


def lengths(right: list[int], wrong: list[int], unit: str, read: str) -> "Figure":
    """Densities of the lengths of correctly and wrongly predicted rows, with their medians."""
    everything = np.array([*right, *wrong], dtype=float)
    low, high = max(1.0, everything.min()), max(2.0, everything.max())
    log = high > 8 * max(1.0, float(np.median(everything)) / 2) and high > 20
    fewest = min(len(values) for values in (right, wrong) if values)
    number = int(np.clip(2.5 * np.cbrt(fewest), 8, 24))  # narrow bins of few texts would show noise
    edges = np.geomspace(low * 0.98, high * 1.02, number) if log else np.linspace(low - 0.5, high + 0.5, number)

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        if log:
            axes.set_xscale("log")
        groups = ((right, "correct", RIGHT, "-"), (wrong, "wrong", WRONG, (0, (4, 2))))
        for values, word, colour, dashes in groups:
            if not values:
                continue
            # densities on the drawn axis, so that equal areas are equal fractions on a log scale too
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
            set_log_ticks(axes, low, high)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel(f"length of the {read} in {unit}" + (" (log scale)" if log else ""))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside upper left", ncols=2, fontsize=10)

    return make_figure(paint, SMALL, 290)


def set_log_ticks(axes: "Axes", low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    steps = [m * 10**e for e in range(7) for m in (1, 2, 5) if low <= m * 10**e <= high]
    if len(steps) > 6:
        steps = [step for step in steps if str(step)[0] == "1"] if high > 1000 * low else steps[::2]
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def reliability(bins: Rows, style: ArmStyle, judged: str) -> "Figure":
    """Accuracy by confidence, above the number of predictions in each bin."""
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
        above.set_ylabel("accuracy")
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
    """Counts and fractions of each true class; without numbers if there are too many classes to read them."""
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
                text = f"{counts[i, j]:,.0f}\n{100 * shares[i, j]:.0f}%"
                axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=9)

    return make_figure(paint, side, side)


def loss(train: Curve, valid: Curve, *, wide: bool) -> "Figure":
    """Training loss (dashed) and validation loss (solid) by step."""

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


def scores_of_runs(runs: list[dict[str, Any]], kinds: list[str], *, metric: str, wide: bool) -> "Figure":
    """One line per run, with a dot and an interval for each kind of arm."""
    styles = arm_styles([{"name": kind, "kind": kind} for kind in kinds])

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for height, run in enumerate(reversed(runs)):
            for number, (kind, style) in enumerate(styles.items()):
                if (score := run["scores"].get(kind)) is None:
                    continue
                span = error_bar(score)
                axes.errorbar(
                    score["score"],
                    height + RUN_OFFSET * ((len(styles) - 1) / 2 - number),
                    xerr=None if span is None else np.array([span]).T,
                    color=style.colour,
                    marker=style.marker,
                    markerfacecolor=style.face,
                    markersize=8,
                    elinewidth=2,
                    capsize=4,
                    linestyle="none",
                    label=kind if height == len(runs) - 1 else None,
                )
        names = [shorten(str(run["run"]).rpartition("/")[2], 30 if wide else 16) for run in reversed(runs)]
        axes.set_yticks(range(len(runs)), names)
        axes.set_ylim(-0.6, len(runs) - 0.4)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(metric)
        percent_axis(axes.xaxis)
        axes.margins(x=0.1)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(styles), frameon=False)

    return make_figure(paint, WIDE if wide else NARROW, 120 + 56 * len(runs))
