"""Closed forms of recurrent models and ELMo; `c` is the config, `d` the sizes."""

from headstock.cost.formulas import (
    Dimensions,
    ExecutionContext,
    ModuleCost,
    SavedActivations,
    Shapes,
    embedding,
    linear,
)
from headstock.model.backbones.recurrent import RecurrentConfig

GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def recurrent_cost(c: RecurrentConfig, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    stack = ModuleCost("stack", parts=(layers("layers", c, d, context),))
    return ModuleCost("backbone", parts=(embedding("tokens", d.vocabulary, d.width), stack))


def elmo_cost(c: RecurrentConfig, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    stacks = (ModuleCost(name, parts=(layers("layers", c, d, context),)) for name in ("ahead", "back"))
    return ModuleCost("backbone", parts=(embedding("tokens", d.vocabulary, d.width), *stacks))


def layers(name: str, c: RecurrentConfig, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    project = (linear("project", d.hidden, d.width),) if c.hidden != c.width else ()
    plain = c.dropout and c.dropout_kind == "plain"
    dropped = SavedActivations(dropped=d.width if plain else 0)
    return ModuleCost(name, parts=(cells("cells", c, d, context), *project), saved=dropped, times=d.depth)


def cells(name: str, c: RecurrentConfig, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    """LSTM, GRU or plain cells: each gate reads the input and the previous output."""
    gates, width, hidden = GATES[c.cell], d.width, d.hidden
    shapes: Shapes = {
        "weight_ih_l0": (gates * hidden, width),
        "weight_hh_l0": (gates * hidden, hidden),
        "bias_ih_l0": (gates * hidden,),
        "bias_hh_l0": (gates * hidden,),
    }
    inside = 7 * hidden  # gates, cell states and outputs
    if c.cell == "rnn":
        inside = hidden * (d.length + 1) / d.length  # outputs, with the initial one
    elif c.cell == "lstm" and context.device == "cpu" and context.workspace:
        # oneDNN saves a workspace instead, with one step more than there are tokens; the formula fits its size
        states = 5 * hidden + 6 * (hidden if c.hidden >= c.width else width)
        inside = 5 * hidden + states * (d.length + 1) / d.length
    saved = SavedActivations(single=width + inside)  # cells always run in float32
    return ModuleCost(name, shapes, flops=2 * gates * hidden * (width + hidden), saved=saved)
