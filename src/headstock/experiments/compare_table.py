"""A comparison as a table for the terminal."""

from typing import Any

from headstock.report.numbers import compact_number
from headstock.report.theme import arm_label
from headstock.tasks.labelled import nouns_of
from headstock.tasks.wording import NOT_PERCENT, metric_name


def comparison_table(results: dict[str, Any]) -> Any:
    """The score with its interval: one row an arm, one column a number of labels."""
    from rich.table import Table

    metric, unit = metric_name(results["metric"]), nouns_of(results.get("task")).unit
    scale = "" if results["metric"] in NOT_PERCENT else ", in %"
    made = Table(title=f"{metric} on {results['measured_rows']:,} {results['measured_on']} rows{scale}")
    made.add_column("arm")
    for count in results["labels"]:
        made.add_column(f"{count:,} {unit}s", justify="right")
    best = {
        count: max(row["score"] for row in results["summary"] if row["labels"] == count) for count in results["labels"]
    }
    for arm in results["arms"]:
        rows = {row["labels"]: row for row in results["summary"] if row["arm"] == arm["name"]}
        made.add_row(arm_label(arm["name"]), *(shown(rows[n], rows[n]["score"] == best[n]) for n in results["labels"]))
    if results["metric"] == "accuracy" and (majority := results.get("majority")):
        made.add_row("(majority class)", *[f"{100 * majority['accuracy']:.1f}"] * len(results["labels"]))
    return made


def shown(row: dict[str, Any], best: bool) -> str:
    number = f"{100 * row['score']:.1f}"
    around = "" if row["low"] is None else f" ({100 * row['low']:.1f} to {100 * row['high']:.1f})"
    return f"[bold]{number}[/bold]{around}" if best else f"{number}{around}"


def runs_table(runs: list[dict[str, Any]]) -> Any:
    """What the pretrained runs are and what they learned of their text: one row each."""
    from rich.table import Table

    made = Table(title="the runs side by side")
    for name in ("run", "objective", "parameters", "tokens", "tokens/s", "ppl", "bits/byte"):
        made.add_column(name, justify="left" if name in ("run", "objective") else "right")
    for run in runs:
        made.add_row(
            run["run"].rpartition("/")[2],
            run["objective"] or "",
            *(compact_number(run[name]) for name in ("parameters", "tokens", "tokens_per_second")),
            *(f"{run[name]:,.3f}" if run[name] else "" for name in ("perplexity", "bits_per_byte")),
        )
    return made
