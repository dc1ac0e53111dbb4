"""Texts as vectors: one for each text, word or token, out of the layers that are asked for.

B rows, T tokens, D width (4 times the model's for concat4), L layers.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import SpecialTokens, Window, windows
from headstock.decoding.batching import to_device, token_batches
from headstock.errors import UserError, did_you_mean
from headstock.io import atomic_file
from headstock.kernels.backends import fast_cpu_kernels, without_cudnn_attention
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch
from headstock.model.heads import pool as pooled
from headstock.model.heads import pooled_positions
from headstock.model.layer_features import ScalarMix, check_layers, feature_width, select_layers
from headstock.model.model import Model
from headstock.tasks.base import pad_with_special_tokens

Pool = Literal["none", "mean", "cls", "last"]
WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]+")  # letters with hyphens and apostrophes inside, or marks


@dataclass(frozen=True)
class TokenAlignment:
    """Where a text's vectors belong: to its tokens, or to its words."""

    text: str
    tokens: list[str]
    words: list[int | None]  # the number of the word that each token is of; None for white space
    offsets: list[tuple[int, int]]  # the characters of each

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens, "words": self.words, "offsets": self.offsets}


def resolve_pooling(pool: str | None, backbone: Backbone) -> Pool:
    """The way asked for, or the one that suits the model."""
    if pool is None:
        return "last" if backbone.causal else "mean"
    if pool not in get_args(Pool):
        ways = ", ".join(get_args(Pool))
        raise UserError(f"pool: must be one of {ways}, not {pool!r}{did_you_mean(pool, get_args(Pool))}")
    if pool == "cls" and backbone.causal:
        raise UserError("pool: a causal model's first mark sees no text, so cls says nothing; use last or mean")
    return pool  # type: ignore[return-value]


def embed(
    model: Model, texts: Sequence[Sequence[int]], *, special: SpecialTokens, length: int, layers: str, pool: Pool
) -> list[np.ndarray]:
    """For each text (D,), or with pool none (T, D): one vector a token, without those of the marks around the text.

    Pooling is that of the task heads: mean and last count the marks around a text as they do, padding never. A long
    text is read in overlapping rows, whose pooled vectors are averaged; a token's vector is from the row where it has
    most context.
    """
    check_layers(layers, model.backbone.depth)
    width = feature_width(model.backbone.width, layers)
    room, ahead, device = special.capacity(length), not model.backbone.causal, model.device
    rows = [(i, part) for i, text in enumerate(texts) for part in windows(len(text), room, centered=ahead)]
    rows.sort(key=lambda row: row[1].start - row[1].end)  # the longest first; rows of one text stay in order
    found = [np.zeros((len(text), width), dtype=np.float32) for text in texts] if pool == "none" else []
    whole: list[Tensor] = []  # of each batch (B, D), left where the model is until all are there
    for held in token_batches(rows, lambda row: row[1].size + len(special), device):
        shown = [texts[i] if part.size == len(texts[i]) else texts[i][part.start : part.end] for i, part in held]
        batch = to_device(Batch(*pad_with_special_tokens(shown, special.prefix, special.suffix, special.pad)), device)
        if pool != "none":
            whole.append(pooled_vectors(model, batch, layers, pool))
            continue
        vectors = layer_vectors(model, batch, layers)  # (B, T, D)
        for (i, part), row in zip(held, vectors.cpu().numpy(), strict=True):
            found[i][part.keep_start : part.keep_end] = row[kept_positions(part, special)]
    return found if pool == "none" else mean_by_text(whole, [i for i, _ in rows], len(texts))


def mean_by_text(whole: list[Tensor], owners: list[int], count: int) -> list[np.ndarray]:
    """The mean of the rows of each of `count` texts."""
    if not whole:
        return []
    vectors = torch.cat(whole).cpu().numpy()  # in one piece: to ask a GPU more often is to wait for it more often
    if len(vectors) == count:  # one row each, in another order
        found = np.empty_like(vectors)
        found[owners] = vectors
        return list(found)
    sums = np.zeros((count, vectors.shape[1]), dtype=np.float32)
    np.add.at(sums, owners, vectors)
    return list(sums / np.bincount(owners, minlength=count).astype(np.float32)[:, None])


def kept_positions(part: Window, special: SpecialTokens) -> slice:
    """Where in a row the tokens stand that are taken from it."""
    lead = len(special.prefix) - part.start
    return slice(part.keep_start + lead, part.keep_end + lead)


@torch.inference_mode()
@fast_cpu_kernels()
def layer_vectors(model: Model, batch: Batch, layers: str) -> Tensor:
    """(B, T, D) of the chosen layers; a mix has equal shares of all unless the model's own head has learned others."""
    with without_cudnn_attention(batch.tokens.device):
        output = model(batch, keep_layers=layers != "last")
    vectors = select_layers(model.backbone, output, layers).float()
    if layers != "mix":
        return vectors
    learned = next((part for part in model.heads.modules() if isinstance(part, ScalarMix)), None)
    return vectors.mean(-2) if learned is None else learned(vectors)  # (B, T, L + 1, D) -> (B, T, D)


@torch.inference_mode()
@fast_cpu_kernels()
def pooled_vectors(model: Model, batch: Batch, layers: str, how: Literal["mean", "cls", "last"]) -> Tensor:
    """(B, D) the same, pooled."""
    places = pooled_positions(batch, how) if layers == "last" else None
    if places is None:
        return pooled(layer_vectors(model, batch, layers), batch.padding, how)
    with without_cudnn_attention(batch.tokens.device):
        return model(batch, query_positions=places).hidden.squeeze(1).float()


# Vectors on disk


def write_vectors(out: Path, rows: Iterable[tuple[dict[str, Any], np.ndarray]]) -> dict[str, Any]:
    """Write what is known of each text with its vectors, as they come, and say how much that was.

    .jsonl has all in one row a text. .npy has the vectors only; where they are of tokens or words, all texts' one after
    another, and a second file, F.tokens.jsonl, says which `rows` of the array are whose.
    """
    with ExitStack() as stack:
        if out.suffix == ".jsonl":
            lines = stack.enter_context(stack.enter_context(atomic_file(out)).open("w", encoding="utf-8"))
            count, size, width = 0, 0, 0
            for whose, vectors in rows:
                name = "vector" if vectors.ndim == 1 else "vectors"
                numbers = np.round(vectors.astype(np.float64), 6).tolist()
                lines.write(json.dumps(whose | {name: numbers}, ensure_ascii=False) + "\n")
                count, size, width = count + 1, size + len(np.atleast_2d(vectors)), vectors.shape[-1]
            return {"texts": count, "shape": [size, width]}
        table = NpyWriter(stack.enter_context(stack.enter_context(atomic_file(out)).open("wb")))
        count, index = 0, None
        for whose, vectors in rows:
            if vectors.ndim == 2:
                beside = out.with_suffix(".tokens.jsonl")
                index = index or stack.enter_context(
                    stack.enter_context(atomic_file(beside)).open("w", encoding="utf-8")
                )
                place = [table.rows, table.rows + len(vectors)]
                index.write(json.dumps(whose | {"rows": place}, ensure_ascii=False) + "\n")
            table.add(np.atleast_2d(vectors))
            count += 1
        return {"texts": count, "shape": table.close()}


class NpyWriter:
    """A .npy file that grows row by row; how many there are is written into its head in the end."""

    def __init__(self, file: BinaryIO):
        self.file, self.rows, self.width = file, 0, 0

    def add(self, rows: np.ndarray) -> None:
        if not self.width:
            self.width = rows.shape[1]
            self.head()
        self.rows += len(rows)
        self.file.write(np.ascontiguousarray(rows, dtype=np.float32).tobytes())

    def head(self) -> None:
        """numpy leaves room in it for the number of rows to grow."""
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.width)}
        np.lib.format.write_array_header_1_0(self.file, shape)

    def close(self) -> list[int]:
        self.file.seek(0)
        self.head()
        self.file.seek(0, 2)
        return [self.rows, self.width]


# Which vector is whose


def align_tokens(tokenizer: Tokenizer, text: str) -> TokenAlignment:
    """A text's tokens with their characters and the words they are of."""
    offsets = tokenizer.offsets(text)
    touched = overlapping_words(offsets, word_spans(text))
    return TokenAlignment(text, tokenizer.tokenize(text), [next(iter(words), None) for words in touched], offsets)


def word_vectors(aligned: TokenAlignment, vectors: np.ndarray) -> tuple[TokenAlignment, np.ndarray]:
    """The mean of the pieces of each word, (T, D) -> (words, D); a piece across two words counts for both."""
    spans = word_spans(aligned.text)
    pieces: list[list[int]] = [[] for _ in spans]
    for token, words in enumerate(overlapping_words(aligned.offsets, spans)):
        for word in words:
            pieces[word].append(token)
    kept = [word for word in range(len(spans)) if pieces[word]]  # a tokenizer may leave out what it takes for no text
    found = np.stack([vectors[pieces[word]].mean(0) for word in kept]) if kept else vectors[:0]
    texts = [aligned.text[slice(*spans[word])] for word in kept]
    return TokenAlignment(aligned.text, texts, list(range(len(kept))), [spans[word] for word in kept]), found


def word_spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in WORD.finditer(text)]


def overlapping_words(offsets: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[range]:
    """For each token the numbers of the words that it has characters of; both come in the order of the text."""
    begins, ends = [begin for begin, _ in words], [end for _, end in words]
    return [range(bisect_right(ends, begin), bisect_left(begins, end)) for begin, end in offsets]
