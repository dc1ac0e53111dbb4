"""What a report tells of one classifier: where it errs, how sure it is, whether length matters, what it looks at."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headstock.model.model import Model
from headstock.study import mistakes
from headstock.study.attribution import token_weights
from headstock.tasks.classify import Classify, Labelled, label_numbers
from headstock.text.records import Records
from headstock.train.labelled import read_splits
from headstock.train.loaded import load
from headstock.train.loop import row_length
from headstock.train.run import Run

EXPLAINED = 12  # mistakes whose tokens are weighed


def shown_of(rows: Records, classes: Sequence[str]) -> dict[str, Any]:
    """The rows as a person looks at them."""
    return {"texts": rows.plain, "places": [rows.place(i) for i in range(len(rows))], "classes": classes}


def told_of(
    rows: Records, truth: np.ndarray, found: np.ndarray, classes: Sequence[str], explained: Mapping[str, Any]
) -> dict[str, Any]:
    """Confusion, lengths, calibration and the surest mistakes, from the probabilities `found` (N, C) of the rows."""
    shown = shown_of(rows, classes)
    lengths = np.array([len(text.split()) for text in shown["texts"]])
    good = found.argmax(1) == truth
    right, wrong = lengths[good].tolist(), lengths[~good].tolist()
    surest = mistakes.mistakes(found, truth, **shown)
    for mistake, row in zip(surest, mistakes.surest_mistakes(found, truth), strict=True):
        mistake["tokens"] = explained.get(str(row), [])
    return {
        "confusion": mistakes.confusion(truth, found.argmax(1), len(classes)),
        "lengths": {"right": right, "wrong": wrong, "unit": "words", "statistic": mistakes.length_effect(right, wrong)},
        "calibration": mistakes.calibration(found, truth),
        "mistakes": surest,
    }


def explain_mistakes(model: Model, task: Classify, data: Labelled, found: np.ndarray, *, length: int) -> dict[str, Any]:
    """The tokens that weighed most in the surest mistakes, by row."""
    assert data.labels is not None
    explained = {}
    for row in mistakes.surest_mistakes(found, data.labels, limit=EXPLAINED):
        weighed = token_weights(model, task, data, row, target=int(found[row].argmax()), length=length)
        explained[str(row)] = [(token, round(weight, 5)) for token, weight in weighed]
    return explained


def tell_run(run: Run, *, device: str = "auto") -> None:
    """Add to a fine-tuned run's results what it gets wrong, on its test rows or else its validation rows."""
    loaded = load(run.path, device=device)
    task = loaded.classifier()
    if task.several:  # several classes at once have no confusion matrix
        return
    splits = read_splits(loaded.config.data, separator=None, seed=loaded.config.train.seed, say=lambda line: None)
    rows = splits.test if splits.test is not None and splits.test.labels is not None else splits.valid
    truth, found = label_numbers(rows, task.config), loaded.probabilities(rows)
    length = row_length(loaded.model, loaded.config.train)
    explained = explain_mistakes(loaded.model, task, task.prepare(rows), found, length=length)
    run.write_results(run.results() | {"details": told_of(rows, truth, found, task.config.classes, explained)})
