"""Teacher forcing: each target token is predicted from the source and the true tokens before it."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, pad
from headstock.model.model import Model
from headstock.tasks.base import token_loss

Row = tuple[Sequence[int], Sequence[int] | None]  # source and target ids


def teacher_forcing_batch(
    rows: Sequence[Row], *, start: int, end: int, source_end: int, filler: int, length: int
) -> Batch:
    """Sources S <eos> with decoder inputs <bos> A B C and labels A B C <eos>.

    Both sides are truncated to `length` tokens; a truncated target has no EOS label.
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
    """The summed loss of the target tokens, and the number of correct top-1 predictions."""
    # the token head is the widest layer, so padding does not pass through it
    loss, right = token_loss(
        model.heads["token"], *batch.gather_labelled("token", model(batch).hidden), smoothing=smoothing
    )
    return {"token": loss, "correct": right}


def token_score(sums: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float]:
    count = max(1, counts["token"])
    loss = sums["token"] / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": sums["correct"] / count}
