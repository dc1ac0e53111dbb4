"""Textbook symbols for the sizes of a model, and formulas of them as text and HTML."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from headstock.cost.formulas import Dimensions
from headstock.model.model import Model

if TYPE_CHECKING:
    from markupsafe import Markup

SYMBOLS = {
    "vocabulary": ("V", "vocabulary size"),
    "width": ("D", "width"),
    "depth": ("M", "number of layers"),
    "hidden": ("F", "feed-forward width"),
    "context": ("T", "context length"),
    "heads": ("A", "attention heads"),
    "segments": ("G", "segments"),
    "relative_buckets": ("R", "buckets of distances"),
    "classes": ("C", "classes"),
    "source_vocabulary": ("V_src", "source vocabulary size"),
    "encoder_depth": ("M_enc", "encoder layers"),
    "length": ("L", "tokens per row"),
    "source_length": ("L_src", "source tokens"),
}
ORDER = ["B", "L", "L_src", "M", "M_enc", "V", "V_src", "T", "G", "R", "C", "A", "r", "D", "F", "H"]  # of factors
SUBSCRIPTS = {"src": "ₛ", "enc": "ₑ"}
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Symbol:
    name: str
    meaning: str
    value: int


def symbols_of(model: Model) -> tuple[Dimensions, dict[str, str]]:
    """A symbol for each size of a model, and their meanings; sizes that the settings make equal share a symbol."""
    import sympy

    config, names = model.backbone.config, dict(SYMBOLS)
    if hasattr(config, "cell"):
        names["hidden"] = ("H", "recurrent units")
    if model.backbone.is_bilm:
        names["width"] = ("D", "width per direction")
    if model.backbone.is_encoder_decoder:
        names["vocabulary"] = ("V", "target vocabulary size")
        names["depth"] = ("M", "decoder layers")
        names["length"] = ("L", "target tokens")
    symbols = Dimensions(
        **{size.name: sympy.Symbol(names[size.name][0], positive=True, integer=True) for size in fields(Dimensions)}
    )
    if hasattr(config, "width") and getattr(config, "hidden", None) == config.width:
        symbols = replace(symbols, hidden=symbols.width)
        names["width"] = ("D", f"{names['width'][1]}, equal to the {names['hidden'][1]}")
    if getattr(config, "source_vocabulary", None) is None:
        symbols = replace(symbols, source_vocabulary=symbols.vocabulary)
    if getattr(config, "encoder_depth", None) is None:
        symbols = replace(symbols, encoder_depth=symbols.depth)
    return symbols, dict(names.values())


def values_of(symbols: Dimensions, numbers: Dimensions) -> dict[Any, int]:
    """The value of each symbol; where two sizes share one, that of the first."""
    values: dict[Any, int] = {}
    for size in fields(Dimensions):
        values.setdefault(getattr(symbols, size.name), getattr(numbers, size.name))
    return values


def legend(expressions: list[Any], values: dict[Any, int], meanings: dict[str, str]) -> list[Symbol]:
    """The symbols that expressions use, in the order of the sizes."""
    import sympy

    used = set().union(*(sympy.sympify(expression).free_symbols for expression in expressions))
    return [Symbol(str(symbol), meanings[str(symbol)], value) for symbol, value in values.items() if symbol in used]


# Formulas


def formula(expression: Any) -> str:
    """Python syntax: `3*D**2 + 3*D`."""
    import sympy

    return str(sympy.expand(sympy.sympify(expression)))


def in_text(expression: Any, *by: Any) -> str:
    """`3D² + 3D`; grouped by symbols, as in `VD + M(6D² + 10D)`."""
    return typeset(expression, by, symbol=symbol_text, power=lambda power: str(power).translate(SUPERSCRIPTS))


def power_of_ten(power: int) -> str:
    """`10⁻³`."""
    return "10" + str(power).translate(SUPERSCRIPTS)


def symbol_text(name: str) -> str:
    name, _, subscript = name.partition("_")
    return name + SUBSCRIPTS.get(subscript, "")


def in_html(expression: Any, *by: Any) -> "Markup":
    """The same in HTML, with italic symbols."""
    from markupsafe import Markup

    html = typeset(expression, by, symbol=symbol_html, power=lambda power: f"<sup>{power}</sup>")
    return Markup(f'<span class="math">{html}</span>')


def symbol_html(name: str) -> str:
    name, _, subscript = name.partition("_")
    return f"<i>{name}</i>" + (f"<sub>{subscript}</sub>" if subscript else "")


def typeset(expression: Any, by: Any, *, symbol: Callable[[str], str], power: Callable[[int], str]) -> str:
    import sympy

    remainder, groups = sympy.expand(sympy.sympify(expression)), []
    for i, factor in enumerate(by):
        coefficient = remainder.coeff(factor, 1)
        if len(sympy.Add.make_args(coefficient)) > 1:
            remainder = sympy.expand(remainder - factor * coefficient)
            groups.append(f"{symbol(str(factor))}({typeset(coefficient, by[i + 1 :], symbol=symbol, power=power)})")
    ungrouped = "" if groups and remainder == 0 else typeset_sum(remainder, symbol, power)
    return " + ".join(filter(None, [ungrouped, *groups]))


def typeset_sum(expression: Any, symbol: Callable[[str], str], power: Callable[[int], str]) -> str:
    text = ""
    for term in expression.as_ordered_terms():
        number, factors = term.as_coeff_Mul()
        sign = "−" if number < 0 else "+"
        text += (f" {sign} " if text else sign.strip("+")) + typeset_term(
            abs(number), factors.as_powers_dict(), symbol, power
        )
    return text


def typeset_term(number: Any, powers: Any, symbol: Callable[[str], str], power: Callable[[int], str]) -> str:
    """A product such as 2DF, or a fraction such as 2MD/A."""
    numerator: list[str] = []
    denominator: list[str] = []
    for base, exponent in sorted(powers.items(), key=lambda item: ORDER.index(str(item[0])) if item[0] != 1 else -1):
        if base != 1:
            size = abs(int(exponent))
            factor = symbol(str(base)) + (power(size) if size > 1 else "")
            (numerator if exponent > 0 else denominator).append(factor)
    value = float(number)  # sympy distinguishes 1.0 from 1
    coefficient = f"{int(value):,}" if value == int(value) else f"{value:.4g}"
    top = ("" if value == 1 and numerator else coefficient) + "".join(numerator)
    return f"{top}/{''.join(denominator)}" if denominator else top
