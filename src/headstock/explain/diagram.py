"""A model as the picture that a course would show: what a text passes through, with shapes and weights on each part."""

from dataclasses import dataclass
from typing import Any

from headstock.explain.parameters import Params
from headstock.explain.parameters_page import shown_lines
from headstock.explain.subject import Subject
from headstock.explain.svg import GAP, SKIP, WIDTH, Box, Sketch, style
from headstock.explain.symbols import formula, in_html, in_text
from headstock.report.render import render

RIGHT = WIDTH / 2 + 16  # from the middle of a column to the frame around what is repeated
LEFT = WIDTH / 2 + SKIP + 14
HEADS = {
    "token": ("Language model's head", "a score for every entry of the vocabulary", "(B, T, V)"),
    "next": ("Next-sentence head", "does the second text follow?", "(B, 2)"),
    "label": ("Classifier's head", "a score for every class", "(B, C)"),
    "tag": ("Tagger's head", "a score for every tag", "(B, T, C)"),
    "span": ("Head for answers", "first or last token of the answer?", "(B, T, 2)"),
}
POSITIONS = {"sinusoidal": "sine waves, fixed", "learned": "learned"}
NORMS = {"layer": "Layer norm", "rms": "RMS norm"}
BENT = {"relu": "ReLU", "gelu": "GELU", "gelu_tanh": "GELU", "silu": "SiLU", "swiglu": "SwiGLU"}
LOOKS: dict[tuple[str, ...], str] = {("causal",): "each looks back only", ("full",): "each looks both ways"}
LOOKS |= {("causal", "full"): "back only or both ways, row by row"}


@dataclass
class Known:
    """What is written on the parts of one model."""

    subject: Subject
    params: Params

    def __post_init__(self) -> None:
        self.config = self.subject.model.backbone.config
        self.lines = {line.path: line for line in self.params.lines}

    def box(self, name: str, kind: str, path: str, *lines: str, masks: tuple[str, ...] = ()) -> Box:
        """A part with its weights; without, where it has none."""
        line = self.lines.get(path)
        count, form = ("", "") if line is None else (f"{line.value:,}", in_text(line.formula))
        return Box(name, kind, count, form, lines, masks)

    def norm(self, path: str) -> Box:
        return self.box(NORMS[self.config.norm_kind], "norm", path)


def draw_model(subject: Subject, params: Params) -> Sketch:
    """The picture of any family."""
    known, sketch = Known(subject, params), Sketch()
    backbone = subject.model.backbone
    if backbone.is_encoder_decoder:
        draw_both_sides(sketch, known)
    elif backbone.bidirectional:
        draw_both_ways(sketch, known)
    else:
        y, table = draw_embedding(sketch, known, 0, 0, "backbone")
        if hasattr(known.config, "cell"):
            y = draw_layers(sketch, known, 0, y, "backbone.stack", "read from left to right")
        else:
            y, _ = draw_blocks(sketch, known, 0, y, "backbone", masks_of(subject))
        draw_heads(sketch, known, 0, y, table)
    sketch.text(sketch.left, sketch.top - 26, f"{subject.name}: {params.total:,} weights", "title")
    sketch.reach(sketch.left, sketch.top - 42)
    return sketch


def masks_of(subject: Subject) -> tuple[str, ...]:
    """Who may look at whom: the past, everybody, or both in turn."""
    if subject.config.objective == "hybrid":
        return ("causal", "full")
    return ("causal",) if subject.model.backbone.causal else ("full",)


# A column, from below


def draw_embedding(
    sketch: Sketch, known: Known, x: float, y: float, at: str, *, table: str = "", tokens: str = "tokens"
) -> tuple[float, float]:
    """Tokens become vectors; where the next part begins, and how high the table stands that a head may share."""
    c = known.config
    shape = "(B, S" if tokens == "source" else "(B, T"
    sketch.text(x, y, tokens, "name", "middle")
    sketch.reach(x, y + 4)
    low = arrow(sketch, x, y - 14, f"{shape})")
    scaled = "each token's own row, times √D" if getattr(c, "embed_scale", False) else "each token's own row"
    y = sketch.box(x, low, known.box("Embedding of tokens", "embedding", table or f"{at}.tokens", scaled))
    middle = (low + y) / 2
    sides = []
    if getattr(c, "positions", None) in POSITIONS:
        sides.append(("Positions", POSITIONS[c.positions], f"{at}.positions"))
    if getattr(c, "segments", 0):
        sides.append(("Kinds of text", "learned", f"{at}.segments"))
    for place, (name, what, path) in enumerate(sides):
        y = beside(sketch, known, x, y, name, what, path, room=22 if place else 16)
    if getattr(c, "embed_norm", False):
        y = sketch.box(x, arrow(sketch, x, y, long=GAP + (10 if sides else 0)), known.norm(f"{at}.embed_norm"))
        sides = []
    return arrow(sketch, x, y, f"{shape}, D)", long=GAP + (18 if sides else 6), tip=False), middle


def beside(sketch: Sketch, known: Known, x: float, y: float, name: str, what: str, path: str, *, room: float) -> float:
    """Something that is added from the side; where the sum ends."""
    line, width = known.lines.get(path), WIDTH / 2 - 28
    said = what if line is None else f"{in_text(line.formula)} = {line.value:,}"
    box, middle = Box(name, "plain" if line is None else "embedding", lines=(said,)), x + 28 + width / 2
    at = y - room - box.height / 2
    sketch.way((x, y), (x, at + 10))
    sketch.box(middle, at + box.height / 2, box, width)
    sketch.way((middle - width / 2, at), (x + 10, at))
    sketch.plus(x, at)
    return at - 10


def arrow(sketch: Sketch, x: float, y: float, shape: str = "", *, long: float = GAP, tip: bool = True) -> float:
    sketch.way((x, y), (x, y - long), tip=tip)
    sketch.text(x + 10, y - long + 14, shape, "shape")
    return y - long


def draw_blocks(
    sketch: Sketch, known: Known, x: float, y: float, at: str, masks: tuple[str, ...], *, cross: bool = False
) -> tuple[float, float]:
    """The layers and the last norm; where they end, and how high cross-attention stands."""
    c, low, path, meets = known.config, y, f"{at}.blocks.*", 0.0
    share = f"{c.heads} heads of {c.width // c.heads} numbers" if c.heads > 1 else f"one head of {c.width} numbers"
    more = {
        "rotary positions turn queries and keys": c.positions == "rotary",
        "queries and keys are normed in each head": c.qk_norm,
    }
    lines = (share, LOOKS[masks], *(words for words, so in more.items() if so))
    inside = known.box("Self-attention", "attention", f"{path}.attention", *lines, masks=masks)
    y, _ = draw_residual(sketch, known, x, y, inside, f"{path}.around_attention")
    if cross:
        where = (share, "queries from here,", "keys and values from the encoder")
        inside = known.box("Cross-attention", "cross", f"{path}.cross", *where)
        y, meets = draw_residual(sketch, known, x, y, inside, f"{path}.around_cross")
    up = f"{c.width} → {c.hidden} → {c.width}, {BENT[c.activation]}"
    inside = known.box("Feed-forward", "feed", f"{path}.feed", up)
    y, _ = draw_residual(sketch, known, x, y, inside, f"{path}.around_feed")
    y = close_frame(sketch, known, x, low, y, path)
    if c.norm == "pre":
        y = sketch.box(x, arrow(sketch, x, y), known.norm(f"{at}.final_norm"))
    return y, meets


def close_frame(sketch: Sketch, known: Known, x: float, low: float, y: float, path: str) -> float:
    """The frame around what is repeated, with room for how often."""
    sketch.way((x, y), (x, y - 28), tip=False)
    sketch.frame(x, low, y - 28, f"× {known.lines[path].times}", left=LEFT, right=RIGHT)
    return y - 28


def draw_residual(sketch: Sketch, known: Known, x: float, y: float, inside: Box, at: str) -> tuple[float, float]:
    """A sublayer and the way around it: what it makes is added to what came, normed before or after.

    Where it ends, and how high the middle of the sublayer is.
    """
    pre = known.config.norm == "pre"
    norm, begin, around = known.norm(f"{at}.norm"), y - 14, x - WIDTH / 2 - SKIP + 8
    sketch.dot(x, begin)
    y = arrow(sketch, x, y, long=GAP + 8)
    if pre:
        y = arrow(sketch, x, sketch.box(x, y, norm), long=GAP - 6)
    top = sketch.box(x, y, inside)
    middle = (top + y) / 2
    y = arrow(sketch, x, top, long=GAP - 8) - 10
    sketch.way((x, begin), (around, begin), (around, y), (x - 10, y))
    sketch.plus(x, y)
    y -= 10
    return (y if pre else sketch.box(x, arrow(sketch, x, y, long=GAP - 6), norm)), middle


def draw_heads(
    sketch: Sketch, known: Known, x: float, y: float, table: float, *, wide: str = "D", side: float = RIGHT + 16
) -> None:
    """The heads side by side, each with what it gives; a tied one is joined to the embedding that it shares."""
    model, low = known.subject.model, y
    y = arrow(sketch, x, low, long=GAP + 8)
    several = len(model.heads) > 1
    sketch.text(x - 10 if several else x + 10, low - GAP / 2, f"(B, T, {wide})", "shape", "end" if several else "start")
    for place, name in enumerate(model.heads):
        at = x + place * (WIDTH + 90)
        if place:
            sketch.way((x, low - 14), (at, low - 14), (at, y))
            sketch.dot(x, low - 14)
        title, what, shape = HEADS.get(name, (name, "", ""))
        shared = name == "token" and model.backbone.config.tied
        box = known.box(title, "head", f"heads.{name}", what, *details(known, name))
        if box.formula:  # below the rest: formulas of heads may be long
            box.lines, box.formula = (*box.lines, f"{box.formula} = {box.count}"), ""
            box.count = ""
        if shared:
            box.lines = (*box.lines, "tied: its matrix is the embedding's")
            way = ((x + WIDTH / 2, table), (x + side, table), (x + side, y - 16), (x + WIDTH / 2, y - 16))
            sketch.way(*way, tip=False, kind="tie")
        top = sketch.box(at, y, box)
        sketch.way((at, top), (at, top - GAP))
        twice = name == "token" and model.backbone.bidirectional
        sketch.text(at + 10, top - GAP + 8, f"{shape} twice" if twice else shape, "shape")


def details(known: Known, name: str) -> list[str]:
    """What else a head does."""
    head, pool = known.subject.model.heads[name], getattr(known.subject.config.task, "pool", None)
    more = {
        "through one more layer and a norm": getattr(head, "transform", None) is not None,
        "on a mix of all layers that it learns": getattr(head, "mix", None) is not None,
        f"on one vector a text: {pool}": name == "label" and pool,
        "once for each direction": name == "token" and known.subject.model.backbone.bidirectional,
    }
    return [words for words, so in more.items() if so]


# Encoder and decoder


def draw_both_sides(sketch: Sketch, known: Known) -> None:
    """Two columns; what the encoder makes of the source goes to every layer of the decoder."""
    backbone, apart = known.subject.model.backbone, LEFT + RIGHT + 76
    own = backbone.encoder.tokens is not backbone.tokens  # type: ignore[union-attr]
    path = "backbone.encoder.tokens" if own else "backbone.tokens"
    y, source = draw_embedding(sketch, known, 0, 0, "backbone.encoder", table=path, tokens="source")
    top, _ = draw_blocks(sketch, known, 0, y, "backbone.encoder", ("full",))
    y, target = draw_embedding(
        sketch, known, apart, 0, "backbone.decoder", table="backbone.tokens", tokens="target so far"
    )
    if not own:
        sketch.way((WIDTH / 2, source), (apart - WIDTH / 2, target), tip=False, kind="tie")
        sketch.text(apart / 2, source - 7, "one table", "soft", "middle")
    y, meets = draw_blocks(sketch, known, apart, y, "backbone.decoder", ("causal",), cross=True)
    across = RIGHT + (apart - LEFT - RIGHT) / 2
    sketch.way((0, top), (0, top - 26), (across, top - 26), (across, meets), (apart - WIDTH / 2, meets))
    sketch.text(10, top - 34, "(B, S, D)", "shape")
    draw_heads(sketch, known, apart, y, target)


# Cells


def draw_layers(sketch: Sketch, known: Known, x: float, y: float, at: str, words: str) -> float:
    """Layers of cells; each step also gets what the step before left."""
    c, low, path = known.config, y, f"{at}.layers.*"
    kind, holds = {"lstm": ("LSTM", "output and memory"), "gru": ("GRU", "output")}[c.cell]
    y = arrow(sketch, x, y)
    told = (words, f"from step to step: {holds}")
    top = sketch.box(x, y, known.box(f"{kind}, {c.hidden} cells", "cells", f"{path}.cells", *told))
    around, edge = x - WIDTH / 2 - SKIP + 10, x - WIDTH / 2
    sketch.way((edge, top + 13), (around, top + 13), (around, y - 13), (edge, y - 13))
    y = top
    if f"{path}.project" in known.lines:
        back = known.box("Back to the width", "plain", f"{path}.project")
        y = sketch.box(x, arrow(sketch, x, y, "(B, T, H)", long=GAP + 4), back)
    return close_frame(sketch, known, x, low, y, path)


def draw_both_ways(sketch: Sketch, known: Known) -> None:
    """One embedding, two stacks that read from either end, and their vectors side by side."""
    apart = (LEFT + RIGHT + 24) / 2
    y, table = draw_embedding(sketch, known, 0, 0, "backbone")
    tops = []
    for x, at, words in ((-apart, "ahead", "read from left to right"), (apart, "back", "read from right to left")):
        sketch.way((0, y), (x, y), (x, y - 14), tip=False)
        tops.append(draw_layers(sketch, known, x, y - 14, f"backbone.{at}", words))
    sketch.dot(0, y)
    top = min(tops) - GAP - 12
    for x in (-apart, apart):
        sketch.way((x, tops[0]), (x, top + 14), (x / 3, top + 14), (x / 3, top))
        sketch.text(x + 10, tops[0] - 8, "(B, T, D)", "shape")
    both = Box("Side by side", "plain", lines=("read up to a token, and from the end back to it",))
    draw_heads(sketch, known, 0, sketch.box(0, top, both), table, wide="2D", side=apart + RIGHT + 16)


# What is told beside it


def explain_shapes(subject: Subject) -> dict[str, str]:
    """The letters of the shapes, in the order in which they come up."""
    backbone = subject.model.backbone
    config, several = backbone.config, any("C" in HEADS[name][2] for name in subject.model.heads if name in HEADS)
    most = f", {backbone.context:,} at the most" if backbone.context else ""
    told = {"B": "rows in a batch", "T": f"tokens in a row{most}"}
    if backbone.is_encoder_decoder:
        told |= {"T": f"tokens of the target{most}", "S": f"tokens of the source{most}"}
    told["D"] = f"numbers in a token's vector: {config.width:,}" + (
        " in each direction" if backbone.bidirectional else ""
    )
    if hasattr(config, "cell"):
        told["H"] = f"cells in a layer: {config.hidden:,}"
    elif config.hidden != config.width:
        told["F"] = f"numbers inside the feed-forward part: {config.hidden:,}"
    told["V"] = f"entries of the vocabulary: {config.vocabulary:,}"
    if getattr(config, "source_vocabulary", None):
        told["Vₛ"] = f"entries of the source's vocabulary: {config.source_vocabulary:,}"
    if getattr(config, "segments", 0):
        told["G"] = f"kinds of text in a row: {config.segments}"
    if getattr(config, "qk_norm", False):
        told["A"] = f"attention heads: {config.heads}"
    if several:
        told["C"] = f"classes: {subject.model.dimensions().classes:,}"
    return told


def facts(subject: Subject, params: Params) -> dict[str, Any]:
    """The parts with their weights, in the order in which a text meets them."""
    return {
        "name": subject.name,
        "family": subject.config.family,
        "total": params.total,
        "base": params.base,
        "heads": {name: params.heads[name] for name in subject.model.heads},
        "parts": [
            {"part": line.path, "count": line.count, "times": line.times, "formula": formula(line.formula)}
            for line in params.lines
            if not line.tensor
        ],
        "shapes": explain_shapes(subject),
    }


def model_svg(subject: Subject, params: Params, *, page: bool = False) -> str:
    """The picture as a file of its own, or as part of a page."""
    label = f"{subject.name}, from its tokens below to its heads above; {params.total:,} weights"
    return draw_model(subject, params).svg(label, page=page)


def model_page(subject: Subject, params: Params) -> str:
    from markupsafe import Markup

    parts = {"subject": subject, "params": params, "shapes": explain_shapes(subject), "style": Markup(style(page=True))}
    picture = Markup(model_svg(subject, params, page=True))
    lines = [one for one in shown_lines(params.lines) if not one.line.tensor]
    return render("headstock.explain", "model.html", picture=picture, lines=lines, math=in_html, **parts)
