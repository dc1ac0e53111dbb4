"""Presents gradients: along the residual stream, through each residual connection, by depth, and through time."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from headstock.explain.document import (
    Bullets,
    Chart,
    Checks,
    Column,
    DocumentBlock,
    ExplainDocument,
    KeyFigures,
    Section,
    Table,
    Text,
    notes,
)
from headstock.explain.gradients import DepthGradients, GradientFacts
from headstock.explain.hooks import SUBLAYERS, Ablation
from headstock.explain.recurrence import RecurrenceFacts
from headstock.explain.render_document import Panel, chart_svg, picture_of, side_by_side, with_legend
from headstock.report.format import pluralize
from headstock.report.theme import ARMS, GRID, SOFT

BLUE, ORANGE, GREEN, PURPLE = (ARMS[kind][1][0][0] for kind in ("pretrained", "scratch", "frozen", "tfidf"))
VARIANTS = {  # of the residual connections: name, colour, line style and marker
    None: ("unchanged", BLUE, "-", "o"),
    "skip-gradient": ("no gradient through the skip", ORANGE, "--", "s"),
    "skip": ("no skip at all", PURPLE, ":", "^"),
}
ABBREVIATIONS = {"attention": "a", "cross": "c", "feed": "f"}
FLOOR = 1e-18  # the lower end of logarithmic axes
FORMULAS = {
    "pre": (
        "O = H + F(N(H)), so dL/dH = dL/dO + dL/dO · dF(N(H))/dH",
        "The norm is inside the sublayer's branch: the first term is the gradient from above, unchanged at any depth.",
    ),
    "post": (
        "O = N(S), S = H + F(H), so dL/dH = dL/dS + dL/dS · dF(H)/dH, dL/dS = dL/dO · dN(S)/dS",
        "The norm follows the sum: even the first term passes through it, at every layer again.",
    ),
}


def stacks_of(parts: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(part.stack for part in parts))


def stack_suffix(stack: str) -> str:
    return "" if stack == "stack" else f", {stack}"


def gradient_document(facts: GradientFacts, name: str, text: str) -> ExplainDocument:
    stacks = stacks_of(facts.stream)
    sections = [
        Section("", summary_blocks(facts, text)),
        *(Section(f"Along the residual stream{stack_suffix(stack)}", stack_blocks(facts, stack)) for stack in stacks),
        Section("Outside the layers", [parameter_tiles(facts.parameters), ablation_table(facts)], style="short"),
    ]
    if facts.depths:
        sections.append(Section("Why depth needs the skip", depth_blocks(facts.depths)))
    panels: list[Panel] = [partial(stream_panel, facts=facts, stack=stack) for stack in stacks]
    panels += [partial(depth_panel, depths=facts.depths)] if facts.depths else []
    count = len(panels)
    return ExplainDocument(
        subject="gradients",
        title=f"{name}: one backward pass",
        summary=f"loss {facts.loss:.4f} over {facts.target} · {facts.norm}-norm · "
        f"{pluralize(len(facts.connections), 'residual connection')}",
        page_title=f"Gradients of {name}",
        sections=sections,
        json=facts.to_dict(),
        picture=lambda: chart_svg("gradients", side_by_side(panels), "gradient norms by layer", 480 * count, 400),
    )


def summary_blocks(facts: GradientFacts, text: str) -> list[DocumentBlock]:
    ablations = {one.what: one for one in facts.ablations}
    bottom, without_gradient = facts.stream[0].gradient, ablations["skip-gradient"].received[0]
    share = f" ({without_gradient / bottom:.3g} of it)" if bottom else ""
    verdicts = [
        f"The gradient at the embedding has norm {bottom:.3g}. Without the gradient through the skip connections, "
        f"{without_gradient:.3g} would remain{share}.",
        f"Without skip connections in the forward pass, the same weights have a loss of {ablations['skip'].loss:.3f} "
        f"instead of {facts.loss:.3f}.",
    ]
    return [
        *([Text(text, "quote", only="page")] if text else []),
        *notes(facts.notes),
        Checks([facts.check()]),
        Bullets(verdicts, "verdicts many", only="page"),
    ]


def stack_blocks(facts: GradientFacts, stack: str) -> list[DocumentBlock]:
    suffix = stack_suffix(stack)
    formula, reason = FORMULAS[facts.norm]
    return [
        Chart(
            f"stream-{stack}",
            f"norm of the gradient at each point of the residual stream{suffix}",
            with_legend(lambda axes: stream_panel(axes, facts, stack), columns=3),
            "The norm of the loss gradient at each point of the residual stream; it flows from right to left. Dashed: "
            "the same forward pass, but no gradient flows back through the skip connections. Dotted: no skip in either "
            "pass; the norms rescale what is left of the signal, so that its gradient need not be small, but see the "
            "loss.",
        ),
        Text(formula, "formula", only="page"),
        Text(reason, only="page"),
        Chart(
            f"terms-{stack}",
            f"the two terms of dL/dH{suffix}",
            with_legend(lambda axes: terms_panel(axes, facts, stack), columns=2),
            "The norm of each term: through the skip, and through the sublayer.",
        ),
        connection_table(facts, stack),
        layer_table(facts.layers, stack),
    ]


def connection_table(facts: GradientFacts, stack: str) -> Table:
    columns = [
        Column("layer"),
        Column("sublayer"),
        Column("|dL/dO|", "number"),
        Column("skip term", "number"),
        Column("sublayer term", "number"),
        Column("cosine", "signed"),
        Column("|dL/dH|", "number"),
        Column("error", "error"),
    ]
    rows = [
        [
            one.layer,
            SUBLAYERS[one.sublayer],
            one.received,
            one.skip,
            one.through,
            one.cosine,
            one.passed,
            one.error,
        ]
        for one in reversed(facts.connections)
        if one.stack == stack
    ]
    caption = (
        "Each term is a vector-Jacobian product of its own; dL/dH comes from the whole backward pass, in double "
        "precision. The error is that of the sum of both terms, relative to |dL/dH|."
    )
    return Table(f"Residual connections{stack_suffix(stack)}, from the top", columns, rows, caption)


def layer_table(layers: Sequence[Any], stack: str, more: Sequence[tuple[str, Any]] = ()) -> Table:
    """Gradient norms per layer, from the top; `more` are further columns as functions of a layer."""
    of_stack = [layer for layer in reversed(layers) if layer.stack == stack]
    groups = list(dict.fromkeys(group for layer in of_stack for group in layer.parameters))
    names = ["received", "passed down", *groups, *(name for name, _ in more)]
    rows = [
        [
            layer.layer,
            layer.received,
            layer.passed,
            *(layer.parameters.get(group) for group in groups),
            *(function(layer) for _, function in more),
        ]
        for layer in of_stack
    ]
    caption = "The gradient that a layer receives from above and passes down, and that of its parameters by group."
    columns = [Column("layer"), *(Column(name, "number") for name in names)]
    return Table(f"Gradient norms by layer{stack_suffix(stack)}", columns, rows, caption)


def parameter_tiles(parameters: dict[str, float]) -> KeyFigures:
    return KeyFigures([(group, f"{norm:.3g}", "gradient norm") for group, norm in parameters.items()])


def ablation_table(facts: GradientFacts) -> Table:
    rows: list[list[Any]] = [["unchanged", facts.loss, facts.stream[0].gradient]]
    rows += [[VARIANTS[one.what][0], one.loss, one.received[0]] for one in facts.ablations]
    columns = [Column("residual connections"), Column("loss", "loss"), Column("gradient at the embedding", "number")]
    return Table("Without residual connections, the same weights", columns, rows)


def depth_blocks(depths: Sequence[DepthGradients]) -> list[DocumentBlock]:
    deepest, shallowest = max(one.depth for one in depths), min(one.depth for one in depths)
    share = {(one.norm, one.without): one.share for one in depths if one.depth == deepest}
    names: dict[Ablation | None, str] = {
        None: "with skip",
        "skip": "no skip at all",
        "skip-gradient": "no gradient through the skip",
    }
    norms: tuple[Literal["pre", "post"], ...] = ("pre", "post")
    rows = [[f"{norm}-norm", *(share[norm, ablation] for ablation in names)] for norm in norms]
    columns = [Column("norm"), *(Column(name, "number") for name in names.values())]
    return [
        Text(
            f"Freshly initialized models of {shallowest} to {deepest} layers with this run's kind of block: how much "
            "of the gradient at the top of the stack reaches the bottom.",
            only="page",
        ),
        Chart(
            "depths",
            "gradient at the bottom relative to the top, by depth",
            with_legend(lambda axes: depth_panel(axes, depths), columns=2),
            "Solid: with residual connections. Dashed: the same forward pass without the gradient through the skip, "
            "which leaves the product of the sublayers' Jacobians; it vanishes. Dotted: without the skip in both "
            "passes; each norm divides by the norm of what is left and so rescales the gradient, which may even "
            "explode. The axis ends at 10⁻¹⁸.",
            narrow_height=1.32,
        ),
        Table(f"Fresh models of {deepest} layers: gradient at the bottom / at the top", columns, rows),
    ]


# Panels


def log_axis(axes: Any) -> None:
    """Powers of ten with Unicode superscripts: charts do not parse formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    superscripts = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"10{str(round(math.log10(value))).translate(superscripts)}")
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y")


def stream_panel(axes: Any, facts: GradientFacts, stack: str) -> None:
    """Gradient norms along the stream, with and without residual connections."""
    rows = [row for row, point in enumerate(facts.stream) if point.stack == stack]
    lines: dict[str | None, list[float]] = {None: [point.gradient for point in facts.stream]}
    lines |= {one.what: one.received for one in facts.ablations}
    for variant, (name, colour, line, marker) in VARIANTS.items():
        values = [max(lines[variant][row], FLOOR) for row in rows]
        marker = marker if len(rows) < 30 else ""
        axes.plot(range(len(rows)), values, line, color=colour, marker=marker, markersize=4.5, label=name)
    ends = [(at, facts.stream[row].layer) for at, row in enumerate(rows) if facts.stream[row].point == "resid_post"]
    ticks = ends[:: max(1, len(ends) // 8)]
    axes.set_xticks([0, *(at for at, _ in ticks)], ["in", *(str(layer) for _, layer in ticks)])
    axes.set_xlabel("embedding, then after each layer" if stack == "stack" else f"{stack}: embedding, then each layer")
    axes.set_ylabel("gradient norm")
    log_axis(axes)


def terms_panel(axes: Any, facts: GradientFacts, stack: str) -> None:
    """The two terms at every residual connection, side by side."""
    terms = [one for one in facts.connections if one.stack == stack]
    for shift, name, colour, values in (
        (-0.2, "through the skip", BLUE, [one.skip for one in terms]),
        (0.2, "through the sublayer", ORANGE, [one.through for one in terms]),
    ):
        axes.bar([at + shift for at in range(len(terms))], values, 0.38, color=colour, label=name)
    sublayer_axis(axes, terms)
    axes.set_ylabel("norm of the term")
    axes.grid(axis="y")


def sublayer_axis(axes: Any, sublayers: Sequence[Any], *, embedding: bool = False) -> None:
    """Layer and sublayer below each point (`1a`, `1f`), thinned out where there are many."""
    every = max(1, len(sublayers) // 16)
    labels = [
        f"{one.layer}{ABBREVIATIONS[one.sublayer]}" if at % every == 0 else "" for at, one in enumerate(sublayers)
    ]
    axes.set_xticks(range(len(labels) + embedding), ["in", *labels] if embedding else labels)
    kinds = [key for key in SUBLAYERS if any(one.sublayer == key for one in sublayers)]
    legend = ", ".join(f"{ABBREVIATIONS[key]} {SUBLAYERS[key]}" for key in kinds)
    axes.set_xlabel(f"layer and sublayer:{' ' if len(kinds) < 3 else chr(10)}{legend}")  # two fit beside it on a phone


def depth_panel(axes: Any, depths: Sequence[DepthGradients]) -> None:
    """The share of the gradient that reaches the bottom of fresh models, by depth."""
    for norm, colour in (("pre", BLUE), ("post", ORANGE)):
        for variant, (name, _, line, marker) in VARIANTS.items():
            points = [one for one in depths if (one.norm, one.without) == (norm, variant)]
            axes.plot(
                [one.depth for one in points],
                [one.share for one in points],
                line,
                color=colour,
                marker=marker,
                markersize=4.5,
                label=f"{norm}-norm, {name if variant else 'with skip'}",
            )
    axes.axhline(1, color=GRID, linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({one.depth for one in depths})
    axes.set_xticks(ticks, [str(depth) for depth in ticks])
    axes.minorticks_off()
    log_axis(axes)
    shares = [one.share for one in depths]
    axes.set_ylim(max(FLOOR, min(shares) / 10), 30 * max(1.0, *shares))
    axes.set_xlabel("number of layers")
    axes.set_ylabel("gradient at the bottom / at the top")


# Recurrent models


def recurrence_document(facts: RecurrenceFacts, name: str, text: str) -> ExplainDocument:
    ends = [("first token", lambda layer: layer.steps[0]), ("last token", lambda layer: layer.steps[-1])]
    steps = [(name, lambda layer, end=end: end(layer) if any(layer.steps) else None) for name, end in ends]
    chart = Chart(
        "steps",
        "gradient norm by token and layer",
        with_legend(lambda axes: steps_panel(axes, facts), columns=3),
        "The gradient of the last prediction's loss at each layer's input, token by token: how far back in time it "
        "reaches. Each step back multiplies by the cell's Jacobian; there is no attention to bridge distant tokens.",
    )
    blocks: list[DocumentBlock] = [*([Text(text, "quote", only="page")] if text else []), *notes(facts.notes), chart]
    tables = [layer_table(facts.layers, stack, steps) for stack in reversed(stacks_of(facts.layers))]
    return ExplainDocument(
        subject="gradients",
        title=f"{name}: one backward pass through time",
        summary=f"loss {facts.loss:.4f} over {facts.target} · {facts.cell.upper()} · "
        f"{pluralize(len(facts.layers), 'layer')}",
        page_title=f"Gradients of {name}",
        sections=[
            Section("", blocks),
            Section("By layer", [*tables, parameter_tiles(facts.parameters)], style="short"),
        ],
        json=facts.to_dict(),
        picture=picture_of(chart),
    )


def steps_panel(axes: Any, facts: RecurrenceFacts) -> None:
    colours = (BLUE, ORANGE, GREEN, PURPLE, SOFT)
    for number, layer in enumerate(one for one in facts.layers if any(one.steps)):
        label = f"layer {layer.layer}" if layer.stack == "stack" else f"{layer.stack}, layer {layer.layer}"
        norms = [norm or None for norm in layer.steps]
        axes.plot(range(1, len(norms) + 1), norms, color=colours[number % len(colours)], marker=".", label=label)
    log_axis(axes)
    axes.set_xlabel("token")
    axes.set_ylabel("gradient norm")
