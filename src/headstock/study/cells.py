"""One cell of a comparison: an arm, so many labels, one seed. Made once, then read from its file."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstock import __version__
from headstock.files import sha256, write_json
from headstock.study.arms import Arm
from headstock.study.mistakes import calibration
from headstock.study.tfidf import Baseline
from headstock.study.told import explain_mistakes
from headstock.tasks.classify import Classify, ClassifyConfig, label_numbers
from headstock.text.records import Records
from headstock.text.tokenizer import Tokenizer
from headstock.train.finetune import keep_fitted, sizes
from headstock.train.fit import Data, Fitted, fit
from headstock.train.labelled import Splits, subset
from headstock.train.loop import Watch
from headstock.train.metrics import metrics_of
from headstock.train.run import Run
from headstock.train.settings import RunConfig
from headstock.train.transfer import gather_config, settle
from headstock.train.world import World

DIGITS = 5  # of probabilities in a cell's file


@dataclass(frozen=True)
class Ground:
    """What all cells share: the rows, what they are measured on, and common settings."""

    task: str
    splits: Splits
    measured: Records  # labelled: the test rows, or the validation rows where those have no labels
    config: ClassifyConfig  # the classes, the same for all
    settings: dict[str, Any]  # of every arm that is fine-tuned
    folder: Path
    world: World

    @property
    def unlabelled(self) -> Records | None:
        """Test rows to predict."""
        test = self.splits.test
        return test if test is not None and test.labels is None else None

    @property
    def measured_is_valid(self) -> bool:
        return self.splits.test is None or self.splits.test.labels is None

    def rows(self, labels: int, seed: int) -> tuple[Records, Records]:
        """The same training rows for every arm, and at most as many to choose the epoch by: those are labels too."""
        train, valid = self.splits.train, self.splits.valid
        return subset(train, labels, seed=seed), subset(valid, min(labels, len(valid)), seed=seed)


@dataclass(frozen=True)
class Place:
    """Where a cell is in the grid."""

    arm: Arm
    labels: int
    seed: int
    shown: bool  # its mistakes are explained and its model is kept

    @property
    def file(self) -> str:
        return f"{self.arm.name}-{self.labels}".replace(" ", "-").replace("/", "-")


def cell(ground: Ground, place: Place, watch: Sequence[Watch]) -> tuple[dict[str, Any], bool]:
    """A cell from its file, or made now; and whether it was made now."""
    path = ground.folder / "cells" / f"{place.file}-{place.seed}.json"
    train, valid = ground.rows(place.labels, place.seed)
    chosen = settings_of(ground, place, train)
    key = fingerprint(ground, place, chosen, train, valid)
    if (kept := read(path)).get("key") == key and (kept["shown"] or not place.shown):
        return kept, False
    began = time.monotonic()
    made = (
        baseline(ground, place, train, valid) if chosen is None else trained(ground, place, chosen, train, valid, watch)
    )
    made |= {"seconds": round(time.monotonic() - began, 3), "key": key, "shown": place.shown}
    made |= {"arm": place.arm.name, "labels": place.labels, "seed": place.seed}
    write_json(path, made)
    return made, True


def settings_of(ground: Ground, place: Place, train: Records) -> RunConfig | None:
    """What a fine-tuned cell is made with; none for TF-IDF, which has no settings."""
    if place.arm.run is None:
        return None
    given = {**ground.settings, **place.arm.options(), "train.seed": place.seed}
    given |= {"task.classes": list(ground.config.classes), "task.separator": ground.config.separator}
    given |= {"data.train": ground.splits.train.source}
    return settle(gather_config(place.arm.run, ground.task, None, given), train)


def fingerprint(ground: Ground, place: Place, chosen: RunConfig | None, train: Records, valid: Records) -> str:
    """Changes with anything that could change the cell: rows, settings, weights."""
    run, settings = place.arm.run, None if chosen is None else chosen.plain()
    if settings is not None:
        settings["transfer"].pop("run")  # a run that was moved is the same run
        settings["data"].pop("train")
    parts = {
        "version": __version__,
        "rows": Splits(train, valid, ground.measured).fingerprint(),
        "unlabelled": ground.unlabelled.texts if ground.unlabelled else None,
        "classes": ground.config.classes,
        "settings": settings,
        "tokenizer": run.data()["tokenizer"] if run else None,
        "weights": sha256(run.weights_file) if run and place.arm.kind != "scratch" else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def scores(ground: Ground, probabilities: np.ndarray) -> dict[str, Any]:
    """What a cell says of the measured rows."""
    labels = label_numbers(ground.measured, ground.config)
    kept = rounded(probabilities)
    found = metrics_of(ground.config, kept, labels)  # near ties count as they are kept, so that all tables agree
    one = ground.config.separator is None
    return {
        **{name: found[name] for name in ("accuracy", "macro_f1")},
        "loss": metrics_of(ground.config, probabilities, labels)["loss"],  # rounded, the improbable were impossible
        "ece": calibration(kept, labels)["ece"] if one else None,
        "probabilities": kept.tolist(),
    }


def rounded(probabilities: np.ndarray) -> np.ndarray:
    return probabilities.astype(np.float64).round(DIGITS)


def baseline(ground: Ground, place: Place, train: Records, valid: Records) -> dict[str, Any]:
    """TF-IDF and a linear classifier, on the words as a person reads them."""
    numbers = [label_numbers(rows, ground.config) for rows in (train, valid)]
    fitted = Baseline(ground.config.classes).fit(train.plain, numbers[0], valid.plain, numbers[1], seed=place.seed)
    predicted = None if ground.unlabelled is None else fitted.probabilities(ground.unlabelled.plain)
    return {
        **scores(ground, fitted.probabilities(ground.measured.plain)),
        "valid_accuracy": fitted.valid_accuracy,
        "best_epoch": None,
        "tokens_per_second": None,
        "chosen": fitted.chosen,
        "epochs": [],
        "parameters": None,
        "predicted": None if predicted is None else rounded(predicted).tolist(),
    }


def trained(
    ground: Ground, place: Place, chosen: RunConfig, train: Records, valid: Records, watch: Sequence[Watch]
) -> dict[str, Any]:
    """A fine-tuned model, measured and, where it is to be shown, explained and kept."""
    run = place.arm.run
    assert run is not None
    tokenizer = run.tokenizer()
    task = Classify(chosen.task, tokenizer)
    data = Data(task.prepare(train), task.prepare(valid))
    weights = None if place.arm.kind == "scratch" else run.weights()
    fitted = fit(chosen, tokenizer, weights, data, run=None, world=ground.world, watch=watch)
    measured = task.prepare(ground.measured)
    found = fitted.probabilities(measured, dtype=chosen.train.dtype)
    predicted = None
    if ground.unlabelled is not None:
        predicted = fitted.probabilities(task.prepare(ground.unlabelled), dtype=chosen.train.dtype)
    made = {
        **scores(ground, found),
        "valid_accuracy": next(r["valid_accuracy"] for r in fitted.epochs if r["step"] == fitted.progress.best_step),
        "best_epoch": fitted.best_epoch,
        "tokens_per_second": None if chosen.transfer.freeze else speed(fitted),  # frozen, no token is read in training
        "chosen": None,
        "epochs": fitted.epochs,
        "parameters": sizes(fitted.model, frozen=chosen.transfer.freeze),
        "predicted": None if predicted is None else rounded(predicted).tolist(),
    }
    if place.shown:
        if not task.several:
            made["explained"] = explain_mistakes(fitted.model, task, measured, rounded(found), length=fitted.length)
        keep(ground, place, chosen, tokenizer, fitted, Splits(train, valid, None))
    return made


def speed(fitted: Fitted) -> float:
    """Tokens a second while it trained."""
    return round(fitted.progress.tokens / max(1e-9, fitted.progress.seconds - fitted.progress.aside), 1)


def keep(ground: Ground, place: Place, chosen: RunConfig, tokenizer: Tokenizer, fitted: Fitted, splits: Splits) -> None:
    """The model as a run of its own, so that it can be used."""
    run = Run(ground.folder / "runs" / place.file)
    keep_fitted(run, chosen, tokenizer, fitted, splits, ground.world)
