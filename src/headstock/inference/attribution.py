"""Attributes a prediction to input tokens by integrated gradients (Sundararajan et al. 2017).

Plain gradient x input often has the wrong sign in models that normalize the residual stream, where a longer embedding
reduces the weight of what the layers add. Integrated from a baseline, the attributions add up to the difference
between the scores of the text and of the baseline.

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
STEPS = 16  # of the integral


def token_attributions(
    model: Model, task: LabelledTask, data: Any, row: int, *, target: int, length: int, averaged: bool = True
) -> TokenAttributions:
    """Each token that was read, and its contribution to the score of class `target` relative to the mean class.

    The contributions add up to the score of the text minus that of a text in which every token but the first special
    token is the baseline. Not `averaged`, they are plain gradient x input.
    """
    steps = STEPS if averaged else 1
    batch = task.examples(data, length=length).batch([row] * steps).to(model.device)
    fixed = torch.zeros_like(batch.tokens, dtype=torch.bool)
    fixed[:, 0] = True
    blank = baseline_embedding(model, task)

    def score(model: Model, batch: Batch) -> Tensor:
        scores = task.class_scores(model, batch)  # (steps, C)
        alone = task.multilabel or scores.size(1) == 1  # a value, or a class that does not compete with others
        return scores[:, target] if alone else scores[:, target] - scores.mean(1)

    weights = integrated_gradients(model, batch, score, blank=blank, steps=steps, fixed=fixed, averaged=averaged)
    if len(weights) == 1:
        real = slice(1, None if batch.padding is None else int((~batch.padding[0]).sum()))
        ids, values = batch.tokens[0, real].tolist(), weights[0, real]
    else:  # a token in several windows gets the sum
        text, suffix = data.tokens[row], task.special.suffix
        ids, values = [*text, *suffix], weights.new_zeros(len(text) + len(suffix))
        for window, row_weights in zip(windows(len(text), task.special.capacity(length)), weights, strict=True):
            values[window.start : window.end] += row_weights[1 : 1 + window.size]
            values[len(text) :] += row_weights[1 + window.size : 1 + window.size + len(suffix)]
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
    """(windows, T) the contribution of each token of an example to its score.

    The batch holds all windows of the example `steps` times. Their embeddings are interpolated between the baseline
    `blank` and the actual ones, except where `fixed` (rows, T) is True. Not `averaged`, the result is gradient x input
    at the text itself. If the batch has a source, its tokens are attributed.
    """
    rows = len((batch if batch.source is None else batch.source).tokens)
    step = torch.arange(rows, device=model.device) if batch.example_ids is None else batch.example_ids
    share = (step + 0.5) / steps if averaged else torch.ones(rows, device=model.device)  # midpoint rule
    embedded: list[Tensor] = []  # difference to the baseline, and the interpolated embeddings

    def interpolate(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if embedded:  # the target side of an encoder-decoder with one embedding
            return output
        difference = output.detach() - blank if averaged else output.detach()  # (rows, T, D)
        if fixed is not None and averaged:
            difference = difference.masked_fill(fixed[..., None], 0)
        start = output.detach() - difference
        embedded.extend([difference, (start + share[:, None, None] * difference).requires_grad_()])
        return embedded[-1]

    model.eval()
    embedding = model.backbone.tokens if batch.source is None else cast(EncoderDecoder, model.backbone).encoder.tokens
    hook = embedding.register_forward_hook(interpolate)
    try:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(score(model, batch).sum(), embedded[1])
    finally:
        hook.remove()
    products = (gradient * embedded[0]).sum(-1)  # (rows, T)
    return products.view(steps, rows // steps, -1).mean(0)


def baseline_embedding(model: Model, task: Task, *, left_to_right: bool = False) -> Tensor:
    """The embedding of [MASK] if the model was trained with it, otherwise the mean of all embeddings."""
    table = model.backbone.tokens.weight.detach()
    marked = getattr(task.config, "opening", task.bos_role) == "cls"
    if not (model.backbone.causal or left_to_right) and marked and task.tokenizer.mask is not None:
        return table[task.tokenizer.mask]
    return table.mean(0)
