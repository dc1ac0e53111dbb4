"""The section on one model's errors: confusions, length effect, calibration and the most confident errors."""

from statistics import median
from typing import Any

from headstock.data.words import word_spans
from headstock.report import charts
from headstock.report.format import percent, pluralize
from headstock.report.highlighted_text import decode_tokens, make_passage, merge_into_words, top_words
from headstock.report.theme import ArmStyle, Gallery, file_name
from headstock.tasks.labelled import Nouns

MAX_CLASSES = 20  # of a confusion matrix; for more classes the most frequent confusions are listed
MAX_MISTAKES = 20
TEXT_BUDGET = 700_000  # characters quoted on one page


def max_text_length(texts: int) -> int:
    """Characters to quote of each text, so that the page stays small."""
    return max(300, min(6000, TEXT_BUDGET // max(1, texts)))


def describe(
    details: dict[str, Any], classes: list[str], style: ArmStyle, gallery: Gallery, max_text: int, nouns: Nouns
) -> dict[str, Any]:
    """Template values of the section; missing parts are None."""
    mistakes = details.get("mistakes") or []
    listed = mistakes[:MAX_MISTAKES]
    attributed = sum(bool(row.get("tokens")) for row in listed)
    matrix = confusion(details.get("confusion") or [], classes, style, gallery)
    return {
        "seed": details.get("seed"),
        "nouns": nouns,
        "confusion": matrix or confusion_pairs(details, classes),
        "lengths": lengths(details.get("lengths") or {}, style, gallery, nouns),
        "calibration": calibration(details, style, gallery, nouns),
        "risk_coverage": risk_coverage(details.get("risk_coverage") or {}, style, gallery, nouns),
        "points": points(details.get("points") or {}, style, gallery),
        "slices": details.get("slices") or [],
        "mistakes": [mistake(row, max_text) for row in listed],
        "mistakes_left_out": max(0, len(mistakes) - MAX_MISTAKES),
        "marked": any(row.get("marks") for row in listed),
        "weighted": "all" if attributed == len(listed) else "some" if attributed else "none",
    }


def confusion(matrix: list[list[int]], classes: list[str], style: ArmStyle, gallery: Gallery) -> dict[str, Any] | None:
    total = sum(map(sum, matrix))
    if not total:
        return None
    names = classes if len(classes) == len(matrix) else [str(i) for i in range(len(matrix))]
    gallery.save(gallery.unique_name(file_name("confusion", style.name)), charts.confusion(matrix, names))
    rows = []
    for name, counts in zip(names, matrix, strict=True):
        row_total = sum(counts)
        cells = [(count, count / row_total if row_total else 0.0) for count in counts]
        rows.append({"name": name, "total": row_total, "cells": cells})
    confusions = [
        (names[i], names[j], count, count / max(1, sum(matrix[i])))
        for i, counts in enumerate(matrix)
        for j, count in enumerate(counts)
        if i != j and count
    ]
    return {
        "classes": names,
        "rows": rows,
        "table": len(names) <= MAX_CLASSES,
        "largest": sorted(confusions, key=lambda row: -row[2])[:MAX_CLASSES],
        "right": sum(matrix[i][i] for i in range(len(matrix))),
        "total": total,
    }


def confusion_pairs(details: dict[str, Any], classes: list[str]) -> dict[str, Any] | None:
    """The most frequent confusions of a model with too many classes for a matrix."""
    if not (total := details.get("confusion_total")):
        return None
    pairs = details["confusion_pairs"][:MAX_CLASSES]
    largest = [(classes[a], classes[b], count, count / max(1, rows)) for a, b, count, rows in pairs]
    return {"classes": classes, "table": False, "largest": largest, "right": details["confusion_right"], "total": total}


def lengths(values: dict[str, Any], style: ArmStyle, gallery: Gallery, nouns: Nouns) -> dict[str, Any] | None:
    right, wrong, unit = values.get("right") or [], values.get("wrong") or [], values.get("unit") or "words"
    if not right and not wrong:
        return None
    medians = " and ".join(
        f"{median(group):,.0f} {unit} for {pluralize(len(group), f'{word} prediction')}"
        for word, group in (("correct", right), ("wrong", wrong))
        if group
    )
    alt_text = f"{style.label}: lengths of {nouns.input}s by correctness of the prediction; the median is {medians}"
    statistic = values.get("statistic") or {}
    figure = charts.lengths(right, wrong, unit, nouns.input)
    return {
        "chart": gallery.embed(file_name("lengths", style.name), figure, alt_text),
        "text": statistic.get("text") or f"The median is {medians}.",
    }


def calibration(details: dict[str, Any], style: ArmStyle, gallery: Gallery, nouns: Nouns) -> dict[str, Any] | None:
    """The reliability diagram; for a calibrated run also after temperature scaling."""
    values, after = details.get("calibration") or {}, details.get("calibrated") or {}
    bins = values.get("bins") or []
    if not any(row.get("count") for row in bins):
        return None
    alt_text = f"{style.label}: accuracy by confidence; expected calibration error {percent(values.get('ece'))}"
    figure = charts.reliability(bins, style, nouns.item, calibrated=after.get("bins"))
    chart = gallery.embed(file_name("reliability", style.name), figure, alt_text)
    return {"chart": chart, "ece": values.get("ece"), "after": after}


def risk_coverage(values: dict[str, Any], style: ArmStyle, gallery: Gallery, nouns: Nouns) -> dict[str, Any] | None:
    curve = values.get("curve") or []
    if len(curve) < 2:
        return None
    half = min(curve, key=lambda row: abs(row["coverage"] - 0.5))
    shares = f"{percent(curve[-1]['accuracy'])} of all, {percent(half['accuracy'])} of the most confident half"
    alt_text = f"{style.label}: accuracy by coverage; {shares}"
    figure = charts.risk_coverage(curve, style, nouns.item)
    chart = gallery.embed(file_name("coverage", style.name), figure, alt_text)
    return {"chart": chart, "aurc": values.get("aurc"), "shares": shares}


def points(values: dict[str, Any], style: ArmStyle, gallery: Gallery) -> dict[str, Any] | None:
    """Predicted against true numbers."""
    if not values.get("true"):
        return None
    figure = charts.predicted_against_true(values["true"], values["predicted"], style)
    alt_text = f"{style.label}: predictions against labels of {pluralize(len(values['true']), 'row')}"
    return {"chart": gallery.embed(file_name("predicted", style.name), figure, alt_text)}


def mistake(row: dict[str, Any], max_text: int) -> dict[str, Any]:
    text = row.get("text") or ""
    words = merge_into_words(text, decode_tokens(row.get("tokens") or []), word_spans(text))
    top = top_words(words)
    return {
        "place": row.get("place"),
        "question": row.get("question"),
        "subject": row.get("subject"),
        "overlap": row.get("f1", row.get("chrf")),
        "label": row.get("label"),
        "predicted": row.get("predicted"),
        "error": row.get("error"),
        "confidence": row.get("confidence"),
        "passage": make_passage(text, words, marks=row.get("marks") or [], max_length=max_text),
        "towards": [word for word in top if word[1] > 0],
        "against": [word for word in top if word[1] < 0],
    }


def label_error(row: dict[str, Any], max_text: int) -> dict[str, Any]:
    return {**row, "passage": make_passage(row.get("text") or "", preview=400, max_length=max_text)}
