"""Results of comparisons and sweeps as tables for the terminal."""

from typing import TYPE_CHECKING, Any

from headstock.report.format import compact_number, pluralize
from headstock.report.sweep_points import (
    format_interval,
    format_metric,
    format_value,
    gap_to_best,
    is_number,
    missing_score,
)
from headstock.report.theme import arm_label
from headstock.tasks.labelled import nouns_of
from headstock.tasks.text_metrics import NOT_PERCENT, is_score, metric_name
from headstock.train.run_folder import run_title

if TYPE_CHECKING:
    from rich.table import Table


def escape(text: str) -> str:
    """A name from a user's file as a cell, in which [brackets] are no markup."""
    from rich.markup import escape

    return escape(text)


def make_table(title: str, columns: dict[str, bool]) -> "Table":
    """An empty table; `columns` says which are right-aligned. A name that does not fit continues on the next line."""
    from rich.table import Table

    table = Table(title=escape(title))
    for name, is_right in columns.items():
        table.add_column(escape(name), justify="right" if is_right else "left", overflow="fold")
    return table


def score_cell(metric: str, score: float | None, row: dict[str, Any], *, is_best: bool) -> str:
    """A score with its interval; the best is bold."""
    text = missing_score(row) if score is None else format_metric(metric, score)
    return f"[bold]{text}[/bold]{format_interval(metric, row)}" if is_best else f"{text}{format_interval(metric, row)}"


def comparison_table(results: dict[str, Any]) -> "Table":
    """Scores with intervals: one row per arm, one column per number of labels."""
    metric, unit, counts = results["metric"], nouns_of(results.get("task")).unit, results["labels"]
    is_percent = is_score(metric) and metric not in NOT_PERCENT
    scale = " (%)" if is_percent else "" if is_score(metric) else " (lower is better)"
    title = f"{metric_name(metric)} on {results['measured_rows']:,} {results['measured_on']} rows{scale}"
    table = make_table(title, {"arm": False} | {f"{count:,} {unit}s": True for count in counts})
    select = max if is_score(metric) else min
    best = {count: select(row["score"] for row in results["summary"] if row["labels"] == count) for count in counts}
    for arm in results["arms"]:
        rows = sorted((row for row in results["summary"] if row["arm"] == arm["name"]), key=lambda row: row["labels"])
        cells = (score_cell(metric, row["score"], row, is_best=row["score"] == best[row["labels"]]) for row in rows)
        table.add_row(escape(arm_label(arm["name"])), *(cell.replace("%", "") for cell in cells))
    if metric == "accuracy" and (majority := results.get("majority")):
        table.add_row("(majority class)", *[f"{100 * majority['accuracy']:.1f}"] * len(counts))
    return table


def slice_table(results: dict[str, Any], part: dict[str, Any]) -> "Table":
    """Scores with intervals on one slice: one row per group, one column per arm."""
    metric, labels = results["metric"], results["labels"][-1]
    scale = " (%)" if is_score(metric) and metric not in NOT_PERCENT else ""
    title = f"{metric_name(metric)} by {part['slice']}{scale}, {labels:,} {nouns_of(results.get('task')).unit}s"
    arms = [arm_label(arm["name"]) for arm in results["arms"]]
    table = make_table(title, {"group": False, "rows": True} | dict.fromkeys(arms, True))
    for group in part["groups"]:
        best = (max if is_score(metric) else min)(row["score"] for row in group["arms"])
        cells = (score_cell(metric, row["score"], row, is_best=row["score"] == best) for row in group["arms"])
        table.add_row(escape(group["value"]), f"{group['rows']:,}", *(cell.replace("%", "") for cell in cells))
    return table


def runs_table(runs: list[dict[str, Any]]) -> "Table":
    """The pretrained runs of a comparison, one row each."""
    numbers = ("parameters", "tokens", "tokens/s", "ppl", "bits/byte")
    table = make_table("pretrained runs", {"run": False, "objective": False} | dict.fromkeys(numbers, True))
    for run in runs:
        table.add_row(
            escape(run_title(run["run"])),
            run["objective"] or "",
            *(compact_number(run[name]) for name in ("parameters", "tokens", "tokens_per_second")),
            *(f"{run[name]:,.3f}" if run[name] else "" for name in ("perplexity", "bits_per_byte")),
        )
    return table


def sweep_table(results: dict[str, Any]) -> "Table":
    """The points of a sweep, the best first."""
    metric, settings = results["metric"], results["points"][0]["settings"]
    columns = {"": True} | {key: is_number(value) for key, value in settings.items()}
    columns |= dict.fromkeys((metric_name(metric), "gap to the best", "time"), True)
    trials = f"{pluralize(results['seeds'], results.get('unit', 'seed'))} per point"
    title = f"{metric_name(metric)} ({results['better']} is better), {trials}"
    if results["method"] != "grid":
        title = f"{results['points_are']}: {title}"
    table = make_table(title, columns)
    for rank, row in enumerate(results["points"], 1):
        values = (escape(format_value(row["settings"][key])) for key in settings)
        score = score_cell(metric, row["mean"], row, is_best=rank == 1)
        table.add_row(str(rank), *values, score, gap_to_best(results, row), f"{row['seconds']:.1f} s")
    return table


def ensemble_table(results: dict[str, Any]) -> "Table":
    """The members of an ensemble and all of them together, with their accuracies."""
    splits = [split for split in ("valid", "test") if split in results]
    names = {"valid": "out-of-fold" if results["fitted_on"].startswith("out-of-fold") else "valid"}
    titles = [f"{names.get(split, split)} accuracy" for split in splits]
    columns = {"member": False, "weight": True} | dict.fromkeys(titles, True)
    table = make_table(f"weights fitted on {results['fitted_on']}", columns)

    def accuracies(part: dict[str, Any], key: str = "") -> list[str]:
        scores = [part[split][key] if key else part[split] for split in splits]
        return [f"{100 * s['mean']:.1f} ({100 * s['low']:.1f} to {100 * s['high']:.1f})" for s in scores]

    for member in results["members"]:
        table.add_row(escape(member["name"]), f"{member['weight']:.2f}", *accuracies(member))
    table.add_row("together", "", *accuracies(results, "ensemble"))
    table.add_row("gain over the best member", "", *accuracies(results, "gain"))
    return table


def glue_table(results: dict[str, Any]) -> "Table":
    """One row per metric of each GLUE task, and the averaged score."""
    columns = {"task": False, "metric": False, "score (95%)": True, "training rows": True, "rows": True}
    table = make_table(f"GLUE, development rows: {results['run']}", columns)
    for name, task in results["tasks"].items():
        sizes = [f"{task['train_rows']:,}", f"{task['dev_rows']:,}"]
        for metric, value in task["metrics"].items():
            low, high = task["intervals"][metric]
            score = f"{100 * value:.1f}" + ("" if low is None else f" ({100 * low:.1f} to {100 * high:.1f})")
            table.add_row(name, metric_name(metric), score, *sizes)
            name, sizes = "", ["", ""]
    mean, low, high = (100 * results[f"average{end}"] for end in ("", "_low", "_high"))
    table.add_row(
        f"average of {len(results['tasks'])}", "", f"[bold]{mean:.1f}[/bold] ({low:.1f} to {high:.1f})", "", ""
    )
    return table
