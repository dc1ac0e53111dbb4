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
from headstock.explain.hooks import AFTER, Connection, Seen, need_stacks, watching
from headstock.explain.targets import check_length, check_texts, labelled_lesson, lesson
from headstock.inference.pipeline import Pipeline
from headstock.inference.translate import display_tokens
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import pool
from headstock.tasks.base import Task
from headstock.tasks.classify import Classify
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.special_tokens import special_tokens_for
from headstock.tasks.tag import Tag

TOP = 5  # words that are told at each place after each layer
SINGLE = ("last",)  # what a head may read for a lens to make sense: one layer, not a mix of several


@dataclass(frozen=True)
class Step:
    """What one sublayer does to the stream; means over the tokens of the text."""

    stack: str
    layer: int
    sublayer: str
    point: str  # the name of the stream behind it
    norm: float  # the length of a token's vector behind it
    added: float  # the length of what the sublayer adds
    share: float  # that length as a share of the vector it is added to
    cosine: float  # of the angle between the two
    moved: float  # how far the vector moves, as a share of its length before; post-norm scales it again besides


@dataclass(frozen=True)
class TokenPath:
    """One token's vector on its way up, at the embedding and behind every layer."""

    token: str
    norms: list[float]
    home: list[float]  # cosine of its angle to its own embedding
    moved: list[float]  # by each layer, as a share of its length before


@dataclass(frozen=True)
class Guess:
    """What the model would say at one place after each layer, the embedding first."""

    place: int  # in the row
    token: str  # what stands there
    wanted: str | None  # what should be said, where that is known
    layers: list[list[tuple[str, float]]]  # after each: the likeliest answers with their probabilities
    ranks: list[int]  # after each: the rank of what is said in the end, 1 the likeliest


@dataclass(frozen=True)
class Residuals:
    """The whole way of a text through a model."""

    steps: list[Step]
    tokens: dict[str, list[TokenPath]]  # by stack
    embedding: dict[str, float]  # by stack: the mean length of what the first layer is given
    lens: list[Guess]
    says: str  # what the lens tells: "next token", "masked token", "class", "tag"
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        told = asdict(self)
        for guess in told["lens"]:
            guess["layers"] = [[{"answer": a, "probability": p} for a, p in layer] for layer in guess["layers"]]
        return told


@dataclass(frozen=True)
class Reading:
    """A text as a run reads it, and the places whose vectors say something."""

    batch: Batch
    task: Task
    places: list[int]
    says: str
    wanted: list[str | None]
    notes: list[str]


@torch.no_grad()
def residuals(loaded: Pipeline, texts: Sequence[str], *, label: str | None = None) -> Residuals:
    """What happens to a text between its embedding and the run's heads."""
    stacks = need_stacks(loaded.model.backbone, loaded.run)
    read = reading(loaded, texts, label)
    loaded.model.eval()
    with watching(loaded.model) as seen:
        loaded.model(read.batch)
    rows = {"stack": read.batch, "decoder": read.batch, "encoder": read.batch.source}
    tokens, embedding = {}, {}
    for stack in stacks:
        row = rows[stack]
        assert row is not None
        reader = loaded.tokenizer.source_tokenizer or loaded.tokenizer if stack == "encoder" else loaded.tokenizer
        tokens[stack] = paths(seen, stack, display_tokens(reader, row.tokens[0].tolist()))
        embedding[stack] = lengths(seen.point(stack, 1, "resid_pre"))
    lens, notes = look_through(loaded, read, seen)
    steps = [step(one) for one in seen.connections]
    return Residuals(steps, tokens, embedding, lens, read.says, [*read.notes, *notes])


def step(one: Connection) -> Step:
    """What a connection's sublayer adds, computed once more: post-norm hides it behind the norm."""
    added = one.function(one.given if one.around.post else one.around.norm(one.given))
    before = one.given.norm(dim=-1)  # (B, T)
    return Step(
        stack=one.stack,
        layer=one.layer,
        sublayer=one.sublayer,
        point=AFTER[one.sublayer],
        norm=lengths(one.made),
        added=lengths(added),
        share=float((added.norm(dim=-1) / before).mean()),
        cosine=float(F.cosine_similarity(added, one.given, dim=-1).mean()),
        moved=float(((one.made - one.given).norm(dim=-1) / before).mean()),
    )


def lengths(stream: Tensor) -> float:
    """The mean length of its vectors."""
    return float(stream.norm(dim=-1).mean())


def paths(seen: Seen, stack: str, names: Sequence[str]) -> list[TokenPath]:
    """How every token's vector goes."""
    layers = [point.value[0] for point in seen.points(stack) if point.name in ("resid_pre", "resid_post")]  # (T, D)
    norms = torch.stack([layer.norm(dim=-1) for layer in layers], 1).tolist()  # (T, L + 1)
    home = torch.stack([F.cosine_similarity(layer, layers[0], dim=-1) for layer in layers], 1).tolist()
    pairs = pairwise(layers)
    moved = torch.stack([(after - before).norm(dim=-1) / before.norm(dim=-1) for before, after in pairs], 1).tolist()
    return [TokenPath(*path) for path in zip(names, norms, home, moved, strict=True)]


# What is read, and where the model says something


def reading(loaded: Pipeline, texts: Sequence[str], label: str | None) -> Reading:
    """A text with the marks its task puts around it."""
    check_texts(loaded, texts)
    task, tokenizer = loaded.task, loaded.tokenizer
    if isinstance(task, LabelledTask):
        return labelled_reading(loaded, texts, label)
    if label is not None:
        raise UserError(f"{loaded.run}: is a language model and knows no --label")
    if not (task.generates or task.fills_masks):  # a denoiser: both its sides are made from the text
        asked = lesson(loaded, texts)
        note = f"this run repairs texts: it reads what its objective left of this one, and must write {asked.wanted}"
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
    return Reading(batch, task, places, says, wanted or [None] * len(places), notes)


def labelled_reading(loaded: Pipeline, texts: Sequence[str], label: str | None) -> Reading:
    """A text as a fine-tuned run reads it."""
    asked = labelled_lesson(loaded, texts, label)
    task, batch = asked.task, asked.batch
    if isinstance(task, Classify):
        return Reading(batch, task, [0], "class", [label], [])
    if isinstance(task, Tag):
        places = batch.labels["places"][0].tolist()
        return Reading(batch, task, places, "tag", [None] * len(places), [])
    if batch.source is not None:
        return forced_reading(task, batch, loaded.tokenizer, asked.notes)
    return Reading(
        batch, task, [], "nothing", [], [f"a {loaded.labelled_task().title} has no lens: its answer is a span"]
    )


def forced_reading(task: Task, batch: Batch, tokenizer: Any, notes: list[str]) -> Reading:
    """A source beside its target, each token of which must give the next."""
    labels = batch.labels["token"][0].tolist()
    wanted: list[str | None] = [None if one == IGNORE_INDEX else display_tokens(tokenizer, [one])[0] for one in labels]
    return Reading(batch, task, list(range(len(labels))), "next token", wanted, notes)


# The lens


def look_through(loaded: Pipeline, read: Reading, seen: Seen) -> tuple[list[Guess], list[str]]:
    """What the model's own head would say of the stream as it leaves each layer, the final norm applied."""
    if not read.places:
        return [], []
    layers_read = getattr(read.task.config, "layers", "last")
    if not (layers_read in SINGLE or layers_read.isdecimal()):
        return [], [f"its head reads several layers together ({layers_read}), so a single one says nothing to it"]
    stack = "decoder" if read.batch.source is not None else "stack"
    layers = [point.value for point in seen.points(stack) if point.name in ("resid_pre", "resid_post")]
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
        token = "" if read.says == "class" else display_tokens(loaded.tokenizer, [row[place]])[0]
        guesses.append(Guess(place, token, read.wanted[at], told, ranks))
    return guesses, []


def chances_of(loaded: Pipeline, read: Reading, vectors: Tensor) -> Tensor:
    """(places, C): the probability of every answer at every place, from (1, T, D) vectors."""
    heads, task = loaded.model.heads, read.task
    if isinstance(task, Classify):
        scores = heads["label"](pool(vectors, read.batch.padding, task.config.pool)).float()
        return scores.sigmoid() if task.multilabel else scores.softmax(-1)
    return heads["tag" if isinstance(task, Tag) else "token"](vectors[0, read.places]).float().softmax(-1)


def answers_of(loaded: Pipeline, read: Reading) -> Any:
    """The name of an answer by its number."""
    if isinstance(read.task, Classify | Tag):
        return read.task.config.classes.__getitem__
    vocabulary = loaded.tokenizer.vocabulary

    def name(number: int) -> str:
        if number >= vocabulary:
            return f"#{number}"
        (text,) = display_tokens(loaded.tokenizer, [number])
        return text if text.isprintable() else text.encode("unicode_escape").decode()

    return name
