"""Puts a page's parts into its template, everything escaped, and writes numbers the way people read them."""

import functools
import math
import re
from typing import TYPE_CHECKING, Any

from headstock.report.theme import arm_label, colour_variables

if TYPE_CHECKING:
    import jinja2

NONE = "–"
HYPHEN = re.compile(r"(?<![\w.])-(?=[\d.]*\d|∞)")


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def percent(value: Any, digits: int = 1) -> str:
    return minus(f"{100 * value:.{digits}f}%") if is_finite(value) else NONE


def minus(text: str) -> str:
    """The typographic minus sign, which pages use; terminals, cards and JSON keep the ASCII hyphen.

    Only a hyphen that begins a number is replaced: words, names and exponents stay as they are.
    """
    return HYPHEN.sub("\N{MINUS SIGN}", text)


def interval(low: Any, high: Any) -> str:
    """`85.1 to 88.0`, in percent; nothing where there is no interval."""
    return minus(f"{100 * low:.1f} to {100 * high:.1f}") if is_finite(low) and is_finite(high) else ""


def signed(value: Any, digits: int = 2) -> str:
    """A number that may be of either sign, such as a cosine: `+0.41`, `−0.20`."""
    return minus(f"{value:+.{digits}f}") if is_finite(value) else NONE


def points(value: Any) -> str:
    """A difference of accuracies, in points and with its sign."""
    return signed(100 * value, 1) if is_finite(value) else NONE


def weight(value: float) -> str:
    return minus(f"{value:+.2g}").replace("e-", "e\N{MINUS SIGN}")


def whole(value: Any) -> str:
    return f"{value:,.0f}" if is_finite(value) else NONE


def decimal(value: Any, digits: int = 3) -> str:
    return minus(f"{value:,.{digits}f}") if is_finite(value) else NONE


def duration(seconds: Any) -> str:
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


def setting(value: Any) -> str:
    """A setting as people write it in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or NONE
    if isinstance(value, dict):
        return "; ".join(f"{key} {setting(inner)}" for key, inner in value.items()) or NONE
    if isinstance(value, float):
        return f"{value:.6g}"
    return NONE if value is None or value == "" else str(value)


@functools.cache
def environment(package: str) -> "jinja2.Environment":
    """The templates of a package, which stand on the page that all have in common."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package), jinja2.PackageLoader("headstock.report")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (arm_label, percent, points, signed, minus, weight, whole, decimal, duration, setting)
    made.filters |= {function.__name__: function for function in filters}
    made.globals |= {"interval": interval, "pluralize": pluralize, "NONE": NONE}
    return made


def render(package: str, template: str, **parts: Any) -> str:
    """A template of a package (it has a folder `templates`) filled in, as a page that needs nothing else."""
    light, dark = colour_variables()
    return environment(package).get_template(template).render(light=light, dark=dark, **parts)
