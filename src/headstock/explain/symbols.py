"""The letters of textbooks for a model's sizes, and formulas of them as people write them, on terminals and pages."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from headstock.model.formulas import Dimensions
from headstock.model.model import Model

if TYPE_CHECKING:
    from markupsafe import Markup

LETTERS = {
    "vocabulary": ("V", "entries of the vocabulary"),
    "width": ("D", "width: numbers in a token's vector"),
    "depth": ("M", "depth: layers"),
    "hidden": ("F", "hidden: width inside the feed-forward part"),
    "context": ("T", "context: tokens in the longest row"),
    "heads": ("A", "attention heads"),
    "segments": ("G", "kinds of text in a row"),
    "classes": ("C", "classes"),
    "source_vocabulary": ("V_src", "entries of the source's vocabulary"),
    "encoder_depth": ("M_enc", "layers of the encoder"),
    "length": ("L", "tokens in a row"),
    "source_length": ("L_src", "tokens of the source"),
}
ORDER = ["B", "L", "L_src", "M", "M_enc", "V", "V_src", "T", "G", "C", "A", "D", "F", "H"]  # inside a product
BELOW = {"src": "ₛ", "enc": "ₑ"}
POWERS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Letter:
    name: str
    meaning: str
    value: int


def letters_of(model: Model) -> tuple[Dimensions, dict[str, str]]:
    """A model's sizes as letters, and what each letter means; sizes that are one by their settings share a letter."""
    import sympy

    config, names = model.backbone.config, dict(LETTERS)
    if hasattr(config, "cell"):
        names["hidden"] = ("H", "cells in a layer")
    if model.backbone.bidirectional:
        names["width"] = ("D", "width of each direction: numbers in a token's embedding")
    if model.backbone.is_encoder_decoder:
        names["vocabulary"] = ("V", "entries of the vocabulary that is written")
        names["depth"] = ("M", "layers of the decoder")
        names["length"] = ("L", "tokens of the target")
    made = Dimensions(
        **{size.name: sympy.Symbol(names[size.name][0], positive=True, integer=True) for size in fields(Dimensions)}
    )
    if getattr(config, "hidden", None) == config.width:
        made = replace(made, hidden=made.width)
        names["width"] = ("D", f"{names['width'][1]}; and {names['hidden'][1].split(':')[0]}, which is as much here")
    if getattr(config, "source_vocabulary", None) is None:
        made = replace(made, source_vocabulary=made.vocabulary)
    if getattr(config, "encoder_depth", None) is None:
        made = replace(made, encoder_depth=made.depth)
    return made, dict(names.values())


def values_of(letters: Dimensions, numbers: Dimensions) -> dict[Any, int]:
    """What each letter stands for; where two sizes share one, it is the first's."""
    made: dict[Any, int] = {}
    for size in fields(Dimensions):
        made.setdefault(getattr(letters, size.name), getattr(numbers, size.name))
    return made


def legend(expressions: list[Any], values: dict[Any, int], meanings: dict[str, str]) -> list[Letter]:
    """The letters that formulas use, in the order in which they are introduced."""
    import sympy

    used = set().union(*(sympy.sympify(expression).free_symbols for expression in expressions))
    return [Letter(str(one), meanings[str(one)], value) for one, value in values.items() if one in used]


# Formulas as people write them


def formula(expression: Any) -> str:
    """As a program reads it: `3*D**2 + 3*D`."""
    import sympy

    return str(sympy.expand(sympy.sympify(expression)))


def in_text(expression: Any, *by: Any) -> str:
    """`3D² + 3D`; grouped by some letters, as in `VD + M(6D² + 10D)`."""
    return typeset(expression, by, letter=in_unicode, raised=lambda power: str(power).translate(POWERS))


def in_unicode(name: str) -> str:
    name, _, below = name.partition("_")
    return name + BELOW.get(below, "")


def in_html(expression: Any, *by: Any) -> "Markup":
    """The same for a page, letters in italics, with real superscripts."""
    from markupsafe import Markup

    written = typeset(expression, by, letter=letter_in_html, raised=lambda power: f"<sup>{power}</sup>")
    return Markup(f'<span class="math">{written}</span>')


def letter_in_html(name: str) -> str:
    name, _, below = name.partition("_")
    return f"<i>{name}</i>" + (f"<sub>{below}</sub>" if below else "")


def typeset(expression: Any, by: Any, *, letter: Callable[[str], str], raised: Callable[[int], str]) -> str:
    import sympy

    rest, groups = sympy.expand(sympy.sympify(expression)), []
    for i, one in enumerate(by):
        inside = rest.coeff(one, 1)
        if len(sympy.Add.make_args(inside)) > 1:
            rest = sympy.expand(rest - one * inside)
            groups.append(f"{letter(str(one))}({typeset(inside, by[i + 1 :], letter=letter, raised=raised)})")
    written = "" if groups and rest == 0 else sum_of(rest, letter, raised)
    return " + ".join(filter(None, [written, *groups]))


def sum_of(expression: Any, letter: Callable[[str], str], raised: Callable[[int], str]) -> str:
    written = ""
    for term in expression.as_ordered_terms():
        number, factors = term.as_coeff_Mul()
        sign = "−" if number < 0 else "+"
        before = f" {sign} " if written else sign.strip("+")
        written += before + one_term(abs(number), factors.as_powers_dict(), letter, raised)
    return written


def one_term(number: Any, powers: Any, letter: Callable[[str], str], raised: Callable[[int], str]) -> str:
    """A product such as 2DF, or a fraction such as 2MD/A."""
    above: list[str] = []
    below: list[str] = []
    for base, power in sorted(powers.items(), key=lambda item: ORDER.index(str(item[0])) if item[0] != 1 else -1):
        if base != 1:
            size = abs(int(power))
            (above if power > 0 else below).append(letter(str(base)) + (raised(size) if size > 1 else ""))
    value = float(number)  # a symbol's own number may be 1.0, which is not 1 to it
    shown = f"{int(value):,}" if value == int(value) else f"{value:.4g}"
    top = ("" if value == 1 and above else shown) + "".join(above)
    return f"{top}/{''.join(below)}" if below else top
