"""The residual stream after each sublayer: how long it is, what each adds and at what angle, what it would say by now.

B rows, T tokens, D width, V vocabulary, C classes. A row of one text is looked at, so B is 1.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.data.mask_gaps import MASK, SurfaceForms
from headstock.decoding.batching import batch_from_rows
from headstock.errors import UserError
from headstock.explain.hooks import POINT_AFTER, Activations, Connection, need_block_stacks, record_activations
from headstock.explain.targets import check_length, check_texts, labelled_target, training_target
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
        return values | {"says": values.pop("predicts"), "lens": [one.to_dict() for one in self.lens]}


@dataclass(frozen=True)
class LensInput:
    """An encoded text, and the positions at which the model predicts something."""

    batch: Batch
    task: Task
    places: list[int]
    predicts: str
    wanted: list[str | None]
    notes: list[str]


@torch.no_grad()
def explain_residual(pipeline: Pipeline, texts: Sequence[str], *, label: str | None = None) -> ResidualFacts:
    """The residual stream of a text between its embedding and the run's heads."""
    stacks = need_block_stacks(pipeline.model.backbone, pipeline.run)
    read = reading(pipeline, texts, label)
    pipeline.model.eval()
    with record_activations(pipeline.model) as activations:
        pipeline.model(read.batch)
    rows = {"stack": read.batch, "decoder": read.batch, "encoder": read.batch.source}
    tokens, embedding = {}, {}
    for stack in stacks:
        row = rows[stack]
        assert row is not None
        tokenizer = (
            pipeline.tokenizer.source_tokenizer or pipeline.tokenizer if stack == "encoder" else pipeline.tokenizer
        )
        layers = activations.layers(stack)
        tokens[stack] = token_paths(layers, display_tokens(tokenizer, row.tokens[0].tolist()))
        embedding[stack] = mean_norm(layers[0])
    lens, notes = logit_lens(pipeline, read, activations)
    steps = [residual_step(one) for one in activations.connections]
    return ResidualFacts(steps, tokens, embedding, lens, read.predicts, [*read.notes, *notes])


def residual_step(one: Connection) -> ResidualStep:
    added, before = one.added(), one.input.norm(dim=-1)  # (B, T, D), (B, T)
    return ResidualStep(
        stack=one.stack,
        layer=one.layer,
        sublayer=one.sublayer,
        point=POINT_AFTER[one.sublayer],
        norm=mean_norm(one.output),
        added=mean_norm(added),
        share=float((added.norm(dim=-1) / before).mean()),
        cosine=float(F.cosine_similarity(added, one.input, dim=-1).mean()),
        moved=float(((one.output - one.input).norm(dim=-1) / before).mean()),
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


# What is read, and where the model says something


def reading(loaded: Pipeline, texts: Sequence[str], label: str | None) -> LensInput:
    """A text with the marks its task puts around it."""
    check_texts(loaded, texts)
    task, tokenizer = loaded.task, loaded.tokenizer
    if is_labelled(task):
        return labelled_reading(loaded, texts, label)
    if label is not None:
        raise UserError(f"{loaded.run}: is a language model and knows no --label")
    if not (task.generates or task.fills_masks):  # a denoiser: both its sides are made from the text
        asked = training_target(loaded, texts)
        note = (
            f"this run repairs texts: it reads what its objective left of this one, and must write {asked.description}"
        )
        return forced_reading(task, asked.batch, tokenizer, [note])
    notes, wanted = [], list[str | None]()
    if task.fills_masks and MASK in texts[0]:
        ids, gaps = SurfaceForms(tokenizer).tokenize(texts[0])
        marks = special_tokens_for(task, tokenizer)
        places, says, causal = (
            [gap.position + len(marks.prefix) - task.mask_shift for gap in gaps],
            "masked token",
            False,
        )
    elif task.generates:
        ids, marks = tokenizer.encode(texts[0]), special_tokens_for(task, tokenizer, left_to_right=True)
        row = marks.wrap(ids)
        places, says, causal = list(range(len(row))), "next token", True
        wanted = [*display_tokens(tokenizer, row[1:]), None]
    else:
        ids, marks = tokenizer.encode(texts[0]), special_tokens_for(task, tokenizer)
        first = len(marks.prefix)
        places, says, causal = list(range(first, first + len(ids))), "token", False
        notes.append(f"nothing is hidden, so each token is told though it is seen; write {MASK} to hide a word")
    row = marks.wrap(ids)
    check_length(loaded, len(row))
    batch = batch_from_rows([row], marks.pad, loaded.model.device, causal=causal)
    return LensInput(batch, task, places, says, wanted or [None] * len(places), notes)


def labelled_reading(loaded: Pipeline, texts: Sequence[str], label: str | None) -> LensInput:
    """A text as a fine-tuned run reads it."""
    asked = labelled_target(loaded, texts, label)
    task, batch = asked.task, asked.batch
    if task.lens == "class":
        return LensInput(batch, task, [0], "class", [label], [])
    if task.lens == "tag":
        places = batch.labels["places"][0].tolist()
        return LensInput(batch, task, places, "tag", [None] * len(places), [])
    if batch.source is not None:
        return forced_reading(task, batch, loaded.tokenizer, asked.notes)
    return LensInput(
        batch, task, [], "nothing", [], [f"a {loaded.labelled_task().title} has no lens: its answer is a span"]
    )


def forced_reading(task: Task, batch: Batch, tokenizer: Any, notes: list[str]) -> LensInput:
    """A source beside its target, each token of which must give the next."""
    labels = batch.labels["token"][0].tolist()
    wanted: list[str | None] = [None if one == IGNORE_INDEX else display_tokens(tokenizer, [one])[0] for one in labels]
    return LensInput(batch, task, list(range(len(labels))), "next token", wanted, notes)


# The lens


def logit_lens(loaded: Pipeline, read: LensInput, activations: Activations) -> tuple[list[LensPrediction], list[str]]:
    """What the model's own head would say of the stream as it leaves each layer, the final norm applied."""
    if not read.places:
        return [], []
    layers_read = getattr(read.task.config, "layers", "last")
    if not (layers_read == "last" or layers_read.isdecimal()):
        return [], [f"its head reads several layers together ({layers_read}), so a single one says nothing to it"]
    stack = "decoder" if read.batch.source is not None else "stack"
    layers = activations.layers(stack)
    chances = torch.stack([chances_of(loaded, read, loaded.model.backbone.output_norm(layer)) for layer in layers])
    last = int(layers_read) if layers_read.isdecimal() else len(layers) - 1  # the layer that the run itself listens to
    names = answers_of(loaded, read)
    row = read.batch.tokens[0].tolist()
    guesses = []
    for at, place in enumerate(read.places):
        here = chances[:, at]  # (L + 1, C)
        best = here.topk(min(TOP, here.size(1)), -1)
        told = [
            [(names(number), chance) for number, chance in zip(numbers, values, strict=True)]
            for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        final = here[last].argmax()
        ranks = (1 + (here > here[:, final, None]).sum(1)).tolist()
        token = "" if read.predicts == "class" else display_tokens(loaded.tokenizer, [row[place]])[0]
        guesses.append(LensPrediction(place, token, read.wanted[at], told, ranks))
    return guesses, []


def chances_of(loaded: Pipeline, read: LensInput, vectors: Tensor) -> Tensor:
    """(places, C): the probability of every answer at every place, from (1, T, D) vectors."""
    heads, task = loaded.model.heads, read.task
    if is_labelled(task) and task.lens == "class":
        scores = task.lens_scores(loaded.model, vectors, read.batch.padding).float()
        return scores.sigmoid() if task.multilabel else scores.softmax(-1)
    return heads["tag" if task.lens == "tag" else "token"](vectors[0, read.places]).float().softmax(-1)


def answers_of(loaded: Pipeline, read: LensInput) -> Any:
    """The name of an answer by its number."""
    if read.task.lens in ("class", "tag"):
        return read.task.config.classes.__getitem__
    vocabulary = loaded.tokenizer.vocabulary

    def name(number: int) -> str:
        if number >= vocabulary:
            return f"#{number}"
        (text,) = display_tokens(loaded.tokenizer, [number])
        return text if text.isprintable() else text.encode("unicode_escape").decode()

    return name
