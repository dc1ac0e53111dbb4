"""What a measurement is, and on what it was made."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from headstock import __version__
from headstock.planner.machine import device_name, synchronize


@dataclass(frozen=True)
class Measurement:
    """So much a second, or so many seconds, of one kind of work."""

    work: str
    value: float
    unit: str
    theirs: float | None = None  # a peer's, measured in turns with ours
    peer: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer."""
        if self.theirs is None:
            return None
        return self.theirs / self.value if self.unit == "s" else self.value / self.theirs

    def plain(self) -> dict[str, Any]:
        told: dict[str, Any] = {"work": self.work, "value": self.value, "unit": self.unit}
        if self.theirs is None:
            return told
        return told | {"theirs": self.theirs, "peer": self.peer, "ratio": self.ratio}


def environment_info(device: torch.device) -> dict[str, Any]:
    """When, where and with what."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device_name(device),
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def median_seconds(work: Callable[[], object], *, rounds: int, device: torch.device) -> float:
    """The middle of several rounds, after one to warm up."""
    work()
    times = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
