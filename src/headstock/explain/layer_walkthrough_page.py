"""Shows a token's way through a layer: its numbers as lines of text, as a page, and as one picture."""

import math
from html import escape
from typing import Any, Literal

from headstock.explain.layer_walkthrough import Step, Walk
from headstock.report.heatmap import shorten_word
from headstock.report.render import minus, render

Way = Literal["forward", "backward"]
SHOWN = 24  # numbers of a step on a page; a picture has fewer
DRAWN = 16
LINE = 8  # numbers in a line of a terminal
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
CELL, HIGH, LEFT, MARGIN = 52, 26, 170, 16  # pixels
STYLE = """.walk text { font: 13px system-ui, sans-serif; fill: #1c2128 }
.walk .number { font-size: 11px; text-anchor: middle; font-variant-numeric: tabular-nums }
.walk .soft { fill: #62676f; font-size: 12px } .walk .paper { fill: #fdfcfa }
.walk .plus { fill: #d55e00 } .walk .minus { fill: #0072b2 } .walk .part { font-weight: 650 }
@media screen and (prefers-color-scheme: dark) {
.walk text { fill: #e6e8eb } .walk .soft { fill: #a0a5ae } .walk .paper { fill: #15181d }
.walk .plus { fill: #ff8f43 } .walk .minus { fill: #5cb8ec } }"""


# Lines of text


def as_lines(found: Walk, way: Way | None = None) -> list[str]:
    """What a terminal shows: each formula with its numbers below it; backward alone, from the top down."""
    lines = []
    for step in reversed(found.steps) if way == "backward" else found.steps:
        if way != "backward" or step.backward is not None:
            lines += ["", f"{step.name}: {step.formula}" + (f"  ({step.note})" if step.note else "")]
            lines += numbers_of(step, way)
    return lines


def numbers_of(step: Step, way: Way | None) -> list[str]:
    rows = [] if way == "backward" else [("forward ", step.forward, "")]
    if step.backward is not None and way != "forward":
        power = scale(step.backward)
        scaled = [10.0**power * value for value in step.backward]
        rows.append(("backward", scaled, f"  × {ten(-power)}" if power else ""))
    lines, shown = [], len(step.forward) if step.columns else 2 * LINE
    for at in range(0, min(len(step.forward), shown), LINE):
        if step.columns:
            lines.append(" " * 10 + "".join(f"{cut(name):>9}" for name in step.columns[at : at + LINE]))
        for name, values, end in rows:
            lines.append(f"  {name}" + "".join(f"{number(value):>9}" for value in values[at : at + LINE]) + end)
    return [*lines, f"  … {len(step.forward) - shown} more in --json"] if len(step.forward) > shown else lines


def cut(name: str) -> str:
    return name if len(name) <= 8 else f"{name[:7]}…"


def number(value: float) -> str:
    """Three decimals, fewer of large numbers; nothing is told as minus nothing."""
    if math.isinf(value):
        return "-∞" if value < 0 else "∞"
    digits = 3 if abs(value) < 100 else 1
    return f"{value:.{digits}f}".replace("-0.000", "0.000")


def scale(values: list[float]) -> int:
    """By which power of ten small numbers are told, so that the largest of them has one digit before its point."""
    most = max(map(abs, values), default=0.0)
    return 0 if most >= 0.1 or not most else -math.floor(math.log10(most))


def ten(power: int) -> str:
    return "10" + str(power).translate(RAISED)


def heading(found: Walk) -> str:
    """Which token, layer and head it is."""
    where = "layer" if found.stack == "stack" else f"{found.stack} layer"
    return f"“{found.token}”, token {found.place} of {len(found.tokens)}, in {where} {found.layer}, head {found.head}"


def closing(found: Walk) -> list[str]:
    """That it ends where the model ends."""
    return [
        f"forward: the steps end where the model ends, off by {found.forward_error:.0e} of its largest number",
        f"backward: so does the gradient that they hand down, off by {found.backward_error:.0e}",
    ]


# The page


def page(found: Walk, *, name: str, text: str) -> str:
    parts: list[dict[str, Any]] = []
    for step in found.steps:
        if not parts or parts[-1]["name"] != step.part:
            parts.append({"name": step.part, "steps": []})
        parts[-1]["steps"].append(told(step))
    return render(
        "headstock.explain",
        "walk.html",
        found=found,
        parts=parts,
        name=name,
        text=text,
        heading=heading(found),
        sizes=", ".join(f"{letter} = {size}" for letter, size in found.sizes.items()),
        closing=closing(found),
    )


def told(step: Step) -> dict[str, Any]:
    """A step for the template: one entry of `columns` per number, forward above backward, which wrap at any width."""
    shown = len(step.forward) if step.columns else SHOWN
    rows, ways = [cells(step.forward[:shown])], ["forward"]
    if step.backward is not None:
        power = scale(step.backward)
        rows.append(cells([10.0**power * value for value in step.backward[:shown]]))
        ways.append(f"backward × {ten(-power)}" if power else "backward")
    columns = list(zip(*rows, strict=True))
    more = max(0, len(step.forward) - shown)
    return {"step": step, "ways": ways, "columns": columns, "more": more, "fixed": step.backward is None}


def cells(values: list[float]) -> list[tuple[str, str, float]]:
    most = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    return [
        (
            minus(number(value)),
            "minus" if value < 0 else "plus",
            min(1.0, abs(value) / most) if math.isfinite(value) else 0.0,
        )
        for value in values
    ]


# The picture


def picture(found: Walk) -> str:
    """Every step as a strip of numbers, from the bottom of the layer to its top, forward only."""
    widest = max(min(DRAWN, len(step.forward)) for step in found.steps)
    width = max(LEFT + CELL * widest + 2 * MARGIN, 620)
    parts, y = [], 2 * MARGIN + 12
    parts.append(f'<text class="part" x="{MARGIN}" y="{MARGIN + 8}">{escape(heading(found))}</text>')
    for step in found.steps:
        if step.columns:
            for at, name in enumerate(step.columns[:DRAWN]):
                x = LEFT + CELL * (at + 0.5)
                parts.append(f'<text class="number" x="{x:.0f}" y="{y + 11}">{escape(shorten_word(cut(name)))}</text>')
            y += 16
        parts.append(f'<text x="{MARGIN}" y="{y + 17}">{escape(step.name)}</text>')
        for at, (written, side, share) in enumerate(cells(step.forward[:DRAWN])):
            x = LEFT + CELL * at
            box = f'x="{x}" y="{y}" width="{CELL - 2}" height="{HIGH - 2}" rx="3"'
            parts.append(f'<rect class="{side}" {box} fill-opacity="{0.06 + 0.5 * share:.2f}"/>')
            parts.append(f'<text class="number" x="{x + CELL / 2 - 1:.0f}" y="{y + 16}">{written}</text>')
        more = f"   … {len(step.forward) - DRAWN} more" if len(step.forward) > DRAWN else ""
        parts.append(f'<text class="soft" x="{LEFT}" y="{y + HIGH + 12}">{escape(step.formula + more)}</text>')
        y += HIGH + 24
    height, title = y + MARGIN, escape(heading(found))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="walk" width="{width}" height="{height}" '
    head += f'viewBox="0 0 {width} {height}" role="img" aria-label="{title}"><style>{STYLE}</style>'
    return "\n".join([head, f'<rect class="paper" width="{width}" height="{height}"/>', *parts, "</svg>\n"])
