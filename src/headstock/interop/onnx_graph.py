"""The graphs that ONNX Runtime is given: what a run computes, with a name for every number that goes in or comes out.

B rows, T tokens, P tokens read before, D width, H heads, K head width, C classes, V vocabulary.
"""

import logging
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.inference.embed import resolve_pooling
from headstock.model.attention_mask import AttentionMask
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch
from headstock.model.heads import pool
from headstock.model.model import Model
from headstock.tasks.answer import Answer
from headstock.tasks.base import Task
from headstock.tasks.classify import Classify
from headstock.tasks.pair import Pair
from headstock.tasks.tag import Tag

OPSET = 20  # has GELU as one operation; later ones have attention too, but ONNX Runtime asks other shapes of its mask
Names = dict[str, tuple[str, ...]]  # of each tensor its dimensions: a name, or digits where the size never changes


class Graph(nn.Module):
    """Reads whole rows: `input_ids`, `attention_mask` (1 where there is a token) and, where two texts are told apart,
    `token_type_ids`, each (B, T)."""

    kind: ClassVar[str]
    outputs: tuple[str, ...] = ("logits",)

    def __init__(self, model: Model, task: Task):
        super().__init__()
        self.model, self.task = model, task
        joined = isinstance(task, Pair | Answer)
        segments = ("token_type_ids",) if joined and getattr(model.backbone, "segments", None) is not None else ()
        self.inputs: tuple[str, ...] = ("input_ids", "attention_mask", *segments)

    def forward(self, tokens: Tensor, real: Tensor, segments: Tensor | None = None) -> Any:
        return self.answer(Batch(tokens, real == 0, segments=segments))

    @abstractmethod
    def answer(self, batch: Batch) -> Any:
        """What the graph gives for a batch."""

    def example(self, rows: int = 2, length: int = 5, before: int = 3) -> tuple[Tensor, ...]:
        """Inputs of the right shapes, the last row with padding at its end."""
        vocabulary = self.model.backbone.config.vocabulary
        draw = torch.Generator().manual_seed(rows * 10_007 + length)
        real = torch.ones(rows, length, dtype=torch.long)
        real[-1, max(1, length - 2) :] = 0 if rows > 1 else 1
        tokens = torch.randint(vocabulary, (rows, length), generator=draw)
        kinds = (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous()
        return (tokens, real, kinds)[: len(self.inputs)]

    def dynamic(self) -> tuple[dict[int, str], ...]:
        """By input which dimensions may have any size, and what they are called."""
        return tuple({0: "batch", 1: "length"} for _ in self.inputs)


class Classification(Graph):
    """(B, C) a score for every class; of a long text's windows, the scores' mean is the text's."""

    kind = "classification"

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task)
        if getattr(task.config, "long", "head") == "windows" and task.config.dense != "none":
            why = "the windows of a long text are averaged before a head of two layers, which a graph of rows cannot do"
            raise UserError(f"task.long windows with task.dense {task.config.dense}: {why}")

    def answer(self, batch: Batch) -> Tensor:
        assert isinstance(self.task, Classify)
        return self.model.heads["label"](self.task.read(self.model, batch))


class Tagging(Graph):
    """(B, T, C) a score for every tag at every token; a word's are those of its first piece."""

    kind = "tagging"

    def answer(self, batch: Batch) -> Tensor:
        assert isinstance(self.task, Tag)
        return self.model.heads["tag"](self.task.token_features(self.model, batch))


class Answering(Graph):
    """(B, T) a score for every token as the first and as the last of the answer; the first mark's mean "not here"."""

    kind = "answering"
    outputs = ("start_logits", "end_logits")

    def answer(self, batch: Batch) -> tuple[Tensor, ...]:
        assert isinstance(self.task, Answer)
        start, end = self.model.heads["span"](self.task.token_features(self.model, batch)).unbind(-1)
        return start, end


class Embedding(Graph):
    """(B, T, D) every token's vector, and (B, D) one for each row, pooled as `headstock embed` does."""

    kind = "embedding"
    outputs = ("last_hidden_state", "sentence_embedding")

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task)
        self.inputs = self.inputs[:2]
        self.pool = resolve_pooling(None, model.backbone)

    def answer(self, batch: Batch) -> tuple[Tensor, ...]:
        assert self.pool != "none"
        hidden = self.model(batch).hidden
        return hidden, pool(hidden, batch.padding, self.pool)


class Continuing(Graph):
    """(B, T, V) scores of the next tokens, from new tokens and the keys and values of those read before.

    `attention_mask` is (B, P + T), of all tokens so far. Rows may be padded: a token's place is how many real tokens
    stand before it. At first the past is empty: (B, H, 0, K).
    """

    kind = "causal"

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task)
        depth = range(model.backbone.depth)
        self.inputs = ("input_ids", "attention_mask", *(f"past.{i}.{part}" for i in depth for part in PARTS))
        self.outputs = ("logits", *(f"present.{i}.{part}" for i in depth for part in PARTS))

    def forward(self, tokens: Tensor, real: Tensor, *past: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        backbone = self.model.backbone
        assert isinstance(backbone, Transformer)
        kept = Kept(past)
        new = torch.arange(tokens.size(1), device=tokens.device) + past[0].size(2)  # (T,) which of all tokens are new
        places = (real.cumsum(1).index_select(1, new) - 1).clamp(min=0)
        context = backbone.config.context
        x = backbone.embed(Batch(tokens, positions=places), places, context)
        rotation = backbone.rotation(places, context) if backbone.config.positions == "rotary" else None
        every = torch.arange(tokens.size(1) + past[0].size(2), device=tokens.device)
        allowed = (every <= new[:, None]) & (real != 0)[:, None, None]  # (T, S), (B, 1, 1, S) -> (B, 1, T, S)
        for layer, block in enumerate(backbone.blocks):
            x = block(x, AttentionMask(allowed), rotation=rotation, cache=kept, layer=layer)
        return self.model.heads["token"](backbone.output_norm(x)), *kept.present

    def example(self, rows: int = 2, length: int = 5, before: int = 3) -> tuple[Tensor, ...]:
        tokens, real = super().example(rows, length)[:2]
        config = self.model.backbone.config
        shape = (rows, config.heads, before, config.width // config.heads)
        draw = torch.Generator().manual_seed(before)
        past = [torch.randn(shape, generator=draw) for _ in range(2 * config.depth)]
        return tokens, torch.cat([torch.ones(rows, before, dtype=torch.long), real], 1), *past

    def dynamic(self) -> tuple[dict[int, str], ...]:
        past = tuple({0: "batch", 2: "past"} for _ in self.inputs[2:])
        return {0: "batch", 1: "length"}, {0: "batch", 1: "past + length"}, *past


PARTS = ("key", "value")


class Kept:
    """Keys and values that come in from outside and go out longer: a cache without a place of its own."""

    def __init__(self, past: Sequence[Tensor]):
        self.past, self.present = past, list[Tensor]()

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        grown = torch.cat([self.past[2 * layer], keys], 2), torch.cat([self.past[2 * layer + 1], values], 2)
        self.present += grown
        return grown


def graph_of(model: Model, task: Task, *, named: str, embedding: bool = False) -> Graph:
    """The graph for what a run is made for; as an embedding on demand, or where it neither labels nor generates."""
    if not isinstance(model.backbone, Transformer):
        family = model.backbone.name
        raise UserError(f"{named}: a model of the family {family!r} is not written as ONNX; the family transformer is")
    kinds: list[tuple[type[Task], type[Graph]]] = [(Classify, Classification), (Tag, Tagging), (Answer, Answering)]
    found = next((graph for kind, graph in kinds if isinstance(task, kind)), None)
    if embedding or (found is None and not task.generates):
        found = Embedding
    return (found or Continuing)(model, task).eval()


@dataclass
class Written:
    """What a graph on disk is called by."""

    inputs: Names
    outputs: Names


def write_graph(graph: Graph, file: Path) -> Written:
    """Trace the graph and save it, with the names of its inputs, outputs and sizes and nothing of this machine."""
    import onnx

    dynamic = graph.dynamic()
    free = torch.export.Dim.DYNAMIC
    shapes: Any = tuple(dict.fromkeys(one, free) for one in dynamic)
    if isinstance(graph, Continuing):  # what a starred argument takes comes as one
        shapes = (*shapes[:2], shapes[2:])
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names every package it could do without
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph,
            graph.example(),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=shapes,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(str(file))
    model = onnx.load(str(file))
    tidy(model, graph)
    onnx.save(model, str(file))
    return Written(shapes_of(model.graph.input), shapes_of(model.graph.output))


def tidy(model: Any, graph: Graph) -> None:
    """Sizes by their names; no traces of the source, nor shapes of what lies between (quantising makes them wrong)."""
    del model.graph.value_info[:], model.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
    names: dict[str, str] = {}
    for value, called in zip(model.graph.input, graph.dynamic(), strict=True):
        for place, name in called.items():
            names.setdefault(value.type.tensor_type.shape.dim[place].dim_param, name)
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:  # a sum can only be of what was read before and what is new
                size.dim_param = names.get(size.dim_param, "past + length")


def shapes_of(values: Sequence[Any]) -> Names:
    return {
        value.name: tuple(size.dim_param or str(size.dim_value) for size in value.type.tensor_type.shape.dim)
        for value in values
    }
