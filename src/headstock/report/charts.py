"""The charts of the reports: scores, training curves, lengths, calibration, confusion matrix, loss."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.report.format import is_finite, shorten
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
    score_axis,
)
from headstock.tasks.text_metrics import format_metric, metric_name
from headstock.train.run_folder import run_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
Curve = list[tuple[float, float]]

RUN_OFFSET = 0.2  # vertical distance between the dots of one run
BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # a cell is 2 dots wide and 4 high


# Scores with intervals


def error_bar(row: dict[str, Any], key: str = "score") -> tuple[float, float] | None:
    """The distances from the score to the ends of its interval; None without an interval."""
    if not (is_finite(row.get("low")) and is_finite(row.get("high"))):
        return None
    return max(0.0, row[key] - row["low"]), max(0.0, row["high"] - row[key])


def plot_intervals(axes: "Axes", x: Sequence[Any], rows: Rows, *, colour: str, key: str = "score") -> None:
    """Vertical error bars of the rows that have an interval."""
    bars = [(x_value, row[key], span) for x_value, row in zip(x, rows, strict=True) if (span := error_bar(row, key))]
    if bars:
        x_values, y_values, spans = zip(*bars, strict=True)
        options: dict[str, Any] = {"ecolor": colour, "elinewidth": 1.5, "capsize": 3.5, "alpha": 0.85}
        axes.errorbar(x_values, y_values, yerr=np.array(spans).T, fmt="none", **options)


def score_by_labels(
    styles: Sequence[ArmStyle], summary: Rows, labels: list[int], *, wide: bool, metric: str, rows: str
) -> "Figure":
    """One line per arm with intervals, slightly offset so that none hides another."""
    is_log = max(labels) > 4 * min(labels) and min(labels) > 0
    positions = np.log(labels) if is_log else np.asarray(labels, dtype=float)
    offset = 0.0
    if any(error_bar(row) for row in summary if is_finite(row.get("score"))):
        offset = min(np.diff(positions).min() * min(0.055, 0.3 / len(styles)), 0.02 * np.ptp(positions))

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        ends = []
        for number, style in enumerate(styles):
            scored = [row for row in summary if row["arm"] == style.name and is_finite(row.get("score"))]
            scored.sort(key=lambda row: row["labels"])
            if not scored:
                continue
            shift = offset * (number - (len(styles) - 1) / 2)
            x = [positions[labels.index(row["labels"])] + shift for row in scored]
            plot_intervals(axes, x, scored, colour=style.colour)
            axes.plot(x, [row["score"] for row in scored], label=shorten(style.label, 34), **style.line)
            ends.append((scored[-1]["score"], style))
        axes.set_xticks(positions, [f"{count:,}" for count in labels])
        axes.set_xlabel(f"labelled {rows} for training" + (" (log scale)" if is_log else ""))
        axes.set_ylabel(metric_name(metric))
        score_axis(axes.yaxis, metric)
        axes.grid(axis="y")
        axes.margins(x=0.06, y=0.08)
        if wide:
            label_line_ends(axes, ends)
        else:
            has_long_names = max(len(style.label) for style in styles) > 16
            figure.legend(loc="outside lower left", ncols=1 if has_long_names else 2, fontsize=10.5)

    return make_figure(paint, WIDE if wide else NARROW, 370 if wide else 320 + 16 * len(styles))


def label_line_ends(axes: "Axes", ends: list[tuple[float, ArmStyle]]) -> None:
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
    options: dict[str, Any] = {"va": "center", "fontweight": "bold", "fontsize": 11, "annotation_clip": False}
    for height, (_, style) in zip(heights, ends, strict=True):
        end = (1.015, height)
        axes.annotate(shorten(style.label, 30), end, xycoords=axes.get_yaxis_transform(), color=style.colour, **options)


def plot_dot(axes: "Axes", score: dict[str, Any], height: float, style: ArmStyle, label: str | None = None) -> None:
    """A score as a dot with a horizontal interval."""
    span = error_bar(score)
    spans = None if span is None else np.array([span]).T
    options: dict[str, Any] = {"markersize": 8.5, "elinewidth": 2, "capsize": 4.5, "linestyle": "none"}
    axes.errorbar(score["score"], height, xerr=spans, label=label, **style.line | options)


def set_dot_axes(axes: "Axes", names: list[str], metric: str) -> None:
    """The axes of dots with horizontal intervals: `names` from the bottom up, scores in percent."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.35)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(metric_name(metric))
    score_axis(axes.xaxis, metric)
    axes.margins(x=0.12)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def score_by_arm(styles: Sequence[ArmStyle], summary: Rows, *, wide: bool, metric: str) -> "Figure":
    """For one number of labels: a dot with an interval for each arm."""
    scores = {row["arm"]: row for row in summary if is_finite(row.get("score"))}
    scored = [style for style in reversed(styles) if style.name in scores]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for height, style in enumerate(scored):
            row = scores[style.name]
            plot_dot(axes, row, height, style)
            value = format_metric(metric, row["score"])
            axes.annotate(value, (row["score"], height), (0, 11), textcoords="offset points", ha="center", color=INK)
        set_dot_axes(axes, [shorten(style.label, 30 if wide else 18) for style in scored], metric)

    return make_figure(paint, WIDE if wide else NARROW, 90 + (58 if wide else 52) * max(1, len(scored)))


def scores_of_runs(runs: list[dict[str, Any]], kinds: list[str], *, metric: str, wide: bool) -> "Figure":
    """One line per run, with a dot and an interval for each kind of arm."""
    styles = arm_styles([{"name": kind, "kind": kind} for kind in kinds])

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for height, run in enumerate(reversed(runs)):
            for number, (kind, style) in enumerate(styles.items()):
                if (score := run["scores"].get(kind)) is not None:
                    label = kind if height == len(runs) - 1 else None
                    plot_dot(axes, score, height + RUN_OFFSET * ((len(styles) - 1) / 2 - number), style, label)
        names = [shorten(run_title(str(run["run"])), 30 if wide else 16) for run in reversed(runs)]
        set_dot_axes(axes, names, metric)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(styles), frameon=False)

    return make_figure(paint, WIDE if wide else NARROW, 120 + 56 * len(runs))


# Curves


def training(
    panels: list[tuple[ArmStyle, list[Rows]]],
    label: str,
    *,
    key: str = "accuracy",
    limits: tuple[float, float] | None = None,
    size: int = SMALL,
) -> "Figure":
    """A metric by epoch, one panel per arm on a common scale: `limits`, or the range of all panels."""
    limits = limits or curve_limits([epochs for _, runs in panels for epochs in runs], key)

    def paint(figure: "Figure") -> None:
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (style, runs) in zip(grid, panels, strict=True):
            training_panel(axes, style, runs, limits, key)
        grid[0].set_ylabel(label)
        if grid[-1].get_legend_handles_labels()[0]:  # a single point, such as SetFit's, has no curve to name
            grid[-1].legend(loc="best", fontsize=10)

    return make_figure(paint, size * len(panels), 270 if size < WIDE else 330)


def training_panel(axes: "Axes", style: ArmStyle, runs: list[Rows], limits: tuple[float, float], metric: str) -> None:
    """The metric on training (dashed) and validation rows (solid); thin lines are single seeds."""
    from matplotlib.ticker import MaxNLocator

    has_markers = max((len(epochs) for epochs in runs), default=0) <= 15
    for key, dashes, name in ((f"train_{metric}", "--", "training"), (f"valid_{metric}", "-", "validation")):
        curves = [curve for curve in (epoch_curve(epochs, key) for epochs in runs) if curve]
        if not curves:
            continue
        if 1 < len(curves) <= 6:
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), dashes, color=style.colour, linewidth=0.8, alpha=0.35)
        curve = mean_curve(curves)
        options = style.line | {"markersize": 5, "label": name}
        if dashes == "--":
            options |= {"marker": single_marker(curve), "markerfacecolor": PAPER}
        elif not has_markers:
            options["marker"] = None
        axes.plot(*zip(*curve, strict=True), dashes, **options)
    axes.set_title(shorten(style.label, 34), color=style.colour, fontweight="bold", loc="left")
    axes.set_ylim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    score_axis(axes.yaxis, metric)
    axes.grid(axis="y")
    axes.set_xlabel("epoch")


def single_marker(curve: Curve) -> str | None:
    """A marker for a curve of one point, which has no line."""
    return "o" if len(curve) == 1 else None


def epoch_curve(epochs: Rows, key: str) -> Curve:
    return [(row["epoch"], row[key]) for row in epochs if is_finite(row.get(key)) and is_finite(row.get("epoch"))]


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean over seeds at steps that all of them have, so that a seed that stops early causes no jump."""
    tables = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables))) or sorted(tables[0])
    return [(x, float(np.mean([table[x] for table in tables if x in table]))) for x in shared]


def curve_limits(runs: list[Rows], metric: str = "accuracy") -> tuple[float, float]:
    """The range of a metric on training and validation rows, with a margin."""
    keys = (f"train_{metric}", f"valid_{metric}")
    values = [row[key] for epochs in runs for row in epochs for key in keys if is_finite(row.get(key))]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = max(0.02, 0.06 * (high - low))
    return low - margin, (high if metric == "loss" else min(1.0, high)) + margin


def loss(train: Curve, valid: Curve, *, wide: bool) -> "Figure":
    """Training loss (dashed) and validation loss (solid) by step."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        if train:
            line: dict[str, Any] = {"linestyle": "--", "linewidth": 1.4, "marker": single_marker(train)}
            axes.plot(*zip(*train, strict=True), color=RIGHT, markerfacecolor=PAPER, label="training", **line)
        if valid:
            axes.plot(*zip(*valid, strict=True), marker="o", markersize=5, color=WRONG, label="validation")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", nbins=8 if wide else 5)
        axes.grid(axis="y")
        axes.legend(loc="upper right")

    return make_figure(paint, WIDE if wide else NARROW, 330 if wide else 270)


def terminal_chart(
    curve: Sequence[tuple[float, float]],
    *,
    width: int = 60,
    height: int = 10,
    name: str = "",
    format_x: Callable[[float], str] = lambda x: f"{x:,.0f}",
) -> str:
    """A curve in braille characters, with its range of y at the left, and its range of x and `name` below."""
    xs, ys = [x for x, _ in curve], [y for _, y in curve]
    x_min, x_max, y_min, y_max = min(xs), max(xs), min(ys), max(ys)
    x_span, y_span = (x_max - x_min) or 1.0, (y_max - y_min) or 1.0
    cells = [[0] * width for _ in range(height)]
    dots = [
        (round((x - x_min) / x_span * (2 * width - 1)), round((y_max - y) / y_span * (4 * height - 1)))
        for x, y in curve
    ]
    for (x1, y1), (x2, y2) in zip(dots, dots[1:] or dots, strict=False):
        steps = max(abs(x2 - x1), abs(y2 - y1), 1)
        for i in range(steps + 1):
            x, y = round(x1 + (x2 - x1) * i / steps), round(y1 + (y2 - y1) * i / steps)
            cells[y // 4][x // 2] |= BRAILLE_DOTS[y % 4][x % 2]
    lines = []
    for row, line in enumerate(cells):
        label = {0: f"{y_max:7.3f}", height - 1: f"{y_min:7.3f}"}.get(row, " " * 7)
        lines.append(f"{label} ┤{''.join(chr(0x2800 + cell) for cell in line)}")
    first, last = format_x(x_min), format_x(x_max)
    lines.append(f"{' ' * 8}└{'─' * width}")
    lines.append(f"{' ' * 9}{first}{name.center(width - len(last) - len(first))}{last}")
    return "\n".join(lines)


# Errors


def lengths(right: list[int], wrong: list[int], unit: str, input_name: str) -> "Figure":
    """Densities of the lengths of correctly and wrongly predicted rows, with their medians."""
    values = np.array([*right, *wrong], dtype=float)
    low, high = max(1.0, values.min()), max(2.0, values.max())
    is_log = high > 8 * max(1.0, float(np.median(values)) / 2) and high > 20
    smallest_group = min(len(group) for group in (right, wrong) if group)
    bins = int(np.clip(2.5 * np.cbrt(smallest_group), 8, 24))  # narrow bins of few texts would show noise
    edges = np.geomspace(low * 0.98, high * 1.02, bins) if is_log else np.linspace(low - 0.5, high + 0.5, bins)

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        if is_log:
            axes.set_xscale("log")
        dashed = (0, (4, 2))
        for group, name, colour, dashes in ((right, "correct", RIGHT, "-"), (wrong, "wrong", WRONG, dashed)):
            if not group:
                continue
            # densities on the displayed axis, so that equal areas are equal fractions on a log scale too
            count, _ = np.histogram(np.maximum(group, low), edges)
            density = count / (len(group) * np.diff(np.log(edges) if is_log else edges))
            axes.stairs(density, edges, fill=True, color=colour, alpha=0.22, linewidth=0)
            axes.stairs(density, edges, color=colour, linewidth=1.6, label=f"{name} ({len(group):,})")
            median = float(np.median(group))
            axes.axvline(median, color=colour, linewidth=1.6, linestyle=dashes, label=f"median {median:,.0f}")
        if is_log:
            set_log_ticks(axes, low, high)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel(f"length of the {input_name} in {unit}" + (" (log scale)" if is_log else ""))
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


def predicted_against_true(true: list[float], predicted: list[float], style: ArmStyle) -> "Figure":
    """A dot per row; perfect predictions lie on the dashed line."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        ends = [min(*true, *predicted), max(*true, *predicted)]
        axes.plot(ends, ends, color=GRID, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.scatter(true, predicted, s=12, color=style.colour, alpha=0.45, linewidths=0)
        axes.set_xlabel("label")
        axes.set_ylabel("prediction")
        axes.grid()

    return make_figure(paint, SMALL, 270)


def reliability(bins: Rows, style: ArmStyle, item: str, *, calibrated: Rows | None = None) -> "Figure":
    """Accuracy by confidence, above the number of predictions in each bin; `calibrated` bins as a second line."""
    filled = [row for row in bins if row["count"] and is_finite(row["confidence"]) and is_finite(row["accuracy"])]

    def paint(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        low = min([row["low"] for row in filled], default=0.0)
        above.plot([low, 1], [low, 1], color=GRID, linewidth=1.2, linestyle=(0, (4, 3)))
        above.plot([row["confidence"] for row in filled], [row["accuracy"] for row in filled], **style.line)
        if calibrated:
            points = [(row["confidence"], row["accuracy"]) for row in calibrated if row["count"]]
            above.plot(*zip(*points, strict=True), "--", color=RIGHT, marker="x", label="after temperature scaling")
            above.legend(loc="best", fontsize=10)
        above.set_ylabel("accuracy")
        percent_axis(above.yaxis)
        above.grid()
        middles = [(row["low"] + row["high"]) / 2 for row in filled]
        widths = [0.9 * (row["high"] - row["low"]) for row in filled]
        below.bar(middles, [row["count"] for row in filled], widths, color=style.colour, alpha=0.55)
        text: dict[str, Any] = {"ha": "center", "fontsize": 8 if len(filled) > 7 else 9, "color": SOFT}
        for middle, row in zip(middles, filled, strict=True):
            count = row["count"]
            below.annotate(f"{count:,}", (middle, count), (0, 2), textcoords="offset points", **text)
        below.set_yticks([])
        below.spines["left"].set_visible(False)
        below.set_ylabel(f"{item}s")
        below.margins(y=0.3)
        below.set_xlabel("confidence of the prediction")
        percent_axis(below.xaxis)

    return make_figure(paint, SMALL, 350)


def risk_coverage(curve: Rows, style: ArmStyle, item: str) -> "Figure":
    """Accuracy of the most confident predictions by their share."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.plot([row["coverage"] for row in curve], [row["accuracy"] for row in curve], **style.line)
        axes.set_xlabel(f"coverage: share of {item}s that are predicted")
        axes.set_ylabel("accuracy")
        percent_axis(axes.xaxis)
        percent_axis(axes.yaxis)
        axes.grid()

    return make_figure(paint, SMALL, 290)


def confusion(matrix: list[list[int]], classes: list[str]) -> "Figure":
    """Counts and fractions of each true class; without numbers if there are too many classes to read them."""
    counts = np.array(matrix, dtype=float)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    side = min(640, max(300, 62 * len(classes) + 90))
    names = [] if len(classes) > 30 else [shorten(name, 16) for name in classes]

    def paint(figure: "Figure") -> None:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("slate", ["#ffffff", RIGHT]), vmin=0, vmax=1)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
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
