"""Which tokens weighed most in a prediction: gradient x input, averaged on the way from a blank text to this one.

The plain product, taken at the text alone, has the wrong sign in a model that norms its residual stream: there a
longer embedding counts for less beside what the layers add. Averaged along the way (integrated gradients) the weights
add up to the difference that the text makes.

T tokens, D width, C classes.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from headstock.data.windowing import windows
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.tasks.labelled import LabelledTask

TokenAttributions = list[tuple[str, float]]
Scores = Callable[[Model, Batch], Tensor]  # a score for each example of a batch, (N,)
STEPS = 16  # on the way


def token_attributions(
    model: Model, task: LabelledTask, data: Any, row: int, *, target: int, length: int, averaged: bool = True
) -> TokenAttributions:
    """Each token of the part of a text that was read, and how far it moved the score of class `target`.

    Positive speaks for the class, against the mean of all. The weights add up to the score of the text less that of
    a blank one, in which every token but the opening mark is blank; not `averaged`, they are the plain products.
    """
    steps = STEPS if averaged else 1
    batch = task.examples(data, length=length).batch([row] * steps).to(model.device)
    opening = torch.zeros_like(batch.tokens, dtype=torch.bool)
    opening[:, 0] = True
    blank = baseline_embedding(model, task)

    def score(model: Model, batch: Batch) -> Tensor:
        scores = task.class_scores(model, batch)  # (steps, C)
        return scores[:, target] if task.multilabel else scores[:, target] - scores.mean(1)

    weights = integrated_gradients(model, batch, score, blank=blank, steps=steps, fixed=opening, averaged=averaged)
    if len(weights) == 1:
        real = slice(1, None if batch.padding is None else int((~batch.padding[0]).sum()))
        ids, values = batch.tokens[0, real].tolist(), weights[0, real]
    else:  # a token in several windows gets the sum
        text, end = data.tokens[row], len(task.suffix)
        ids, values = [*text, *task.suffix], weights.new_zeros(len(text) + end)
        for window, one in zip(windows(len(text), max(1, length - 1 - end)), weights, strict=True):
            values[window.start : window.end] += one[1 : 1 + window.size]
            values[len(text) :] += one[1 + window.size : 1 + window.size + end]
    return [(task.tokenizer.id_to_token(token), value) for token, value in zip(ids, values.tolist(), strict=True)]


def integrated_gradients(
    model: Model,
    batch: Batch,
    score: Scores,
    *,
    blank: Tensor,
    steps: int,
    fixed: Tensor | None = None,
    averaged: bool = True,
) -> Tensor:
    """(parts, T) what each token of an example adds to its score; a batch holds it `steps` times, in all its parts.

    The embeddings go from `blank` to what they are in equal steps, save those that are `fixed`, (rows, T). Not
    `averaged`, the products are those of the text itself: its gradient by its own embeddings. Where a batch brings a
    source, its tokens are the ones that are weighed.
    """
    weighed = batch if batch.source is None else batch.source
    rows = len(weighed.tokens)
    step = torch.arange(rows, device=model.device) if batch.example_ids is None else batch.example_ids
    share = (step + 0.5) / steps if averaged else torch.ones(rows, device=model.device)  # the middle of each step
    seen: list[Tensor] = []

    def on_the_way(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if seen:  # the target of a source, where both share one embedding
            return output
        far = output.detach() - blank if averaged else output.detach()  # (rows, T, D)
        if fixed is not None and averaged:
            far = far.masked_fill(fixed[..., None], 0)
        start = output.detach() - far
        seen.extend([far, (start + share[:, None, None] * far).requires_grad_()])
        return seen[-1]

    model.eval()
    embedding = model.backbone.tokens if batch.source is None else cast(EncoderDecoder, model.backbone).encoder.tokens
    hook = embedding.register_forward_hook(on_the_way)
    try:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(score(model, batch).sum(), seen[1])
    finally:
        hook.remove()
    products = (gradient * seen[0]).sum(-1)  # (rows, T)
    return products.view(steps, rows // steps, -1).mean(0)


def baseline_embedding(model: Model, task: Task, *, left_to_right: bool = False) -> Tensor:
    """What stands for no word in particular: [MASK] where the model was taught it, else the mean of all words."""
    table = model.backbone.tokens.weight.detach()
    marked = getattr(task.config, "opening", task.bos_role) == "cls"
    if not (model.backbone.causal or left_to_right) and marked and task.tokenizer.mask is not None:
        return table[task.tokenizer.mask]
    return table.mean(0)
