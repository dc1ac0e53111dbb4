"""A difference between two arms in points, rounded as displayed, so that words and numbers never disagree."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """How far one arm is above another, in points with one decimal; without an interval low and high are None."""

    points: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, pair: Mapping[str, Any]) -> "Difference":
        """From a row of `pairs` in results.json. An end that is displayed as 0.0 is zero."""
        low, high = (None if pair[end] is None else to_points(pair[end]) for end in ("low", "high"))
        return cls(to_points(pair["difference"]), low, high)

    @property
    def above(self) -> bool:
        """True if the whole interval is above zero."""
        return self.low is not None and self.low > 0

    @property
    def below(self) -> bool:
        """True if the whole interval is below zero."""
        return self.high is not None and self.high < 0

    def reversed(self) -> "Difference":
        """The difference seen from the other arm."""
        low, high = (None if end is None else 0.0 - end for end in (self.high, self.low))
        return Difference(0.0 - self.points, low, high)

    @property
    def interval(self) -> str:
        """`95% CI 4.2 to 7.9`."""
        return "no interval" if self.low is None else f"95% CI {self.low:.1f} to {self.high:.1f}"

    @property
    def signed(self) -> str:
        """`+0.4 points, 95% CI -1.1 to 1.9`."""
        return f"{self.points:+.1f} points, {self.interval}"


def to_points(fraction: float) -> float:
    """A fraction in points as displayed; never -0.0."""
    return round(100 * fraction, 1) + 0.0
