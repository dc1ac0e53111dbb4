"""What a finished model translates, and where it looked while it did.

T target tokens, S source tokens, D width, H heads, K head width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.model.layers import Attention, Block
from headstock.model.model import Model
from headstock.tasks.translate import Sentences, Translate
from headstock.text.records import Records
from headstock.text.tokenizer import Tokenizer
from headstock.train.predict import outputs


def translations(model: Model, task: Translate, texts: Sequence[str], *, length: int, dtype: str = "auto") -> list[str]:
    """The translation of each text; of what is blank, nothing."""
    rows = [row for row, text in enumerate(texts) if text and not text.isspace()]
    made = [""] * len(texts)
    if rows:
        data = prepared(task, [texts[row] for row in rows])
        found = outputs(model, task, data, length=length, dtype=dtype)
        for row, prediction in zip(rows, task.predictions(data, found), strict=True):
            made[row] = prediction["text"]
    return made


def prepared(task: Translate, texts: Sequence[str]) -> Sentences:
    records = Records("text", list(range(1, len(texts) + 1)), task.columns_of(texts))
    return task.prepare(records, labelled=False)


@dataclass(frozen=True)
class Alignment:
    """How much each token of a translation looked at each token of its source."""

    text: str
    source: list[str]  # S, the end mark last
    target: list[str]  # T, the end mark last unless the translation was cut off before it
    weights: np.ndarray  # (T, S), each row sums to one


@torch.no_grad()
def align(model: Model, task: Translate, text: str, *, length: int) -> Alignment:
    """Translate one text and see what its tokens looked at: the mean over the heads of the decoder's last layer."""
    if not text.strip():
        raise UserError("no text to translate")
    data = prepared(task, [text])
    (found,) = outputs(model, task, data, length=length)
    data.targets = [[int(token) for token in found]]
    batch = task.examples(data, length=length).batch([0]).to(model.device)
    assert batch.source is not None
    model.eval()
    with looking(model) as seen:
        model(batch)
    written = batch.labels["token"][0].tolist()
    return Alignment(
        task.predictions(data, [found])[0]["text"],
        spelled(task.reader, batch.source.tokens[0].tolist()),
        spelled(task.tokenizer, written),
        seen[0][0].float().cpu().numpy(),
    )


@contextmanager
def looking(model: Model) -> Iterator[list[Tensor]]:
    """While this is open, what the decoder's last layer looks at is written down, (B, T, S); nothing else changes.

    The attention itself is one fused product that never has its weights; here they are made again, plainly. Padded
    sources are not told apart, so rows must be read one by one.
    """
    backbone: Any = model.backbone
    seen, block = list[Tensor](), cast(Block, backbone.decoder.blocks[-1])
    assert block.cross is not None and block.around_cross is not None
    cross, around, memory = block.cross, block.around_cross, list[Tensor]()

    def remember(module: Any, given: tuple[Any, ...], output: Any) -> None:
        memory[:] = [output.hidden]

    def look(module: Any, given: tuple[Any, ...]) -> None:
        x = given[0]
        seen.append(attention_of(cross, x if around.post else around.norm(x), memory[0]).mean(1))

    hooks = [backbone.encoder.register_forward_hook(remember), around.register_forward_pre_hook(look)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def attention_of(cross: Attention, x: Tensor, memory: Tensor) -> Tensor:
    """(B, H, T, S): the shares in which each head of a cross-attention mixes the memory for every place of `x`."""
    width = x.size(-1)
    bias = None if cross.inputs.bias is None else cross.inputs.bias[:width]
    (query,) = cross.split(F.linear(x, cross.inputs.weight[:width], bias), 1)  # (B, H, T, K)
    query = query if cross.query_norm is None else cross.query_norm(query)
    keys, _ = cross.remember(memory)
    return (query @ keys.transpose(-1, -2) / query.size(-1) ** 0.5).softmax(-1)


def spelled(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Tokens as a person reads them; marks and parts of a character as the vocabulary spells them."""
    plain = [tokenizer.decode([token]) for token in tokens]
    return [
        tokenizer.token(token) if not text or "\ufffd" in text else text.strip() or "\u2423"
        for text, token in zip(plain, tokens, strict=True)
    ]
