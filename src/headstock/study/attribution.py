"""Which tokens weighed most in a prediction: gradient x input, on a model as it is."""

import torch
from torch import Tensor

from headstock.model.model import Model
from headstock.tasks.classify import Classify, Labelled

Weighed = list[tuple[str, float]]


def token_weights(model: Model, task: Classify, data: Labelled, row: int, *, target: int, length: int) -> Weighed:
    """Each token of the part of a text that was read, and how much it moved the score of class `target`.

    The weight is the derivative of the score by the token's embedding, times that embedding: to first order, what
    the score would lose without the token. Positive speaks for the class. The opening mark is left out.
    """
    batch = task.examples(data, length=length).batch([row]).to(model.device)
    seen: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    model.eval()
    hook = model.backbone.tokens.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            scores = model.heads["label"](task.read(model, batch))  # (1, C)
            score = scores[0, target] - scores[0].mean()  # against the other classes
            (gradient,) = torch.autograd.grad(score, seen[0])
    finally:
        hook.remove()
    weights = (gradient * seen[0].detach()).sum(-1)  # (B, T, D) -> (B, T)
    weighed: Weighed = []
    for ids, values, absent in zip(batch.tokens, weights, padding_of(batch.tokens, batch.padding), strict=True):
        real = [(int(i), float(v)) for i, v, no in zip(ids, values, absent, strict=True) if not no]
        weighed += [(task.tokenizer.token(number), value) for number, value in real[1:]]
    return weighed


def padding_of(tokens: Tensor, padding: Tensor | None) -> Tensor:
    return torch.zeros_like(tokens, dtype=torch.bool) if padding is None else padding
