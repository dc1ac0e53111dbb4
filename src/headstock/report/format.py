"""Formats numbers, differences, durations and settings for pages and tables."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headstock.tasks.text_metrics import UNDETERMINED, decimals, format_metric, format_range, is_score

NONE = "–"
HYPHEN = re.compile(r"(?<![\w.])-(?=[\d.]*\d|∞)")


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def minus(text: str) -> str:
    """Replace the hyphen of negative numbers by the typographic minus sign; words and exponents stay unchanged.

    For pages only: terminals, model cards and JSON keep the ASCII hyphen.
    """
    return HYPHEN.sub("\N{MINUS SIGN}", text)


def percent(value: Any, digits: int = 1) -> str:
    return minus(f"{100 * value:.{digits}f}%") if is_finite(value) else NONE


def interval(low: Any, high: Any) -> str:
    """`85.1 to 88.0`, in percent; empty without an interval, `undetermined` if it contains every difference."""
    if is_finite(low) and is_finite(high) and low <= -1 and high >= 1:
        return UNDETERMINED
    return minus(f"{100 * low:.1f} to {100 * high:.1f}") if is_finite(low) and is_finite(high) else ""


def score(value: Any, metric: str) -> str:
    """A metric's value: `71.3%`, `21.0` (BLEU) or `0.412` (MAE)."""
    return minus(format_metric(metric, value)) if is_finite(value) else NONE


def score_range(metric: str, low: Any, high: Any, value: float | None = None) -> str:
    """A metric's interval: `70.1 to 72.5`; with as many decimals as `value`, and empty without an interval."""
    return minus(format_range(metric, low, high, scale=value)) if is_finite(low) and is_finite(high) else ""


def signed(value: Any, digits: int = 2) -> str:
    """`+0.41`, `−0.20`."""
    return minus(f"{value:+.{digits}f}") if is_finite(value) else NONE


def points(value: Any) -> str:
    """A difference of fractions in points, with its sign."""
    return signed(100 * value, 1) if is_finite(value) else NONE


def weight(value: float) -> str:
    return minus(f"{value:+.2g}").replace("e-", "e\N{MINUS SIGN}")


def whole(value: Any) -> str:
    return f"{value:,.0f}" if is_finite(value) else NONE


def decimal(value: Any, digits: int = 3) -> str:
    return minus(f"{value:,.{digits}f}") if is_finite(value) else NONE


def compact_number(value: float | None) -> str:
    """`40.3M`, `812.4k`, `96`; empty for None."""
    if value is None:
        return ""
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{suffix}"
    return f"{value:.0f}"


def duration(seconds: Any) -> str:
    """`9.8 s`, `42 s`, `3 min 05 s`, `2 h 10 min`."""
    if not is_finite(seconds):
        return NONE
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def pluralize(number: int, one: str, many: str = "") -> str:
    """`1 class`, `12 classes`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def capitalized(text: str) -> str:
    """With an upper-case first letter; the rest unchanged, unlike str.capitalize."""
    return text[:1].upper() + text[1:]


def shorten(name: str, size: int) -> str:
    return name if len(name) <= size else f"{name[: size - 1]}…"


def excerpt(text: str, size: int) -> str:
    """The beginning of a text on one line, up to the end of a word.

    >>> excerpt("the sea, the\\nsea", 10)
    'the sea, ...'
    """
    line = " ".join(text.split())
    if len(line) <= size:
        return line
    words, space, _ = line[: size + 1].rpartition(" ")
    return f"{words} ..." if space else f"{line[:size]}..."


def setting(value: Any) -> str:
    """A setting as in TOML, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or NONE
    if isinstance(value, dict):
        return "; ".join(f"{key} {setting(inner)}" for key, inner in value.items()) or NONE
    if isinstance(value, float):
        return f"{value:.6g}"
    return NONE if value is None or value == "" else str(value)


def format_bytes(count: float) -> str:
    unit, size = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if count >= pair[1]), ("kB", 1e3))
    return f"{count / size:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """A rough duration: `90 s`, `12 minutes`, `2.5 hours`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def format_minutes(minutes: float) -> str:
    """A time budget as it was set: `1 minute`, `0.5 minutes`, `90 minutes`."""
    return f"{minutes:g} minute{'' if minutes == 1 else 's'}"


@dataclass(frozen=True)
class Difference:
    """How much better one arm is than another, in points; without an interval low and high are None.

    Rounded to one decimal as displayed, so that words and numbers never disagree. A difference of errors, such as MAE,
    is in their own unit, and positive where the first arm has the smaller error.
    """

    points: float
    low: float | None
    high: float | None
    digits: int = 1
    unit: str = " points"

    @classmethod
    def of(cls, pair: Mapping[str, Any], metric: str = "accuracy") -> "Difference":
        """From a row of `pairs` in results.json. An end that is displayed as 0.0 is zero."""
        values = [pair[key] for key in ("difference", "low", "high")]
        if is_score(metric):
            mean, low, high = (None if value is None else to_points(value) for value in values)
            return cls(mean or 0.0, low, high)
        digits = decimals(max(abs(value) for value in values if value is not None))
        mean, high, low = (None if value is None else round(-value, digits) + 0.0 for value in values)
        return cls(mean or 0.0, low, high, digits, "")

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
        return replace(self, points=0.0 - self.points, low=low, high=high)

    @property
    def amount(self) -> str:
        """`3.1 points`, without a sign."""
        return f"{abs(self.points):.{self.digits}f}{self.unit}"

    @property
    def interval(self) -> str:
        """`95% CI 4.2 to 7.9`."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.unit and self.low <= -100 and self.high >= 100:
            return f"95% CI {UNDETERMINED}"
        return f"95% CI {self.low:.{self.digits}f} to {self.high:.{self.digits}f}"

    @property
    def signed(self) -> str:
        """`+0.4 points, 95% CI -1.1 to 1.9`; of an error `0.04 better, 95% CI -0.11 to 0.19`."""
        if not self.unit:
            return f"{self.amount} {'worse' if self.points < 0 else 'better'}, {self.interval}"
        return f"{self.points:+.{self.digits}f}{self.unit}, {self.interval}"


def to_points(fraction: float) -> float:
    """A fraction in points as displayed; never -0.0."""
    return round(100 * fraction, 1) + 0.0
