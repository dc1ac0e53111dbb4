"""How many weights each part of a run's model has: its closed form, in letters, with the number it comes to."""

import torch

from headstock.model.backbone import BACKBONES
from headstock.model.formulas import Dimensions
from headstock.model.model import Model
from headstock.tasks.base import TASKS
from headstock.train.run_folder import RunFolder
from headstock.train.settings import make_config

LETTERS = {
    "vocabulary": "V",
    "source_vocabulary": "U",
    "context": "T",
    "segments": "S",
    "depth": "N",
    "encoder_depth": "M",
    "width": "D",
    "hidden": "F",
    "heads": "H",
    "classes": "C",
}


def formula_table(run: RunFolder) -> str:
    """| `backbone.blocks` | N × (4 D² + ...) | 4,448 |, and what the letters stand for."""
    import sympy

    model = without_weights(run)
    numbers = vars(model.dimensions())
    letters = {name: sympy.Symbol(letter, positive=True) for name, letter in LETTERS.items() if numbers[name]}
    form = model.counted(Dimensions(**(numbers | letters)))
    values = {letter: numbers[name] for name, letter in letters.items()}
    told = ["| part | parameters | |", "|---|---|---|"]
    for above in form.parts:
        for part in above.parts:
            if (count := sympy.expand(part.count)) == 0:
                continue
            alike = part.times is not None
            closed = f"{part.times} × ({sympy.expand(part.one)})" if alike else str(count)
            told.append(f"| `{above.name}.{part.name}` | {written(closed)} | {int(count.subs(values)):,} |")
    used = {str(letter) for letter in sympy.sympify(form.count).free_symbols}
    meant = [
        f"{letter} {name.replace('_', ' ')} {numbers[name]:,}" for name, letter in LETTERS.items() if letter in used
    ]
    return "\n".join(told) + f"\n\n{', '.join(meant)}."


def without_weights(run: RunFolder) -> Model:
    """The run's model as shapes alone."""
    chosen = make_config(run.config())
    with torch.device("meta"):
        backbone = BACKBONES.get(chosen.family)(chosen.model)
        return Model(backbone, TASKS.get(chosen.objective)(chosen.task, run.tokenizer()).heads(backbone))


def written(form: str) -> str:
    """`4*D**2 + 3*D` as `4 D² + 3 D`."""
    return form.replace("**2", "²").replace("*", " ")
