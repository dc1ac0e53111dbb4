"""Embeddings of texts, words or tokens from chosen layers.

B rows, T tokens, D width (4 times the model's for concat4), L layers.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import SpecialTokens, Window, windows
from headstock.decoding.batching import length_batches, max_batch_tokens, to_device
from headstock.errors import UserError, did_you_mean
from headstock.kernels.backends import fast_cpu_kernels, single_host_thread, without_cudnn_attention
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch
from headstock.model.heads import pool as pool_tokens
from headstock.model.heads import pooled_positions
from headstock.model.layer_features import ScalarMix, check_layers, feature_width, select_layers
from headstock.model.model import Model
from headstock.tasks.special_tokens import pad_with_special_tokens

PoolKind = Literal["mean", "cls", "last"]
Pool = Literal["none", "mean", "cls", "last"]
WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]+")  # a word with inner hyphens and apostrophes, or punctuation


@dataclass(frozen=True)
class TokenAlignment:
    """The tokens or words that the vectors of a text belong to."""

    text: str
    tokens: list[str]
    words: list[int | None]  # index of each token's word; None for white space
    offsets: list[tuple[int, int]]  # start and end character of each

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens, "words": self.words, "offsets": self.offsets}


def resolve_pooling(pool: str | None, backbone: Backbone) -> Pool:
    """The given pooling, or the default: last token for causal models, otherwise the mean."""
    if pool is None:
        return "last" if backbone.causal else "mean"
    if pool not in get_args(Pool):
        names = ", ".join(get_args(Pool))
        raise UserError(f"pool: must be one of {names}, not {pool!r}{did_you_mean(pool, get_args(Pool))}")
    if pool == "cls" and backbone.causal:
        raise UserError("pool: the first token of a causal model has no context; use last or mean instead of cls")
    return pool  # type: ignore[return-value]


def embed(
    model: Model, texts: Sequence[Sequence[int]], *, special: SpecialTokens, length: int, layers: str, pool: Pool
) -> np.ndarray | list[np.ndarray]:
    """(N, D) one vector per text; with pool "none" (T, D) for each, one vector per token without the special tokens.

    Pooling is the same as in the task heads: mean and last include special tokens, never padding. A long text is read
    in overlapping windows, whose pooled vectors are averaged; a token's vector comes from the window in which it has
    the most context.
    """
    check_layers(layers, model.backbone.depth)
    width = feature_width(model.backbone.width, layers)
    room, centered = special.capacity(length), not model.backbone.causal
    if pool != "none":
        parts, owners = list(texts), list(range(len(texts)))  # the owner of a part is the text it comes from
        if max(map(len, texts), default=0) > room:
            pieces = [(i, w) for i, text in enumerate(texts) for w in windows(len(text), room, centered=centered)]
            parts, owners = [texts[i][w.start : w.end] for i, w in pieces], [i for i, _ in pieces]
        return mean_by_text(embed_parts(model, parts, special, layers, pool), owners, len(texts), width)
    rows = [(i, window) for i, text in enumerate(texts) for window in windows(len(text), room, centered=centered)]
    result = [np.zeros((len(text), width), dtype=np.float32) for text in texts]
    for indices, batch in device_batches(model, [texts[i][w.start : w.end] for i, w in rows], special):
        vectors = layer_vectors(model, batch, layers)  # (B, T, D)
        for index, row in zip(indices, vectors.cpu().numpy(), strict=True):
            i, window = rows[index]
            result[i][window.keep_start : window.keep_end] = row[kept_positions(window, special)]
    return result


def embed_parts(
    model: Model, parts: Sequence[Sequence[int]], special: SpecialTokens, layers: str, pool: PoolKind
) -> np.ndarray:
    """(N, D) the pooled vector of each sequence of tokens, all of which fit into the model."""
    order: list[int] = []
    pooled: list[Tensor] = []  # (B, D) per batch, copied from the device at once at the end
    for indices, batch in device_batches(model, parts, special):
        order += indices
        pooled.append(pooled_vectors(model, batch, layers, pool))
    if not pooled:
        return np.zeros((0, feature_width(model.backbone.width, layers)), dtype=np.float32)
    vectors = torch.cat(pooled).cpu().numpy()
    result = np.empty_like(vectors)
    result[order] = vectors
    return result


def device_batches(
    model: Model, parts: Sequence[Sequence[int]], special: SpecialTokens
) -> Iterator[tuple[list[int], Batch]]:
    """Batches of similar length between special tokens, on the model's device, with the indices of their rows."""
    sizes = np.fromiter(map(len, parts), np.int64, len(parts)) + len(special)
    for indices in length_batches(sizes, max_batch_tokens(model.device)):
        tokens = [parts[index] for index in indices]
        with single_host_thread(model.device):
            padded = pad_with_special_tokens(tokens, special.prefix, special.suffix, special.pad)
            batch = to_device(Batch(*padded), model.device)
        yield indices, batch


def mean_by_text(vectors: np.ndarray, owners: list[int], count: int, width: int) -> np.ndarray:
    """(count, D) the mean of the vectors of each text."""
    if len(vectors) == count:  # one each
        return vectors
    sums = np.zeros((count, width), dtype=np.float32)
    np.add.at(sums, owners, vectors)
    return sums / np.bincount(owners, minlength=count).astype(np.float32)[:, None]


def kept_positions(window: Window, special: SpecialTokens) -> slice:
    """The positions in a row of the tokens that are kept from a window."""
    lead = len(special.prefix) - window.start
    return slice(window.keep_start + lead, window.keep_end + lead)


@torch.inference_mode()
@fast_cpu_kernels()
def layer_vectors(model: Model, batch: Batch, layers: str) -> Tensor:
    """(B, T, D) of the chosen layers; a mix has equal weights unless the model's head has learned others."""
    with without_cudnn_attention(batch.tokens.device):
        output = model(batch, keep_layers=layers != "last")
    vectors = select_layers(model.backbone, output, layers).float()
    if layers != "mix":
        return vectors
    learned = next((part for part in model.heads.modules() if isinstance(part, ScalarMix)), None)
    return vectors.mean(-2) if learned is None else learned(vectors)  # (B, T, L + 1, D) -> (B, T, D)


@torch.inference_mode()
@fast_cpu_kernels()
def pooled_vectors(model: Model, batch: Batch, layers: str, how: PoolKind) -> Tensor:
    """(B, D) the pooled vectors of the chosen layers."""
    positions = pooled_positions(batch, how) if layers == "last" else None
    if positions is None:
        return pool_tokens(layer_vectors(model, batch, layers), batch.padding, how)
    with without_cudnn_attention(batch.tokens.device):
        return model(batch, query_positions=positions).hidden.squeeze(1).float()


# Tokens and words


def align_tokens(tokenizer: Tokenizer, text: str) -> TokenAlignment:
    """The tokens of a text, with their characters and words."""
    offsets = tokenizer.offsets(text)
    touched = overlapping_words(offsets, word_spans(text))
    return TokenAlignment(text, tokenizer.tokenize(text), [next(iter(words), None) for words in touched], offsets)


def word_vectors(aligned: TokenAlignment, vectors: np.ndarray) -> tuple[TokenAlignment, np.ndarray]:
    """(T, D) -> (words, D): the mean over each word's tokens; a token that spans two words counts for both."""
    spans = word_spans(aligned.text)
    pieces: list[list[int]] = [[] for _ in spans]
    for token, overlap in enumerate(overlapping_words(aligned.offsets, spans)):
        for word in overlap:
            pieces[word].append(token)
    words = [word for word in range(len(spans)) if pieces[word]]  # a tokenizer may drop characters
    means = np.stack([vectors[pieces[word]].mean(0) for word in words]) if words else vectors[:0]
    texts = [aligned.text[slice(*spans[word])] for word in words]
    return TokenAlignment(aligned.text, texts, list(range(len(words))), [spans[word] for word in words]), means


def word_spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in WORD.finditer(text)]


def overlapping_words(offsets: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[range]:
    """For each token the indices of the words it overlaps; both are sorted by position."""
    begins, ends = [begin for begin, _ in words], [end for _, end in words]
    return [range(bisect_right(ends, begin), bisect_left(begins, end)) for begin, end in offsets]
