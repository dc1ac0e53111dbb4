"""What data-parallel training sends over the network and saves to disk, in closed form.  N processes.

A ring all-reduce of S bytes is a reduce-scatter and an all-gather, each of which sends (N - 1) / N of S per process.
"""

from dataclasses import dataclass
from typing import Literal

from headstock.cost.formulas import Size

FLOAT32, FLOAT16 = 4, 2  # bytes

Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that each process sends in one optimizer step."""

    gather: Size  # weights, by FSDP only
    reduce: Size  # gradients

    @property
    def total(self) -> Size:
        return self.gather + self.reduce


def step_traffic(
    parameters: Size,
    processes: Size,
    parallel: Parallel = "ddp",
    *,
    outside_blocks: Size = 0,
    half: bool = False,
    scatters: bool = True,
) -> StepTraffic:
    """DDP all-reduces fp32 gradients; FSDP gathers the weights forward and backward and reduce-scatters gradients.

    FSDP gathers the weights `outside_blocks` (embeddings, heads) only once, and in bf16 with `half`. Gradients are
    reduced in fp32 by both. A backend that does not have a reduce-scatter of its own (`scatters` false: gloo)
    all-reduces instead. Micro-batches before the last of a step send no gradients, but FSDP gathers weights for each.
    """
    share = (processes - 1) / processes
    gradients = share * parameters * FLOAT32
    if parallel == "ddp":
        return StepTraffic(0, 2 * gradients)
    weights = share * (2 * parameters - outside_blocks) * (FLOAT16 if half else FLOAT32)
    return StepTraffic(weights, gradients if scatters else 2 * gradients)


def checkpoint_bytes(parameters: Size, optimizer_bytes: Size, *, averaged: bool = False) -> Size:
    """Weights, optimizer states and, if kept, the moving average of the weights."""
    return (2 if averaged else 1) * FLOAT32 * parameters + optimizer_bytes
