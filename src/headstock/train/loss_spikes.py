"""Loss-spike detection: steps whose loss or gradient norm is far above those of the steps before."""

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

WINDOW = 64  # steps that the next one is compared with
FEWEST = 32  # steps before anything is called a spike
DEVIATIONS = 10.0  # above the median, in median absolute deviations scaled to a standard deviation,
RATIO = {"loss": 1.3, "gradient norm": 5.0}  # and at least so many times the median
REPORTED = 5  # spikes that are logged one by one; all of them are counted


class SpikeDetector:
    """Compares each step's loss and gradient norm with a robust range of the last `WINDOW` steps."""

    def __init__(self, say: Callable[[str], None], count: int = 0):
        self.say, self.count = say, count
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in RATIO}

    def add(self, step: int, loss: float, gradient: float) -> None:
        found = []
        for name, value in (("loss", loss), ("gradient norm", gradient)):
            recent = self.recent[name]
            if len(recent) >= FEWEST and (usual := median(recent)) and value > self.limit(name, usual):
                found.append(f"{name} {value:.4g} against a median of {usual:.4g}")
            recent.append(value)
        if found:
            self.count += 1
            if self.count <= REPORTED:
                more = "; further ones are only counted" if self.count == REPORTED else ""
                self.say(f"spike at step {step}: {', '.join(found)} in the {WINDOW} steps before{more}")

    def limit(self, name: str, usual: float) -> float:
        deviation = 1.4826 * median(abs(value - usual) for value in self.recent[name])
        return max(usual + DEVIATIONS * deviation, RATIO[name] * usual)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: list(values) for name, values in self.recent.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, values in state.items():
            self.recent[name].extend(values)
