"""Presents attention weights: interactive maps of every head on a page, and what the heads attend to in numbers.

H heads, T queries, S keys.
"""

import base64
import zlib
from typing import Any

import numpy as np

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.attention import MEASURES, AttentionFacts, HeadFacts, LayerWeights
from headstock.explain.render_document import chart_svg, heatmap_svg
from headstock.report.format import pluralize
from headstock.report.theme import SOFT

SCALE = 1000  # weights are stored as multiples of a thousandth
BLUE = (0.13, 0.52, 0.78)  # legible on light and dark pages
TITLES = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Cross-attention",
    "forward": "Forward self-attention",
    "backward": "Backward self-attention",
}
DESCRIPTIONS = {
    "encoder": "Each position attends to every position of the text.",
    "decoder": "Each position attends to itself and to earlier positions.",
    "cross": "Each target position attends to the source. It is labelled with the token it reads.",
    "forward": "This stack reads from left to right: each position attends to itself and to earlier positions.",
    "backward": "This stack reads from right to left: each position attends to itself and to later positions.",
}
MAIN_MEASURES = ("entropy", "distance", "first")  # shown first
PERCENTAGES = ("first", "itself", "previous", "next")
MAX_COLUMNS = 6  # heads up to which tables stand beside each other


def attention_document(facts: AttentionFacts, text: str) -> doc.ExplainDocument:
    sites = list(dict.fromkeys(layer.where for layer in facts.maps))
    if facts.texts == 1:
        counts = [pluralize(len(facts.tokens) or len(facts.source), "token")]
        counts += [pluralize(len(facts.source), "source token")] if facts.source and facts.tokens else []
        summary = f"“{text}”: {', '.join(counts)}"
    else:
        summary = f"{text}: {pluralize(facts.texts, 'text')}, {pluralize(facts.positions, 'position')}"
    return doc.ExplainDocument(
        subject="attention",
        title=f"{facts.run}: attention",
        summary=summary,
        page_title=f"Attention of {facts.run}",
        sections=[
            doc.Section("", [doc.Checks(facts.checks()), *doc.notes(facts.notes)]),
            *(site_section(facts, where) for where in sites),
        ],
        json=facts.to_dict(),
        picture=lambda: attention_picture(facts),
        style_sheet="attention.css",
        script="attention.js",
    )


def site_section(facts: AttentionFacts, where: str) -> doc.Section:
    """The maps of one kind of attention, and a table per measure."""
    maps = [layer for layer in facts.maps if layer.where == where]
    heads = [head for head in facts.heads if head.where == where]
    (uniform,) = (head for head in facts.uniform if head.where == where)
    queries, keys = facts.axes(where)
    weights = np.stack([layer.weights for layer in maps])  # (layers, H, T, S)
    data = {
        "down": queries[: weights.shape[2]],
        "across": keys[: weights.shape[3]],
        "layers": [layer.layer for layer in maps],
        "heads": weights.shape[1],
        "numbers": [head.head for head in heads[: weights.shape[1]]],
        "weights": packed(weights),
        "scale": SCALE,
    }
    values = {"data": data, "description": DESCRIPTIONS[where], "one_text": facts.texts == 1}
    tables: list[doc.DocumentBlock] = [
        measure_table(TITLES[where], name, heads, uniform)
        for name in sorted(MEASURES, key=lambda name: name not in MAIN_MEASURES)
        if uniform.measures[name] is not None
    ]
    blocks = [doc.Html("attention.html", values), doc.Grid(tables, broad=weights.shape[1] > MAX_COLUMNS)]
    return doc.Section(TITLES[where], blocks, where, "attention")


def measure_table(title: str, name: str, heads: list[HeadFacts], uniform: HeadFacts) -> doc.HeatTable:
    """Layers by heads, with the value of a head with uniform weights for comparison."""
    values = [head.measures[name] or 0.0 for head in heads]
    reference = uniform.measures[name] or 0.0
    largest = max([*values, reference]) or 1.0
    rows = [
        (
            f"layer {layer}",
            [
                doc.HeatCell(measure_text(name, value), value / largest)
                for head, value in zip(heads, values, strict=True)
                if head.layer == layer
            ],
        )
        for layer in dict.fromkeys(head.layer for head in heads)
    ]
    columns = [str(number) for number in dict.fromkeys(head.head for head in heads)]
    caption = f"{MEASURES[name]} (uniform weights: {measure_text(name, reference)})"
    return doc.HeatTable(f"{title}, {name}", columns, rows, caption)


def measure_text(name: str, value: float) -> str:
    return f"{100 * value:.0f}%" if name in PERCENTAGES else f"{value:.2f}"


def packed(weights: np.ndarray) -> str:
    """Weights as 16-bit multiples of 1 / SCALE: all low bytes, then all high bytes, deflated, as base64."""
    steps = np.rint(weights * SCALE).astype("<u2")
    low, high = (steps & 255).astype(np.uint8), (steps >> 8).astype(np.uint8)
    return base64.b64encode(zlib.compress(low.tobytes() + high.tobytes(), 9)).decode()


# Pictures


def attention_picture(facts: AttentionFacts) -> str:
    """All heads side by side; a single one with its tokens."""
    sites = list(dict.fromkeys(layer.where for layer in facts.maps))
    if len(sites) > 1:
        raise UserError(f"--out: an .svg holds one kind of attention; choose with --where {' or '.join(sites)}")
    if len(facts.maps) == 1 and len(facts.maps[0].weights) == 1:
        return head_picture(facts, facts.maps[0])
    layers, heads = len(facts.maps), len(facts.maps[0].weights)
    size = max(60, min(130, 900 // heads))

    def paint(figure: Any) -> None:
        for row, layer in zip(figure.subplots(layers, heads, squeeze=False), facts.maps, strict=True):
            for number, (axes, weights) in enumerate(zip(row, layer.weights, strict=True), 1):
                strength = np.sqrt(weights.clip(0, 1))[..., None]
                colours = np.broadcast_to(np.array(BLUE), (*weights.shape, 3))
                axes.imshow(np.concatenate([colours, strength], -1), interpolation="none", aspect="auto")
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_title(f"{layer.layer}.{number}", fontsize=9, color=SOFT, pad=2)

    width, height = size * heads + 20, (size + 14) * layers + 10
    return chart_svg("heads", paint, f"the attention heads of {facts.run}", width, height)


def head_picture(facts: AttentionFacts, layer: LayerWeights) -> str:
    queries, keys = facts.axes(layer.where)
    weights = layer.weights[0]
    (head,) = (head for head in facts.heads if (head.where, head.layer) == (layer.where, layer.layer))
    return heatmap_svg(
        doc.TokenHeatmap(
            f"{facts.run}: {TITLES[layer.where].lower()}, layer {layer.layer}, head {head.head}",
            queries[: len(weights)],
            keys[: weights.shape[1]],
            weights.tolist(),
            lambda row, column: f"{queries[row]} → {keys[column]}: {weights[row, column]:.1%}",
        )
    )
