"""The modules that are exported to ONNX, with named inputs, outputs and dimensions.

B rows, T tokens, P past tokens, D width, H heads, K head width, C classes, V vocabulary.
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

OPSET = 20  # has GELU as one operator; the attention operator of later opsets expects another mask shape
Names = dict[str, tuple[str, ...]]  # dimensions of each tensor: a name if dynamic, otherwise the size

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
    past = dict(zip(past, present))  # keys and values of all tokens so far
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
    """Reads whole rows: `input_ids`, `attention_mask` (1 at real tokens), for pairs `token_type_ids`; each (B, T)."""

    def __init__(self, model: Model, task: Task, spec: GraphSpec):
        super().__init__()
        self.model, self.task, self.spec = model, task, spec
        self.outputs = spec.outputs
        self.inputs: tuple[str, ...] = ("input_ids", "attention_mask")

    def forward(self, tokens: Tensor, real: Tensor, segments: Tensor | None = None) -> Any:
        return self.answer(Batch(tokens, real == 0, segments=segments))

    def answer(self, batch: Batch) -> Any:
        """The outputs for a batch of whole rows."""
        raise NotImplementedError

    def example(self, rows: int = 2, length: int = 5, before: int = 3) -> tuple[Tensor, ...]:
        """Example inputs; the last row ends in padding."""
        vocabulary = self.model.backbone.config.vocabulary
        draw = torch.Generator().manual_seed(rows * 10_007 + length)
        real = torch.ones(rows, length, dtype=torch.long)
        real[-1, max(1, length - 2) :] = 0 if rows > 1 else 1
        tokens = torch.randint(vocabulary, (rows, length), generator=draw)
        kinds = (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous()
        return (tokens, real, kinds)[: len(self.inputs)]

    def dynamic(self) -> tuple[dict[int, str], ...]:
        """The names of each input's dynamic dimensions."""
        return tuple({0: "batch", 1: "length"} for _ in self.inputs)


class LabelledGraph(Graph):
    """What a labelled task computes for rows; its spec names the outputs."""

    def __init__(self, model: Model, task: LabelledTask):
        super().__init__(model, task, task.graph_spec())
        if task.texts_per_row > 1 and getattr(model.backbone, "segments", None) is not None:
            self.inputs = (*self.inputs, "token_type_ids")

    def answer(self, batch: Batch) -> Any:
        return cast(LabelledTask, self.task).graph_outputs(self.model, batch)


class EmbeddingGraph(Graph):
    """(B, T, D) token vectors and (B, D) text vectors, pooled as by `headstock embed`."""

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task, EMBEDDING)
        self.pool = resolve_pooling(None, model.backbone)

    def answer(self, batch: Batch) -> tuple[Tensor, ...]:
        assert self.pool != "none"
        hidden = self.model(batch).hidden
        return hidden, pool(hidden, batch.padding, self.pool)


class CausalGraph(Graph):
    """(B, T, V) logits of the next tokens, given new tokens and the KV cache of past ones.

    `attention_mask` is (B, P + T), of all tokens so far. Rows may be padded: a token's position is the number of real
    tokens before it. The initial cache is empty: (B, H, 0, K).
    """

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task, CAUSAL)
        depth = range(model.backbone.depth)
        self.inputs = ("input_ids", "attention_mask", *(f"past.{i}.{part}" for i in depth for part in PARTS))
        self.outputs = ("logits", *(f"present.{i}.{part}" for i in depth for part in PARTS))

    def forward(self, tokens: Tensor, real: Tensor, *past: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        backbone = self.model.backbone
        assert isinstance(backbone, Transformer)
        kept = GraphCache(past)
        new = torch.arange(tokens.size(1), device=tokens.device) + past[0].size(2)  # (T,) indices of the new tokens
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


class GraphCache:
    """A KV cache whose tensors are inputs and outputs of the graph."""

    def __init__(self, past: Sequence[Tensor]):
        self.past, self.present = past, list[Tensor]()

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        grown = torch.cat([self.past[2 * layer], keys], 2), torch.cat([self.past[2 * layer + 1], values], 2)
        self.present += grown
        return grown


def make_graph(model: Model, task: Task, *, named: str, embedding: bool = False) -> Graph:
    """The graph of a run's task; an embedding graph on request, or if the task neither predicts nor generates."""
    backbone = model.backbone
    if not backbone.supports_onnx:
        raise UserError(f"{named}: the family {backbone.name!r} cannot be exported to ONNX, a transformer can")
    if is_labelled(task) and not embedding:
        return LabelledGraph(model, task).eval()
    generates = task.generates and isinstance(backbone, Transformer)  # the graph has the KV cache of a Transformer
    return (CausalGraph if generates and not embedding else EmbeddingGraph)(model, task).eval()


@dataclass
class SavedGraph:
    """The names and dimensions of a saved graph."""

    inputs: Names
    outputs: Names


def write_graph(graph: Graph, file: Path) -> SavedGraph:
    """Trace the graph and save it with named dimensions and without metadata of this machine."""
    import onnx

    dynamic = graph.dynamic()
    free = torch.export.Dim.DYNAMIC
    shapes: Any = tuple(dict.fromkeys(one, free) for one in dynamic)
    if isinstance(graph, CausalGraph):  # the shapes of *past are one tuple
        shapes = (*shapes[:2], shapes[2:])
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about optional packages
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
    return SavedGraph(shapes_of(model.graph.input), shapes_of(model.graph.output))


def tidy(model: Any, graph: Graph) -> None:
    """Name the dimensions, and remove source metadata and inner shapes, which quantization would invalidate."""
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
            if size.dim_param:  # the only sum of dimensions
                size.dim_param = names.get(size.dim_param, "past + length")


def shapes_of(values: Sequence[Any]) -> Names:
    return {
        value.name: tuple(size.dim_param or str(size.dim_value) for size in value.type.tensor_type.shape.dim)
        for value in values
    }
