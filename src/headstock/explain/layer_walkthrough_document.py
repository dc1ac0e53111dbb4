"""Presents a token's computation in one layer: each formula with its values, and all of them as one picture."""

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Literal

from headstock.explain import document as doc
from headstock.explain.layer_walkthrough import LayerWalkthrough, Step
from headstock.explain.render_document import strip_cells
from headstock.report.format import shorten

Direction = Literal["forward", "backward"]
MAX_DRAWN = 16  # numbers of a step in a picture
CELL, HEIGHT, LEFT, MARGIN = 52, 26, 170, 16  # pixels
STYLE = """.layer text { font: 13px system-ui, sans-serif; fill: #1c2128 }
.layer .number { font-size: 11px; text-anchor: middle; font-variant-numeric: tabular-nums }
.layer .soft { fill: #62676f; font-size: 12px } .layer .paper { fill: #fdfcfa }
.layer .plus { fill: #d55e00 } .layer .minus { fill: #0072b2 } .layer .part { font-weight: 650 }
@media screen and (prefers-color-scheme: dark) {
.layer text { fill: #e6e8eb } .layer .soft { fill: #a0a5ae } .layer .paper { fill: #15181d }
.layer .plus { fill: #ff8f43 } .layer .minus { fill: #5cb8ec } }"""


def layer_document(
    facts: LayerWalkthrough, name: str, text: str, *, steps: Sequence[str] = (), direction: Direction | None = None
) -> doc.ExplainDocument:
    """All steps, or those named in `steps`; with one direction, backward from the top down."""
    selected = facts.select(steps) if steps else facts
    introduction: list[doc.DocumentBlock] = [
        doc.Text(text, "quote", only="page"),
        doc.Text(
            "Each formula with its values for this token. Forward is what the layer computes; backward is the gradient "
            "of the loss with respect to each value. Orange is positive, blue negative.",
            only="page",
        ),
        *([] if steps else [doc.Checks(facts.checks()), *doc.notes(facts.notes)]),
    ]
    order = [step for step in selected.steps if direction != "backward" or step.backward is not None]
    order = order[::-1] if direction == "backward" else order
    sizes = ", ".join(f"{symbol} = {size}" for symbol, size in facts.sizes.items())
    details = f"{name} · {facts.norm}-norm · {sizes} · loss {facts.loss:.3f} over {facts.target}"
    return doc.ExplainDocument(
        subject="one token in one layer",
        title=title_of(facts),
        summary="",
        page_title=f"A token in {name}",
        sections=[
            doc.Section("", [doc.Text(details, "soft", only="page"), *introduction]),
            *(
                doc.Section(part.capitalize(), [strip_of(step, facts, direction) for step in group])
                for part, group in groupby(order, key=lambda step: step.part)
            ),
        ],
        json=selected.to_dict(),
        picture=lambda: layer_picture(selected),
    )


def title_of(facts: LayerWalkthrough) -> str:
    stack = "layer" if facts.stack == "stack" else f"{facts.stack} layer"
    count = len(facts.tokens)
    return f"“{facts.token}”, token {facts.position} of {count}, in {stack} {facts.layer}, head {facts.head}"


def strip_of(step: Step, facts: LayerWalkthrough, direction: Direction | None) -> doc.NumberStrip:
    lines = [] if direction == "backward" else [("forward", step.forward)]
    if step.backward is not None and direction != "forward":
        lines.append(("backward", step.backward))
    own = facts.position - 1 if step.columns and step.part != "cross-attention" else None
    fixed = "A constant: it has no gradient." if step.backward is None else ""
    return doc.NumberStrip(step.name, step.formula, lines, step.columns, step.note, own, fixed)


def layer_picture(facts: LayerWalkthrough) -> str:
    """Every step as a strip of numbers, from the bottom of the layer to its top, forward only."""
    widest = max(min(MAX_DRAWN, len(step.forward)) for step in facts.steps)
    width = max(LEFT + CELL * widest + 2 * MARGIN, 620)
    title, parts, y = escape(title_of(facts)), [], 2 * MARGIN + 12
    parts.append(f'<text class="part" x="{MARGIN}" y="{MARGIN + 8}">{title}</text>')
    for step in facts.steps:
        if step.columns:
            for column, name in enumerate(step.columns[:MAX_DRAWN]):
                x = LEFT + CELL * (column + 0.5)
                label = escape(shorten(name, 8))
                parts.append(f'<text class="number" x="{x:.0f}" y="{y + 11}">{label}</text>')
            y += 16
        parts.append(f'<text x="{MARGIN}" y="{y + 17}">{escape(step.name)}</text>')
        for column, (written, sign, share) in enumerate(strip_cells(step.forward[:MAX_DRAWN])):
            x = LEFT + CELL * column
            box = f'x="{x}" y="{y}" width="{CELL - 2}" height="{HEIGHT - 2}" rx="3"'
            parts.append(f'<rect class="{sign}" {box} fill-opacity="{0.06 + 0.5 * share:.2f}"/>')
            parts.append(f'<text class="number" x="{x + CELL / 2 - 1:.0f}" y="{y + 16}">{written}</text>')
        suffix = f"   … {len(step.forward) - MAX_DRAWN} more" if len(step.forward) > MAX_DRAWN else ""
        parts.append(f'<text class="soft" x="{LEFT}" y="{y + HEIGHT + 12}">{escape(step.formula + suffix)}</text>')
        y += HEIGHT + 24
    height = y + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="layer" width="{width}" height="{height}" '
    head += f'viewBox="0 0 {width} {height}" role="img" aria-label="{title}"><style>{STYLE}</style>'
    return "\n".join([head, f'<rect class="paper" width="{width}" height="{height}"/>', *parts, "</svg>\n"])
