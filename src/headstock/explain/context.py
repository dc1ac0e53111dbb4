"""How a language model uses its context: the loss by position, and by the number of tokens it may read.

B rows, T tokens in a row, N predictions, C clusters (rows, documents or stretches of text), K bins.

Two views of the same loss. By position, rows of text are read once and the loss is averaged over each bin of
positions; later tokens have more context, but they are also other tokens. By context length, the same tokens are
predicted again and again from the last 1, 2, 4, ... tokens only, so that all that changes is the context.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from headstock.data.token_store import TokenStore
from headstock.decoding.batching import max_batch_tokens, to_device, token_batches
from headstock.errors import UserError
from headstock.inference.pipeline import Pipeline
from headstock.inference.score import ScoredPositions, score_rows, target_log_probabilities
from headstock.intervals import TAILS, ratios, resampled_ratios
from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.packing import PackedWindows
from headstock.tasks.special_tokens import bos_id

MIN_CLUSTERS = 30  # fewer documents do not represent the variation: stretches of text are resampled instead
STRETCHES = 100
MIN_SHARE = 0.25  # of the tokens must have as much text before them as the longest context that is measured
NEGLIGIBLE = math.log(1.01)  # nats: 1% of perplexity


@dataclass(frozen=True)
class Estimate:
    """A mean in nats with its 95% interval; NaN where there are no tokens."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class LossTable:
    """Summed losses and counts by cluster and bin, both (C, K)."""

    losses: np.ndarray
    counts: np.ndarray

    def means(self, contrast: np.ndarray) -> list[Estimate]:
        """Of each row of `contrast` (M, K), the weighted sum of the bins' mean losses, over resampled clusters."""
        means = _contrasts(ratios(self.losses.sum(0), self.counts.sum(0)), contrast)  # (M,)
        resampled = _contrasts(resampled_ratios(self.losses, self.counts, key=("context",)), contrast)  # (R, M)
        lows, highs = np.full((2, len(means)), np.nan)
        known = ~np.isnan(means)
        if known.any():
            lows[known], highs[known] = np.nanquantile(resampled[:, known], TAILS, axis=0)
        rows = zip(means, np.minimum(lows, means), np.maximum(highs, means), strict=True)
        return [Estimate(*map(float, row)) for row in rows]

    def losses_by_bin(self) -> list[Estimate]:
        return self.means(np.eye(self.losses.shape[1]))

    def gains(self) -> list[Estimate]:
        """What each bin gains over the previous one."""
        bins = self.losses.shape[1]
        return self.means(np.eye(bins - 1, bins) - np.eye(bins - 1, bins, k=1)) if bins > 1 else []

    def minus(self, other: "LossTable") -> list[Estimate]:
        """The difference of two models on the same tokens, by bin."""
        assert np.array_equal(self.counts, other.counts), "both models predict the same tokens"
        return LossTable(self.losses - other.losses, self.counts).losses_by_bin()


def _contrasts(values: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """values (..., K) @ contrast (M, K)' where a NaN counts only in the sums that it is part of."""
    unknown = np.isnan(values).astype(float) @ (contrast != 0).T > 0
    return np.where(unknown, np.nan, np.nan_to_num(values) @ contrast.T)


@dataclass(frozen=True)
class RunContext:
    """The losses of one run."""

    run: str
    by_position: LossTable | None
    by_context: LossTable | None
    loss: float | None  # over all positions

    def effective_context(self, lengths: Sequence[int]) -> int | None:
        """The shortest context whose perplexity is within 1% of that of the longest (Khandelwal et al., 2018)."""
        if self.by_context is None:
            return None
        means = [estimate.mean for estimate in self.by_context.losses_by_bin()]
        return next(length for length, mean in zip(lengths, means, strict=True) if mean - means[-1] <= NEGLIGIBLE)


@dataclass(frozen=True)
class ContextFacts:
    """Runs that read the same text."""

    text: str
    row_length: int
    bins: list[tuple[int, int]]  # first and last position of each
    contexts: list[int]  # numbers of tokens that are read
    targets: int  # tokens predicted from each of these contexts
    runs: list[RunContext]
    paired: bool  # all runs have the same tokenizer, so that their losses can be subtracted
    notes: list[str] = field(default_factory=list)

    def differences(self) -> Iterable[tuple[RunContext, list[Estimate], list[Estimate]]]:
        """Each further run minus the first, by position and by context; positive where the first is better."""
        for run in self.runs[1:] if self.paired else ():
            yield (
                run,
                _minus(run.by_position, self.runs[0].by_position),
                _minus(run.by_context, self.runs[0].by_context),
            )

    def to_dict(self) -> dict[str, Any]:
        rows = [self._run_dict(run) for run in self.runs]
        differences = [
            {
                "run": run.run,
                "minus": self.runs[0].run,
                "positions": self._rows(self._position_keys(), "difference", positions),
                "contexts": self._rows(self._context_keys(), "difference", contexts),
            }
            for run, positions, contexts in self.differences()
        ]
        sizes = {"text": self.text, "row_length": self.row_length, "targets": self.targets}
        return sizes | {"runs": rows, "differences": differences, "notes": self.notes}

    def _run_dict(self, run: RunContext) -> dict[str, Any]:
        positions = run.by_position.losses_by_bin() if run.by_position else []
        counts = run.by_position.counts.sum(0) if run.by_position else []
        contexts = run.by_context.losses_by_bin() if run.by_context else []
        keys = [key | {"tokens": int(count)} for key, count in zip(self._position_keys(), counts, strict=False)]
        context_rows = self._rows(self._context_keys(), "loss", contexts)
        for row, gain in zip(context_rows[1:], run.by_context.gains() if run.by_context else (), strict=True):
            row |= {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
        return {
            "run": run.run,
            "loss": run.loss,
            "positions": self._rows(keys, "loss", positions),
            "contexts": context_rows,
            "effective_context": run.effective_context(self.contexts),
        }

    def _position_keys(self) -> list[dict[str, int]]:
        return [{"first": first, "last": last} for first, last in self.bins]

    def _context_keys(self) -> list[dict[str, int]]:
        return [{"context": length} for length in self.contexts]

    @staticmethod
    def _rows(keys: Sequence[dict[str, int]], name: str, estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
        return [
            key | {name: value.mean, "low": value.low, "high": value.high}
            for key, value in zip(keys, estimates, strict=False)
            if not math.isnan(value.mean)
        ]


def _minus(a: LossTable | None, b: LossTable | None) -> list[Estimate]:
    return a.minus(b) if a is not None and b is not None else []


def explain_context(
    pipelines: Sequence[Pipeline],
    stores: Sequence[TokenStore],
    *,
    text: str = "",
    by: str | None = None,
    row_length: int | None = None,
    max_context: int | None = None,
    targets: int = 2000,
    max_tokens: int = 200_000,
    bos: bool = False,
) -> ContextFacts:
    """The losses of runs, each on its own tokens of the same text; `by` is "position", "context" or None for both.

    With `bos` a truncated context starts with the BOS token, which does not count as one of its tokens.
    """
    if targets < 1 or max_tokens < 1:
        raise UserError("--targets and --tokens must be 1 or more")
    for pipeline in pipelines:
        pipeline.require("generates", "predict a token from those before it")
    limits = {pipeline.length: str(pipeline.run) for pipeline in pipelines}
    shortest = min(limits)
    for option, value, limit in (("--length", row_length, shortest), ("--max-context", max_context, shortest - bos)):
        if value is not None and not 1 <= value <= limit:
            raise UserError(f"{option} {value}: must be from 1 to {limit:,}, because {limits[shortest]} reads no more")
    length = row_length or shortest
    paired = len({pipeline.tokenizer.fingerprint for pipeline in pipelines}) == 1
    longest = max_context or min(default_context(store.lengths, length - bos) for store in stores)
    contexts = context_lengths(longest)
    bins = position_bins(length)
    runs, notes, measured = [], [], targets
    for pipeline, store in zip(pipelines, stores, strict=True):
        rows = PackedRowsReader(pipeline, store, length)
        by_position = None if by == "context" else rows.losses_by_position(bins, max_tokens)
        by_context = None
        if by != "position":
            by_context = losses_by_context(pipeline, store, contexts, targets, bos=bos)
            measured = min(measured, int(by_context.counts[:, 0].sum()))
        loss = None if by_position is None else float(by_position.losses.sum() / by_position.counts.sum())
        runs.append(RunContext(str(pipeline.run), by_position, by_context, loss))
    if len(pipelines) > 1 and not paired:
        notes.append("the runs have different tokenizers: their losses are per token of their own and not comparable")
    if by != "position" and max_context is None and longest < length - bos:
        notes.append(f"contexts end at {longest} tokens: too few documents of this text are longer (--max-context)")
    return ContextFacts(
        text,
        length,
        [] if by == "context" else bins,
        [] if by == "position" else contexts,
        0 if by == "position" else measured,
        runs,
        paired,
        notes,
    )


def position_bins(length: int) -> list[tuple[int, int]]:
    """Positions 0-1, 2-3, 4-7, 8-15, ... of a row."""
    edges = [0, *(1 << power for power in range(1, length.bit_length()) if 1 << power < length), length]
    return [(first, end - 1) for first, end in pairwise(edges)]


def context_lengths(longest: int) -> list[int]:
    """1, 2, 4, ... and the longest itself."""
    return [*(1 << power for power in range(longest.bit_length()) if 1 << power < longest), longest]


def default_context(lengths: np.ndarray, row_length: int) -> int:
    """The longest of these contexts that a quarter of all tokens have before them."""
    candidates = context_lengths(row_length)
    return max(
        (k for k in candidates if eligible_targets(lengths, k).sum() >= MIN_SHARE * lengths.sum()),
        default=candidates[0],
    )


def eligible_targets(lengths: np.ndarray, context: int) -> np.ndarray:
    """How many tokens of each document, its end included, follow at least `context` tokens, its start included."""
    return np.maximum(lengths - context + 1, 0)


@dataclass(frozen=True)
class PackedRowsReader:
    """Rows of text as in training, but without what a recurrent model would carry over from the row before."""

    pipeline: Pipeline
    store: TokenStore
    length: int

    @torch.inference_mode()
    @fast_cpu_kernels()
    def losses_by_position(self, bins: Sequence[tuple[int, int]], max_tokens: int) -> LossTable:
        """The losses of evenly spaced rows; a cluster is a row."""
        tokenizer, model = self.pipeline.tokenizer, self.pipeline.model
        windows = PackedWindows(
            self.store,
            self.length,
            bos=bos_id(tokenizer, "start"),
            eos=self.store.eos,
            filler=tokenizer.pad or 0,
            seed=None,
            epoch=0,
        )
        rows = min(len(windows), max(1, max_tokens // self.length))
        indices = np.linspace(0, len(windows) - 1, rows).astype(int)
        step = max(1, max_batch_tokens(model.device) // self.length)
        losses, counts = np.zeros((rows, len(bins))), np.zeros((rows, len(bins)))
        starts = np.array([first for first, _ in bins])
        for begin in range(0, rows, step):
            packed = windows.rows(indices[begin : begin + step])
            batch = to_device(packed.batch(packed.tokens, {}, causal=True), model.device)
            real = packed.next_tokens != IGNORE_INDEX
            targets = torch.from_numpy(packed.next_tokens[real]).to(model.device)
            hidden = model(batch).hidden[torch.from_numpy(real).to(model.device)]  # (B, T, D) -> (N, D)
            values = -target_log_probabilities(model, hidden, targets).double().cpu().numpy()
            cells = begin + np.nonzero(real)[0], np.searchsorted(starts, packed.positions[real], "right") - 1
            np.add.at(losses, cells, values)
            np.add.at(counts, cells, 1)
        return LossTable(losses, counts)


def losses_by_context(
    pipeline: Pipeline, store: TokenStore, contexts: Sequence[int], targets: int, *, bos: bool = False
) -> LossTable:
    """The losses of evenly spaced tokens, each predicted from its last `contexts` tokens alone.

    A token takes part only if it has the longest context before it, so that all lengths predict the same tokens. A
    truncated context has no BOS token unless `bos`, because no document starts there.
    """
    start = [bos_id(pipeline.tokenizer, "start")] if bos else []
    rows = list(target_rows(pipeline, store, contexts[-1], targets))
    if not rows:
        raise UserError(f"no document of this text has {contexts[-1]} tokens; choose a smaller --max-context")
    clusters = np.array([document for document, _, _ in rows])
    if len(set(clusters.tolist())) < MIN_CLUSTERS:
        clusters = np.arange(len(rows)) * STRETCHES // len(rows) if len(rows) > STRETCHES else np.arange(len(rows))
    _, clusters = np.unique(clusters, return_inverse=True)
    losses = np.zeros((clusters.max() + 1, len(contexts)))
    for column, context in enumerate(contexts):
        scored = [scored_target(truncate(tokens, context, start), target) for _, tokens, target in rows]
        batches = token_batches(scored, lambda row: len(row.tokens), pipeline.model.device)
        pad = pipeline.tokenizer.pad or 0
        values = [value for batch in batches for value in score_rows(pipeline.model, batch, pad_id=pad, causal=True)]
        np.add.at(losses[:, column], clusters, -np.concatenate(values))
    counts = np.bincount(clusters)[:, None].repeat(len(contexts), 1)
    return LossTable(losses, counts.astype(float))


def truncate(tokens: list[int], context: int, start: list[int]) -> list[int]:
    """The last `context` tokens after `start`, unless they start with it themselves."""
    last = tokens[-context:]
    return last if last[: len(start)] == start else [*start, *last]


def scored_target(tokens: list[int], target: int) -> ScoredPositions:
    return ScoredPositions(tokens, [len(tokens) - 1], [target], 0, 0)


def target_rows(
    pipeline: Pipeline, store: TokenStore, context: int, targets: int
) -> Iterable[tuple[int, list[int], int]]:
    """Evenly spaced tokens that follow at least `context` others: document, these tokens, and the token itself."""
    bos = bos_id(pipeline.tokenizer, "start")
    ends = eligible_targets(store.lengths, context).cumsum()
    total = int(ends[-1]) if len(ends) else 0
    for number in np.linspace(0, total - 1, min(targets, total)).astype(int) if total else ():
        document = int(np.searchsorted(ends, number, side="right"))
        index = context - 1 + number - int(ends[document - 1] if document else 0)  # of the target in the document
        start = int(store.offsets[document]) + index
        text = store.slice(start - min(index, context), start + 1).tolist()
        before = text[:-1] if index >= context else [bos, *text[:-1]]
        yield document, before, text[-1]
