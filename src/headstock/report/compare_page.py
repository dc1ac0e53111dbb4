"""The report of `headstock compare`, made from its results.json alone."""

from pathlib import Path
from typing import Any

from headstock.errors import UserError
from headstock.experiments.verdict import Difference
from headstock.report import charts
from headstock.report import error_section as details
from headstock.report.render import is_finite, percent, render
from headstock.report.run_charts import scores_of_runs
from headstock.report.theme import ArmStyle, Gallery, arm_label, file_name, styles
from headstock.tasks.labelled import nouns_of
from headstock.tasks.wording import METRICS, metric_name
from headstock.train.run_folder import RunFolder

KINDS = ("scratch", "pretrained", "frozen")
NEEDED = ("arms", "labels", "cells", "summary")
MOST_LABEL_ERRORS = 40


def write_compare_report(folder: Path) -> Path:
    """Make report.html, and its charts as files under figures/, from the folder's results.json."""
    run = RunFolder(folder)
    results = run.results()
    missing = [key for key in NEEDED if not results.get(key)]
    if missing:
        raise UserError(f"{folder}: its results.json lacks {', '.join(missing)}; run headstock compare again")
    fill_in(results)
    gallery = Gallery(folder / "figures")
    looks = styles(results["arms"])
    found = results.get("details") or {}
    parts = {
        "score": score_charts(results, looks, gallery),
        "runs": run_charts(results, gallery),
        "training": training_charts(results, looks, gallery),
        "arms": arm_details(results, looks, gallery),
        "label_errors": label_errors(found),
    }
    page = render(
        __package__,
        "compare.html",
        results=results,
        looks=looks,
        chosen=chosen_classifiers(results["cells"]),
        grid=score_grid(results),
        nouns=nouns_of(results.get("task")),
        metric=metric_name(results["metric"]),
        of_layers=len(results["arms"]) > 1 and all("task.layers" in (a.get("settings") or {}) for a in results["arms"]),
        metrics=metrics_told(results),
        run_kinds=kinds_of_runs(results),
        pairs=described_pairs(results.get("pairs") or []),
        commonest=commonest_class(results),
        detail_labels=found.get("labels") or max(results["labels"]),
        **parts,
    )
    run.write_report(page)
    return run.report


def fill_in(results: dict[str, Any]) -> None:
    """What was made before there were other metrics compares accuracies."""
    results.setdefault("metric", "accuracy")
    for row in [*results["summary"], *results["cells"]]:
        row.setdefault("score", row.get("accuracy"))
    for row in results["summary"]:
        row.setdefault(f"{results['metric']}_low", row.get("low"))
        row.setdefault(f"{results['metric']}_high", row.get("high"))
    for row in results["cells"]:
        row.setdefault("valid_score", row.get("valid_accuracy"))


def metrics_told(results: dict[str, Any]) -> dict[str, str]:
    """The metrics there are, the one that counts first; an exact match is also called accuracy, and is told once."""
    metrics = dict.fromkeys([results["metric"], *METRICS])
    known = [key for key in metrics if any(is_finite(row.get(key)) for row in results["summary"])]
    known.sort(key=lambda key: key != results["metric"])
    return {key: metric_name(key) for key in known if key != "accuracy" or "exact_match" not in known}


def score_charts(results: dict[str, Any], looks: dict[str, ArmStyle], gallery: Gallery) -> dict[str, Any]:
    """The chart of the first screen, once for a page's width and once for a telephone's."""
    metric, rows = metric_name(results["metric"]), nouns_of(results.get("task")).rows
    labels, summary, shown = sorted(results["labels"]), results["summary"], list(looks.values())
    said = "; ".join(
        f"{arm_label(row['arm'])} {percent(row.get('score'))} with {row['labels']:,}"
        for row in sorted(summary, key=lambda row: (list(looks).index(row["arm"]), row["labels"]))
    )
    label = f"{metric[0].upper()}{metric[1:]} by number of labelled {rows}: {said}"
    several = len(labels) > 1
    both = {}
    for width in ("wide", "narrow"):
        if several:
            figure = charts.score_by_labels(shown, summary, labels, wide=width == "wide", metric=metric, rows=rows)
        else:
            figure = charts.score_of_arms(shown, summary, wide=width == "wide", metric=metric)
        name = results["metric"] if width == "wide" else f"{results['metric']}-narrow"
        both[width] = gallery.embed(name, figure, label, keep=width == "wide")
    return both | {"several": several, "intervals": any(charts.reach(row) for row in summary if row.get("score"))}


def kinds_of_runs(results: dict[str, Any]) -> list[str]:
    """The ways in which the runs' scores were had, where several runs stand side by side."""
    return [kind for kind in KINDS if any(kind in run["scores"] for run in results.get("runs") or [])]


def run_charts(results: dict[str, Any], gallery: Gallery) -> dict[str, Any] | None:
    """The runs as dots with their intervals, one line each; None where there is but one run."""
    runs, metric = results.get("runs") or [], metric_name(results["metric"])
    if not runs:
        return None
    label = "; ".join(
        f"{run['run']} {kind} {percent(run['scores'][kind]['score'])}" for run in runs for kind in run["scores"]
    )
    return {
        width: gallery.embed(
            f"runs-{width}",
            scores_of_runs(runs, kinds_of_runs(results), metric=metric, wide=width == "wide"),
            f"The runs by {metric}: {label}",
            keep=width == "wide",
        )
        for width in ("wide", "narrow")
    }


def training_charts(results: dict[str, Any], looks: dict[str, ArmStyle], gallery: Gallery) -> list[dict[str, Any]]:
    """For each number of labels, the largest first: a chart an arm that has epochs."""
    nouns = nouns_of(results.get("task"))
    groups, learned = [], nouns.learned
    for labels in sorted(results["labels"], reverse=True):
        panels = []
        for style in looks.values():
            cells = [cell for cell in results["cells"] if (cell["arm"], cell["labels"]) == (style.name, labels)]
            runs = [cell["epochs"] for cell in cells if cell.get("epochs")]
            if runs:
                panels.append((style, runs))
        if not panels:
            continue
        name = f"training-{labels}"
        gallery.save(gallery.unique_name(name), charts.training(panels, learned))
        limits = charts.accuracy_limits([epochs for _, runs in panels for epochs in runs])
        shown = [
            gallery.embed(
                file_name(name, style.name),
                charts.training_alone(style, runs, limits, learned=learned),
                f"{style.label} with {labels:,} {nouns.unit}s: {learned} in training and validation by epoch",
                keep=False,
            )
            for style, runs in panels
        ]
        groups.append({"labels": labels, "charts": shown, "seeds": max(len(runs) for _, runs in panels)})
    return groups


def arm_details(results: dict[str, Any], looks: dict[str, ArmStyle], gallery: Gallery) -> list[dict[str, Any]]:
    found, nouns = (results.get("details") or {}).get("arms") or {}, nouns_of(results.get("task"))
    room = details.room_for(sum(len(arm.get("mistakes") or []) for arm in found.values()))
    names = [name for name in looks if name in found]
    kinds = {arm["name"]: arm.get("kind") for arm in results["arms"]}
    first = next((name for name in names if kinds.get(name) == "pretrained"), names[0] if names else None)
    return [
        {
            "style": looks[name],
            "first": name == first,  # the one that is open: what the reader came for
            **details.describe(found[name], results.get("classes") or [], looks[name], gallery, room, nouns),
        }
        for name in names
    ]


def label_errors(found: dict[str, Any]) -> dict[str, Any]:
    rows = found.get("label_errors") or []
    shown = [details.label_error(row, 2000) for row in rows[:MOST_LABEL_ERRORS]]
    return {"rows": shown, "left_out": len(rows) - len(shown), "searched": "label_errors" in found}


def score_grid(results: dict[str, Any]) -> dict[str, Any]:
    """The summary by arm and by number of labels, and the best score of each number."""
    cells = {(row["arm"], row["labels"]): row for row in results["summary"]}
    best = {
        labels: max((row["score"] for row in results["summary"] if row["labels"] == labels), default=None)
        for labels in results["labels"]
    }
    return {"cells": cells, "best": best, "labels": sorted(results["labels"])}


def chosen_classifiers(cells: list[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """Which classifier the arm without epochs settled on, where one was chosen."""
    names: dict[tuple[str, int], list[str]] = {}
    for cell in cells:
        if cell.get("chosen"):
            names.setdefault((cell["arm"], cell["labels"]), []).append(cell["chosen"])
    return {key: ", ".join(dict.fromkeys(chosen)) for key, chosen in names.items()}


def described_pairs(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each difference with whether it is decided, and its place on a scale all of them share."""
    reaches = [abs(pair[key]) for pair in pairs for key in ("difference", "low", "high") if is_finite(pair[key])]
    scale = max(reaches, default=0.0) or 1.0
    described = []
    for pair in pairs:
        known = is_finite(pair["low"]) and is_finite(pair["high"])
        gap = Difference.of(pair) if known else None
        decided = gap is not None and (gap.above or gap.below)
        places = {key: 50 + 46 * pair[key] / scale for key in ("difference", "low", "high") if is_finite(pair[key])}
        described.append({**pair, "known": known, "decided": decided, "places": places})
    return described


def commonest_class(results: dict[str, Any]) -> tuple[str, float] | None:
    """What always answering the commonest class would score on the measured rows."""
    if found := results.get("majority"):
        return found["class"], found["accuracy"]
    data = (results.get("data") or {}).get(results.get("measured_on") or "test") or {}
    counts = data.get("classes") or {}
    if not sum(counts.values()):
        return None
    name = max(counts, key=lambda key: counts[key])
    return name, counts[name] / sum(counts.values())
