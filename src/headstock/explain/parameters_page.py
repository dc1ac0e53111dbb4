"""Shows a model's weights beside their formulas: as tables for a terminal, as a chart and as a page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headstock.explain.parameters import Line, Params
from headstock.explain.symbols import in_html, in_text
from headstock.report.render import render
from headstock.report.standalone import standalone_svg
from headstock.report.theme import ARMS, GRID, PAPER, WIDE, Gallery, make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {
    "backbone": "the whole backbone",
    "encoder": "encoder",
    "decoder": "decoder",
    "tokens": "embedding of tokens",
    "positions": "embedding of positions",
    "segments": "embedding of kinds of text",
    "embed_norm": "norm of the embedding",
    "attention": "self-attention",
    "cross": "cross-attention",
    "inputs": "queries, keys and values",
    "output": "back to the width",
    "query_norm": "norm of queries",
    "key_norm": "norm of keys",
    "around_attention": "its norm",
    "around_cross": "its norm",
    "feed": "feed-forward",
    "gate": "gate",
    "up": "up to the hidden width",
    "down": "down again",
    "around_feed": "its norm",
    "final_norm": "last norm",
    "cells": "cells",
    "project": "back to the width",
    "ahead": "reading forward",
    "back": "reading backward",
    "heads": "heads",
    "token": "language model's head",
    "next": "next-sentence head",
    "label": "classifier's head",
    "tag": "tagger's head",
    "span": "head for answers",
    "transform": "a layer before the scores",
    "pooler": "pooler",
    "mix": "mix of layers",
    "linear": "linear layer",
    "dense": "linear layer",
    "norm": "norm",
}
UNITS = ("B", "kB", "MB", "GB", "TB")
GROUPS = ["embeddings", "attention", "cross-attention", "feed-forward", "cells", "norms", "heads"]
COLOURS = dict(zip(GROUPS, [ARMS[kind][1][i][0] for kind, i in (
    ("pretrained", 0), ("scratch", 0), ("scratch", 2), ("frozen", 0), ("frozen", 2), ("tfidf", 2), ("tfidf", 0)
)], strict=True))  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """A line as it is read."""

    line: Line
    level: int
    name: str
    words: str


def shown_lines(lines: list[Line]) -> list[Shown]:
    """The lines nested in each other, without those that only say again what the one part inside them says."""
    made: list[Shown] = []
    for here, below in zip(lines, [*lines[1:], None], strict=True):
        inside = below is not None and not below.tensor and below.level == here.level + 1
        if inside and below.formula == here.formula and here.level > 0:  # type: ignore[union-attr]
            continue
        above = next((one for one in reversed(made) if here.path.startswith(f"{one.line.path}.")), None)
        name = here.path.removeprefix(f"{above.line.path}.") if above else here.path
        made.append(Shown(here, above.level + 1 if above else 0, name.removesuffix(".*"), words_for(here, name)))
    return made


def words_for(line: Line, name: str) -> str:
    """What a part is, in words; of several names the first says it."""
    if line.tensor:
        return ""
    if line.path.endswith(".*"):
        return "each layer" if line.times > 1 else "the layer"
    return WORDS.get(name.partition(".")[0], "")


def group_of(path: str) -> str:
    """What a part of a model is to a reader."""
    words = path.split(".")
    if words[0] == "heads":
        return "heads"
    if any("norm" in word for word in words):
        return "norms"
    for name, group in (("cross", "cross-attention"), ("attention", "attention"), ("feed", "feed-forward")):
        if name in words:
            return group
    return "cells" if "cells" in words or "project" in words else "embeddings"


def shares(params: Params) -> tuple[dict[str, float], dict[str, float]]:
    """Weights, and arithmetic on the way forward, by group."""
    weights, flops = dict.fromkeys(GROUPS, 0.0), dict.fromkeys(GROUPS, 0.0)
    for line in params.lines:
        if line.tensor:
            weights[group_of(line.path)] += line.value * line.times
    for cost in params.flops:
        flops[group_of(cost.name)] += cost.value
    return weights, flops


def picture(params: Params) -> str:
    """The two bars alone."""
    return standalone_svg(Gallery().embed("shares", draw_shares(params), f"where the weights of {params.name} are"))


def draw_shares(params: Params, width: float = WIDE) -> "Figure":
    """Two bars: where the weights are, and where the arithmetic is."""
    weights, flops = shares(params)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, found in enumerate((weights, flops)):
            total, at = sum(found.values()), 0.0
            for group, value in found.items():
                share = value / total
                axes.barh(place, share, left=at, color=COLOURS[group], height=0.62, edgecolor="none")
                if share > 0.07:
                    axes.text(at + share / 2, place, f"{share:.0%}", ha="center", va="center", color=PAPER)
                at += share
        axes.set_yticks([0, 1], ["weights", "arithmetic"])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1)
        axes.invert_yaxis()
        axes.set_xticks([])
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        from matplotlib.patches import Patch

        keys = [Patch(color=COLOURS[name], label=name) for name in GROUPS if weights[name] or flops[name]]
        columns = len(keys) if width >= WIDE else 3
        figure.legend(handles=keys, loc="outside lower left", ncols=columns, fontsize=10, handlelength=0.9)
        axes.grid(False)
        axes.set_facecolor("none")
        axes.spines["left"].set_color(GRID)

    return make_figure(paint, width, 140 if width >= WIDE else 165)


def bytes_of(value: float) -> str:
    size, unit = float(value), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}" if size < 999.5 else f"{size:.0f} {UNITS[unit]}"


def flops_of(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g} {unit}FLOP"
    return f"{value:.4g} FLOP"


# In words


def about_heads(params: Params) -> str:
    """Whether the number of attention heads is in the formula, and why."""
    if params.derivative is None:
        return "There is no attention, and so there are no heads of it."
    if params.derivative == 0:
        return (
            "The number of heads A is in none of these formulas: the derivative of the total by A is 0. The heads "
            "share the width. Each has queries, keys and values of D/A numbers, and A of them side by side are D "
            "numbers again, so that one matrix of D × 3D makes them all, however many there are."
        )
    return (
        "The number of heads A is in the formula in one place only: queries and keys are normed inside each head, and "
        "all heads of a layer share the D/A weights of that norm. The matrices do not depend on A: the heads share the "
        f"width. The derivative of the total by A is {in_text(params.derivative)}."
    )


def about_positions(params: Params) -> str | None:
    if params.fixed is None:
        return None
    return (
        f"Beside the weights stand {params.fixed.value:,} fixed numbers ({in_text(params.fixed.formula)}): the sines "
        "and cosines of the positions. Nothing trains them, so they are not counted."
    )


def about_sharing(params: Params) -> str | None:
    """Which heads have nothing of their own."""
    none = [WORDS.get(name, name) for name, count in params.heads.items() if not count]
    return f"The {none[0]} has no weights of its own: it is tied to the embedding of tokens." if none else None


def remarks(params: Params) -> list[str]:
    return list(filter(None, [about_heads(params), about_positions(params), about_sharing(params)]))


def head_names(heads: tuple[str, ...]) -> str:
    return " and ".join(WORDS.get(name, name) for name in heads)


# For a terminal


def params_tables(params: Params) -> Iterator[Any]:
    yield parts_table(params)
    yield ""
    yield totals_table(params)
    yield ""
    yield from remarks(params)
    yield ""
    yield costs_table(params)
    yield ""
    yield "  ".join(f"{in_text(symbol(one.name))} {one.value:,}" for one in params.letters)


def parts_table(params: Params, *, tensors: bool = True) -> Any:
    """Every part under the one it is in; with or without its tensors."""
    from rich.table import Table

    title = f"{params.name}: {params.total:,} weights = {in_text(params.totals[0].formula, *params.by)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, side in (("part", "left"), ("formula", "left"), ("comes to", "right"), ("counted", "right")):
        table.add_column(name, justify=side, header_style="dim")  # type: ignore[arg-type]
    table.add_column("", style="dim")
    for shown in shown_lines(params.lines):
        line = shown.line
        if line.tensor and not tensors:
            continue
        name = "  " * shown.level + shown.name + (f" × {line.times}" if line.path.endswith(".*") else "")
        words = " × ".join(map(in_text, line.shape)) if line.tensor else shown.words
        style = "dim" if line.tensor else "bold" if shown.level == 0 else ""
        form = in_text(line.formula, *params.by)
        table.add_row(name, form, f"{line.value:,}", f"{line.count:,}", words, style=style)
    return table


def totals_table(params: Params) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("with", header_style="dim")
    for name in ("total", "all learn", "backbone frozen: learn", "stay"):
        table.add_column(name, justify="right", header_style="dim")
    for one in params.totals:
        numbers = (one.total, one.total, one.own, one.total - one.own)
        table.add_row(head_names(one.heads), *(f"{number:,}" for number in numbers))
    return table


def costs_table(params: Params) -> Any:
    from rich.table import Table

    title = f"What a token costs, and a step on {params.batch} rows of {params.length} tokens"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", min_width=20)
    table.add_column("formula", header_style="dim", overflow="fold")
    table.add_column("comes to", justify="right", header_style="dim", min_width=12)
    table.add_column("gpu, bfloat16", justify="right", header_style="dim", min_width=10)
    for cost in (params.forward, params.training):
        table.add_row(f"token, {cost.name}", in_text(cost.formula), flops_of(cost.value), "")
    here, gpu = params.memory["cpu, float32"], params.memory["gpu, bfloat16, estimated"]
    for cost, other in zip(here, gpu, strict=True):
        table.add_row(cost.name, in_text(cost.formula), bytes_of(cost.value), bytes_of(other.value))
    return table


# As a page


def params_page(params: Params) -> str:
    gallery = Gallery()
    label = f"Shares of the parts of {params.name} in its weights and in its arithmetic"
    charts = {
        "wide": gallery.embed("shares", draw_shares(params), label),
        "narrow": gallery.embed("shares-narrow", draw_shares(params, 340), label),
    }
    return render(
        "headstock.explain",
        "params.html",
        params=params,
        lines=shown_lines(params.lines),
        math=in_html,
        remarks=remarks(params),
        head_names=head_names,
        bytes_of=bytes_of,
        flops_of=flops_of,
        charts=charts,
        memory=list(zip(*params.memory.values(), strict=True)),
        places=list(params.memory),
        letter=lambda name: in_html(symbol(name)),
    )


def symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name)
