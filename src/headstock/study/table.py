"""A comparison as a table for the terminal."""

from typing import Any

from headstock.study.names import METRICS


def table(results: dict[str, Any]) -> Any:
    """The score with its interval: one row an arm, one column a number of labels."""
    from rich.table import Table

    metric = METRICS[results["metric"]]
    made = Table(title=f"{metric} on {results['measured_rows']:,} {results['measured_on']} rows, in %")
    made.add_column("arm")
    for count in results["labels"]:
        made.add_column(f"{count:,} labels", justify="right")
    best = {
        count: max(row["score"] for row in results["summary"] if row["labels"] == count) for count in results["labels"]
    }
    for arm in results["arms"]:
        rows = {row["labels"]: row for row in results["summary"] if row["arm"] == arm["name"]}
        made.add_row(arm["name"], *(shown(rows[n], rows[n]["score"] == best[n]) for n in results["labels"]))
    return made


def shown(row: dict[str, Any], best: bool) -> str:
    number = f"{100 * row['score']:.1f}"
    around = "" if row["low"] is None else f" ({100 * row['low']:.1f} to {100 * row['high']:.1f})"
    return f"[bold]{number}[/bold]{around}" if best else f"{number}{around}"
