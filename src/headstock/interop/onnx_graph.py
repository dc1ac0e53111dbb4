"""The modules that are exported to ONNX, with named inputs, outputs and dimensions.

B rows, T tokens, P past tokens, D width, H heads, K head width, C classes, V vocabulary.
"""

import logging
import warnings
from collections.abc import Sequence
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
    vectors = session.run(["sentence_embedding"], {{"input_ids": row, "attention_mask": np.ones_like(row)}})[0]
    print(json.dumps(vectors[0].tolist()))
"""

GENERATE_SCRIPT = """
text = sys.argv[1]
tokens = new = [about["start"], *{cut}]
past = {{name: np.zeros(about["past"], np.float32) for name in about["inputs"] if name.startswith("past")}}
while len(tokens) < about["length"]:
    inputs = {{"input_ids": np.array([new]), "attention_mask": np.ones((1, len(tokens)), np.int64)}}
    logits, *present = session.run(None, inputs | past)
    past = dict(zip(past, present))  # keys and values of all tokens so far
    logits[0, -1, about["never"]] = -np.inf
    new = [int(logits[0, -1].argmax())]  # greedy; sample from softmax(logits) for a different text each time
    if new[0] == about["end"]:
        break
    tokens = tokens + new
print({text})
"""

EMBEDDING = GraphSpec(
    "embedding",
    "An embedding of every text and of every token.",
    ("last_hidden_state", "sentence_embedding"),
    script=EMBED_SCRIPT,
    limits="It embeds the beginning of a long text; Headstock averages over windows that cover all of it.",
)
CAUSAL = GraphSpec(
    "causal",
    "Generates the continuation of a text.",
    script=GENERATE_SCRIPT,
    arguments="the beginning of a text",
    limits="It stops at the end of the model's context; Headstock drops the beginning of the text and continues.",
)


class Graph(nn.Module):
    """Reads whole rows: `input_ids`, `attention_mask` (1 at real tokens), for pairs `token_type_ids`; each (B, T)."""

    def __init__(self, model: Model, task: Task, spec: GraphSpec):
        super().__init__()
        self.model, self.task, self.spec = model, task, spec
        self.outputs = spec.outputs
        self.inputs: tuple[str, ...] = ("input_ids", "attention_mask")

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor | None = None) -> Any:
        return self.compute(Batch(tokens, mask == 0, segments=segments))

    def compute(self, batch: Batch) -> Any:
        """The outputs for a batch of whole rows."""
        raise NotImplementedError

    def example(self, rows: int = 2, length: int = 5, past: int = 3) -> tuple[Tensor, ...]:
        """Example inputs; the last row ends in padding."""
        vocabulary = self.model.backbone.config.vocabulary
        generator = torch.Generator().manual_seed(rows * 10_007 + length)
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[-1, max(1, length - 2) :] = 0 if rows > 1 else 1
        tokens = torch.randint(vocabulary, (rows, length), generator=generator)
        segments = (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous()
        return (tokens, mask, segments)[: len(self.inputs)]

    def dynamic_axes(self) -> tuple[dict[int, str], ...]:
        """The names of each input's dynamic dimensions."""
        return tuple({0: "batch", 1: "length"} for _ in self.inputs)


class LabelledGraph(Graph):
    """The outputs of a labelled task, as its spec names them."""

    def __init__(self, model: Model, task: LabelledTask):
        super().__init__(model, task, task.graph_spec())
        if task.texts_per_row > 1 and getattr(model.backbone, "segments", None) is not None:
            self.inputs = (*self.inputs, "token_type_ids")

    def compute(self, batch: Batch) -> Any:
        return cast(LabelledTask, self.task).graph_outputs(self.model, batch)


class EmbeddingGraph(Graph):
    """(B, T, D) token vectors and (B, D) text vectors, pooled as by `headstock embed`."""

    def __init__(self, model: Model, task: Task):
        super().__init__(model, task, EMBEDDING)
        self.pool = resolve_pooling(None, model.backbone)

    def compute(self, batch: Batch) -> tuple[Tensor, ...]:
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

    def forward(self, tokens: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        backbone = self.model.backbone
        assert isinstance(backbone, Transformer)
        cache = GraphCache(past)
        queries = torch.arange(tokens.size(1), device=tokens.device) + past[0].size(2)  # (T,) indices of new tokens
        positions = (mask.cumsum(1).index_select(1, queries) - 1).clamp(min=0)
        context = backbone.config.context
        x = backbone.embed(Batch(tokens, positions=positions), positions, context)
        rotation = backbone.rotation(positions, context) if backbone.config.positions == "rotary" else None
        keys = torch.arange(tokens.size(1) + past[0].size(2), device=tokens.device)
        allowed = (keys <= queries[:, None]) & (mask != 0)[:, None, None]  # (T, S), (B, 1, 1, S) -> (B, 1, T, S)
        attention_mask = AttentionMask(allowed)
        if backbone.relative is not None:
            attention_mask = attention_mask.with_bias(backbone.relative_bias(queries, keys))
        for layer, block in enumerate(backbone.blocks):
            x = block(x, attention_mask, rotation=rotation, cache=cache, layer=layer)
        return self.model.heads["token"](backbone.output_norm(x)), *cache.present

    def example(self, rows: int = 2, length: int = 5, past: int = 3) -> tuple[Tensor, ...]:
        tokens, mask = super().example(rows, length)[:2]
        config = self.model.backbone.config
        shape = (rows, config.heads, past, config.width // config.heads)
        generator = torch.Generator().manual_seed(past)
        cache = [torch.randn(shape, generator=generator) for _ in range(2 * config.depth)]
        return tokens, torch.cat([torch.ones(rows, past, dtype=torch.long), mask], 1), *cache

    def dynamic_axes(self) -> tuple[dict[int, str], ...]:
        past = tuple({0: "batch", 2: "past"} for _ in self.inputs[2:])
        return {0: "batch", 1: "length"}, {0: "batch", 1: "past + length"}, *past


PARTS = ("key", "value")


class GraphCache:
    """A KV cache whose tensors are inputs and outputs of the graph."""

    def __init__(self, past: Sequence[Tensor]):
        self.past, self.present = past, list[Tensor]()

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        extended = torch.cat([self.past[2 * layer], keys], 2), torch.cat([self.past[2 * layer + 1], values], 2)
        self.present += extended
        return extended


def make_graph(model: Model, task: Task, *, source: str, embedding: bool = False) -> Graph:
    """The graph of a run's task; an embedding graph on request, or if the task neither predicts nor generates."""
    backbone = model.backbone
    if not backbone.supports_onnx:
        raise UserError(f"{source}: the family {backbone.name!r} cannot be exported to ONNX, a transformer can")
    if is_labelled(task) and not embedding:
        return LabelledGraph(model, task).eval()
    generates = task.generates and isinstance(backbone, Transformer)  # the graph has the KV cache of a Transformer
    return (CausalGraph if generates and not embedding else EmbeddingGraph)(model, task).eval()


def write_graph(graph: Graph, file: Path) -> dict[str, Names]:
    """Trace the graph and save it without metadata of this machine; returns the dimensions of inputs and outputs."""
    import onnx

    shapes: Any = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in graph.dynamic_axes())
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
    name_dimensions(model, graph)
    onnx.save(model, str(file))
    return {"inputs": dimensions(model.graph.input), "outputs": dimensions(model.graph.output)}


def name_dimensions(model: Any, graph: Graph) -> None:
    """Name the dimensions, and remove source metadata and inner shapes, which quantization would invalidate."""
    del model.graph.value_info[:], model.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
    names: dict[str, str] = {}
    for value, axes in zip(model.graph.input, graph.dynamic_axes(), strict=True):
        for axis, name in axes.items():
            names.setdefault(value.type.tensor_type.shape.dim[axis].dim_param, name)
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:  # the only sum of dimensions
                size.dim_param = names.get(size.dim_param, "past + length")


def dimensions(values: Sequence[Any]) -> Names:
    return {
        value.name: tuple(size.dim_param or str(size.dim_value) for size in value.type.tensor_type.shape.dim)
        for value in values
    }
