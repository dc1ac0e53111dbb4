"""What one model got right and wrong, ready for the page: confusion, lengths, calibration, mistakes."""

from statistics import median
from typing import Any

from headstock.data.word_joining import word_spans
from headstock.report import charts
from headstock.report.highlighted_text import decode_tokens, make_passage, merge_into_words, top_words
from headstock.report.render import percent, pluralize
from headstock.report.theme import ArmStyle, Gallery, file_name
from headstock.tasks.wording import Nouns

MOST_CLASSES = 20  # a larger matrix is no longer read; its largest entries are listed instead
MOST_MISTAKES = 20
TEXT_BUDGET = 700_000  # characters of quoted text on one page, which keeps it light enough to mail


def room_for(texts: int) -> int:
    """Characters each quoted text may take: all of a review as a rule, less where there are many."""
    return max(300, min(6000, TEXT_BUDGET // max(1, texts)))


def describe(
    detail: dict[str, Any], classes: list[str], style: ArmStyle, gallery: Gallery, room: int, nouns: Nouns
) -> dict[str, Any]:
    """The parts of one arm that are there; what is missing is None."""
    mistakes = detail.get("mistakes") or []
    weighted = sum(bool(row.get("tokens")) for row in mistakes[:MOST_MISTAKES])
    return {
        "seed": detail.get("seed"),
        "nouns": nouns,
        "confusion": confusion(detail.get("confusion") or [], classes, style, gallery)
        or confusion_pairs(detail, classes),
        "lengths": lengths(detail.get("lengths") or {}, style, gallery, nouns),
        "calibration": calibration(detail.get("calibration") or {}, style, gallery, nouns),
        "mistakes": [mistake(row, room) for row in mistakes[:MOST_MISTAKES]],
        "mistakes_left_out": max(0, len(mistakes) - MOST_MISTAKES),
        "marked": any(row.get("marks") for row in mistakes[:MOST_MISTAKES]),
        "weighted": "all" if weighted == len(mistakes[:MOST_MISTAKES]) else "some" if weighted else "none",
    }


def confusion(matrix: list[list[int]], classes: list[str], style: ArmStyle, gallery: Gallery) -> dict[str, Any] | None:
    total = sum(map(sum, matrix))
    if not total:
        return None
    names = classes if len(classes) == len(matrix) else [str(i) for i in range(len(matrix))]
    gallery.save(gallery.unique_name(file_name("confusion", style.name)), charts.confusion(matrix, names))
    rows = []
    for name, counts in zip(names, matrix, strict=True):
        of = sum(counts)
        rows.append({"name": name, "total": of, "cells": [(count, count / of if of else 0.0) for count in counts]})
    wrong = [
        (names[i], names[j], count, count / max(1, sum(matrix[i])))
        for i, counts in enumerate(matrix)
        for j, count in enumerate(counts)
        if i != j and count
    ]
    return {
        "classes": names,
        "rows": rows,
        "table": len(names) <= MOST_CLASSES,
        "largest": sorted(wrong, key=lambda row: -row[2])[:MOST_CLASSES],
        "right": sum(matrix[i][i] for i in range(len(matrix))),
        "total": total,
    }


def confusion_pairs(detail: dict[str, Any], classes: list[str]) -> dict[str, Any] | None:
    """The commonest confusions of a model of so many classes that no matrix was kept."""
    if not (total := detail.get("confusion_total")):
        return None
    pairs = detail["confusion_pairs"][:MOST_CLASSES]
    largest = [(classes[a], classes[b], count, count / max(1, rows)) for a, b, count, rows in pairs]
    return {"classes": classes, "table": False, "largest": largest, "right": detail["confusion_right"], "total": total}


def lengths(found: dict[str, Any], style: ArmStyle, gallery: Gallery, nouns: Nouns) -> dict[str, Any] | None:
    right, wrong, unit = found.get("right") or [], found.get("wrong") or [], found.get("unit") or "words"
    if not right and not wrong:
        return None
    medians = " and ".join(
        f"{median(values):,.0f} {unit} for {pluralize(len(values), f'{word} prediction')}"
        for word, values in (("right", right), ("wrong", wrong))
        if values
    )
    label = f"{style.label}: lengths of {nouns.read}s, predictions right and wrong; the median is {medians}"
    said = (found.get("statistic") or {}).get("text")
    return {
        "chart": gallery.embed(file_name("lengths", style.name), charts.lengths(right, wrong, unit, nouns.read), label),
        "text": said or f"The median is {medians}.",
        "matters": (found.get("statistic") or {}).get("matters"),
        "p": (found.get("statistic") or {}).get("p"),
    }


def calibration(found: dict[str, Any], style: ArmStyle, gallery: Gallery, nouns: Nouns) -> dict[str, Any] | None:
    bins = found.get("bins") or []
    if not any(row.get("count") for row in bins):
        return None
    error = percent(found.get("ece"))
    label = f"{style.label}: share of right predictions by confidence; the expected calibration error is {error}"
    figure = charts.reliability(bins, style, nouns.judged)
    return {"chart": gallery.embed(file_name("reliability", style.name), figure, label), "ece": found.get("ece")}


def mistake(row: dict[str, Any], room: int) -> dict[str, Any]:
    text = row.get("text") or ""
    words = merge_into_words(text, decode_tokens(row.get("tokens") or []), word_spans(text))
    named = top_words(words)
    return {
        "place": row.get("place"),
        "question": row.get("question"),
        "subject": row.get("subject"),
        "overlap": row.get("f1", row.get("chrf")),
        "label": row.get("label"),
        "predicted": row.get("predicted"),
        "confidence": row.get("confidence"),
        "passage": make_passage(text, words, marks=row.get("marks") or [], room=room),
        "towards": [word for word in named if word[1] > 0],
        "against": [word for word in named if word[1] < 0],
    }


def label_error(row: dict[str, Any], room: int) -> dict[str, Any]:
    return {**row, "passage": make_passage(row.get("text") or "", first=400, room=room)}
