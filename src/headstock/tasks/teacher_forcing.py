"""How an encoder-decoder learns: it reads a source, and each token of the target must follow from the true ones before.

B rows, T target tokens, N predicted tokens, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, pad
from headstock.model.model import Model
from headstock.tasks.base import token_loss

Row = tuple[Sequence[int], Sequence[int] | None]  # a source and, where it is known, its target


def teacher_forcing_batch(
    rows: Sequence[Row], *, start: int, end: int, source_end: int, filler: int, length: int
) -> Batch:
    """Sources S <end> beside targets <start> A B C, which must give A B C <end>.

    What does not fit into `length` tokens is cut; a target that was cut is not taught to end there.
    """
    sources = Batch(*pad([[*source[: length - 1], source_end] for source, _ in rows], filler))
    if any(target is None for _, target in rows):
        tokens, padding = pad([[start] for _ in rows], filler)
        return Batch(tokens, padding, source=sources)
    targets = [list(target) for _, target in rows if target is not None]
    tokens, padding = pad([[start, *target][:length] for target in targets], filler)
    labels, _ = pad([[*target, end][:length] for target in targets], IGNORE_INDEX)
    return Batch(
        tokens,
        padding,
        source=sources,
        labels={"token": labels},
        label_positions={"token": find_label_positions(labels)},
    )


def token_losses(model: Model, batch: Batch, *, smoothing: float) -> dict[str, Tensor]:
    """The loss of all target tokens, and how many of the best guesses are right."""
    # the head is by far the widest layer, so padding does not pass through it
    loss, right = token_loss(
        model.heads["token"], *batch.gather_labelled("token", model(batch).hidden), smoothing=smoothing
    )
    return {"token": loss, "correct": right}


def token_score(sums: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float]:
    count = max(1, counts["token"])
    loss = sums["token"] / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": sums["correct"] / count}
