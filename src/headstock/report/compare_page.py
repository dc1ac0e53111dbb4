"""The report of `headstock compare`, rendered from its results.json."""

from typing import Any

from headstock.errors import UserError
from headstock.report import charts, error_section
from headstock.report.format import Difference, capitalized, interval, is_finite, minus, points, score, signed
from headstock.report.render import render
from headstock.report.theme import ArmStyle, Gallery, arm_label, arm_styles, file_name
from headstock.tasks.labelled import nouns_of
from headstock.tasks.text_metrics import METRICS, NOT_PERCENT, decimals, is_score, metric_name
from headstock.train.run_folder import RunFolder

REQUIRED_KEYS = ("arms", "labels", "cells", "summary")
MAX_LABEL_ERRORS = 40

Results = dict[str, Any]
Styles = dict[str, ArmStyle]


def compare_page(run: RunFolder) -> str:
    """The page; its charts are also written as files under figures/."""
    results = run.results()
    if missing := [key for key in REQUIRED_KEYS if not results.get(key)]:
        raise UserError(f"{run}: its results.json lacks {', '.join(missing)}; run headstock compare again")
    fill_in_defaults(results)
    gallery = Gallery(run.path / "figures")
    styles = arm_styles(results["arms"])
    details, arms = results.get("details") or {}, results["arms"]
    return render(
        __package__,
        "compare.html",
        results=results,
        styles=styles,
        classifiers=selected_classifiers(results["cells"]),
        grid=score_grid(results),
        nouns=nouns_of(results.get("task")),
        metric=metric_name(results["metric"]),
        of_layers=len(arms) > 1 and all("task.layers" in (arm.get("settings") or {}) for arm in arms),
        metrics=available_metrics(results),
        run_kinds=run_kinds(results),
        pairs=describe_pairs(results.get("pairs") or [], results["metric"]),
        is_score=is_score(results["metric"]),
        percent_scores=is_score(results["metric"]) and results["metric"] not in NOT_PERCENT,
        bare=lambda value: score(value, results["metric"]).removesuffix("%"),
        majority=majority_class(results),
        detail_labels=details.get("labels") or max(results["labels"]),
        score=score_charts(results, styles, gallery),
        runs=run_charts(results, gallery),
        training=training_charts(results, styles, gallery),
        slices=slice_tables(results),
        arms=arm_details(results, styles, gallery),
        label_errors=label_errors(details),
    )


def fill_in_defaults(results: Results) -> None:
    """Add keys that results of early versions lack: they compared accuracies only."""
    results.setdefault("metric", "accuracy")
    metric = results["metric"]
    for row in [*results["summary"], *results["cells"]]:
        row.setdefault("score", row.get("accuracy"))
    for row in results["summary"]:
        row.setdefault(f"{metric}_low", row.get("low"))
        row.setdefault(f"{metric}_high", row.get("high"))
    for row in results["cells"]:
        row.setdefault("valid_score", row.get("valid_accuracy"))


def available_metrics(results: Results) -> dict[str, str]:
    """The metrics with values, the primary one first. Exact match is also stored as accuracy, and shown once."""
    candidates = dict.fromkeys([results["metric"], *METRICS])
    keys = [key for key in candidates if any(is_finite(row.get(key)) for row in results["summary"])]
    return {key: metric_name(key) for key in keys if key != "accuracy" or "exact_match" not in keys}


def score_charts(results: Results, styles: Styles, gallery: Gallery) -> dict[str, Any]:
    """The main chart, in a wide and a narrow version."""
    metric, rows = metric_name(results["metric"]), nouns_of(results.get("task")).rows
    labels, summary, style_list = sorted(results["labels"]), results["summary"], list(styles.values())
    values = "; ".join(
        f"{arm_label(row['arm'])} {score(row.get('score'), results['metric'])} with {row['labels']:,}"
        for row in sorted(summary, key=lambda row: (list(styles).index(row["arm"]), row["labels"]))
    )
    alt_text = f"{capitalized(metric)} by number of labelled {rows}: {values}"
    has_levels = len(labels) > 1

    def draw(wide: bool) -> Any:
        if has_levels:
            return charts.score_by_labels(style_list, summary, labels, wide=wide, metric=results["metric"], rows=rows)
        return charts.score_by_arm(style_list, summary, wide=wide, metric=results["metric"])

    versions = gallery.embed_both((results["metric"], f"{results['metric']}-narrow"), draw, alt_text)
    has_intervals = any(charts.error_bar(row) for row in summary if row.get("score"))
    return versions | {"several": has_levels, "intervals": has_intervals}


def run_kinds(results: Results) -> list[str]:
    """The kinds of arms that the pretrained runs have scores of."""
    kinds = dict.fromkeys(arm.get("kind") for arm in results["arms"])
    return [kind for kind in kinds if any(kind in run["scores"] for run in results.get("runs") or [])]


def run_charts(results: Results, gallery: Gallery) -> dict[str, Any] | None:
    """The scores of the pretrained runs; None if there is only one run."""
    runs, metric = results.get("runs") or [], metric_name(results["metric"])
    if not runs:
        return None
    values = "; ".join(
        f"{run['run']} {kind} {score(run['scores'][kind]['score'], results['metric'])}"
        for run in runs
        for kind in run["scores"]
    )
    kinds, alt_text = run_kinds(results), f"{capitalized(metric)} of the runs: {values}"
    return gallery.embed_both(
        ("runs-wide", "runs-narrow"),
        lambda wide: charts.scores_of_runs(runs, kinds, metric=results["metric"], wide=wide),
        alt_text,
    )


def training_charts(results: Results, styles: Styles, gallery: Gallery) -> list[dict[str, Any]]:
    """For each number of labels, the largest first: one chart per arm with epochs."""
    nouns = nouns_of(results.get("task"))
    groups, metric_name = [], nouns.training_metric
    for labels in sorted(results["labels"], reverse=True):
        panels = []
        for style in styles.values():
            cells = [cell for cell in results["cells"] if (cell["arm"], cell["labels"]) == (style.name, labels)]
            if curves := [cell["epochs"] for cell in cells if cell.get("epochs")]:
                panels.append((style, curves))
        if not panels:
            continue
        options: dict[str, Any] = {"labels": labels, "gallery": gallery, "unit": nouns.unit}
        accuracies = training_panels(panels, nouns.training_key, metric_name, **options)
        losses = training_panels(panels, "loss", "loss", **options)
        seeds = max(len(curves) for _, curves in panels)
        groups.append({"labels": labels, "charts": accuracies, "losses": losses, "seeds": seeds})
    return groups


def training_panels(
    panels: list[tuple[ArmStyle, list[Any]]],
    quantity: str,
    name: str,
    *,
    labels: int,
    gallery: Gallery,
    unit: str,
) -> list[Any]:
    """One chart per arm on a common scale, and one file of all; none if no arm has the quantity."""
    runs = [epochs for _, curves in panels for epochs in curves]
    if not any(is_finite(row.get(f"valid_{quantity}")) for epochs in runs for row in epochs):
        return []
    stem, limits = f"{'loss' if quantity == 'loss' else 'training'}-{labels}", charts.curve_limits(runs, quantity)
    gallery.save(gallery.unique_name(stem), charts.training(panels, name, key=quantity))
    return [
        gallery.embed(
            file_name(stem, style.name),
            charts.training([(style, curves)], name, limits=limits, key=quantity),
            f"{style.label} with {labels:,} {unit}s: training and validation {name} by epoch",
            save=False,
        )
        for style, curves in panels
    ]


def slice_tables(results: Results) -> list[dict[str, Any]]:
    """The slices with their paired differences, each with whether it is clear."""
    metric = results["metric"]
    return [
        {**part, "groups": [{**group, "pairs": describe_pairs(group["pairs"], metric)} for group in part["groups"]]}
        for part in results.get("slices") or []
        if part.get("groups")
    ]


def arm_details(results: Results, styles: Styles, gallery: Gallery) -> list[dict[str, Any]]:
    details, nouns = (results.get("details") or {}).get("arms") or {}, nouns_of(results.get("task"))
    max_text = error_section.max_text_length(sum(len(arm.get("mistakes") or []) for arm in details.values()))
    names = [name for name in styles if name in details]
    kinds = {arm["name"]: arm.get("kind") for arm in results["arms"]}
    selected = next((name for name in names if kinds.get(name) == "pretrained"), names[0] if names else None)
    classes = results.get("classes") or []
    return [
        {
            "style": styles[name],
            "first": name == selected,  # the tab that is open
            **error_section.describe(details[name], classes, styles[name], gallery, max_text, nouns),
            "slices": [],  # those of all arms have a section of their own
        }
        for name in names
    ]


def label_errors(details: dict[str, Any]) -> dict[str, Any]:
    rows = details.get("label_errors") or []
    described = [error_section.label_error(row, 2000) for row in rows[:MAX_LABEL_ERRORS]]
    return {"rows": described, "left_out": len(rows) - len(described), "searched": "label_errors" in details}


def score_grid(results: Results) -> dict[str, Any]:
    """The summary by arm and number of labels, and the best score of each number."""
    cells = {(row["arm"], row["labels"]): row for row in results["summary"]}
    select = max if is_score(results["metric"]) else min
    best = {
        labels: select((row["score"] for row in results["summary"] if row["labels"] == labels), default=None)
        for labels in results["labels"]
    }
    return {"cells": cells, "best": best, "labels": sorted(results["labels"])}


def selected_classifiers(cells: list[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """The linear classifiers that the TF-IDF arm selected."""
    names: dict[tuple[str, int], list[str]] = {}
    for cell in cells:
        if cell.get("chosen"):
            names.setdefault((cell["arm"], cell["labels"]), []).append(cell["chosen"])
    return {key: ", ".join(dict.fromkeys(selected)) for key, selected in names.items()}


def describe_pairs(pairs: list[dict[str, Any]], metric: str = "accuracy") -> list[dict[str, Any]]:
    """Each difference with whether it is clear, and its position on a common scale."""
    sizes = [abs(pair[key]) for pair in pairs for key in ("difference", "low", "high") if is_finite(pair[key])]
    scale = max(sizes, default=0.0) or 1.0
    described = []
    for pair in pairs:
        known = is_finite(pair["low"]) and is_finite(pair["high"])
        gap = Difference.of(pair, metric) if known else None
        decided = gap is not None and (gap.above or gap.below)
        positions = {key: 50 + 46 * pair[key] / scale for key in ("difference", "low", "high") if is_finite(pair[key])}
        if is_score(metric):
            texts = {"shown": points(pair["difference"]), "range": interval(pair["low"], pair["high"])}
        else:
            digits = decimals(max(abs(pair[key] or 0.0) for key in ("difference", "low", "high")))
            ends = f"{pair['low']:.{digits}f} to {pair['high']:.{digits}f}" if known else ""
            texts = {"shown": signed(pair["difference"], digits), "range": minus(ends)}
        described.append({**pair, **texts, "known": known, "decided": decided, "positions": positions})
    return described


def majority_class(results: Results) -> tuple[str, float] | None:
    """The majority class and the accuracy of always predicting it on the evaluation rows."""
    if majority := results.get("majority"):
        return majority["class"], majority["accuracy"]
    data = (results.get("data") or {}).get(results.get("measured_on") or "test") or {}
    counts = data.get("classes") or {}
    if not sum(counts.values()):
        return None
    name = max(counts, key=lambda key: counts[key])
    return name, counts[name] / sum(counts.values())
