"""A plan in words: what is proposed and why, and what it will take."""

from typing import Any

from headstock.experiments.compare_table import compact_number
from headstock.planner.planner import Plan
from headstock.planner.rules import MOST_PASSES, REASONS


def table(made: Plan) -> Any:
    """One row a decision, with its reason."""
    from rich.table import Table

    shown = Table(title=f"a plan for {size(made.choice.text.bytes)} of text on {made.machine.name}")
    for name in ("what", "proposed", "because"):
        shown.add_column(name)
    for what, proposed in decisions(made).items():
        shown.add_row(what, proposed, REASONS[what])
    return shown


def decisions(made: Plan) -> dict[str, str]:
    tree = made.tree
    length = tree["train"].get("length") or tree["model"].get("context") or 256
    rows, at_once = tree["train"]["batch"], tree["train"].get("micro_batch")
    proposed = {
        "objective": f"{made.choice.objective} ({tree['model']['family']})",
        "size": f"{made.choice.label}, {compact_number(made.costs.parameters)} parameters",
        "passes": f"{made.passes:.1f} over {compact_number(made.choice.text.tokens)} tokens",
        "vocabulary": f"{tree['tokenizer']['vocabulary']:,}",
        "context": f"{length} tokens",
        "batch": f"{rows} rows, {made.steps:,} steps" + (f", {at_once} rows at once" if at_once else ""),
        "valid_tokens": f"{tree['train']['valid_tokens']:,} each time",
        "lr": f"{tree['train']['lr']:g} ({tree['train']['optimizer']})",
    }
    return proposed | ({"dropout": f"{dropped:g}"} if (dropped := tree["model"].get("dropout")) else {})


def told(made: Plan) -> list[str]:
    """What it will take, and what to know about that."""
    each = made.costs
    lines = [
        f"{'measured' if each.measured else 'forecast'}: {duration(made.seconds)}, "
        f"{made.tokens_per_second:,.0f} tokens/s, {size(each.peak)} of memory at most, "
        f"{made.plain()['flops']:.2g} operations"
    ]
    if not each.measured:
        lines.append("roughly: time may be off by a factor of two before it is tried here with --probe")
    if each.cold > 0.05 * made.seconds:
        lines.append(f"a new process may take up to {duration(each.cold)} more, to load or make its kernels")
    if not made.exact:
        lines.append("the corpus is large, so its size was estimated from a part of it")
    if made.minutes is not None and made.seconds < 0.8 * 60 * made.minutes:
        most = MOST_PASSES[made.choice.objective]
        lines.append(
            f"the text is used up before the {made.minutes:g} minutes: it is read {most} times, and more would only "
            "learn it by heart; more text would help more than more time"
        )
    if made.minutes is not None and made.seconds > 1.05 * 60 * made.minutes:
        lines.append(
            f"this is more than the {made.minutes:g} minutes: to begin, to validate and to save alone takes "
            f"{duration(made.seconds - made.steps * each.step)}"
        )
    if made.minutes is None:
        lines.append("no --minutes were named, so this is as much as the text is worth")
    return lines


def why(made: Plan) -> str:
    """In a line: what was chosen for a run of so many minutes."""
    chosen = decisions(made)
    parts = ", ".join(chosen[name] for name in ("objective", "size", "passes", "batch"))
    return (
        f"no preset or size was named, so it was chosen for {made.minutes:g} minutes here: {parts}; "
        f"about {made.tokens_per_second:,.0f} tokens/s and {size(made.costs.peak)} (headstock plan says why)"
    )


def heading(made: Plan) -> str:
    """The comment at the top of a recipe."""
    each = made.costs
    return (
        f"{each.parameters:,} parameters, {made.passes:.1f} passes over about {made.choice.text.tokens:,.0f} tokens.\n"
        f"{'Measured' if each.measured else 'Forecast'} on {made.machine.name}: {duration(made.seconds)}, "
        f"{made.tokens_per_second:,.0f} tokens/s, {size(each.peak)}."
    )


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def size(count: float) -> str:
    unit, each = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if count >= pair[1]), ("kB", 1e3))
    return f"{count / each:.1f} {unit}"
