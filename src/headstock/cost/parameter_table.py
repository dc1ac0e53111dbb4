"""The parameters of each part of a model as a Markdown table of closed forms, for model cards."""

from headstock.cost.formulas import Dimensions, ModuleCost
from headstock.cost.model import model_dimensions, module_costs
from headstock.model.model import Model

LETTERS = {
    "vocabulary": "V",
    "source_vocabulary": "U",
    "context": "T",
    "segments": "S",
    "relative_buckets": "R",
    "depth": "N",
    "encoder_depth": "M",
    "width": "D",
    "hidden": "F",
    "heads": "H",
    "classes": "C",
}


def formula_table(model: Model) -> str:
    """| `backbone.blocks` | N × (4 D² + ...) | 4,448 |, and a legend of the letters."""
    import sympy

    numbers = vars(model_dimensions(model))
    letters = {name: sympy.Symbol(letter, positive=True) for name, letter in LETTERS.items() if numbers[name]}
    cost = module_costs(model, Dimensions(**(numbers | letters)))
    values = {letter: numbers[name] for name, letter in letters.items()}
    lines = ["| part | parameters | |", "|---|---|---|"]
    for parent in cost.parts:
        for part in parent.parts or (parent,):
            count = sympy.expand(part.count)
            if count == 0:
                continue
            path = part.name if part is parent else f"{parent.name}.{part.name}"
            lines.append(f"| `{path}` | {typeset(_formula(part))} | {int(count.subs(values)):,} |")
    used = {str(letter) for letter in sympy.sympify(cost.count).free_symbols}
    legend = [
        f"{letter} {name.replace('_', ' ')} {numbers[name]:,}" for name, letter in LETTERS.items() if letter in used
    ]
    table = "\n".join(lines) + (f"\n\n{', '.join(legend)}." if legend else "")
    if measured := cost.measured_parts():
        table += f"\n\nCounted, since there is no closed form for: {', '.join(measured)}."
    return table


def _formula(part: ModuleCost) -> str:
    import sympy

    each = str(sympy.expand(part.count_each))
    return each if part.times is None else f"{part.times} × ({each})"


def typeset(formula: str) -> str:
    """`4*D**2 + 3*D` as `4 D² + 3 D`."""
    return formula.replace("**2", "²").replace("*", " ")
