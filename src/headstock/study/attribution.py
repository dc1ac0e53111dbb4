"""Which tokens weighed most in a prediction: gradient x input, averaged on the way from a blank text to this one.

The plain product, taken at the text alone, has the wrong sign in a model that norms its residual stream: there a
longer embedding counts for less beside what the layers add. Averaged along the way (integrated gradients) the weights
add up to the difference that the text makes.
"""

import torch
from torch import Tensor

from headstock.model.model import Model
from headstock.tasks.classify import Classify, Labelled

Weighed = list[tuple[str, float]]
STEPS = 16  # on the way


def token_weights(model: Model, task: Classify, data: Labelled, row: int, *, target: int, length: int) -> Weighed:
    """Each token of the part of a text that was read, and how far it moved the score of class `target`.

    Positive speaks for the class, against the mean of all. The weights add up to the score of the text less that of
    a blank one, in which every token but the opening mark is blank.
    """
    batch = task.examples(data, length=length).batch([row] * STEPS).to(model.device)
    rows = len(batch.tokens)
    step = batch.owners if batch.owners is not None else torch.arange(rows, device=model.device)
    share = (step + 0.5) / STEPS  # (rows,) how far on the way; the middle of each step is looked at
    seen: list[Tensor] = []

    def on_the_way(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        far = (output.detach() - blank).masked_fill(opening, 0)  # (rows, T, D)
        start = output.detach() - far
        seen.extend([far, (start + share[:, None, None] * far).requires_grad_()])
        return seen[-1]

    model.eval()
    blank = blank_embedding(model, task)
    opening = torch.zeros_like(batch.tokens, dtype=torch.bool)[..., None]
    opening[:, 0] = True
    hook = model.backbone.tokens.register_forward_hook(on_the_way)
    try:
        with torch.enable_grad():
            scores = model.heads["label"](task.read(model, batch))  # (STEPS, C)
            (gradient,) = torch.autograd.grad((scores[:, target] - scores.mean(1)).sum(), seen[1])
    finally:
        hook.remove()
    products = (gradient * seen[0]).sum(-1)  # (rows, T)
    parts = rows // STEPS  # rows of the text itself, the same for every step
    weights = products.view(STEPS, parts, -1).mean(0)  # (parts, T)
    weighed: Weighed = []
    for part in range(parts):
        real = batch.tokens.size(1) if batch.padding is None else int((~batch.padding[part]).sum())
        ids, values = batch.tokens[part, 1:real].tolist(), weights[part, 1:real].tolist()
        again = len(weighed) - part * task.stride(length)  # tokens that the window before has read too: told once
        for place, value in enumerate(values[:again], len(weighed) - again):
            weighed[place] = (weighed[place][0], weighed[place][1] + value)
        new = zip(ids[again:], values[again:], strict=True)
        weighed += [(task.tokenizer.token(number), value) for number, value in new]
    return weighed


def blank_embedding(model: Model, task: Classify) -> Tensor:
    """What stands for no word in particular: [MASK] where the model was taught it, else the mean of all words."""
    table = model.backbone.tokens.weight.detach()
    if not model.backbone.causal and task.config.opening == "cls" and task.tokenizer.mask is not None:
        return table[task.tokenizer.mask]
    return table.mean(0)
