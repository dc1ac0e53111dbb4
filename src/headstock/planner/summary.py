"""Presents a plan: a table of decisions with reasons, notes, and the heading of a recipe."""

from typing import Any

from headstock.cost.measured import measured_note
from headstock.planner.forecast import affordable_steps
from headstock.planner.planner import TrainingPlan
from headstock.planner.rules import REASONS, max_epochs
from headstock.report.format import compact_number, format_bytes, format_duration, format_minutes, pluralize


def plan_table(plan: TrainingPlan) -> Any:
    """One row per decision, with its reason."""
    from rich.table import Table

    table = Table(title=f"a plan for {format_bytes(plan.candidate.text.bytes)} of text on {plan.machine.name}")
    for name in ("what", "proposed", "because"):
        table.add_column(name)
    for name, value in decisions(plan).items():
        table.add_row(name, value, REASONS[name])
    return table


def decisions(plan: TrainingPlan) -> dict[str, str]:
    model, train = plan.config["model"], plan.config["train"]
    context = train.get("length") or model.get("context") or 256
    micro_batch = f", {train['micro_batch']} rows at once" if train.get("micro_batch") else ""
    values = {
        "objective": f"{plan.candidate.objective} ({model['family']})",
        "size": f"{plan.candidate.label}, {compact_number(plan.costs.parameters)} parameters",
        "passes": f"{plan.epochs:.1f} over {compact_number(plan.candidate.text.tokens)} tokens",
        "vocabulary": f"{plan.config['tokenizer']['vocabulary']:,}",
        "context": f"{context} tokens",
        "batch": f"{train['batch']} rows, {plan.steps:,} steps{micro_batch}",
        "valid_tokens": f"{train['valid_tokens']:,} each time",
        "lr": f"{train['lr']:g} ({train['optimizer']})",
    }
    return values | ({"dropout": f"{dropout:g}"} if (dropout := model.get("dropout")) else {})


def plan_notes(plan: TrainingPlan) -> list[str]:
    """What the plan costs, and what to know about that estimate."""
    costs = plan.costs
    notes = [
        f"{'measured' if costs.probed else 'forecast'}: {format_duration(plan.seconds)}, "
        f"{plan.tokens_per_second:,.0f} tokens/s, {format_bytes(costs.peak_bytes)} of memory at most, "
        f"{plan.to_dict()['flops']:.2g} FLOPs"
    ]
    if not costs.probed:
        notes.append("The time is a rough estimate and may be off by a factor of two; --probe measures it here.")
    if costs.measured_parts:
        notes.append(measured_note(costs.measured_parts))
    if costs.cold_start_seconds > 0.05 * plan.seconds:
        duration = format_duration(costs.cold_start_seconds)
        notes.append(f"A new process may take up to {duration} more to compile or load its kernels.")
    if not plan.exact:
        notes.append("The corpus is large, so its size was estimated from a sample.")
    if plan.minutes is None:
        notes.append("Without --minutes, the amount of text decides.")
    elif plan.seconds < 0.8 * 60 * plan.minutes:
        epochs = max_epochs(plan.candidate.objective)
        notes.append(
            f"Training ends before {format_minutes(plan.minutes)}: after {epochs} epochs the model would only memorize "
            "the text. More text would help more than more time."
        )
    elif plan.seconds > 1.05 * 60 * plan.minutes:
        overhead = format_duration(plan.seconds - plan.steps * costs.step_seconds)
        notes.append(
            f"This takes more than {format_minutes(plan.minutes)}: start-up, validations and checkpoints take "
            f"{overhead}."
        )
    return notes


def plan_reason(plan: TrainingPlan) -> str:
    """Explains the model of `pretrain --minutes` without a preset, and how long it is trained.

    Such a run follows the clock, also beyond the epochs that the plan would stop at.
    """
    assert plan.minutes is not None
    values, costs, minutes = decisions(plan), plan.costs, format_minutes(plan.minutes)
    steps = affordable_steps(costs, 60 * plan.minutes, plan.valid_tokens)
    epochs = steps * costs.step_tokens / max(1.0, plan.candidate.text.tokens)
    return (
        f"no preset or size given, so this model was chosen for {minutes}: {values['objective']}, {values['size']}, "
        f"batches of {plan.config['train']['batch']} rows, {format_bytes(costs.peak_bytes)} of memory at most "
        f"(headstock plan explains it). Training stops after {minutes}, however many steps that gives: about "
        f"{pluralize(steps, 'step')} or {epochs:.1f} epochs by a forecast that may be off by a factor of two."
    )


def recipe_heading(plan: TrainingPlan) -> str:
    """The comment at the top of a recipe."""
    costs, tokens = plan.costs, plan.candidate.text.tokens
    return (
        f"{costs.parameters:,} parameters, {plan.epochs:.1f} epochs over about {tokens:,.0f} tokens.\n"
        f"{'Measured' if costs.probed else 'Forecast'} on {plan.machine.name}: {format_duration(plan.seconds)}, "
        f"{plan.tokens_per_second:,.0f} tokens/s, {format_bytes(costs.peak_bytes)}."
    )
