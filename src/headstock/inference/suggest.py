"""Which rows of an unlabelled pool to label next (active learning): uncertain ones, diverse ones, or both (BADGE).

N rows of the pool, M labelled rows, C classes, D width.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from headstock.errors import UserError, did_you_mean
from headstock.inference.inputs import check_iterable
from headstock.results import Result
from headstock.rng import generator
from headstock.tasks.labelled import is_labelled

if TYPE_CHECKING:
    from headstock.inference.pipeline import Pipeline

logger = logging.getLogger(__name__)

SuggestionMethod = Literal["margin", "entropy", "uncertainty", "diversity", "badge"]
NOVEL = 0.5  # cosine distance from which a reason calls a row unlike the others


@dataclass(frozen=True, eq=False)
class Suggestion(Result):
    """A row to label, and why."""

    rank: int
    row: int  # its line in the file, or its number in the list
    text: str
    label: str | None  # the prediction; None for a run without a classification head
    confidence: float | None  # the probability of that label
    margin: float | None  # the difference to the second most likely label
    entropy: float | None  # of the probabilities, from 0 to 1
    novelty: float  # cosine distance to the most similar row that is labelled or ranked above, from 0 to 2
    reason: str


def suggest(
    pipeline: "Pipeline", rows: Iterable[str | tuple[int, str]], *, count: int, method: str | None, seed: int
) -> list[Suggestion]:
    """The `count` rows of a pool to label next, the most useful first.

    Rows are texts, or (line, text). Equal texts are suggested once, and texts that the run was trained on never.
    """
    method = resolve_method(pipeline, method)
    if count < 1:
        raise UserError(f"count: must be 1 or more, not {count}")
    labelled = training_texts(pipeline)
    numbered = (row if isinstance(row, tuple) else (i, row) for i, row in enumerate(check_iterable(rows, "rows"), 1))
    pool = distinct_rows(numbered, exclude=labelled)
    if not pool:
        raise UserError("the pool has no text that is not labelled yet")
    texts = [text for _, text in pool]
    has_classes = is_labelled(pipeline.task)
    probabilities = np.asarray(pipeline.probabilities(texts), dtype=np.float64) if has_classes else None
    vectors = centered_embeddings(pipeline, [*texts, *labelled])
    known = vectors[len(texts) :]
    indices = rank_rows(
        vectors[: len(texts)], probabilities, min(count, len(texts)), method=method, labelled=known, seed=seed
    )
    novelty = novelty_by_rank(vectors[indices], known)
    classes = pipeline.task.config.classes if has_classes else ()
    return [
        describe_row(rank, *pool[index], None if probabilities is None else probabilities[index], classes, distance)
        for rank, (index, distance) in enumerate(zip(indices, novelty, strict=True), 1)
    ]


def resolve_method(pipeline: "Pipeline", method: str | None) -> str:
    """The method, by default margin; a run without a classification head only knows what is similar."""
    if method is not None and method not in get_args(SuggestionMethod):
        names = get_args(SuggestionMethod)
        raise UserError(f"method: must be one of {', '.join(names)}, not {method!r}{did_you_mean(method, names)}")
    task = pipeline.task
    if not is_labelled(task):
        if method not in (None, "diversity"):
            raise UserError(f"{pipeline.run}: predicts no classes, so nothing is uncertain; use --method diversity")
        return "diversity"
    if not task.predicts_classes or task.multilabel or not task.row_is_text:
        raise UserError(f"{pipeline.run}: is a {task.title}; suggestions need one class for each text")
    return method or "margin"


def training_texts(pipeline: "Pipeline") -> list[str]:
    """The texts that the run was trained on; none if it was not trained on labels, or its file is gone."""
    task, config = pipeline.task, pipeline.config
    path = getattr(config.data, "train", "")
    if not is_labelled(task) or not path:
        return []
    try:
        names = pipeline.resolve_columns(path)
        return list(task.read_file(path, config=task.config, columns=names, skip_blank=True).display_texts)
    except UserError as error:
        logger.info(f"the rows that {pipeline.run} was trained on cannot be excluded from the pool: {error}")
        return []


def distinct_rows(rows: Iterable[tuple[int, str]], *, exclude: Sequence[str]) -> list[tuple[int, str]]:
    """The first row of each text, ignoring white space, without blank ones and those in `exclude`."""
    seen = {" ".join(text.split()) for text in exclude} | {""}
    result = []
    for line, text in rows:
        if not isinstance(text, str):
            raise UserError(f"rows[{line}] is a {type(text).__name__}, expected a text (str)")
        if (key := " ".join(text.split())) not in seen:
            seen.add(key)
            result.append((line, text))
    return result


def centered_embeddings(pipeline: "Pipeline", texts: Sequence[str]) -> np.ndarray:
    """(N, D) embeddings around their mean, of length 1: uncentered ones all point in about the same direction."""
    vectors = np.stack(list(pipeline.with_model(0).iter_embeddings(texts))).astype(np.float64)
    vectors -= vectors.mean(0)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


# Selection


def rank_rows(
    vectors: np.ndarray,
    probabilities: np.ndarray | None,
    count: int,
    *,
    method: str,
    labelled: np.ndarray | None = None,
    seed: int = 0,
) -> list[int]:
    """The indices of `count` rows with unit `vectors` (N, D) and class `probabilities` (N, C), the best first."""
    known = vectors[:0] if labelled is None else labelled
    if method == "diversity":
        return farthest_first(vectors, known, count)
    assert probabilities is not None
    if method == "badge":
        return badge(vectors, probabilities, count, seed=seed)
    ordered = np.sort(probabilities, axis=1)
    scores = {
        "uncertainty": 1 - ordered[:, -1],
        "margin": ordered[:, -2] - ordered[:, -1],
        "entropy": normalized_entropy(probabilities),
    }[method]
    return np.argsort(-scores, kind="stable")[:count].tolist()


def normalized_entropy(probabilities: np.ndarray) -> np.ndarray:
    """(N, C) -> (N,) from 0 to 1."""
    terms = probabilities * np.log(np.maximum(probabilities, 1e-300))
    return np.clip(-terms.sum(-1) / np.log(probabilities.shape[-1]), 0, 1)


def farthest_first(vectors: np.ndarray, labelled: np.ndarray, count: int) -> list[int]:
    """Core-set selection (Sener and Savarese 2018): each row is the one farthest from all labelled and chosen ones.

    Without labelled rows, the first is the one nearest to the mean.
    """
    if len(labelled):
        nearest = np.full(len(vectors), np.inf)
        for row in labelled:
            nearest = np.minimum(nearest, squared_distances(vectors, row))
        indices = [int(nearest.argmax())]
    else:
        nearest = np.full(len(vectors), np.inf)
        indices = [int(squared_distances(vectors, vectors.mean(0)).argmin())]
    while len(indices) < count:
        nearest = np.minimum(nearest, squared_distances(vectors, vectors[indices[-1]]))
        nearest[indices] = -1.0
        indices.append(int(nearest.argmax()))
    return indices


def squared_distances(vectors: np.ndarray, row: np.ndarray) -> np.ndarray:
    return ((vectors - row) ** 2).sum(1)


def badge(vectors: np.ndarray, probabilities: np.ndarray, count: int, *, seed: int) -> list[int]:
    """BADGE (Ash et al. 2020): k-means++ on the gradients that the head would get from the predicted labels.

    A gradient (p - onehot) x h is long where the model is uncertain, and its direction is the text. The product is
    never formed: the inner product of two gradients is that of their factors. Rows are drawn in proportion to their
    squared distance from those already chosen.
    """
    errors = probabilities.copy()  # (N, C)
    errors[np.arange(len(errors)), probabilities.argmax(1)] -= 1
    norms = (errors**2).sum(1) * (vectors**2).sum(1)  # (N,) squared lengths of the gradients
    random, indices = generator(seed, "badge"), [int(norms.argmax())]
    nearest = np.full(len(vectors), np.inf)
    while len(indices) < count:
        last = indices[-1]
        products = (errors @ errors[last]) * (vectors @ vectors[last])
        nearest = np.minimum(nearest, np.maximum(norms + norms[last] - 2 * products, 0))
        nearest[indices] = 0
        total = nearest.sum()
        rest = np.setdiff1d(np.arange(len(vectors)), indices)
        weights = nearest[rest] / total if total > 0 else np.full(len(rest), 1 / len(rest))
        indices.append(int(random.choice(rest, p=weights / weights.sum())))
    return indices


# Reasons


def novelty_by_rank(vectors: np.ndarray, labelled: np.ndarray) -> list[float]:
    """The cosine distance of each row to the nearest labelled row or row ranked above it; 1 if there is none."""
    result, known = [], labelled
    for vector in vectors:
        result.append(float(1 - (known @ vector).max()) if len(known) else 1.0)
        known = np.vstack([known, vector])
    return result


def describe_row(
    rank: int, row: int, text: str, probabilities: np.ndarray | None, classes: Sequence[str], novelty: float
) -> Suggestion:
    novelty = round(max(0.0, novelty), 4)
    unlike = "unlike the rows above" if novelty >= NOVEL else "similar to another row"
    if probabilities is None:
        return Suggestion(rank, row, text, None, None, None, None, novelty, unlike)
    second, first = np.argsort(probabilities)[-2:]
    margin = float(probabilities[first] - probabilities[second])
    doubt = f"{classes[first]} {probabilities[first]:.0%} or {classes[second]} {probabilities[second]:.0%}"
    return Suggestion(
        rank,
        row,
        text,
        classes[first],
        round(float(probabilities[first]), 4),
        round(margin, 4),
        round(float(normalized_entropy(probabilities[None])[0]), 4),
        novelty,
        f"{doubt}, {unlike}",
    )
