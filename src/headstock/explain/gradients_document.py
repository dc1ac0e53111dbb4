"""Presents gradients: along the residual stream, through each residual connection, by depth, and through time."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from headstock.explain import document as doc
from headstock.explain.gradients import DepthGradients, GradientFacts
from headstock.explain.hooks import SUBLAYERS
from headstock.explain.recurrence import RecurrenceFacts
from headstock.explain.render_document import Panel, chart_svg, picture_of, side_by_side, with_legend
from headstock.explain.residual_connections import Ablation
from headstock.explain.symbols import power_of_ten
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
    "none": (
        "O = H + F(H), so dL/dH = dL/dO + dL/dO · dF(H)/dH",
        "There is no norm: the first term is the gradient from above, but nothing keeps the size of H in bounds.",
    ),
}
WITHOUT_SKIP = {
    "pre": ("O = F(N(H)), so dL/dH = dL/dO · dF(N(H))/dH", "There is no skip connection: the first term is missing."),
    "post": ("O = N(F(H)), so dL/dH = dL/dO · dN(F(H))/dH", "There is no skip connection: the first term is missing."),
    "none": ("O = F(H), so dL/dH = dL/dO · dF(H)/dH", "There is no skip connection: the first term is missing."),
}


def stacks_of(parts: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(part.stack for part in parts))


def stack_suffix(stack: str) -> str:
    return "" if stack == "stack" else f", {stack}"


def gradient_document(facts: GradientFacts, name: str, text: str) -> doc.ExplainDocument:
    stacks = stacks_of(facts.stream)
    sections = [doc.Section("", summary_blocks(facts, text))]
    for stack in stacks:
        sections.append(doc.Section(f"Along the residual stream{stack_suffix(stack)}", stack_blocks(facts, stack)))
    outside = [parameter_tiles(facts.parameters), ablation_table(facts)]
    sections.append(doc.Section("Outside the layers", outside, style="short"))
    if facts.depths:
        sections.append(doc.Section("Why depth needs the skip", depth_blocks(facts.depths)))
    panels: list[Panel] = [partial(stream_panel, facts=facts, stack=stack) for stack in stacks]
    panels += [partial(depth_panel, depths=facts.depths)] if facts.depths else []
    count, skips = len(panels), "" if facts.residual else ", no skip connections"
    return doc.ExplainDocument(
        subject="gradients",
        title=f"{name}: one backward pass",
        summary=f"loss {facts.loss:.4f} over {facts.target} · {facts.norm}-norm{skips} · "
        f"{pluralize(len(facts.connections), 'residual connection')}",
        page_title=f"Gradients of {name}",
        sections=sections,
        json=facts.to_dict(),
        picture=lambda: chart_svg("gradients", side_by_side(panels), "gradient norms by layer", 480 * count, 400),
    )


def summary_blocks(facts: GradientFacts, text: str) -> list[doc.DocumentBlock]:
    ablations = {ablation.what: ablation for ablation in facts.ablations}
    bottom, without_gradient = facts.stream[0].gradient, ablations["skip-gradient"].received[0]
    share = f" ({without_gradient / bottom:.3g} of it)" if bottom else ""
    verdicts = [
        f"The gradient at the embedding has norm {bottom:.3g}. Without the gradient through the skip connections, "
        f"{without_gradient:.3g} would remain{share}.",
        f"Without skip connections in the forward pass, the same weights have a loss of {ablations['skip'].loss:.3f} "
        f"instead of {facts.loss:.3f}.",
    ]
    return [
        *doc.notes(facts.notes, text=text),
        doc.Checks([facts.check()]),
        doc.Bullets(verdicts, "verdicts many", only="page"),
    ]


def stack_blocks(facts: GradientFacts, stack: str) -> list[doc.DocumentBlock]:
    suffix = stack_suffix(stack)
    formula, reason = (FORMULAS if facts.residual else WITHOUT_SKIP)[facts.norm]
    return [
        doc.Chart(
            f"stream-{stack}",
            f"norm of the gradient at each point of the residual stream{suffix}",
            with_legend(lambda axes: stream_panel(axes, facts, stack), columns=3),
            "The norm of the loss gradient at each point of the residual stream; it flows from right to left. Dashed: "
            "the same forward pass, but no gradient flows back through the skip connections. Dotted: no skip in either "
            "pass; the norms rescale what is left of the signal, so that its gradient need not be small, but see the "
            "loss.",
        ),
        doc.Text(formula, "formula", only="page"),
        doc.Text(reason, only="page"),
        doc.Chart(
            f"terms-{stack}",
            f"the two terms of dL/dH{suffix}",
            with_legend(lambda axes: terms_panel(axes, facts, stack), columns=2),
            "The norm of each term: through the skip, and through the sublayer.",
        ),
        connection_table(facts, stack),
        layer_table(facts.layers, stack),
    ]


def connection_table(facts: GradientFacts, stack: str) -> doc.Table:
    caption = (
        "Each term is a vector-Jacobian product of its own; dL/dH comes from the whole backward pass, in double "
        "precision. The error is that of the sum of both terms, relative to |dL/dH|."
    )
    return doc.Table.from_records(
        f"Residual connections{stack_suffix(stack)}, from the top",
        [connection for connection in reversed(facts.connections) if connection.stack == stack],
        {
            "layer": ("text", "layer"),
            "sublayer": ("text", lambda connection: SUBLAYERS[connection.sublayer]),
            "|dL/dO|": ("number", "received"),
            "skip term": ("number", "skip"),
            "sublayer term": ("number", "through"),
            "cosine": ("signed", "cosine"),
            "|dL/dH|": ("number", "passed"),
            "error": ("error", "error"),
        },
        caption,
    )


def layer_table(layers: Sequence[Any], stack: str, extra: dict[str, Callable[[Any], Any]] | None = None) -> doc.Table:
    """Gradient norms per layer, from the top; `extra` are further columns as functions of a layer."""
    of_stack = [layer for layer in reversed(layers) if layer.stack == stack]
    columns: dict[str, Any] = {"layer": ("text", "layer"), "received": ("number", "received")}
    columns["passed down"] = ("number", "passed")
    for group in dict.fromkeys(group for layer in of_stack for group in layer.parameters):
        columns[group] = ("number", lambda layer, group=group: layer.parameters.get(group))
    columns |= {name: ("number", function) for name, function in (extra or {}).items()}
    caption = "The gradient that a layer receives from above and passes down, and that of its parameters by group."
    return doc.Table.from_records(f"Gradient norms by layer{stack_suffix(stack)}", of_stack, columns, caption)


def parameter_tiles(parameters: dict[str, float]) -> doc.KeyFigures:
    return doc.KeyFigures([(group, f"{norm:.3g}", "gradient norm") for group, norm in parameters.items()])


def ablation_table(facts: GradientFacts) -> doc.Table:
    rows: list[list[Any]] = [["unchanged", facts.loss, facts.stream[0].gradient]]
    rows += [[VARIANTS[ablation.what][0], ablation.loss, ablation.received[0]] for ablation in facts.ablations]
    columns = {"residual connections": "text", "loss": "loss", "gradient at the embedding": "number"}
    return doc.Table("Without residual connections, the same weights", columns, rows)


def depth_blocks(depths: Sequence[DepthGradients]) -> list[doc.DocumentBlock]:
    deepest, shallowest = max(model.depth for model in depths), min(model.depth for model in depths)
    share = {(model.norm, model.without): model.share for model in depths if model.depth == deepest}
    variants: dict[Ablation | None, str] = {
        None: "with skip",
        "skip": "no skip at all",
        "skip-gradient": "no gradient through the skip",
    }
    norms: tuple[Literal["pre", "post"], ...] = ("pre", "post")
    rows = [[f"{norm}-norm", *(share[norm, variant] for variant in variants)] for norm in norms]
    columns = {"norm": "text"} | dict.fromkeys(variants.values(), "number")
    return [
        doc.Text(
            f"Freshly initialized models of {shallowest} to {deepest} layers with this run's kind of block: how much "
            "of the gradient at the top of the stack reaches the bottom.",
            only="page",
        ),
        doc.Chart(
            "depths",
            "gradient at the bottom relative to the top, by depth",
            with_legend(lambda axes: depth_panel(axes, depths), columns=2),
            "Solid: with residual connections. Dashed: the same forward pass without the gradient through the skip, "
            "which leaves the product of the sublayers' Jacobians; it vanishes. Dotted: without the skip in both "
            "passes; each norm divides by the norm of what is left and so rescales the gradient, which may even "
            "explode. The axis ends at 10⁻¹⁸.",
            narrow_height=1.32,
        ),
        doc.Table(f"Fresh models of {deepest} layers: gradient at the bottom / at the top", columns, rows),
    ]


# Panels


def log_axis(axes: Any) -> None:
    """Powers of ten with Unicode superscripts: charts do not parse formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(round(math.log10(value)))))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y")


def stream_panel(axes: Any, facts: GradientFacts, stack: str) -> None:
    """Gradient norms along the stream, with and without residual connections."""
    rows = [row for row, point in enumerate(facts.stream) if point.stack == stack]
    lines: dict[str | None, list[float]] = {None: [point.gradient for point in facts.stream]}
    lines |= {ablation.what: ablation.received for ablation in facts.ablations}
    for variant, (name, colour, line, marker) in VARIANTS.items():
        values = [max(lines[variant][row], FLOOR) for row in rows]
        marker = marker if len(rows) < 30 else ""
        axes.plot(range(len(rows)), values, line, color=colour, marker=marker, markersize=4.5, label=name)
    points = [facts.stream[row] for row in rows]
    ends = [(x, point.layer) for x, point in enumerate(points) if point.point == "resid_post"]
    ticks = ends[:: max(1, len(ends) // 8)]
    axes.set_xticks([0, *(x for x, _ in ticks)], ["in", *(str(layer) for _, layer in ticks)])
    axes.set_xlabel("embedding, then after each layer" if stack == "stack" else f"{stack}: embedding, then each layer")
    axes.set_ylabel("gradient norm")
    log_axis(axes)


def terms_panel(axes: Any, facts: GradientFacts, stack: str) -> None:
    """The two terms at every residual connection, side by side."""
    connections = [connection for connection in facts.connections if connection.stack == stack]
    x = np.arange(len(connections))
    axes.bar(x - 0.2, [connection.skip for connection in connections], 0.38, color=BLUE, label="through the skip")
    through = [connection.through for connection in connections]
    axes.bar(x + 0.2, through, 0.38, color=ORANGE, label="through the sublayer")
    sublayer_axis(axes, connections)
    axes.set_ylabel("norm of the term")
    axes.grid(axis="y")


def sublayer_axis(axes: Any, sublayers: Sequence[Any], *, embedding: bool = False) -> None:
    """Layer and sublayer below each point (`1a`, `1f`), thinned out where there are many."""
    names = [f"{sublayer.layer}{ABBREVIATIONS[sublayer.sublayer]}" for sublayer in sublayers]
    every = max(1, len(names) // 16)
    labels = [name if x % every == 0 else "" for x, name in enumerate(names)]
    axes.set_xticks(range(len(labels) + embedding), ["in", *labels] if embedding else labels)
    kinds = [key for key in SUBLAYERS if any(sublayer.sublayer == key for sublayer in sublayers)]
    legend = ", ".join(f"{ABBREVIATIONS[key]} {SUBLAYERS[key]}" for key in kinds)
    axes.set_xlabel(f"layer and sublayer:{' ' if len(kinds) < 3 else chr(10)}{legend}")  # two fit beside it on a phone


def depth_panel(axes: Any, depths: Sequence[DepthGradients]) -> None:
    """The share of the gradient that reaches the bottom of fresh models, by depth."""
    for norm, colour in (("pre", BLUE), ("post", ORANGE)):
        for variant, (name, _, line, marker) in VARIANTS.items():
            models = [model for model in depths if (model.norm, model.without) == (norm, variant)]
            x, y = [model.depth for model in models], [model.share for model in models]
            label = f"{norm}-norm, {name if variant else 'with skip'}"
            axes.plot(x, y, line, color=colour, marker=marker, markersize=4.5, label=label)
    axes.axhline(1, color=GRID, linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({model.depth for model in depths})
    axes.set_xticks(ticks, [str(depth) for depth in ticks])
    axes.minorticks_off()
    log_axis(axes)
    shares = [model.share for model in depths]
    axes.set_ylim(max(FLOOR, min(shares) / 10), 30 * max(1.0, *shares))
    axes.set_xlabel("number of layers")
    axes.set_ylabel("gradient at the bottom / at the top")


# Recurrent models


def recurrence_document(facts: RecurrenceFacts, name: str, text: str) -> doc.ExplainDocument:
    steps = {
        "first token": lambda layer: layer.steps[0] if any(layer.steps) else None,
        "last token": lambda layer: layer.steps[-1] if any(layer.steps) else None,
    }
    chart = doc.Chart(
        "steps",
        "gradient norm by token and layer",
        with_legend(lambda axes: steps_panel(axes, facts), columns=3),
        "The gradient of the last prediction's loss at each layer's input, token by token: how far back in time it "
        "reaches. Each step back multiplies by the cell's Jacobian; there is no attention to bridge distant tokens.",
    )
    tables = [layer_table(facts.layers, stack, steps) for stack in reversed(stacks_of(facts.layers))]
    return doc.ExplainDocument(
        subject="gradients",
        title=f"{name}: one backward pass through time",
        summary=f"loss {facts.loss:.4f} over {facts.target} · {facts.cell.upper()} · "
        f"{pluralize(len(facts.layers), 'layer')}",
        page_title=f"Gradients of {name}",
        sections=[
            doc.Section("", [*doc.notes(facts.notes, text=text), chart]),
            doc.Section("By layer", [*tables, parameter_tiles(facts.parameters)], style="short"),
        ],
        json=facts.to_dict(),
        picture=picture_of(chart),
    )


def steps_panel(axes: Any, facts: RecurrenceFacts) -> None:
    colours = (BLUE, ORANGE, GREEN, PURPLE, SOFT)
    for number, layer in enumerate(layer for layer in facts.layers if any(layer.steps)):
        label = f"layer {layer.layer}" if layer.stack == "stack" else f"{layer.stack}, layer {layer.layer}"
        norms = [norm or None for norm in layer.steps]
        axes.plot(range(1, len(norms) + 1), norms, color=colours[number % len(colours)], marker=".", label=label)
    log_axis(axes)
    axes.set_xlabel("token")
    axes.set_ylabel("gradient norm")
