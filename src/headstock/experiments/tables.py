"""Results of comparisons and sweeps as tables for the terminal."""

from typing import Any

from headstock.report.format import compact_number
from headstock.report.sweep_points import (
    format_interval,
    format_metric,
    format_value,
    gap_to_best,
    is_number,
)
from headstock.report.theme import arm_label
from headstock.tasks.labelled import nouns_of
from headstock.tasks.wording import NOT_PERCENT, metric_name


def comparison_table(results: dict[str, Any]) -> Any:
    """Scores with intervals: one row per arm, one column per number of labels."""
    from rich.table import Table

    metric, unit = results["metric"], nouns_of(results.get("task")).unit
    scale = "" if metric in NOT_PERCENT else " (%)"
    table = Table(title=f"{metric_name(metric)} on {results['measured_rows']:,} {results['measured_on']} rows{scale}")
    table.add_column("arm")
    for count in results["labels"]:
        table.add_column(f"{count:,} {unit}s", justify="right")
    best = {
        count: max(row["score"] for row in results["summary"] if row["labels"] == count) for count in results["labels"]
    }
    for arm in results["arms"]:
        rows = {row["labels"]: row for row in results["summary"] if row["arm"] == arm["name"]}
        cells = (score_cell(rows[count], is_best=rows[count]["score"] == best[count]) for count in results["labels"])
        table.add_row(arm_label(arm["name"]), *cells)
    if metric == "accuracy" and (majority := results.get("majority")):
        table.add_row("(majority class)", *[f"{100 * majority['accuracy']:.1f}"] * len(results["labels"]))
    return table


def score_cell(row: dict[str, Any], *, is_best: bool) -> str:
    score = f"{100 * row['score']:.1f}"
    interval = "" if row["low"] is None else f" ({100 * row['low']:.1f} to {100 * row['high']:.1f})"
    return f"[bold]{score}[/bold]{interval}" if is_best else f"{score}{interval}"


def runs_table(runs: list[dict[str, Any]]) -> Any:
    """The pretrained runs of a comparison, one row each."""
    from rich.table import Table

    table = Table(title="pretrained runs")
    for name in ("run", "objective", "parameters", "tokens", "tokens/s", "ppl", "bits/byte"):
        table.add_column(name, justify="left" if name in ("run", "objective") else "right")
    for run in runs:
        table.add_row(
            run["run"].rpartition("/")[2],
            run["objective"] or "",
            *(compact_number(run[name]) for name in ("parameters", "tokens", "tokens_per_second")),
            *(f"{run[name]:,.3f}" if run[name] else "" for name in ("perplexity", "bits_per_byte")),
        )
    return table


def sweep_table(results: dict[str, Any]) -> Any:
    """The points of a sweep, the best first."""
    from rich.table import Table

    metric, settings = results["metric"], results["points"][0]["settings"]
    name = metric_name(metric)
    table = Table(title=f"{name} ({results['better']} is better), {results['seeds']} seeds per point")
    table.add_column("", justify="right")
    for key, value in settings.items():
        table.add_column(key, justify="right" if is_number(value) else "left")
    for heading in (name, "gap to the best", "time"):
        table.add_column(heading, justify="right")
    for rank, row in enumerate(results["points"], 1):
        failed = row["mean"] is None
        score = "failed" if failed else f"{format_metric(metric, row['mean'])}{format_interval(metric, row)}"
        table.add_row(
            str(rank),
            *(format_value(row["settings"][key]) for key in settings),
            f"[bold]{score}[/bold]" if rank == 1 else score,
            gap_to_best(results, row),
            f"{row['seconds']:.1f} s",
        )
    return table
