"""The residual stream after each sublayer: its norm, what is added to it, and its predictions (logit lens).

B rows (by_layer 1), T tokens, D width, P positions, C classes or vocabulary entries, L layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.data.mask_gaps import MASK
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.explain.hooks import POINT_AFTER, need_block_stacks, run_with_cache, stack_prefix
from headstock.explain.inputs import encode_input, labelled_target, training_target
from headstock.explain.subject import check_texts, row_tokens
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.tasks.base import Task
from headstock.tasks.labelled import is_labelled
from headstock.tasks.special_tokens import special_tokens_for

TOP = 5  # answers per position and layer


@dataclass(frozen=True)
class ResidualStep:
    """What one sublayer does to the stream: means over the tokens of the text."""

    stack: str
    layer: int
    sublayer: str
    point: str  # the name of the stream after it
    norm: float  # of a token's vector after it
    added: float  # norm of what the sublayer adds
    share: float  # `added` relative to the vector it is added to
    cosine: float  # of the two
    moved: float  # the distance the vector moves relative to its norm before; post-norm also rescales it


@dataclass(frozen=True)
class TokenPath:
    """One token's vector at the embedding and after every layer."""

    token: str
    norms: list[float]
    home: list[float]  # cosine with its own embedding
    moved: list[float]  # by each layer, relative to its norm before


@dataclass(frozen=True)
class LensPrediction:
    """The model's predictions at one position from the stream after each layer, the embedding first."""

    position: int
    token: str
    expected: str | None  # the correct answer, where it is known
    layers: list[list[tuple[str, float]]]  # per layer, the most probable answers with their probabilities
    ranks: list[int]  # per layer, the rank of the final answer, from 1

    def to_dict(self) -> dict[str, Any]:
        layers = [[{"answer": a, "probability": p} for a, p in layer] for layer in self.layers]
        return {
            "place": self.position,
            "token": self.token,
            "wanted": self.expected,
            "layers": layers,
            "ranks": self.ranks,
        }


@dataclass(frozen=True)
class ResidualFacts:
    """The residual stream of one text."""

    steps: list[ResidualStep]
    tokens: dict[str, list[TokenPath]]  # by stack
    embedding: dict[str, float]  # by stack: the mean norm at the input of the first layer
    lens: list[LensPrediction]
    predicts: str  # what the lens predicts: "next token", "masked token", "class", "tag"
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values | {"says": values.pop("predicts"), "lens": [prediction.to_dict() for prediction in self.lens]}


@dataclass(frozen=True)
class LensInput:
    """An encoded text, and the positions at which the model predicts something."""

    batch: Batch
    task: Task
    positions: list[int]
    predicts: str
    expected: list[str | None]
    notes: list[str]


@torch.no_grad()
def explain_residual(pipeline: Pipeline, texts: Sequence[str], *, label: str | None = None) -> ResidualFacts:
    """The residual stream of a text between its embedding and the run's heads."""
    stacks = need_block_stacks(pipeline.model.backbone, pipeline.run)
    read = lens_input(pipeline, texts, label)
    pipeline.model.eval()
    _, cache = run_with_cache(pipeline.model, read.batch, ["*embedding", "*.output", "*.resid_*"])
    rows = {"stack": read.batch, "decoder": read.batch, "encoder": read.batch.source}
    tokens, embedding = {}, {}
    steps: list[ResidualStep] = []
    layers: list[Tensor] = []
    for stack, transformer in stacks.items():  # the last one is what the heads read
        row = rows[stack]
        assert row is not None
        layers = stream_layers(cache, stack, transformer.depth)
        tokens[stack] = token_paths(layers, row_tokens(pipeline, row, source=stack == "encoder"))
        embedding[stack] = mean_norm(layers[0])
        steps += residual_steps(cache, stack, transformer.depth)
    lens, notes = logit_lens(pipeline, read, layers)
    return ResidualFacts(steps, tokens, embedding, lens, read.predicts, [*read.notes, *notes])


def stream_layers(cache: Mapping[str, Tensor], stack: str, depth: int) -> list[Tensor]:
    """(B, T, D) the embedding and the output of each layer of a stack."""
    prefix = stack_prefix(stack)
    return [cache[f"{prefix}embedding"], *(cache[f"{prefix}blocks.{layer}.resid_post"] for layer in range(depth))]


def residual_steps(cache: Mapping[str, Tensor], stack: str, depth: int) -> Iterator[ResidualStep]:
    """Every sublayer of a stack, in the order of computation."""
    before = cache[f"{stack_prefix(stack)}embedding"]
    for layer in range(depth):
        block = f"{stack_prefix(stack)}blocks.{layer}"
        for sublayer, point in POINT_AFTER.items():
            if (after := cache.get(f"{block}.{point}")) is not None:
                added = cache[f"{block}.{sublayer}.output"]
                yield residual_step(stack, layer + 1, sublayer, before, added, after)
                before = after


def residual_step(stack: str, layer: int, sublayer: str, before: Tensor, added: Tensor, after: Tensor) -> ResidualStep:
    norms = before.norm(dim=-1)  # (B, T)
    return ResidualStep(
        stack=stack,
        layer=layer,
        sublayer=sublayer,
        point=POINT_AFTER[sublayer],
        norm=mean_norm(after),
        added=mean_norm(added),
        share=float((added.norm(dim=-1) / norms).mean()),
        cosine=float(F.cosine_similarity(added, before, dim=-1).mean()),
        moved=float(((after - before).norm(dim=-1) / norms).mean()),
    )


def mean_norm(stream: Tensor) -> float:
    return float(stream.norm(dim=-1).mean())


def token_paths(layers: Sequence[Tensor], names: Sequence[str]) -> list[TokenPath]:
    """The path of every token's vector, from (1, T, D) per layer."""
    rows = [layer[0] for layer in layers]  # (T, D)
    norms = torch.stack([row.norm(dim=-1) for row in rows], 1).tolist()  # (T, L + 1)
    home = torch.stack([F.cosine_similarity(row, rows[0], dim=-1) for row in rows], 1).tolist()
    moves = [(after - before).norm(dim=-1) / before.norm(dim=-1) for before, after in pairwise(rows)]
    moved = torch.stack(moves, 1).tolist()
    return [TokenPath(*path) for path in zip(names, norms, home, moved, strict=True)]


# Input


def lens_input(pipeline: Pipeline, texts: Sequence[str], label: str | None) -> LensInput:
    """A text with the special tokens of its task."""
    check_texts(pipeline, texts)
    task, tokenizer = pipeline.task, pipeline.tokenizer
    if is_labelled(task):
        return labelled_lens_input(pipeline, texts, label)
    if label is not None:
        raise UserError(f"{pipeline.run}: is a language model and has no --label")
    if not (task.generates or task.fills_masks):  # a denoiser makes source and target from the text
        target = training_target(pipeline, texts)
        note = f"this run denoises: it reads the corrupted text and predicts {target.description}"
        return forced_lens_input(task, target.batch, tokenizer, [note])
    has_mask = task.fills_masks and MASK in texts[0]
    encoded = encode_input(pipeline, texts, left_to_right=task.generates and not has_mask)
    ids = encoded.batch.tokens[0].tolist()
    if has_mask:
        positions = [position - task.mask_shift for position, token in enumerate(ids) if token == tokenizer.mask]
        return LensInput(encoded.batch, task, positions, "masked token", [None] * len(positions), [])
    if task.generates:
        return LensInput(encoded.batch, task, list(range(len(ids))), "next token", [*encoded.tokens[1:], None], [])
    special = special_tokens_for(task, tokenizer)
    positions = list(range(len(special.prefix), len(ids) - len(special.suffix)))
    note = f"no token is masked, so each is predicted although it is visible; write {MASK} to mask a word"
    return LensInput(encoded.batch, task, positions, "token", [None] * len(positions), [note])


def labelled_lens_input(pipeline: Pipeline, texts: Sequence[str], label: str | None) -> LensInput:
    target = labelled_target(pipeline, texts, label)
    task, batch = target.task, target.batch
    if task.lens == "class":
        return LensInput(batch, task, [0], "class", [label], [])
    if task.lens == "tag":
        positions = batch.labels["word_positions"][0].tolist()
        return LensInput(batch, task, positions, "tag", [None] * len(positions), [])
    if batch.source is not None:
        return forced_lens_input(task, batch, pipeline.tokenizer, target.notes)
    return LensInput(batch, task, [], "nothing", [], [f"a {task.title} has no logit lens"])


def forced_lens_input(task: Task, batch: Batch, tokenizer: Tokenizer, notes: list[str]) -> LensInput:
    """An encoder-decoder with teacher forcing: each target position predicts the next token."""
    labels = batch.labels["token"][0].tolist()
    expected = [None if label == IGNORE_INDEX else display_tokens(tokenizer, [label])[0] for label in labels]
    return LensInput(batch, task, list(range(len(labels))), "next token", expected, notes)


# Logit lens


def logit_lens(pipeline: Pipeline, read: LensInput, layers: Sequence[Tensor]) -> tuple[list[LensPrediction], list[str]]:
    """The predictions of the model's own head from the stream after each layer, behind the final norm."""
    if not read.positions:
        return [], []
    head_layers = getattr(read.task.config, "layers", "last")
    if not (head_layers == "last" or head_layers.isdecimal()):
        return [], [f"the head reads several layers ({head_layers}), so there is no logit lens of a single one"]
    vectors = [pipeline.model.backbone.output_norm(layer) for layer in layers]
    probabilities = torch.stack([lens_probabilities(pipeline, read, layer) for layer in vectors])  # (L + 1, P, C)
    final_layer = int(head_layers) if head_layers.isdecimal() else len(layers) - 1  # the one that the run's head reads
    row = read.batch.tokens[0].tolist()
    predictions = []
    for index, position in enumerate(read.positions):
        by_layer = probabilities[:, index]  # (L + 1, C)
        top = by_layer.topk(min(TOP, by_layer.size(1)), -1)
        answers = [
            [(answer_name(pipeline, read, answer), value) for answer, value in zip(indices, values, strict=True)]
            for indices, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        final = by_layer[final_layer].argmax()
        ranks = (1 + (by_layer > by_layer[:, final, None]).sum(1)).tolist()
        token = "" if read.predicts == "class" else display_tokens(pipeline.tokenizer, [row[position]])[0]
        predictions.append(LensPrediction(position, token, read.expected[index], answers, ranks))
    return predictions, []


def lens_probabilities(pipeline: Pipeline, read: LensInput, vectors: Tensor) -> Tensor:
    """(P, C) the probability of every answer at each position, from (1, T, D) vectors."""
    heads, task = pipeline.model.heads, read.task
    if is_labelled(task) and task.lens == "class":
        scores = task.lens_scores(pipeline.model, vectors, read.batch.padding).float()
        return scores.sigmoid() if task.multilabel else scores.softmax(-1)
    return heads["tag" if task.lens == "tag" else "token"](vectors[0, read.positions]).float().softmax(-1)


def answer_name(pipeline: Pipeline, read: LensInput, index: int) -> str:
    if read.task.lens in ("class", "tag"):
        return read.task.config.classes[index]
    if index >= pipeline.tokenizer.vocabulary:
        return f"#{index}"
    (text,) = display_tokens(pipeline.tokenizer, [index])
    return text if text.isprintable() else text.encode("unicode_escape").decode()
