"""The graphs that ONNX Runtime is given: what a run computes, with a name for every number that goes in or comes out.

B rows, T tokens, P tokens read before, D width, H heads, K head width, C classes, V vocabulary.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.inference.embed import resolve_pooling
from headstock.model.attention_mask import AttentionMask
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch
from headstock.model.heads import pool
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.tasks.graph_spec import GraphSpec
from headstock.tasks.labelled import LabelledTask, is_labelled

OPSET = 20  # has GELU as one operation; later ones have attention too, but ONNX Runtime asks other shapes of its mask
Names = dict[str, tuple[str, ...]]  # of each tensor its dimensions: a name, or digits where the size never changes

EMBED_SCRIPT = """
for text in sys.argv[1:]:
    row = np.array([about["before"] + {cut}[: about["room"]] + about["after"]])
    found = session.run(["sentence_embedding"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0]
    print(json.dumps(found[0].tolist()))
"""

GENERATE_SCRIPT = """
text = sys.argv[1]
read = new = [about["start"], *{cut}]
past = {{name: np.zeros(about["past"], np.float32) for name in about["inputs"] if name.startswith("past")}}
while len(read) < about["length"]:
    given = {{"input_ids": np.array([new]), "attention_mask": np.ones((1, len(read)), np.int64)}}
    scores, *present = session.run(None, given | past)
    past = dict(zip(past, present))  # the keys and values of all that was read
    scores[0, -1, about["never"]] = -np.inf
    new = [int(scores[0, -1].argmax())]  # the likeliest; draw from softmax(scores) for another text each time
    if new[0] == about["end"]:
        break
    read = read + new
print({text})
"""

EMBEDDING = GraphSpec(
    "embedding",
    "A vector for every text, and one for every token.",
    ("last_hidden_state", "sentence_embedding"),
    script=EMBED_SCRIPT,
    limits="It reads one row of a long text, where Headstock averages over as many as it takes.",
)
CAUSAL = GraphSpec(
    "causal",
    "How a text goes on.",
    script=GENERATE_SCRIPT,
    arguments="the beginning of a text",
    limits="It ends where the model's context does, where Headstock drops the beginning and goes on.",
)


class Graph(nn.Module):
    """Reads whole rows: `input_ids`, `attention_mask` (1 where there is a token) and, where two texts are told apart,
    `token_type_ids`, each (B, T)."""

    def __init__(self, model: Model, task: Task, spec: GraphSpec):
        super().__init__()
        self.model, self.task, self.spec = model, task, spec
        self.outputs = spec.outputs
        self.inputs: tuple[str, ...] = ("input_ids", "attention_mask")

    def forward(self, tokens: Tensor, real: Tensor, segments: Tensor | None = None) -> Any:
        return self.answer(Batch(tokens, real == 0, segments=segments))

    def answer(self, batch: Batch) -> Any:
        """What the graph gives for a batch of whole rows."""
        raise NotImplementedError

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


class LabelledGraph(Graph):
    """What a labelled task computes for rows; its spec names the outputs."""

    def __init__(self, model: Model, task: LabelledTask):
        super().__init__(model, task, task.graph_spec())
        if task.texts_per_row > 1 and getattr(model.backbone, "segments", None) is not None:
            self.inputs = (*self.inputs, "token_type_ids")

    def answer(self, batch: Batch) -> Any:
        return cast(LabelledTask, self.task).graph_outputs(self.model, batch)


class Embedding(Graph):
    """(B, T, D) every token's vector, and (B, D) one for each row, pooled as `headstock embed` does."""

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task, EMBEDDING)
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

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task, CAUSAL)
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
    if is_labelled(task) and not embedding:
        return LabelledGraph(model, task).eval()
    return (Continuing if task.generates and not embedding else Embedding)(model, task).eval()


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
