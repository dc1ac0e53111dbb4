"""Small learnable datasets, and the schema of a comparison's results.json."""

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

WORDS = ["Anne", "Ben", "le café", "Zoë", "sees", "home", "the sea", "Paris"]  # also in the corpus
LABEL_WORDS = {"bad": "finds", "good": "likes"}
HEADER = ("text", "label")
PEOPLE, VERBS, PLACES = ["Anne", "Ben", "le café", "Zoë"], ["sees", "likes", "finds"], ["home", "the sea", "Paris"]

ARMS = ["scratch", "pretrained", "frozen", "tfidf"]
SETTINGS = {"epochs": 1, "least_steps": 2, "batch": 8}
GRID = {"labels": [24, 8], "seeds": 2, "settings": SETTINGS}
SMALL = {"labels": [8], "seeds": 2, "settings": SETTINGS}


def make_rows(count: int, *, name: str) -> list[tuple[str, str]]:
    """Distinct texts of nine words; one word, at a random position, determines the label."""
    pick = random.Random(name)
    rows: dict[str, str] = {}
    while len(rows) < count:
        label = pick.choice(list(LABEL_WORDS))
        words = [*pick.choices(WORDS, k=6), LABEL_WORDS[label], LABEL_WORDS[label], name]
        pick.shuffle(words)
        rows.setdefault(" ".join(words), label)
    return list(rows.items())


def make_pairs(count: int, *, name: str) -> list[dict[str, Any]]:
    """Two sentences, labelled by whether they mention the same person."""
    pick, rows = random.Random(name), []
    for _ in range(count):
        first, second = pick.choice(PEOPLE), pick.choice(PEOPLE)
        text, text_b = (f"{pick.choice(PLACES)} {pick.choice(VERBS)} {person}." for person in (first, second))
        rows.append({"text": text, "text_b": text_b, "label": "same" if first == second else "other"})
    return rows


def make_tagged(count: int, *, name: str) -> list[dict[str, Any]]:
    """Sentences with people and places as entities, some of two words."""
    pick, rows = random.Random(name), []
    for _ in range(count):
        tokens, tags = [], []
        for part, kind in ((PLACES, "LOC"), (VERBS, None), (PEOPLE, "PER"), (PLACES, "LOC"))[: pick.randint(3, 4)]:
            words = pick.choice(part).split()
            tokens += words
            tags += ["O"] * len(words) if kind is None else [f"B-{kind}"] + [f"I-{kind}"] * (len(words) - 1)
        rows.append({"tokens": [*tokens, "."], "tags": [*tags, "O"]})
    return rows


def make_questions(count: int, *, name: str) -> list[dict[str, Any]]:
    """Questions about who is where; some are unanswerable."""
    pick, rows = random.Random(name), []
    for number in range(count):
        people, places = pick.sample(PEOPLE, 3), pick.sample(PLACES, 2)
        context = f"{people[0]} finds {places[0]}. {people[1]} finds {places[1]}."
        subject = pick.choices(range(3), [3, 3, 1])[0]
        answer = [] if subject == 2 else [{"text": places[subject], "answer_start": context.index(places[subject])}]
        rows.append({"id": f"{name}{number}", "context": context, "question": f"{people[subject]}?", "answers": answer})
    return rows


MAKERS = {"pair": make_pairs, "tag": make_tagged, "answer": make_questions}
TARGETS = {"classify": "label", "pair": "label", "tag": "tags", "answer": "answers"}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_rows(path: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = HEADER) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def with_corpus(run: Path, copy: Path, corpus: Path) -> Path:
    """A copy of a run whose config names another corpus."""
    shutil.copytree(run, copy)
    settings = json.loads((copy / "config.json").read_text())
    settings["data"]["corpus"] = [str(corpus)]
    (copy / "config.json").write_text(json.dumps(settings))
    return copy


def fail_if_trained(event):
    raise AssertionError("nothing should be trained")


def modification_times(folder: Path) -> dict[str, int]:
    """Modification times of all files except results.json, which is always rewritten."""
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / "results.json"]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def without_timings(results: Any) -> Any:
    """Results without the values that depend on the clock."""
    if isinstance(results, dict):
        return {
            key: without_timings(value) for key, value in results.items() if key not in ("seconds", "tokens_per_second")
        }
    return [without_timings(item) for item in results] if isinstance(results, list | tuple) else results


# A schema is a type, a tuple of alternatives, a list of one schema, a table with exactly these keys, or {ANY: schema}

ANY = "*"
SHARE = (float, "share")
MAYBE = (float, type(None))
EPOCH = {
    "epoch": int,
    "step": int,
    "train_accuracy": SHARE,
    "valid_accuracy": SHARE,
    "train_loss": float,
    "valid_loss": float,
}
CELL = {
    "arm": str,
    "labels": int,
    "seed": int,
    "score": SHARE,
    "accuracy": SHARE,
    "macro_f1": SHARE,
    "loss": float,
    "ece": SHARE,
    "valid_score": SHARE,
    "best_epoch": (int, type(None)),
    "seconds": float,
    "tokens_per_second": MAYBE,
    "chosen": (str, type(None)),
    "epochs": [EPOCH],
}
# of other tasks
CELLS = {
    "pair": CELL,
    "tag": CELL | {"f1": SHARE, "macro_f1": type(None)},
    "answer": CELL | {"f1": SHARE, "exact_match": SHARE, "macro_f1": type(None), "loss": type(None)},
}
SUMMARY = {
    "arm": str,
    "labels": int,
    "seeds": int,
    "metric": str,
    "score": SHARE,
    "low": MAYBE,
    "high": MAYBE,
    "accuracy": SHARE,
    "accuracy_low": MAYBE,
    "accuracy_high": MAYBE,
    "macro_f1": SHARE,
    "macro_f1_low": MAYBE,
    "macro_f1_high": MAYBE,
    "seconds": float,
    "tokens_per_second": MAYBE,
}
LEAKAGE = {
    "run": str,
    "checked": bool,
    "why": (str, type(None)),
    "corpus": [str],
    "documents": int,
    "tested": int,
    "exact": int,
    "near": int,
    "excluded": bool,
    "examples": [{"place": str, "text": str, "found": str, "share": SHARE}],
}
SCORED = {"score": SHARE, "low": MAYBE, "high": MAYBE}
ARM_DETAILS = {
    "seed": int,
    "confusion": [[int]],
    "lengths": {
        "right": [int],
        "wrong": [int],
        "unit": str,
        "statistic": {"p": SHARE, "probability": SHARE, "matters": bool, "text": str},
    },
    "calibration": {
        "bins": [{"low": SHARE, "high": SHARE, "count": int, "confidence": SHARE, "accuracy": SHARE}],
        "ece": SHARE,
    },
    "risk_coverage": {"aurc": SHARE, "curve": [{"coverage": SHARE, "accuracy": SHARE, "confidence": SHARE}]},
    "slices": [{"metric": str, "slice": str, "groups": [SCORED | {"value": str, "rows": int}]}],
    "mistakes": [
        {"place": str, "text": str, "label": str, "predicted": str, "confidence": SHARE, "tokens": [[(str, float)]]}
    ],
}
TEXT_MISTAKE = {"place": str, "text": str, "label": str, "predicted": str, "confidence": SHARE, "tokens": [str]}
TEXT_MISTAKE |= {"marks": [[(int, str)]]}
DETAILS = {
    "pair": ARM_DETAILS,
    "tag": ARM_DETAILS | {"mistakes": [TEXT_MISTAKE | {"subject": str}]},
    "answer": {key: ARM_DETAILS[key] for key in ("seed", "lengths", "calibration", "risk_coverage", "slices")}
    | {"mistakes": [TEXT_MISTAKE | {"question": str, "f1": SHARE}]},
}
PAIR = {"a": str, "b": str, "difference": float, "low": MAYBE, "high": MAYBE}
LABEL_ERROR = {"place": str, "text": str, "label": str, "suggested": str, "confidence": SHARE, "agree": int, "of": int}
SCHEMA = {
    "kind": str,
    "task": str,
    "metric": str,
    "better": str,
    "title": str,
    "versions": {ANY: str},
    "device": str,
    "seconds": float,
    "seed": int,
    "settings": {ANY: {ANY: object}},
    "data": {ANY: {"file": str, "rows": int, "classes": {ANY: int}}},
    "classes": [str],
    "measured_on": str,
    "measured_rows": int,
    "leakage": [LEAKAGE],
    "train_overlap": int,
    "majority": ({"class": str, "accuracy": SHARE}, type(None)),
    "arms": [
        {
            "name": str,
            "kind": str,
            "run": (str, type(None)),
            "parameters": ({"total": int, "trainable": int, "frozen": int}, type(None)),
            "settings": {ANY: object},
        }
    ],
    "runs": [{ANY: object}],
    "labels": [int],
    "seeds": [int],
    "cells": [CELL],
    "summary": [SUMMARY],
    "pairs": [PAIR | {"labels": int}],
    "slices": [
        {
            "slice": str,
            "groups": [{"value": str, "rows": int, "arms": [SCORED | {"arm": str}], "pairs": [PAIR]}],
        }
    ],
    "verdicts": [str],
    "notes": [str],
    "warnings": [str],
    "details": {"labels": int, "arms": {ANY: ARM_DETAILS}, "label_errors": [LABEL_ERROR]},
}


def schema(task: str) -> dict[str, Any]:
    """The schema of results.json for a task."""
    if task == "classify":
        return SCHEMA
    metrics = [metric for metric in ("f1", "exact_match") if metric in CELLS[task]]
    summary = SUMMARY | {f"{metric}{end}": MAYBE for metric in metrics for end in ("", "_low", "_high")}
    summary |= {"macro_f1": MAYBE}
    if "exact_match" in metrics:  # exact match is the accuracy and has the interval
        summary = {key: value for key, value in summary.items() if key not in ("accuracy_low", "accuracy_high")}
    details = {"labels": int, "arms": {ANY: DETAILS[task]}}
    details |= {"label_errors": [LABEL_ERROR]} if task == "pair" else {}
    data = {ANY: {"file": str, "rows": int, "classes": ({ANY: int}, type(None))}}
    return SCHEMA | {"cells": [CELLS[task]], "summary": [summary], "details": details, "data": data}


def schema_errors(value: Any, expected: Any, path: str = "results") -> list[str]:
    """The paths at which a value does not match the schema `expected`."""
    if isinstance(expected, tuple):
        if expected == SHARE:
            return [] if isinstance(value, float) and 0 <= value <= 1 else [f"{path}: {value!r} is no share"]
        alternatives = [schema_errors(value, schema, path) for schema in expected]
        return min(alternatives, key=len)
    if isinstance(expected, list):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [error for i, item in enumerate(value) for error in schema_errors(item, expected[0], f"{path}[{i}]")]
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is no table"]
        if list(expected) == [ANY]:
            expected = dict.fromkeys(value, expected[ANY])
        errors = [f"{path}.{key}: missing" for key in expected if key not in value]
        errors += [f"{path}.{key}: unknown" for key in value if key not in expected]
        for key in expected.keys() & value.keys():
            errors += schema_errors(value[key], expected[key], f"{path}.{key}")
        return errors
    is_valid = expected is object or type(value) is expected
    return [] if is_valid else [f"{path}: {value!r} is no {expected.__name__}"]


def draw_two_arms(folder: Path) -> Path:
    """Leave the training curves and errors of two arms in a comparison: those of the others have the same charts."""
    path = folder / "results.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    results["details"]["arms"] = details = dict(list(results["details"]["arms"].items())[-2:])
    results["cells"] = [cell if cell["arm"] in details else cell | {"epochs": []} for cell in results["cells"]]
    path.write_text(json.dumps(results), encoding="utf-8")
    return folder
