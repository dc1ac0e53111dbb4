"""The architecture of a model as a diagram: the modules a text passes through, with shapes and parameter counts."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from headstock.cost.model import model_dimensions
from headstock.explain import document as doc
from headstock.explain.parameters import ModuleCount, ParameterFacts
from headstock.explain.parameters_document import module_table
from headstock.explain.subject import ExplainSubject
from headstock.explain.svg import GAP, SKIP, WIDTH, Box, Diagram
from headstock.explain.symbols import formula, in_text
from headstock.model.backbones.bidirectional_transformer import BidirectionalTransformer
from headstock.model.backbones.elmo import Elmo
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.ngram import NGram
from headstock.model.backbones.recurrent import Recurrent
from headstock.model.backbones.recurrent_encoder_decoder import RecurrentEncoderDecoder
from headstock.model.backbones.transformer import Transformer
from headstock.tasks.base import TASKS

RIGHT = WIDTH / 2 + 16  # from the centre of a column to the frame around repeated layers
LEFT = WIDTH / 2 + SKIP + 14
BESIDE = (LEFT + RIGHT + 24) / 2  # from the middle of two columns to the centre of each
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
ACTIVATIONS |= {"geglu": "GEGLU"}
MASKS: dict[tuple[str, ...], str] = {
    ("causal",): "causal",
    ("full",): "bidirectional",
    ("causal", "full"): "causal or bidirectional, row by row",
    ("backward",): "causal from right to left",
}
CELLS = {
    "lstm": ("LSTM", "hidden and cell state"),
    "gru": ("GRU", "hidden state"),
    "rnn": ("Plain recurrence (tanh)", "hidden state"),
}


class ModelDiagram(Diagram):
    """Draws one model from the bottom up: `x` is the centre of the current column, `y` its current height."""

    def __init__(self, subject: ExplainSubject, params: ParameterFacts):
        super().__init__()
        self.subject, self.params = subject, params
        self.config = subject.model.backbone.config
        self.modules = {module.path: module for module in params.modules}
        self.x = self.y = 0.0

    def draw(self) -> "ModelDiagram":
        backbone = self.subject.model.backbone
        families: dict[type, Callable[[], None]] = {
            EncoderDecoder: self.draw_encoder_decoder,
            RecurrentEncoderDecoder: self.draw_recurrent_encoder_decoder,
            Elmo: self.draw_elmo,
            BidirectionalTransformer: self.draw_bidirectional_transformer,
            NGram: self.draw_ngram,
        }
        if draw_family := families.get(type(backbone)):
            draw_family()
        elif not isinstance(backbone, Transformer | Recurrent):
            self.draw_other()
        else:
            table = self.draw_embedding("backbone")
            if hasattr(self.config, "cell"):
                self.draw_cells("backbone.stack", "left to right")
            else:
                self.draw_blocks("backbone", self.masks())
            self.draw_heads(table)
        self.text(self.left, self.top - 26, f"{self.subject.name}: {self.params.total:,} parameters", "title")
        self.include(self.left, self.top - 42)
        return self

    def masks(self) -> tuple[str, ...]:
        task = TASKS.get(self.subject.config.objective)
        if task.generates and task.fills_masks:
            return ("causal", "full")
        return ("causal",) if self.subject.model.backbone.causal else ("full",)

    def module_box(self, name: str, kind: str, path: str, *lines: str, masks: tuple[str, ...] = ()) -> Box:
        """A module with its parameter count, where it has parameters."""
        module = self.module(path)
        count = "" if module is None else f"{module.value:,}"
        form = "" if module is None or not has_symbols(module) else in_text(module.formula)
        return Box(name, kind, count, form, lines, masks)

    def module(self, path: str) -> ModuleCount | None:
        """A module; where a family has no closed form, equal layers are not merged, and the first stands for all."""
        return self.modules.get(path) or self.modules.get(path.replace("*", "0"))

    # A column, from the bottom up

    def arrow(self, shape: str = "", *, length: float = GAP, tip: bool = True) -> None:
        self.line((self.x, self.y), (self.x, self.y - length), tip=tip)
        self.y -= length
        self.text(self.x + 10, self.y + 14, shape, "shape")

    def place(self, box: Box) -> float:
        """Put a box on top of the column; returns the y of its centre."""
        low, self.y = self.y, self.box(self.x, self.y, box)
        return (low + self.y) / 2

    def place_norm(self, path: str, *, length: float = GAP) -> None:
        """An arrow of some length to a norm."""
        self.arrow(length=length)
        self.place(self.module_box(NORMS[self.config.norm_kind], "norm", path))

    def draw_tokens(self, name: str, shape: str) -> None:
        self.text(self.x, self.y, name, "name", "middle")
        self.include(self.x, self.y + 4)
        self.y -= 14
        self.arrow(shape)

    def draw_embedding(self, path: str, *, table: str = "", tokens: str = "tokens") -> float:
        """Token embedding and what is added to it; returns the y of the table, which a head may share."""
        shape = "(B, S" if tokens == "source" else "(B, T"
        table_y = self.draw_table(table or f"{path}.tokens", tokens, f"{shape})")
        self.draw_summands(path, f"{shape}, D)")
        return table_y

    def draw_table(self, path: str, tokens: str, shape: str) -> float:
        """The tokens and their embedding; returns its y."""
        self.draw_tokens(tokens, shape)
        scaled = "row lookup, scaled by √D" if getattr(self.config, "embed_scale", False) else "row lookup"
        return self.place(self.module_box("Token embedding", "embedding", path, scaled))

    def draw_summands(self, path: str, shape: str) -> None:
        """Positions and segments, as far as there are any, and a norm."""
        config, added = self.config, []
        if getattr(config, "positions", None) in POSITIONS:
            added.append(("Positions", POSITIONS[config.positions], f"{path}.positions"))
        if getattr(config, "segments", 0):
            added.append(("Segments", "learned", f"{path}.segments"))
        for number, (name, description, module) in enumerate(added):
            self.draw_added(name, description, module, gap=22 if number else 16)
        if getattr(config, "embed_norm", False):
            self.place_norm(f"{path}.embed_norm", length=GAP + (10 if added else 0))
            added = []
        self.arrow(shape, length=GAP + (18 if added else 6), tip=False)

    def draw_added(self, name: str, description: str, path: str, *, gap: float) -> None:
        """A term that is added from the side."""
        module, width = self.module(path), WIDTH / 2 - 28
        text = description
        if module is not None:
            form = f"{in_text(module.formula)} = " if has_symbols(module) else ""
            text = f"{form}{module.value:,}"
        box, centre = Box(name, "plain" if module is None else "embedding", lines=(text,)), self.x + 28 + width / 2
        y = self.y - gap - box.height / 2
        self.line((self.x, self.y), (self.x, y + 10))
        self.box(centre, y + box.height / 2, box, width)
        self.line((centre - width / 2, y), (self.x + 10, y))
        self.plus(self.x, y)
        self.y = y - 10

    def draw_blocks(self, stack: str, masks: tuple[str, ...], *, cross: bool = False) -> float:
        """The layers and the final norm; returns the y of cross-attention."""
        config, low, path, cross_y = self.config, self.y, f"{stack}.blocks.*", 0.0
        heads = f"{config.heads} {'heads' if config.heads > 1 else 'head'} of width {config.width // config.heads}"
        options = {
            "rotary position embeddings": config.positions == "rotary",
            "a learned bias for each distance": config.positions == "relative",
            "queries and keys normalized in each head": config.qk_norm,
        }
        lines = (heads, MASKS[masks], *(text for text, used in options.items() if used))
        box = self.module_box("Self-attention", "attention", f"{path}.attention", *lines, masks=masks)
        self.draw_residual(box, f"{path}.around_attention")
        if cross:
            lines = (heads, "queries from the decoder,", "keys and values from the encoder")
            box = self.module_box("Cross-attention", "cross", f"{path}.cross", *lines)
            cross_y = self.draw_residual(box, f"{path}.around_cross")
        widths = f"{config.width} → {config.hidden} → {config.width}, {ACTIVATIONS[config.activation]}"
        widths += " at the end" if config.feed_activation == "outer" else ""
        self.draw_residual(self.module_box("Feed-forward", "feed", f"{path}.feed", widths), f"{path}.around_feed")
        self.close_frame(low, path)
        if config.norm == "pre":
            self.place_norm(f"{stack}.final_norm")
        return cross_y

    def close_frame(self, low: float, path: str) -> None:
        """The frame around repeated layers."""
        self.arrow(length=28, tip=False)
        merged = self.modules.get(path)
        times = merged.times if merged else sum(fullmatch(path, other) for other in self.modules)
        self.frame(self.x, low, self.y, f"× {times}", left=LEFT, right=RIGHT)

    def draw_residual(self, sublayer: Box, path: str) -> float:
        """A sublayer with its skip connection and norm; returns the y of the sublayer's centre."""
        x, start, skip_x = self.x, self.y - 14, self.x - WIDTH / 2 - SKIP + 8
        if self.config.norm == "pre":
            self.place_norm(f"{path}.norm", length=GAP + 8)
            self.arrow(length=GAP - 6)
        else:
            self.arrow(length=GAP + 8)
        middle = self.place(sublayer)
        if self.config.residual:
            self.dot(x, start)
            self.arrow(length=GAP - 8)
            self.y -= 10
            self.line((x, start), (skip_x, start), (skip_x, self.y), (x - 10, self.y))
            self.plus(x, self.y)
            self.y -= 10
        if self.config.norm == "post":
            self.place_norm(f"{path}.norm", length=GAP - 6)
        return middle

    def draw_heads(self, table_y: float, *, width: str = "D", side: float = RIGHT + 16) -> None:
        """The heads side by side; a tied one is joined to the embedding at height `table_y`."""
        model, x, low = self.subject.model, self.x, self.y
        self.arrow(length=GAP + 8)
        label_x, anchor = (x - 10, "end") if len(model.heads) > 1 else (x + 10, "start")
        self.text(label_x, low - GAP / 2, f"(B, T, {width})", "shape", anchor)
        for number, name in enumerate(model.heads):
            centre = x + number * (WIDTH + 90)
            if number:
                self.line((x, low - 14), (centre, low - 14), (centre, self.y))
                self.dot(x, low - 14)
            title, description, shape = HEADS.get(name, (name, "", ""))
            box = self.module_box(title, "head", f"heads.{name}", description, *self.head_details(name))
            if box.formula:  # on a line of its own: formulas of heads may be long
                box.lines = (*box.lines, f"{box.formula} = {box.count}")
                box.formula = box.count = ""
            if name == "token" and getattr(model.backbone.config, "tied", False) and table_y:
                box.lines = (*box.lines, "tied to the token embedding")
                edge, y = x + WIDTH / 2, self.y - 16
                self.line((edge, table_y), (x + side, table_y), (x + side, y), (edge, y), tip=False, kind="tied")
            top = self.box(centre, self.y, box)
            self.line((centre, top), (centre, top - GAP))
            twice = name == "token" and model.backbone.is_bilm
            self.text(centre + 10, top - GAP + 8, f"{shape} twice" if twice else shape, "shape")

    def head_details(self, name: str) -> list[str]:
        head, pool = self.subject.model.heads[name], getattr(self.subject.config.task, "pool", None)
        details = {
            "after one more layer and a norm": getattr(head, "transform", None) is not None,
            "on a learned mix of all layers": getattr(head, "mix", None) is not None,
            f"pooling: {pool}": name == "label" and pool,
            "once per direction": name == "token" and self.subject.model.backbone.is_bilm,
        }
        return [text for text, used in details.items() if used]

    # Families with two stacks, and recurrent ones

    def draw_encoder_decoder(self) -> None:
        """Two columns; the encoder's output goes to every layer of the decoder."""
        backbone, distance = self.subject.model.backbone, LEFT + RIGHT + 76
        shared = backbone.encoder.tokens is backbone.tokens  # type: ignore[union-attr]
        path = "backbone.tokens" if shared else "backbone.encoder.tokens"
        source_y = self.draw_embedding("backbone.encoder", table=path, tokens="source")
        self.draw_blocks("backbone.encoder", ("full",))
        top, self.x, self.y = self.y, distance, 0.0
        target_y = self.draw_embedding("backbone.decoder", table="backbone.tokens", tokens="target so far")
        if shared:
            self.line((WIDTH / 2, source_y), (distance - WIDTH / 2, target_y), tip=False, kind="tied")
            self.text(distance / 2, source_y - 7, "shared", "soft", "middle")
        cross_y = self.draw_blocks("backbone.decoder", ("causal",), cross=True)
        between = RIGHT + (distance - LEFT - RIGHT) / 2
        self.line((0, top), (0, top - 26), (between, top - 26), (between, cross_y), (distance - WIDTH / 2, cross_y))
        self.text(10, top - 34, "(B, S, D)", "shape")
        self.draw_heads(target_y)

    def draw_cells(self, stack: str, direction: str, *, tokens: str = "T") -> None:
        """Recurrent layers; each step also receives the state of the step before."""
        config, low, path = self.config, self.y, f"{stack}.layers.*"
        kind, state = CELLS[config.cell]
        lines = (direction, f"recurrent: {state}")
        self.arrow()
        bottom, edge = self.y - 13, self.x - WIDTH / 2
        self.place(self.module_box(f"{kind}, {config.hidden} units", "cells", f"{path}.cells", *lines))
        loop_x, top = edge - SKIP + 10, self.y + 13
        self.line((edge, top), (loop_x, top), (loop_x, bottom), (edge, bottom))
        if self.module(f"{path}.project") is not None:
            self.arrow(f"(B, {tokens}, H)", length=GAP + 4)
            self.place(self.module_box("Output projection", "plain", f"{path}.project"))
        self.close_frame(low, path)

    def draw_other(self) -> None:
        """A family without a diagram of its own: one box that lists its modules."""
        children = [module for path, module in self.modules.items() if path.count(".") == 1 and not module.tensor]
        lines = [f"{module.path.removeprefix('backbone.')}: {module.value:,}" for module in children]
        self.draw_tokens("tokens", "(B, T)")
        self.place(self.module_box(f"{self.subject.config.family.capitalize()} backbone", "cells", "backbone", *lines))
        self.draw_heads(0)

    def draw_directions(self, draw: Callable[[str, str], None], stacks: dict[str, str], shape: str) -> None:
        """A stack that reads forward beside one that reads backward, and the concatenation of what they return."""
        y, tops = self.y, []
        for x, (stack, direction) in zip((-BESIDE, BESIDE), stacks.items(), strict=True):
            self.line((0, y), (x, y), (x, y - 14), tip=False)
            self.x, self.y = x, y - 14
            draw(stack, direction)
            tops.append(self.y)
        self.dot(0, y)
        self.x, self.y = 0.0, min(tops) - GAP - 12
        for x in (-BESIDE, BESIDE):
            self.line((x, tops[0]), (x, self.y + 14), (x / 3, self.y + 14), (x / 3, self.y))
            self.text(x + 10, tops[0] - 8, shape, "shape")
        self.place(Box("Concatenation", "plain", lines=("the states of both directions at each token",)))

    def draw_elmo(self) -> None:
        """One embedding, a forward and a backward stack of cells."""
        table_y = self.draw_embedding("backbone")
        stacks = {"backbone.ahead": "left to right", "backbone.back": "right to left"}
        self.draw_directions(self.draw_cells, stacks, "(B, T, D)")
        self.draw_heads(table_y, width="2D", side=BESIDE + RIGHT + 16)

    def draw_bidirectional_transformer(self) -> None:
        """One embedding, and a causal Transformer in each direction, with positions of its own."""

        def draw(stack: str, mask: str) -> None:
            self.draw_summands(stack, "(B, T, D)")
            self.draw_blocks(stack, (mask,))

        table_y = self.draw_table("backbone.forwards.tokens", "tokens", "(B, T)")
        self.arrow("(B, T, D)", length=GAP + 6, tip=False)
        self.draw_directions(draw, {"backbone.forwards": "causal", "backbone.backwards": "backward"}, "(B, T, D)")
        self.draw_heads(table_y, width="2D", side=BESIDE + RIGHT + 16)

    def draw_recurrent_encoder_decoder(self) -> None:
        """A bidirectional encoder, a decoder beside it, and attention of the decoder's output over the source."""
        backbone, distance = self.subject.model.backbone, BESIDE + LEFT + RIGHT + 76
        shared = backbone.source_tokens is backbone.tokens
        table = "backbone.tokens" if shared else "backbone.source_tokens"
        source_y = self.draw_embedding("backbone", table=table, tokens="source")
        stacks = {"backbone.forwards": "left to right", "backbone.backwards": "right to left"}
        self.draw_directions(partial(self.draw_cells, tokens="S"), stacks, "(B, S, D)")
        self.arrow("(B, S, 2D)", length=GAP + 4)
        self.place(self.module_box("Projection of both directions", "plain", "backbone.join"))
        top, self.x, self.y = self.y, distance, 0.0
        target_y = self.draw_embedding("backbone", table="backbone.tokens", tokens="target so far")
        if shared:
            self.line((WIDTH / 2, source_y), (distance - WIDTH / 2, target_y), tip=False, kind="tied")
            self.text(distance / 2, source_y - 7, "shared", "soft", "middle")
        self.draw_cells("backbone.decoder", "left to right")
        self.arrow("(B, T, D)", length=GAP + 8)
        lines = ("queries from the decoder, keys and values from", "the encoder; concatenated with the query, tanh")
        attention_y = self.place(self.module_box("Attention over the source", "cross", "backbone.attention", *lines))
        between = distance - LEFT - 38
        corners = ((0, top - 26), (between, top - 26), (between, attention_y))
        self.line((0, top), *corners, (distance - WIDTH / 2, attention_y))
        self.text(10, top - 34, "(B, S, D)", "shape")
        self.draw_heads(target_y)

    def draw_ngram(self) -> None:
        """The embeddings of the last tokens side by side, and hidden layers."""
        config = self.config
        table_y = self.draw_embedding("backbone")
        self.arrow(length=8)
        lines = (f"the vectors of the last {config.order} tokens, zero before the first",)
        self.place(Box("Concatenation", "plain", lines=lines))
        self.draw_hidden_layer("backbone.layers.0", config.order * config.width, "(B, T, ND)")
        if config.depth > 1:
            self.arrow(length=14, tip=False)
            low = self.y
            self.draw_hidden_layer("backbone.layers.1", config.width, "(B, T, D)")
            self.arrow(length=28, tip=False)
            self.frame(self.x, low, self.y, f"× {config.depth - 1}", left=LEFT, right=RIGHT)
        self.draw_heads(table_y)

    def draw_hidden_layer(self, path: str, inputs: int, shape: str) -> None:
        config = self.config
        self.arrow(shape, length=GAP + 4)
        widths = f"{inputs:,} → {config.hidden:,}, tanh"
        self.place(self.module_box(f"Hidden layer, {config.hidden:,} units", "feed", f"{path}.up", widths))
        self.arrow("(B, T, F)", length=GAP + 4)
        widths = f"{config.hidden:,} → {config.width:,}"
        self.place(self.module_box("Output projection", "plain", f"{path}.down", widths))


def has_symbols(module: ModuleCount) -> bool:
    """Whether the formula of a module says more than its count."""
    return bool(getattr(module.formula, "free_symbols", None))


def fullmatch(pattern: str, path: str) -> bool:
    """Whether a path is one of the layers that a pattern with * stands for."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None


def shape_symbols(subject: ExplainSubject) -> dict[str, str]:
    """The meaning of the symbols in shapes, in the order in which they appear."""
    backbone = subject.model.backbone
    config = backbone.config
    limit = f", at most {backbone.context:,}" if backbone.context else ""
    meanings = {"B": "rows per batch", "T": f"tokens per row{limit}"}
    if backbone.is_encoder_decoder:
        meanings |= {"T": f"target tokens{limit}", "S": f"source tokens{limit}"}
    width = getattr(config, "width", backbone.width)
    meanings["D"] = f"width: {width:,}" + (" per direction" if backbone.is_bilm else "")
    if hasattr(config, "cell"):
        meanings["H"] = f"recurrent units: {config.hidden:,}"
    elif getattr(config, "hidden", width) != width:
        meanings["F"] = f"feed-forward width: {config.hidden:,}"
    if hasattr(config, "order"):
        meanings["N"] = f"tokens that a prediction depends on: {config.order}"
    if hasattr(config, "vocabulary"):
        meanings["V"] = f"vocabulary size: {config.vocabulary:,}"
    if getattr(config, "source_vocabulary", None):
        meanings["Vₛ"] = f"source vocabulary size: {config.source_vocabulary:,}"
    if getattr(config, "segments", 0):
        meanings["G"] = f"segments: {config.segments}"
    relative = getattr(config, "positions", None) == "relative"
    if relative:
        meanings["R"] = f"buckets of distances: {config.relative_buckets}"
    if relative or getattr(config, "qk_norm", False):
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
