"""Presents parameter counts beside their formulas, and what a token and a training step cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstock.explain import document as doc
from headstock.explain.parameters import ModuleCount, ParameterFacts
from headstock.explain.render_document import picture_of
from headstock.explain.symbols import in_text
from headstock.report.theme import ARMS, GRID, PAPER, WIDE

DESCRIPTIONS = {
    "backbone": "the whole backbone",
    "encoder": "encoder",
    "decoder": "decoder",
    "tokens": "token embedding",
    "positions": "position embedding",
    "segments": "segment embedding",
    "relative": "relative position bias",
    "embed_norm": "embedding norm",
    "attention": "self-attention",
    "cross": "cross-attention",
    "inputs": "query, key and value projections",
    "output": "output projection",
    "query_norm": "query norm",
    "key_norm": "key norm",
    "around_attention": "its norm",
    "around_cross": "its norm",
    "feed": "feed-forward",
    "gate": "gate",
    "up": "up projection",
    "down": "down projection",
    "around_feed": "its norm",
    "final_norm": "final norm",
    "cells": "recurrent cells",
    "project": "output projection",
    "ahead": "forward stack",
    "back": "backward stack",
    "heads": "heads",
    "token": "language model head",
    "next": "next-sentence head",
    "label": "classification head",
    "tag": "tagging head",
    "span": "question-answering head",
    "transform": "transform before the logits",
    "pooler": "pooler",
    "mix": "layer mix",
    "linear": "linear layer",
    "dense": "linear layer",
    "norm": "norm",
}
GROUPS = ["embeddings", "attention", "cross-attention", "feed-forward", "cells", "norms", "heads"]
SHADES = (("pretrained", 0), ("scratch", 0), ("scratch", 2), ("frozen", 0), ("frozen", 2), ("tfidf", 2), ("tfidf", 0))
COLOURS = {group: ARMS[kind][1][shade][0] for group, (kind, shade) in zip(GROUPS, SHADES, strict=True)}
MAX_UNFOLDED = 20  # tensors that a page lists without folding


def parameter_document(params: ParameterFacts) -> doc.ExplainDocument:
    chart = shares_chart(params)
    return doc.ExplainDocument(
        subject="parameters",
        title=f"{params.name}: {params.total:,} parameters",
        summary=f"family {params.family}",
        page_title=f"Parameters of {params.name}",
        sections=[
            doc.Section("", [*doc.notes(params.notes), headline(params), chart, symbols_table(params)]),
            doc.Section("Module by module", [module_table(params), *remarks(params)], "parts"),
            doc.Section("Heads and what is trained", [totals_table(params), finetuning_table(params)], "totals"),
            doc.Section("Cost", cost_blocks(params), "costs"),
            doc.Section("Every tensor", [tensor_table(params)], "tensors"),
        ],
        json=params.to_dict(),
        picture=picture_of(chart),
    )


def headline(params: ParameterFacts) -> doc.DocumentBlock:
    trained = "the head alone; the backbone is frozen" if params.frozen else "all of them"
    if params.lora:
        trained = f"adapters of rank {params.lora} (LoRA), merged after training, and the head"
    return doc.KeyFigures(
        [
            ("parameters", f"{params.total:,}", doc.Formula(params.totals[0].formula, params.by)),
            ("in the backbone", f"{params.base:,}", doc.Formula(params.base_formula, params.by)),
            ("trainable", f"{params.trainable:,}", trained),
        ],
        only="page",
    )


def symbols_table(params: ParameterFacts) -> doc.DocumentBlock:
    import sympy

    rows = [[doc.Formula(sympy.Symbol(symbol.name)), symbol.value, symbol.meaning] for symbol in params.symbols]
    return doc.Table("Symbols", {"symbol": "formula", "value": "count", "meaning": "text"}, rows, heading=False)


# Modules


@dataclass(frozen=True)
class ModuleRow:
    """A module or tensor as a row of the tree."""

    module: ModuleCount
    level: int
    name: str
    description: str


def module_rows(lines: Sequence[ModuleCount]) -> list[ModuleRow]:
    """The tree of modules, without those that have a single child with the same parameters."""
    rows: list[ModuleRow] = []
    for module, following in zip(lines, [*lines[1:], None], strict=True):
        has_child = following is not None and not following.tensor and following.level == module.level + 1
        if has_child and following.formula == module.formula and module.level > 0:  # type: ignore[union-attr]
            continue
        parent = next((row for row in reversed(rows) if module.path.startswith(f"{row.module.path}.")), None)
        name = module.path.removeprefix(f"{parent.module.path}.") if parent else module.path
        level = parent.level + 1 if parent else 0
        rows.append(ModuleRow(module, level, name.removesuffix(".*"), description_of(module, name)))
    return rows


def description_of(module: ModuleCount, name: str) -> str:
    if module.tensor:
        return ""
    if module.path.endswith(".*"):
        return "each layer" if module.times > 1 else "the layer"
    return DESCRIPTIONS.get(name.partition(".")[0], "")


def module_table(params: ParameterFacts, *, tensors: bool = True) -> doc.DocumentBlock:
    """The tree of modules with their formulas; with or without the tensors."""
    rows = []
    for row in module_rows(params.modules):
        module = row.module
        if module.tensor and not tensors:
            continue
        name = row.name + (f" × {module.times}" if module.path.endswith(".*") else "")
        description = " × ".join(map(in_text, module.shape)) if module.tensor else row.description
        style = "tensor" if module.tensor else "top" if row.level == 0 else ""
        cells = [name, description, doc.Formula(module.formula, params.by), module.value, module.count]
        rows.append(doc.Row(cells, row.level, style))
    columns = {"module": "code", "description": "text", "formula": "formula", "value": "count", "counted": "count"}
    title = f"Total {in_text(params.totals[0].formula, *params.by)}"
    caption = "The value of each formula beside the number counted in the model. Of identical layers one is shown."
    return doc.Table(title, columns, rows, caption, heading=False)


def remarks(params: ParameterFacts) -> list[doc.DocumentBlock]:
    lines = [heads_remark(params)]
    if params.fixed is not None:
        formula = in_text(params.fixed.formula)
        lines.append(
            f"Besides the parameters there are {params.fixed.value:,} fixed numbers ({formula}), the sines and cosines "
            "of the positions. They are not trained and not counted."
        )
    if tied := [DESCRIPTIONS.get(name, name) for name, count in params.heads.items() if not count]:
        lines.append(f"The {tied[0]} has no parameters of its own: it is tied to the token embedding.")
    return [doc.Bullets(lines)]


def heads_remark(params: ParameterFacts) -> str:
    """Whether the number of attention heads appears in the formula, and why."""
    if params.derivative is None:
        return "There is no attention, and so there are no attention heads."
    if params.derivative == 0:
        return (
            "The number of heads A appears in none of these formulas: the derivative of the total by A is 0. The heads "
            "split the width. Each has queries, keys and values of D/A features, and A of them together have D "
            "features again, so that one matrix of D × 3D serves any number of heads."
        )
    return (
        "The number of heads A appears in one place only: queries and keys are normalized within each head, and all "
        "heads of a layer share the D/A weights of that norm. The matrices do not depend on A: the heads split the "
        f"width. The derivative of the total by A is {in_text(params.derivative)}."
    )


def totals_table(params: ParameterFacts) -> doc.DocumentBlock:
    columns: dict[str, Any] = {
        "head": ("text", lambda total: " and ".join(DESCRIPTIONS.get(name, name) for name in total.heads)),
        "formula": ("formula", lambda total: doc.Formula(total.formula, params.by)),
        "parameters": ("count", "total"),
        "trained with a frozen backbone": ("count", "own"),
        "frozen": ("count", lambda total: total.total - total.own),
    }
    caption = "The same backbone with the heads it has or could have."
    return doc.Table.from_records("By head", params.totals, columns, caption, heading=False)


def finetuning_table(params: ParameterFacts) -> doc.DocumentBlock:
    columns: dict[str, Any] = {
        "trained": ("text", "name"),
        "formula": ("formula", lambda way: doc.Formula(way.trainable.formula, params.by)),
        "parameters": ("count", lambda way: way.trainable.value),
        "gradients and optimizer": ("bytes", lambda way: way.state.value),
        "FLOP per token": ("flops", lambda way: way.flops and way.flops.value),
    }
    caption = (
        "Of the backbone with a head; the optimizer is AdamW. FLOP are those of the backbone, forward and backward: "
        "LoRA needs no gradients of frozen matrices. With the head alone, the backbone reads each text once."
    )
    return doc.Table.from_records("Ways to fine-tune", params.finetuning, columns, caption)


# Cost


def cost_blocks(params: ParameterFacts) -> list[doc.DocumentBlock]:
    costs = params.costs
    flops: list[Any] = [[cost.name, doc.Formula(cost.formula), cost.value] for cost in costs.flops]
    for name, cost in (("forward", costs.forward), ("training, forward and backward", costs.training)):
        flops.append(doc.Row([name, doc.Formula(cost.formula, params.by), cost.value], style="sum"))
    memory = [
        doc.Row(
            [first.name, doc.Formula(first.formula, params.by), first.value, *(cost.value for cost in others)],
            style="sum" if first.name == "total" else "",
        )
        for first, *others in zip(*costs.memory.values(), strict=True)
    ]
    rows_of = f"rows of {params.length:,} tokens"
    return [
        doc.Text(
            "A multiplication and an addition are two floating-point operations (FLOP). Only matrix products are "
            "counted. The backward pass costs twice the forward pass: once for the inputs, once for the weights.",
            only="page",
        ),
        doc.Table(
            "FLOP per token",
            {"module": "code", "formula": "formula", "value": "flops"},
            flops,
            f"For {rows_of}; attention is counted in full, although a causal mask could save half of it.",
        ),
        doc.Table(
            f"Memory of a step on {params.batch:,} {rows_of}",
            {"purpose": "text", "formula": "formula"} | dict.fromkeys(costs.memory, "bytes"),
            memory,
            f"The formula is that of “{next(iter(costs.memory))}”. Activations are what the forward pass keeps for the "
            "backward pass; working memory is the gradient of the logits and, in half precision, copies of the "
            "weights. The total is with the optimizer of the settings. With dropout, a CPU keeps attention matrices, "
            "hence L².",
        ),
    ]


def tensor_table(params: ParameterFacts) -> doc.DocumentBlock:
    columns: dict[str, Any] = {
        "tensor": ("code", "module"),
        "in PyTorch": ("code", lambda tensor: tensor.torch or ""),
        "formula": ("formula", lambda tensor: doc.Formula(tensor.formula)),
        "value": ("count", "value"),
        "counted": ("count", "count"),
    }
    caption = "With the names that torch.nn.TransformerEncoderLayer and TransformerDecoderLayer give the same tensors."
    options: dict[str, Any] = {"fold_after": MAX_UNFOLDED, "heading": False, "only": "page"}
    return doc.Table.from_records("Tensors", params.tensors, columns, caption, **options)


# Chart


def group_of(path: str) -> str:
    names = path.split(".")
    if names[0] == "heads":
        return "heads"
    if any("norm" in name for name in names):
        return "norms"
    for name, group in (("cross", "cross-attention"), ("attention", "attention"), ("feed", "feed-forward")):
        if name in names:
            return group
    return "cells" if "cells" in names or "project" in names else "embeddings"


def shares(params: ParameterFacts) -> tuple[dict[str, float], dict[str, float]]:
    """Parameters, and FLOP of the forward pass, by group of modules."""
    counts, flops = dict.fromkeys(GROUPS, 0.0), dict.fromkeys(GROUPS, 0.0)
    for module in params.modules:
        if module.tensor:
            counts[group_of(module.path)] += module.value * module.times
    for cost in params.costs.flops:
        flops[group_of(cost.name)] += cost.value
    return counts, flops


def shares_chart(params: ParameterFacts) -> doc.Chart:
    """Two stacked bars: parameters and FLOP by group of modules."""
    counts, flops = shares(params)

    def paint(figure: Any) -> None:
        from matplotlib.patches import Patch

        axes = figure.subplots()
        for row, values in enumerate((counts, flops)):
            total, left = sum(values.values()), 0.0
            for group, value in values.items():
                share = value / total if total else 0.0
                axes.barh(row, share, left=left, color=COLOURS[group], height=0.62, edgecolor="none")
                if share > 0.07:
                    axes.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", color=PAPER)
                left += share
        axes.set_yticks([0, 1], ["parameters", "FLOP"])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_color(GRID)
        keys = [Patch(color=COLOURS[name], label=name) for name in GROUPS if counts[name] or flops[name]]
        columns = len(keys) if figure.get_figwidth() * 72 >= WIDE else 3
        figure.legend(handles=keys, loc="outside lower left", ncols=columns, fontsize=10, handlelength=0.9)

    label = f"Shares of the modules of {params.name} in its parameters and in its FLOP"
    caption = "Where the parameters are, and where the FLOP of a forward pass are. An embedding lookup takes none."
    return doc.Chart("shares", label, paint, caption, height=140 / WIDE, narrow_height=165 / 350)
