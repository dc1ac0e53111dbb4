"""Describes how language models use their context: tables and charts of the loss by position and context length."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock.explain import document as doc
from headstock.explain.context import ContextFacts, Estimate, RunContext
from headstock.explain.render_document import Panel, picture_of, side_by_side, with_legend
from headstock.report.format import shorten

COLOURS = ("#0072b2", "#d55e00", "#00876a", "#a8488a", "#6d6a2c")
MARKERS = "os^Dv"


def context_document(facts: ContextFacts) -> doc.ExplainDocument:
    names = run_names(facts.runs)
    panels: list[Panel] = []
    sections = [doc.Section("", [*doc.notes(facts.notes), *verdicts(facts, names)])]
    if facts.bins:
        panels.append(lambda axes: position_panel(axes, facts, names))
        sections.append(doc.Section("By position", [position_chart(panels[-1]), position_table(facts, names)]))
    if facts.contexts:
        panels.append(lambda axes: context_panel(axes, facts, names))
        sections.append(doc.Section("By context length", [context_chart(panels[-1]), context_table(facts, names)]))
    both = doc.Chart("context", "loss by position and by context length", side_by_side(panels), height=0.5)
    return doc.ExplainDocument(
        subject="context",
        title=f"{', '.join(names)}: use of context",
        summary=f"rows of {facts.row_length:,} tokens"
        + (f" · {facts.targets:,} tokens predicted from each context length" if facts.contexts else "")
        + (f" · {facts.text}" if facts.text else ""),
        page_title=f"Use of context: {', '.join(names)}",
        sections=sections,
        json=facts.to_dict(),
        picture=picture_of(both),
    )


def run_names(runs: Sequence[RunContext]) -> list[str]:
    """The last part of each run's path, or all of it where two would be alike; numbered if a run is named twice."""
    names = [run.run.rpartition("/")[2] for run in runs]
    if len(set(names)) < len(names):
        names = [run.run for run in runs]
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, 1)]


def verdicts(facts: ContextFacts, names: Sequence[str]) -> list[doc.DocumentBlock]:
    """One sentence per run: how much context it needs."""
    lines = []
    for run, name in zip(facts.runs, names, strict=True):
        if run.by_context is None:
            continue
        losses, used = run.by_context.losses_by_bin(), run.effective_context(facts.contexts)
        total = run.by_context.means(np.eye(1, len(losses)) - np.eye(1, len(losses), k=len(losses) - 1))[0]
        lines.append(
            f"{name}: {facts.contexts[-1]:,} tokens of context gain {interval_text(total)} nats over one token. "
            f"With {used:,} of them the perplexity is within 1% of that with all (effective context size)."
        )
    return [doc.Bullets(lines)] if lines else []


def interval_text(value: Estimate) -> str:
    return "" if math.isnan(value.mean) else f"{value.mean:.3f} ({value.low:.3f} to {value.high:.3f})"


def position_table(facts: ContextFacts, names: Sequence[str]) -> doc.Table:
    runs = [(run.by_position.losses_by_bin(), run.by_position) for run in facts.runs if run.by_position is not None]
    columns: dict[str, str] = {"position": "text"} | ({"tokens": "count"} if len(names) == 1 else {})
    columns |= dict.fromkeys(names, "text")
    differences = {names[i]: rows for i, (_, rows, _) in enumerate(facts.differences(), 1)}
    columns |= {f"{name} - {names[0]}": "text" for name in differences}
    rows = [
        [
            str(first) if first == last else f"{first}-{last}",
            *([int(runs[0][1].counts[:, number].sum())] if len(names) == 1 else []),
            *(interval_text(losses[number]) for losses, _ in runs),
            *(interval_text(row[number]) for row in differences.values()),
        ]
        for number, (first, last) in enumerate(facts.bins)
        if any(table.counts[:, number].any() for _, table in runs)
    ]
    caption = "The mean loss of the tokens predicted at these positions of a row or document, with 95% intervals."
    return doc.Table("Loss by position (nats per token)", columns, rows, caption, heading=False)


def context_table(facts: ContextFacts, names: Sequence[str]) -> doc.Table:
    columns = {"context": "text"}
    cells: list[list[str]] = [[f"{length:,}"] for length in facts.contexts]

    def add(title: str, estimates: Sequence[Estimate], skip: int = 0) -> None:
        columns[title] = "text"
        for row, value in zip(cells[skip:], estimates, strict=True):
            row.append(interval_text(value))
        for row in cells[:skip]:
            row.append("")

    for run, name in zip(facts.runs, names, strict=True):
        assert run.by_context is not None
        add(name, run.by_context.losses_by_bin())
        if len(facts.runs) == 1:
            add("gain", run.by_context.gains(), skip=1)
    for number, (_, _, estimates) in enumerate(facts.differences(), 1):
        add(f"{names[number]} - {names[0]}", estimates)
    caption = "The mean loss of the same tokens, predicted from this many tokens before them, with 95% intervals."
    caption += " The gain is that over the row above." if len(facts.runs) == 1 else ""
    return doc.Table("Loss by context length (nats per token)", columns, cells, caption, heading=False)


# Charts


def position_chart(panel: Panel) -> doc.Chart:
    caption = "The mean loss by position in the row or document, with 95% intervals. Later tokens are other tokens."
    return doc.Chart("position", "loss by position", with_legend(panel, columns=3), caption)


def context_chart(panel: Panel) -> doc.Chart:
    caption = "The mean loss of the same tokens by the number of tokens they are predicted from, with 95% intervals."
    return doc.Chart("length", "loss by context length", with_legend(panel, columns=3), caption)


def position_panel(axes: Any, facts: ContextFacts, names: Sequence[str]) -> None:
    for number, run in enumerate(facts.runs):
        assert run.by_position is not None
        filled = run.by_position.counts.sum(0) > 0
        x = [(first + last) / 2 + 1 for (first, last), used in zip(facts.bins, filled, strict=True) if used]
        losses = [value for value, used in zip(run.by_position.losses_by_bin(), filled, strict=True) if used]
        plot_losses(axes, number, x, losses, names[number])
    log_axis(axes, "position in the row")


def context_panel(axes: Any, facts: ContextFacts, names: Sequence[str]) -> None:
    for number, run in enumerate(facts.runs):
        assert run.by_context is not None
        plot_losses(axes, number, facts.contexts, run.by_context.losses_by_bin(), names[number])
    log_axis(axes, "tokens of context")


def plot_losses(axes: Any, number: int, x: Sequence[float], losses: Sequence[Estimate], name: str) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    lows, highs = [value.low for value in losses], [value.high for value in losses]
    axes.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, [value.mean for value in losses], color=colour, marker=marker, markersize=4.5, label=shorten(name, 30))


def log_axis(axes: Any, label: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(2, numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("loss (nats)")
    axes.grid(axis="y")
