"""Draws what one backward pass shows: the gradient on its way down, the two terms, and fresh models of many depths."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headstock.explain.depth_study import AtDepth
from headstock.explain.gradients import Gradients
from headstock.explain.hooks import SUBLAYERS
from headstock.explain.recurrence import Recurrence
from headstock.report.render import minus, render
from headstock.report.standalone import standalone_svg
from headstock.report.theme import ARMS, GRID, NARROW, SOFT, WIDE, Gallery, make_figure

if TYPE_CHECKING:
    from markupsafe import Markup

BLUE, ORANGE, GREEN, PURPLE = (ARMS[kind][1][0][0] for kind in ("pretrained", "scratch", "frozen", "tfidf"))
WAYS = {  # how the residual connections work: its name, colour, line and marker
    None: ("as it is", BLUE, "-", "o"),
    "skip-gradient": ("no gradient through the skip", ORANGE, "--", "s"),
    "skip": ("no skip at all", PURPLE, ":", "^"),
}
FLOOR = 1e-18  # what is smaller than this beside one is nothing to a number in single or double precision
PANEL = 0.62  # height of a chart as a share of its width


def both(
    gallery: Gallery, name: str, paint: Callable[[Any], None], label: str, share: float = PANEL, more: float = 0.3
) -> dict[str, Any]:
    """A chart for a page's column and one for a telephone, which is `more` of its width higher."""
    return {
        "wide": gallery.embed(name, make_figure(paint, WIDE, share * WIDE), label),
        "narrow": gallery.embed(f"{name}-narrow", make_figure(paint, NARROW, (share + more) * NARROW), label),
    }


def log_axis(axes: Any) -> None:
    """Powers of ten in plain letters: a page's own font has them, and no chart here reads formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"10{str(round(math.log10(value))).translate(raised)}")
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y")


def stream_panel(axes: Any, found: Gradients, stack: str) -> None:
    """The length of the gradient at every point of the stream, with residual connections and without."""
    rows = [row for row, point in enumerate(found.stream) if point[0] == stack]
    lines: dict[str | None, list[float]] = {None: [point[3] for point in found.stream]}
    lines |= {one.what: one.received for one in found.ablations}
    for way, (name, colour, line, marker) in WAYS.items():
        values = [max(lines[way][row], FLOOR) for row in rows]
        few = marker if len(rows) < 30 else ""
        axes.plot(range(len(rows)), values, line, color=colour, marker=few, markersize=4.5, label=name)
    ends = [(at, found.stream[row][1]) for at, row in enumerate(rows) if found.stream[row][2] == "resid_post"]
    shown = ends[:: max(1, len(ends) // 8)]
    axes.set_xticks([0, *(at for at, _ in shown)], ["in", *(str(layer) for _, layer in shown)])
    axes.set_xlabel("embedding, then behind each layer" if stack == "stack" else f"{stack}: embedding, then each layer")
    axes.set_ylabel("length of the gradient")
    log_axis(axes)


def terms_panel(axes: Any, found: Gradients, stack: str) -> None:
    """The two terms at every residual connection, side by side."""
    terms = [one for one in found.connections if one.stack == stack]
    for shift, name, colour, values in (
        (-0.2, "around the sublayer (skip)", BLUE, [one.skip for one in terms]),
        (0.2, "through the sublayer", ORANGE, [one.through for one in terms]),
    ):
        axes.bar([at + shift for at in range(len(terms))], values, 0.38, color=colour, label=name)
    kinds = {"attention": "a", "cross": "c", "feed": "f"}
    every = max(1, len(terms) // 16)
    labels = [f"{one.layer}{kinds[one.sublayer]}" if at % every == 0 else "" for at, one in enumerate(terms)]
    axes.set_xticks(range(len(terms)), labels)
    axes.set_xlabel("layer and sublayer: " + ", ".join(f"{kinds[key]} {SUBLAYERS[key]}" for key in present(terms)))
    axes.set_ylabel("length of the term")
    axes.grid(axis="y")


def present(terms: Sequence[Any]) -> list[str]:
    return [key for key in SUBLAYERS if any(one.sublayer == key for one in terms)]


def depth_panel(axes: Any, study: Sequence[AtDepth]) -> None:
    """What is left of the gradient at the bottom of fresh models, by their depth."""
    for norm, colour in (("pre", BLUE), ("post", ORANGE)):
        for way, (name, _, line, marker) in WAYS.items():
            chosen = [one for one in study if (one.norm, one.without) == (norm, way)]
            shares = [one.share for one in chosen]
            full = name if way else "with skip"
            axes.plot(
                [one.depth for one in chosen],
                shares,
                line,
                color=colour,
                marker=marker,
                markersize=4.5,
                label=f"{norm}-norm, {full}",
            )
    axes.axhline(1, color=GRID, linewidth=0.8)
    axes.set_xscale("log", base=2)
    depths = sorted({one.depth for one in study})
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    log_axis(axes)
    top = max(one.share for one in study)
    axes.set_ylim(max(FLOOR, min(one.share for one in study) / 10), 30 * max(1.0, top))
    axes.set_xlabel("depth: layers")
    axes.set_ylabel("gradient at the bottom / at the top")


def with_legend(panel: Callable[..., None], *given: Any, columns: int = 1) -> Callable[[Any], None]:
    """One panel with its legend below, where it hides nothing."""

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        panel(axes, *given)
        if not axes.get_legend_handles_labels()[1]:
            return
        narrow = figure.get_figwidth() * 72 < (NARROW + WIDE) / 2
        figure.legend(loc="outside lower left", ncols=1 if narrow else columns, fontsize=10)

    return paint


def picture(found: Gradients) -> str:
    """Both stories beside each other: this run's layers, and fresh models of many depths."""
    stacks = list(dict.fromkeys(point[0] for point in found.stream))
    count = len(stacks) + bool(found.depths)

    def paint(figure: Any) -> None:
        panels = figure.subplots(1, count, squeeze=False)[0]
        for axes, stack in zip(panels, stacks, strict=False):
            stream_panel(axes, found, stack)
            axes.legend(fontsize=8.5)
        if found.depths:
            depth_panel(panels[-1], found.depths)
            panels[-1].legend(fontsize=8.5, loc="lower left")

    return standalone_svg(
        str(Gallery().embed("gradients", make_figure(paint, 480 * count, 400), "the gradient on its way down"))
    )


def page(found: Gradients, *, name: str, text: str) -> str:
    gallery, stacks = Gallery(), []
    for stack in dict.fromkeys(point[0] for point in found.stream):
        layers = [layer for layer in found.layers if layer.stack == stack]
        stacks.append(
            {
                "name": stack,
                "stream": both(
                    gallery,
                    f"stream-{stack}",
                    with_legend(stream_panel, found, stack, columns=3),
                    f"length of the gradient at each point of the {stack}",
                ),
                "terms": both(
                    gallery,
                    f"terms-{stack}",
                    with_legend(terms_panel, found, stack, columns=2),
                    "the two terms of dL/dH",
                ),
                "layers": layers,
                "groups": list(layers[0].parameters),
                "connections": [one for one in found.connections if one.stack == stack],
            }
        )
    depths = (
        both(gallery, "depths", with_legend(depth_panel, found.depths, columns=2), "gradient by depth", more=0.7)
        if found.depths
        else None
    )
    return render(
        "headstock.explain",
        "gradients.html",
        found=found,
        stacks=stacks,
        depths=depths,
        ends=ends_of(found.depths),
        name=name,
        text=text,
        sublayers=SUBLAYERS,
        without={one.what: one for one in found.ablations},
        small=small,
    )


def ends_of(study: Sequence[AtDepth]) -> dict[str, AtDepth]:
    """The deepest fresh model of each kind."""
    return {f"{one.norm} {one.without or 'whole'}": one for one in sorted(study, key=lambda one: one.depth)}


def small(value: float) -> "Markup":
    """A number of any size: `0.0123`, or `3.7 × 10` to some power."""
    from markupsafe import Markup

    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return Markup(minus(f"{value:.4g}"))
    mantissa, power = f"{value:.1e}".split("e")
    return Markup(f"{mantissa}&thinsp;×&thinsp;10<sup>{'−' if power[0] == '-' else ''}{int(power[1:])}</sup>")


# Through time


def steps_panel(axes: Any, found: Recurrence) -> None:
    """What reaches each token of the loss at the end, by layer."""
    colours = (BLUE, ORANGE, GREEN, PURPLE, SOFT)
    for number, layer in enumerate(one for one in found.layers if any(one.steps)):
        steps = [step or None for step in layer.steps]
        named = f"layer {layer.layer}" if layer.stack == "stack" else f"{layer.stack}, layer {layer.layer}"
        axes.plot(range(1, len(steps) + 1), steps, color=colours[number % len(colours)], marker=".", label=named)
    log_axis(axes)
    axes.set_xlabel("token, from the first to the last")
    axes.set_ylabel("length of the gradient")


def time_picture(found: Recurrence) -> str:
    figure = make_figure(with_legend(steps_panel, found, columns=3), WIDE, PANEL * WIDE)
    return standalone_svg(str(Gallery().embed("steps", figure, "length of the gradient by token and layer")))


def time_page(found: Recurrence, *, name: str, text: str) -> str:
    chart = both(
        Gallery(), "steps", with_legend(steps_panel, found, columns=3), "length of the gradient by token and layer"
    )
    groups = list(dict.fromkeys(group for layer in found.layers for group in layer.parameters))
    parts = {"found": found, "chart": chart, "groups": groups, "name": name, "text": text, "small": small}
    return render("headstock.explain", "recurrence.html", **parts)
