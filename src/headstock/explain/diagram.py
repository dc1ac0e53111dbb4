"""The architecture of a model as a diagram: the modules a text passes through, with shapes and parameter counts."""

from dataclasses import dataclass
from typing import Any

from headstock.cost.model import model_dimensions
from headstock.explain import document as doc
from headstock.explain.parameters import ParameterFacts
from headstock.explain.parameters_document import module_table
from headstock.explain.subject import ExplainSubject
from headstock.explain.svg import GAP, SKIP, WIDTH, Box, Diagram
from headstock.explain.symbols import formula, in_text
from headstock.model.backbones.elmo import Elmo
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.recurrent import Recurrent
from headstock.model.backbones.transformer import Transformer
from headstock.tasks.base import TASKS

RIGHT = WIDTH / 2 + 16  # from the centre of a column to the frame around repeated layers
LEFT = WIDTH / 2 + SKIP + 14
HEADS = {
    "token": ("Language model head", "a logit for every vocabulary entry", "(B, T, V)"),
    "next": ("Next-sentence head", "does the second text follow the first?", "(B, 2)"),
    "label": ("Classification head", "a logit for every class", "(B, C)"),
    "tag": ("Tagging head", "a logit for every tag", "(B, T, C)"),
    "span": ("Question-answering head", "start and end of the answer", "(B, T, 2)"),
}
POSITIONS = {"sinusoidal": "sinusoidal, fixed", "learned": "learned"}
NORMS = {"layer": "Layer norm", "rms": "RMS norm"}
ACTIVATIONS = {"relu": "ReLU", "gelu": "GELU", "gelu_tanh": "GELU", "silu": "SiLU", "swiglu": "SwiGLU"}
MASKS: dict[tuple[str, ...], str] = {
    ("causal",): "causal",
    ("full",): "bidirectional",
    ("causal", "full"): "causal or bidirectional, row by row",
}


@dataclass
class ModelDiagram:
    """Draws one model; `path` is always that of a module, (x, y) the centre of a column and its current height."""

    subject: ExplainSubject
    params: ParameterFacts

    def __post_init__(self) -> None:
        self.config = self.subject.model.backbone.config
        self.modules = {module.path: module for module in self.params.modules}
        self.diagram = Diagram()

    def draw(self) -> Diagram:
        backbone = self.subject.model.backbone
        if isinstance(backbone, EncoderDecoder):
            self.draw_encoder_decoder()
        elif isinstance(backbone, Elmo):
            self.draw_elmo()
        elif not isinstance(backbone, Transformer | Recurrent):
            self.draw_heads(0, self.draw_other(0, 0), 0)
        else:
            y, table = self.draw_embedding(0, 0, "backbone")
            if hasattr(self.config, "cell"):
                y = self.draw_cells(0, y, "backbone.stack", "left to right")
            else:
                y, _ = self.draw_blocks(0, y, "backbone", self.masks())
            self.draw_heads(0, y, table)
        title = f"{self.subject.name}: {self.params.total:,} parameters"
        self.diagram.text(self.diagram.left, self.diagram.top - 26, title, "title")
        self.diagram.include(self.diagram.left, self.diagram.top - 42)
        return self.diagram

    def masks(self) -> tuple[str, ...]:
        if TASKS.get(self.subject.config.objective).mixes_masks:
            return ("causal", "full")
        return ("causal",) if self.subject.model.backbone.causal else ("full",)

    def box(self, name: str, kind: str, path: str, *lines: str, masks: tuple[str, ...] = ()) -> Box:
        """A module with its parameter count, where it has parameters."""
        module = self.modules.get(path)
        count, form = ("", "") if module is None else (f"{module.value:,}", in_text(module.formula))
        return Box(name, kind, count, form, lines, masks)

    def norm(self, path: str) -> Box:
        return self.box(NORMS[self.config.norm_kind], "norm", path)

    def arrow(self, x: float, y: float, shape: str = "", *, length: float = GAP, tip: bool = True) -> float:
        self.diagram.line((x, y), (x, y - length), tip=tip)
        self.diagram.text(x + 10, y - length + 14, shape, "shape")
        return y - length

    # A column, from the bottom up

    def draw_embedding(
        self, x: float, y: float, path: str, *, table: str = "", tokens: str = "tokens"
    ) -> tuple[float, float]:
        """Token embedding and what is added to it; returns the next y, and the y of the table that a head may share."""
        config, diagram = self.config, self.diagram
        shape = "(B, S" if tokens == "source" else "(B, T"
        diagram.text(x, y, tokens, "name", "middle")
        diagram.include(x, y + 4)
        low = self.arrow(x, y - 14, f"{shape})")
        scaled = "row lookup, scaled by √D" if getattr(config, "embed_scale", False) else "row lookup"
        y = diagram.box(x, low, self.box("Token embedding", "embedding", table or f"{path}.tokens", scaled))
        middle = (low + y) / 2
        added = []
        if getattr(config, "positions", None) in POSITIONS:
            added.append(("Positions", POSITIONS[config.positions], f"{path}.positions"))
        if getattr(config, "segments", 0):
            added.append(("Segments", "learned", f"{path}.segments"))
        for number, (name, description, module) in enumerate(added):
            y = self.draw_added(x, y, name, description, module, room=22 if number else 16)
        if getattr(config, "embed_norm", False):
            y = diagram.box(x, self.arrow(x, y, length=GAP + (10 if added else 0)), self.norm(f"{path}.embed_norm"))
            added = []
        return self.arrow(x, y, f"{shape}, D)", length=GAP + (18 if added else 6), tip=False), middle

    def draw_added(self, x: float, y: float, name: str, description: str, path: str, *, room: float) -> float:
        """A term that is added from the side; returns the y above the sum."""
        module, width = self.modules.get(path), WIDTH / 2 - 28
        text = description if module is None else f"{in_text(module.formula)} = {module.value:,}"
        box, middle = Box(name, "plain" if module is None else "embedding", lines=(text,)), x + 28 + width / 2
        height = y - room - box.height / 2
        self.diagram.line((x, y), (x, height + 10))
        self.diagram.box(middle, height + box.height / 2, box, width)
        self.diagram.line((middle - width / 2, height), (x + 10, height))
        self.diagram.plus(x, height)
        return height - 10

    def draw_blocks(
        self, x: float, y: float, stack: str, masks: tuple[str, ...], *, cross: bool = False
    ) -> tuple[float, float]:
        """The layers and the final norm; returns the next y, and the y of cross-attention."""
        config, low, path, cross_y = self.config, y, f"{stack}.blocks.*", 0.0
        heads = f"{config.heads} {'heads' if config.heads > 1 else 'head'} of width {config.width // config.heads}"
        options = {
            "rotary position embeddings": config.positions == "rotary",
            "queries and keys normalized in each head": config.qk_norm,
        }
        lines = (heads, MASKS[masks], *(text for text, used in options.items() if used))
        box = self.box("Self-attention", "attention", f"{path}.attention", *lines, masks=masks)
        y, _ = self.draw_residual(x, y, box, f"{path}.around_attention")
        if cross:
            lines = (heads, "queries from the decoder,", "keys and values from the encoder")
            box = self.box("Cross-attention", "cross", f"{path}.cross", *lines)
            y, cross_y = self.draw_residual(x, y, box, f"{path}.around_cross")
        widths = f"{config.width} → {config.hidden} → {config.width}, {ACTIVATIONS[config.activation]}"
        box = self.box("Feed-forward", "feed", f"{path}.feed", widths)
        y, _ = self.draw_residual(x, y, box, f"{path}.around_feed")
        y = self.close_frame(x, low, y, path)
        if config.norm == "pre":
            y = self.diagram.box(x, self.arrow(x, y), self.norm(f"{stack}.final_norm"))
        return y, cross_y

    def close_frame(self, x: float, low: float, y: float, path: str) -> float:
        """The frame around repeated layers."""
        self.diagram.line((x, y), (x, y - 28), tip=False)
        self.diagram.frame(x, low, y - 28, f"× {self.modules[path].times}", left=LEFT, right=RIGHT)
        return y - 28

    def draw_residual(self, x: float, y: float, sublayer: Box, path: str) -> tuple[float, float]:
        """A sublayer with its skip connection and norm; returns the next y, and the y of the sublayer's centre."""
        diagram, pre = self.diagram, self.config.norm == "pre"
        norm, start, skip_x = self.norm(f"{path}.norm"), y - 14, x - WIDTH / 2 - SKIP + 8
        diagram.dot(x, start)
        y = self.arrow(x, y, length=GAP + 8)
        if pre:
            y = self.arrow(x, diagram.box(x, y, norm), length=GAP - 6)
        top = diagram.box(x, y, sublayer)
        middle = (top + y) / 2
        y = self.arrow(x, top, length=GAP - 8) - 10
        diagram.line((x, start), (skip_x, start), (skip_x, y), (x - 10, y))
        diagram.plus(x, y)
        y -= 10
        return (y if pre else diagram.box(x, self.arrow(x, y, length=GAP - 6), norm)), middle

    def draw_heads(self, x: float, y: float, table: float, *, width: str = "D", side: float = RIGHT + 16) -> None:
        """The heads side by side; a tied one is joined to the embedding at height `table`."""
        model, diagram, low = self.subject.model, self.diagram, y
        y = self.arrow(x, low, length=GAP + 8)
        label_x, anchor = (x - 10, "end") if len(model.heads) > 1 else (x + 10, "start")
        diagram.text(label_x, low - GAP / 2, f"(B, T, {width})", "shape", anchor)
        for number, name in enumerate(model.heads):
            centre = x + number * (WIDTH + 90)
            if number:
                diagram.line((x, low - 14), (centre, low - 14), (centre, y))
                diagram.dot(x, low - 14)
            title, description, shape = HEADS.get(name, (name, "", ""))
            box = self.box(title, "head", f"heads.{name}", description, *self.head_details(name))
            if box.formula:  # on a line of its own: formulas of heads may be long
                box.lines = (*box.lines, f"{box.formula} = {box.count}")
                box.formula = box.count = ""
            if name == "token" and getattr(model.backbone.config, "tied", False) and table:
                box.lines = (*box.lines, "tied to the token embedding")
                points = ((x + WIDTH / 2, table), (x + side, table), (x + side, y - 16), (x + WIDTH / 2, y - 16))
                diagram.line(*points, tip=False, kind="tied")
            top = diagram.box(centre, y, box)
            diagram.line((centre, top), (centre, top - GAP))
            twice = name == "token" and model.backbone.bidirectional
            diagram.text(centre + 10, top - GAP + 8, f"{shape} twice" if twice else shape, "shape")

    def head_details(self, name: str) -> list[str]:
        head, pool = self.subject.model.heads[name], getattr(self.subject.config.task, "pool", None)
        details = {
            "after one more layer and a norm": getattr(head, "transform", None) is not None,
            "on a learned mix of all layers": getattr(head, "mix", None) is not None,
            f"pooling: {pool}": name == "label" and pool,
            "once per direction": name == "token" and self.subject.model.backbone.bidirectional,
        }
        return [text for text, used in details.items() if used]

    # Families with two stacks, and recurrent ones

    def draw_encoder_decoder(self) -> None:
        """Two columns; the encoder's output goes to every layer of the decoder."""
        backbone, diagram, distance = self.subject.model.backbone, self.diagram, LEFT + RIGHT + 76
        shared = backbone.encoder.tokens is backbone.tokens  # type: ignore[union-attr]
        path = "backbone.tokens" if shared else "backbone.encoder.tokens"
        y, source = self.draw_embedding(0, 0, "backbone.encoder", table=path, tokens="source")
        top, _ = self.draw_blocks(0, y, "backbone.encoder", ("full",))
        y, target = self.draw_embedding(
            distance, 0, "backbone.decoder", table="backbone.tokens", tokens="target so far"
        )
        if shared:
            diagram.line((WIDTH / 2, source), (distance - WIDTH / 2, target), tip=False, kind="tied")
            diagram.text(distance / 2, source - 7, "shared", "soft", "middle")
        y, cross_y = self.draw_blocks(distance, y, "backbone.decoder", ("causal",), cross=True)
        between = RIGHT + (distance - LEFT - RIGHT) / 2
        diagram.line((0, top), (0, top - 26), (between, top - 26), (between, cross_y), (distance - WIDTH / 2, cross_y))
        diagram.text(10, top - 34, "(B, S, D)", "shape")
        self.draw_heads(distance, y, target)

    def draw_cells(self, x: float, y: float, stack: str, direction: str) -> float:
        """Recurrent layers; each step also receives the state of the step before."""
        config, low, path = self.config, y, f"{stack}.layers.*"
        kind, state = {"lstm": ("LSTM", "hidden and cell state"), "gru": ("GRU", "hidden state")}[config.cell]
        y = self.arrow(x, y)
        box = self.box(f"{kind}, {config.hidden} units", "cells", f"{path}.cells", direction, f"recurrent: {state}")
        top = self.diagram.box(x, y, box)
        loop_x, edge = x - WIDTH / 2 - SKIP + 10, x - WIDTH / 2
        self.diagram.line((edge, top + 13), (loop_x, top + 13), (loop_x, y - 13), (edge, y - 13))
        y = top
        if f"{path}.project" in self.modules:
            projection = self.box("Output projection", "plain", f"{path}.project")
            y = self.diagram.box(x, self.arrow(x, y, "(B, T, H)", length=GAP + 4), projection)
        return self.close_frame(x, low, y, path)

    def draw_other(self, x: float, y: float) -> float:
        """A family without a diagram of its own: one box that lists its modules."""
        children = [module for path, module in self.modules.items() if path.count(".") == 1 and not module.tensor]
        lines = [f"{module.path.removeprefix('backbone.')}: {module.value:,}" for module in children]
        self.diagram.text(x, y, "tokens", "name", "middle")
        self.diagram.include(x, y + 4)
        box = self.box(f"{self.subject.config.family.capitalize()} backbone", "cells", "backbone", *lines)
        return self.diagram.box(x, self.arrow(x, y - 14, "(B, T)"), box)

    def draw_elmo(self) -> None:
        """One embedding, a forward and a backward stack, and their concatenation."""
        diagram, distance = self.diagram, (LEFT + RIGHT + 24) / 2
        y, table = self.draw_embedding(0, 0, "backbone")
        tops = []
        for x, stack, direction in ((-distance, "ahead", "left to right"), (distance, "back", "right to left")):
            diagram.line((0, y), (x, y), (x, y - 14), tip=False)
            tops.append(self.draw_cells(x, y - 14, f"backbone.{stack}", direction))
        diagram.dot(0, y)
        top = min(tops) - GAP - 12
        for x in (-distance, distance):
            diagram.line((x, tops[0]), (x, top + 14), (x / 3, top + 14), (x / 3, top))
            diagram.text(x + 10, tops[0] - 8, "(B, T, D)", "shape")
        both = Box("Concatenation", "plain", lines=("the states of both directions at each token",))
        self.draw_heads(0, diagram.box(0, top, both), table, width="2D", side=distance + RIGHT + 16)


def shape_symbols(subject: ExplainSubject) -> dict[str, str]:
    """The meaning of the symbols in shapes, in the order in which they appear."""
    backbone = subject.model.backbone
    config = backbone.config
    limit = f", at most {backbone.context:,}" if backbone.context else ""
    meanings = {"B": "rows per batch", "T": f"tokens per row{limit}"}
    if backbone.is_encoder_decoder:
        meanings |= {"T": f"target tokens{limit}", "S": f"source tokens{limit}"}
    width = getattr(config, "width", backbone.width)
    meanings["D"] = f"width: {width:,}" + (" per direction" if backbone.bidirectional else "")
    if hasattr(config, "cell"):
        meanings["H"] = f"recurrent units: {config.hidden:,}"
    elif getattr(config, "hidden", width) != width:
        meanings["F"] = f"feed-forward width: {config.hidden:,}"
    if hasattr(config, "vocabulary"):
        meanings["V"] = f"vocabulary size: {config.vocabulary:,}"
    if getattr(config, "source_vocabulary", None):
        meanings["Vₛ"] = f"source vocabulary size: {config.source_vocabulary:,}"
    if getattr(config, "segments", 0):
        meanings["G"] = f"segments: {config.segments}"
    if getattr(config, "qk_norm", False):
        meanings["A"] = f"attention heads: {config.heads}"
    if any("C" in HEADS[name][2] for name in subject.model.heads if name in HEADS):
        meanings["C"] = f"classes: {model_dimensions(subject.model).classes:,}"
    return meanings


def model_svg(subject: ExplainSubject, params: ParameterFacts, *, page: bool = False) -> str:
    label = f"{subject.name}, from its tokens at the bottom to its heads at the top; {params.total:,} parameters"
    return ModelDiagram(subject, params).draw().svg(label, page=page)


def model_document(subject: ExplainSubject, params: ParameterFacts) -> doc.ExplainDocument:
    symbols = shape_symbols(subject)
    introduction = (
        "A text enters at the bottom. Each module shows its parameter count beside the formula; framed modules are "
        "repeated, each layer with parameters of its own. A circle with a plus is a residual sum."
    )
    return doc.ExplainDocument(
        subject="architecture",
        title=f"{params.name}: {params.total:,} parameters",
        summary=f"family {params.family} · {params.base:,} in the backbone",
        page_title=f"Architecture of {params.name}",
        sections=[
            doc.Section(
                "",
                [
                    *doc.notes(params.notes),
                    doc.Text(introduction, only="page"),
                    doc.Svg(lambda: model_svg(subject, params, page=True)),
                    doc.Table("Symbols", {"symbol": "text", "meaning": "text"}, list(symbols.items()), only="page"),
                ],
            ),
            doc.Section("Modules", [module_table(params, tensors=False)]),
        ],
        json=model_json(subject, params, symbols),
        picture=lambda: model_svg(subject, params),
        style_sheet="diagram.css",
    )


def model_json(subject: ExplainSubject, params: ParameterFacts, symbols: dict[str, str]) -> dict[str, Any]:
    return {
        "name": subject.name,
        "family": subject.config.family,
        "total": params.total,
        "base": params.base,
        "heads": {name: params.heads[name] for name in subject.model.heads},
        "parts": [
            {"part": module.path, "count": module.count, "times": module.times, "formula": formula(module.formula)}
            for module in params.modules
            if not module.tensor
        ],
        "shapes": symbols,
    }
