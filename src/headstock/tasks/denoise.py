"""Denoising (span infilling): the encoder reads a text with spans replaced by [MASK], the decoder writes all of it.

B rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headstock.config import added
from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, PlanDefaults, Sample, token_losses, token_score
from headstock.tasks.masking import EpochMasker, MaskingConfig, MaskingTask
from headstock.tasks.packing import DocumentChunks
from headstock.tasks.samples import NEW_TOKENS, sample_denoising
from headstock.tasks.special_tokens import decoder_start_id


@dataclass(frozen=True)
class DenoiseConfig:
    fraction: float = 0.3  # share of the tokens that are removed
    fraction_start: float | None = None  # initial share in training, which changes linearly to `fraction`
    unit: Literal["token", "word", "span"] = "span"  # what is removed together; adjacent units share one [MASK]
    span_mean: float = 3.0  # mean tokens per span
    span_most: int = 10  # most tokens per span
    decoder_start: Literal["bos", "pad"] = added("bos")  # the first token of the decoder's input

    def __post_init__(self) -> None:
        self.masking_config()  # validates the settings

    def masking_config(self) -> MaskingConfig:
        """The settings of a TokenMasker that replaces every selected token by [MASK]."""
        masking = {name: value for name, value in vars(self).items() if name != "decoder_start"}
        return MaskingConfig(**masking, masked=1.0, random=0.0)


@TASKS.add("denoise")
class Denoise(MaskingTask):
    """Reconstructs texts from which spans were removed."""

    Config = DenoiseConfig
    needs_encoder_decoder = True
    is_language_model = True
    plan = PlanDefaults(max_epochs=16, family="seq2seq", batch_shapes=250)
    huggingface_head = "ForConditionalGeneration"

    def __init__(self, config: DenoiseConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.bos = decoder_start_id(tokenizer, config.decoder_start)

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if length < 2:
            raise UserError(f"train.length: {length} is too short for a text and its special token")
        return DenoisingExamples(self, data, length, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        return token_losses(model, model(batch).hidden, batch, smoothing=smoothing)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        return token_score(sums, counts)

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        examples = DenoisingExamples(self, store, min(length, NEW_TOKENS), seed=None, epoch=0)
        starts = np.flatnonzero(examples.chunks.starts == 0)  # of documents: other chunks may start inside a word
        lengths = examples.lengths[starts]
        return sample_denoising(model, self, examples, starts[lengths >= min(12, int(lengths.max()))], seed=seed)


class DenoisingExamples:
    """Chunks of documents and corrupted versions of them, drawn anew in every epoch."""

    def __init__(self, task: Denoise, store: TokenStore, length: int, *, seed: int | None, epoch: int):
        self.task, self.store = task, store
        self.masker = EpochMasker(task, seed=seed, epoch=epoch)
        # the store's EOS token is not counted; source and target have one special token each
        self.chunks = DocumentChunks(store.lengths - 1, length - 1, seed=seed, epoch=epoch)
        self.lengths = self.chunks.lengths + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        task = self.task
        chunks, is_token = self.read(indices)
        corrupted, is_kept = self.corrupt(chunks, is_token, indices)
        source = Batch(*with_eos(corrupted[is_kept], is_kept.sum(1), task.eos, task.pad_id))
        labels, padding = with_eos(chunks[is_token], is_token.sum(1), task.eos, IGNORE_INDEX)
        tokens = torch.full_like(labels, task.bos)
        tokens[:, 1:] = labels[:, :-1]  # shifted right
        if padding is not None:
            tokens[padding] = task.pad_id
        positions = find_label_positions(labels)
        return Batch(tokens, padding, source=source, labels={"token": labels}, label_positions={"token": positions})

    def read(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) the tokens of chunks, and True at tokens."""
        rows = np.asarray(indices)
        lengths = self.chunks.lengths[rows]
        first = self.store.offsets[self.chunks.documents[rows]] + self.chunks.starts[rows]
        return self.store.windows(first, int(lengths.max())), np.arange(lengths.max()) < lengths[:, None]

    def corrupt(
        self, chunks: np.ndarray, is_token: np.ndarray, indices: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) chunks with removed tokens replaced by [MASK], and True at tokens that remain: one [MASK] per span."""
        documents = np.zeros(chunks.shape, np.int64)  # a chunk is from one document
        corrupted, originals = self.masker.mask(chunks, is_token, documents, indices)
        is_masked = originals != IGNORE_INDEX
        continues_span = np.zeros(chunks.shape, bool)
        continues_span[:, 1:] = is_masked[:, 1:] & is_masked[:, :-1]
        return corrupted, is_token & ~continues_span

    def name(self, index: int) -> str:
        return self.store.location(int(self.chunks.documents[index]))


def with_eos(flat: np.ndarray, counts: np.ndarray, eos: int, filler: int) -> tuple[Tensor, Tensor | None]:
    """Concatenated rows of the given lengths as one tensor with an EOS token after each, and its padding mask."""
    columns = np.arange(counts.max() + 1)
    rows = np.full((len(counts), len(columns)), filler, np.int64)
    rows[columns < counts[:, None]] = flat
    rows[np.arange(len(counts)), counts] = eos
    padding = columns > counts[:, None]
    return torch.from_numpy(rows), torch.from_numpy(padding) if padding.any() else None
