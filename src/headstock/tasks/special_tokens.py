"""Special tokens around texts: which ones a task uses, and segment ids derived from them.

B rows, T tokens.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import SpecialTokens
from headstock.errors import UserError
from headstock.tasks.base import Task

PAIR_SPECIAL_TOKENS = 3  # of [CLS] A [SEP] B [SEP]


def bos_id(tokenizer: Tokenizer, role: str) -> int:
    """The first token of every text: the one of this role (start or cls), or else another that the tokenizer has."""
    first, second = (tokenizer.bos, tokenizer.cls) if role == "start" else (tokenizer.cls, tokenizer.bos)
    for token in (first, second, tokenizer.eos):
        if token is not None:
            return token
    raise UserError("this tokenizer has no special token to start a text with (<sos>, [CLS] or EOS)")


def decoder_start_id(tokenizer: Tokenizer, role: Literal["bos", "pad"]) -> int:
    """The token that starts the decoder's input: T5 uses its padding token."""
    if role == "bos":
        return bos_id(tokenizer, "start")
    if tokenizer.pad is None:
        raise UserError("task.decoder_start: this tokenizer has no padding token")
    return tokenizer.pad


def separator_id(tokenizer: Tokenizer) -> int:
    """The token after a text or between two: the separator, or else the EOS token."""
    token = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
    if token is None:
        raise UserError("this tokenizer has no special token to end a text with ([SEP] or EOS)")
    return token


def special_tokens_for(task: Task, tokenizer: Tokenizer, *, left_to_right: bool = False) -> SpecialTokens:
    """The special tokens around a single text, as in training.

    With `left_to_right` the text starts with the BOS token and has no end, since it may be continued. Tasks trained
    on pairs of texts also close a single text.
    """
    pad = tokenizer.pad or 0
    if left_to_right:
        return SpecialTokens((bos_id(tokenizer, "start"),), (), pad)
    first = bos_id(tokenizer, getattr(task.config, "opening", task.bos_role))
    closed = task.needs_sentences or getattr(task.config, "closed", False)
    return SpecialTokens((first,), (separator_id(tokenizer),) if closed else (), pad)


def segment_ids(tokens: Tensor, separator: int) -> Tensor:
    """(B, T) segment ids: 0 up to and including the first separator, then 1."""
    is_separator = (tokens == separator).long()
    is_separator[:, 0] = 0  # the BOS token, which in some tokenizers (GPT-2's) is the same one
    return ((is_separator.cumsum(1) - is_separator) > 0).long()


def pad_with_special_tokens(
    texts: Sequence[Sequence[int]], prefix: Sequence[int], suffix: Sequence[int], filler: int
) -> tuple[Tensor, Tensor | None]:
    """Texts between special tokens as one tensor (B, T), and its padding mask (None without padding).

    Equivalent to `pad`, without building a list per text.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = (lengths + len(prefix))[:, None]  # (B, 1)
    columns = np.arange(int(lengths.max(initial=0)) + len(prefix) + len(suffix))
    tokens = np.full((len(texts), len(columns)), filler, np.int64)
    tokens[:, : len(prefix)] = prefix
    is_text = (columns >= len(prefix)) & (columns < ends)
    tokens[is_text] = np.fromiter(chain.from_iterable(texts), np.int64, int(lengths.sum()))
    if suffix:
        np.put_along_axis(tokens, ends + np.arange(len(suffix)), np.asarray(suffix)[None], 1)
    padding = columns >= ends + len(suffix)
    return torch.from_numpy(tokens), torch.from_numpy(padding) if padding.any() else None
