"""Shows what heads look at: a page on which every head's map can be enlarged and pointed at, or a picture alone.

H heads, T queries, S keys.
"""

import base64
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.errors import UserError
from headstock.explain.attention import MEASURES, AttentionFacts, Head, Map
from headstock.report.heatmap import draw_heatmap
from headstock.report.render import render
from headstock.report.standalone import standalone_svg
from headstock.report.theme import SOFT, Gallery, make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 1000  # a weight is told in so many steps: to a tenth of a percent
MOST = 64  # places that squares with words beside them can show
BLUE = (0.13, 0.52, 0.78)  # seen on light and on dark ground alike
TITLES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
SAYS = {
    "encoder": "Each place looks at every place of the same text, before and after it.",
    "decoder": "Each place looks at itself and at what stands before it.",
    "cross": "Each place of the target looks at the places of the source. It bears the name of the token it reads; the "
    "next one is what it writes.",
}
MAIN = ("entropy", "distance", "first")  # the measures that every reader wants; the others are folded away
SHARES = ("first", "itself", "previous", "next")  # those that are told in percent


def packed(weights: np.ndarray) -> str:
    """Weights in steps of a thousandth, all their low bytes and then all their high ones, deflated: small as text."""
    steps = np.rint(weights * STEPS).astype("<u2")
    low, high = (steps & 255).astype(np.uint8), (steps >> 8).astype(np.uint8)
    return base64.b64encode(zlib.compress(low.tobytes() + high.tobytes(), 9)).decode()


def page(found: AttentionFacts, text: str) -> str:
    places = list(dict.fromkeys(one.where for one in found.maps))
    parts = [part_of(found, where) for where in places]
    data = [part.pop("data") for part in parts]
    return render("headstock.explain", "attention.html", found=found, text=text, parts=parts, data=data, steps=STEPS)


def part_of(found: AttentionFacts, where: str) -> dict[str, Any]:
    """One section of the page: its maps, and a table of every measure."""
    maps = [one for one in found.maps if one.where == where]
    heads = [head for head in found.heads if head.where == where]
    (even,) = (head for head in found.even if head.where == where)
    down, across = found.axes(where)
    weights = np.stack([one.weights for one in maps])  # (layers, H, T, S)
    layers = [one.layer for one in maps]
    data = {
        "down": down[: weights.shape[2]],
        "across": across[: weights.shape[3]],
        "layers": layers,
        "heads": weights.shape[1],
        "numbers": [head.head for head in heads[: weights.shape[1]]],
        "weights": packed(weights),
    }
    tables = [table_of(name, heads, even, layers) for name in MEASURES if even.measures[name] is not None]
    known = {"where": where, "title": TITLES[where], "says": SAYS[where], "layers": layers, "data": data}
    return known | {
        "heads": weights.shape[1],
        "tables": [table for table in tables if table["name"] in MAIN],
        "more": [table for table in tables if table["name"] not in MAIN],
    }


def table_of(name: str, heads: list[Head], even: Head, layers: list[int]) -> dict[str, Any]:
    """Layers down, heads across: one measure, with what an even head would come to."""
    values = {(head.layer, head.head): head.measures[name] or 0.0 for head in heads}
    most = max([*values.values(), even.measures[name] or 0.0]) or 1.0
    rows = [
        (layer, [(value, told(name, value), value / most) for (at, _), value in values.items() if at == layer])
        for layer in layers
    ]
    return {"name": name, "means": MEASURES[name], "rows": rows, "even": told(name, even.measures[name] or 0.0)}


def told(name: str, value: float) -> str:
    return f"{100 * value:.0f}%" if name in SHARES else f"{value:.2f}"


# A picture by itself


def picture(found: AttentionFacts) -> str:
    """All heads side by side; a single one with its words."""
    if len({one.where for one in found.maps}) > 1:
        raise UserError("--out: an .svg holds one kind of attention; choose with --where encoder, decoder or cross")
    if len(found.maps) == 1 and len(found.maps[0].weights) == 1:
        return one_head(found, found.maps[0])
    return standalone_svg(Gallery().embed("heads", all_heads(found.maps), f"the heads of {found.run}"))


def one_head(found: AttentionFacts, shown: Map) -> str:
    down, across = found.axes(shown.where)
    weights = shown.weights[0]
    if max(weights.shape) > MOST:
        raise UserError(f"--out: a text of {max(weights.shape)} tokens is too long to make_figure, {MOST} are the most")

    def told(row: int, column: int) -> str:
        return f"{down[row]} → {across[column]}: {weights[row, column]:.1%}"

    (head,) = (one for one in found.heads if (one.where, one.layer) == (shown.where, shown.layer))
    title = f"{found.run}: {TITLES[shown.where].lower()}, layer {shown.layer}, head {head.head}"
    return draw_heatmap(down[: len(weights)], across[: weights.shape[1]], weights.tolist(), title=title, tooltip=told)


def all_heads(maps: list[Map]) -> "Figure":
    layers, heads = len(maps), len(maps[0].weights)
    size = max(60, min(130, 900 // heads))

    def paint(figure: Any) -> None:
        panels = figure.subplots(layers, heads, squeeze=False)
        for row, one in zip(panels, maps, strict=True):
            for number, (axes, weights) in enumerate(zip(row, one.weights, strict=True), 1):
                strength = np.sqrt(weights.clip(0, 1))[..., None]
                colours = np.broadcast_to(np.array(BLUE), (*weights.shape, 3))
                axes.imshow(np.concatenate([colours, strength], -1), interpolation="none", aspect="auto")
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_title(f"{one.layer}.{number}", fontsize=9, color=SOFT, pad=2)

    return make_figure(paint, size * heads + 20, (size + 14) * layers + 10)
