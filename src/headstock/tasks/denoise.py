"""Denoising (span infilling): the encoder reads a text with spans replaced by [MASK], the decoder writes it whole.

B rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, count_real_tokens, find_label_positions
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import TASKS, Examples, Sample, Task, bos_id
from headstock.tasks.chunking import DocumentChunks
from headstock.tasks.masked import epoch_key
from headstock.tasks.masking import MaskingConfig, TokenMasker
from headstock.tasks.samples import SAMPLES, suppressed_tokens, with_masks
from headstock.tasks.teacher_forcing import token_losses, token_score

DENOISED_TOKENS = 40  # of a sample


@dataclass(frozen=True)
class DenoiseConfig:
    fraction: float = 0.3  # share of the tokens that are removed
    fraction_start: float | None = None  # initial share in training, which changes linearly to `fraction`
    unit: Literal["token", "word", "span"] = "span"  # what is removed together; adjacent units share one [MASK]
    span_mean: float = 3.0  # mean tokens per span
    span_most: int = 10  # most tokens per span

    def __post_init__(self) -> None:
        self.masking_config()  # validates the settings

    def masking_config(self) -> MaskingConfig:
        """The settings of a TokenMasker that replaces every drawn token by [MASK]."""
        return MaskingConfig(**vars(self), masked=1.0, random=0.0)


@TASKS.add("denoise")
class Denoise(Task):
    """Reconstructs texts from which spans were removed."""

    Config = DenoiseConfig
    needs_encoder_decoder = True
    default_family = "seq2seq"
    max_epochs = 16
    batch_shapes = 250
    huggingface_head = "ForConditionalGeneration"
    is_language_model = True

    def __init__(self, config: DenoiseConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.mask is None or tokenizer.eos is None:
            raise UserError("this tokenizer has no [MASK] or no end mark, which denoising needs")
        self.masker = TokenMasker(config.masking_config(), tokenizer)
        self.mask, self.eos, self.bos = tokenizer.mask, tokenizer.eos, bos_id(tokenizer, self.bos_role)
        self.pad_id = tokenizer.pad or 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": LMHead(backbone)}

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if length < 2:
            raise UserError(f"train.length: {length} is too short for a text and its mark")
        return DenoisingExamples(self, data, length, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        return token_losses(model, batch, smoothing=smoothing)

    def tokens(self, batch: Batch) -> int:
        return count_real_tokens(batch)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        return token_score(sums, counts)

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        """Held-out texts with masked spans, and the whole texts that the model writes."""
        tokenizer = self.tokenizer
        examples = DenoisingExamples(self, store, min(length, DENOISED_TOKENS), seed=None, epoch=0)
        starts = np.flatnonzero(examples.cuts.begins == 0)  # of documents: other pieces may begin inside a word
        long = starts[examples.lengths[starts] >= min(12, int(examples.lengths[starts].max()))]
        draw = np.random.default_rng(derive_seed(seed, "sample rows"))
        rows = sorted(draw.choice(long, size=min(SAMPLES, len(long)), replace=False).tolist())
        batches = [examples.batch([row]) for row in rows]
        sources = [batch.source.tokens[0].tolist() for batch in batches if batch.source is not None]
        outputs = generate(
            model,
            [[self.bos]] * len(rows),
            max_tokens=DENOISED_TOKENS,
            sampling=Sampling(temperature=0.0),
            end=self.eos,
            forbidden=suppressed_tokens(tokenizer, model.backbone.config.vocabulary),
            sources=sources,
        )
        return [
            Sample(
                "denoised",
                with_masks(source, tokenizer),
                tokenizer.decode(output.tokens),
                tokenizer.decode(batch.labels["token"][0].tolist()),
            )
            for source, output, batch in zip(sources, outputs, batches, strict=True)
        ]


class DenoisingExamples:
    """Chunks of documents and corrupted versions of them, drawn anew in every epoch."""

    def __init__(self, task: Denoise, store: TokenStore, length: int, *, seed: int | None, epoch: int):
        self.task, self.store, self.length = task, store, length
        self.key, self.training = epoch_key(seed, epoch), seed is not None
        self.cuts = DocumentChunks(
            store.lengths - 1, length - 1, seed=seed, epoch=epoch
        )  # each side has one special token
        self.lengths = self.cuts.lengths + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        task = self.task
        shown, there = self.pieces(indices)
        left, kept = self.broken(shown, there, indices)
        source = Batch(*ending(left[kept], kept.sum(1), task.eos, task.pad_id))
        labels, padding = ending(shown[there], there.sum(1), task.eos, IGNORE_INDEX)
        tokens = torch.full_like(labels, task.bos)
        tokens[:, 1:] = labels[:, :-1]  # shifted right
        if padding is not None:
            tokens[padding] = task.pad_id
        return Batch(
            tokens,
            padding,
            source=source,
            labels={"token": labels},
            label_positions={"token": find_label_positions(labels)},
        )

    def pieces(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) the tokens of chunks, and True at tokens."""
        at = np.asarray(indices)
        there = np.arange(self.cuts.lengths[at].max()) < self.cuts.lengths[at][:, None]
        first = self.store.offsets[self.cuts.documents[at]] + self.cuts.begins[at]
        return self.store.windows(first, there.shape[1]), there

    def broken(self, shown: np.ndarray, there: np.ndarray, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) chunks with removed tokens replaced by [MASK], and True at tokens that remain."""
        task = self.task
        fraction = task.masker.fraction(task.progress if self.training else 1.0)
        one = np.zeros(there.shape, np.int64)  # a chunk is of one document
        _, was = task.masker.mask_tokens(shown, there, one, key=self.key, rows=indices, fraction=fraction)
        gone = was != IGNORE_INDEX
        again = np.zeros(there.shape, bool)  # True after the first token of a span
        again[:, 1:] = gone[:, 1:] & gone[:, :-1]
        return np.where(gone, task.mask, shown), there & ~again

    def name(self, index: int) -> str:
        return self.store.location(int(self.cuts.documents[index]))


def ending(flat: np.ndarray, counts: np.ndarray, end: int, filler: int) -> tuple[Tensor, Tensor | None]:
    """Concatenated rows of the given lengths as one tensor with an EOS token after each, and its padding mask."""
    place = np.arange(counts.max() + 1)
    rows = np.full((len(counts), len(place)), filler, np.int64)
    rows[place < counts[:, None]] = flat
    rows[np.arange(len(counts)), counts] = end
    padding = place > counts[:, None]
    return torch.from_numpy(rows), torch.from_numpy(padding) if padding.any() else None
