"""How long a comparison takes on this machine: a few real steps are timed, the rest is counted."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headstock.data.records import Records
from headstock.experiments.arms import Arm
from headstock.experiments.compare_trials import ExperimentContext, GridPoint, input_texts, trial_config
from headstock.experiments.tfidf import TfidfClassifier
from headstock.planner.machine import synchronize
from headstock.tasks.class_labels import label_numbers
from headstock.train.callbacks import Event
from headstock.train.finetune_config import CHARACTERS
from headstock.train.fit import LabelledData, fit
from headstock.train.labelled_data import subset
from headstock.train.settings import RunConfig

STEPS, WARM = 12, 2  # that are timed, and the first of them, which are not counted
ROWS = 64  # that are read, at most,
PREDICTED = 16  # and that are predicted
HEAD = 0.003  # seconds of a step that trains a head on stored features
EXPLAINED = 100  # rows' worth of reading goes into the mistakes of a cell that is shown
# Two whole comparisons took 0.7 and 0.9 times the estimate in processor time. The upper end leaves room for other
# programs; a machine that gets much busier takes longer than that.
LOW, HIGH = 0.7, 1.5


@dataclass(frozen=True)
class Throughput:
    """What was measured on this machine, in seconds."""

    step: float = 0.0  # one optimizer step of the whole model
    row: float = 0.0  # reading one row
    output: float = 0.0  # predicting one row, which a translator does word by word
    text: float = 0.0  # TF-IDF features of one text
    fitting: float = 0.0  # the TF-IDF classifiers on few rows


def measure_throughput(ground: ExperimentContext, arm: Arm) -> Throughput:
    """The pace of one arm: a few steps on rows of the comparison, thrown away."""
    train = subset(ground.splits.train, min(ROWS, len(ground.splits.train)), seed=0)
    valid = subset(ground.splits.valid, min(ROWS, len(ground.splits.valid)), seed=0)
    if arm.run is None:
        return tfidf_pace(ground, train, valid)
    # the whole model also for a frozen arm: reading is timed by its validation
    trained = replace(arm, settings=without_frozen(arm), kind="pretrained" if arm.kind == "frozen" else arm.kind)
    chosen = trial_config(ground, GridPoint(trained, len(train), 0, analyze_errors=False), train)
    assert chosen is not None and arm.run is not None
    short = replace(chosen.train, steps=STEPS, epochs=None, minutes=None, validate_every=STEPS, ema=0.0)
    tokenizer = arm.run.tokenizer()
    task = ground.task_class(chosen.task, tokenizer)
    data = LabelledData(task.prepare(train), task.prepare(valid))
    moments, read = [time.perf_counter()], [0.0]

    def hear(event: Event) -> None:
        synchronize(ground.distributed.device)
        if event.kind == "step":
            moments.append(time.perf_counter())
        elif event.kind == "valid":
            read.append(time.perf_counter() - moments[-1])

    weights = None if arm.kind == "scratch" else arm.run.weights()
    fitted = fit(
        replace(chosen, train=short),
        tokenizer,
        weights,
        data,
        run=None,
        distributed=ground.distributed,
        callbacks=[hear],
    )
    some = valid.select(range(min(PREDICTED, len(valid))))
    began = time.perf_counter()
    fitted.outputs(task.prepare(some), dtype=chosen.train.dtype)
    output = (time.perf_counter() - began) / max(1, len(some))
    steps = [after - before for before, after in pairwise(moments)][WARM:]
    # the mean, not the median: where other programs use the machine too, some steps take much longer
    return Throughput(step=statistics.mean(steps), row=read[-1] / max(1, len(valid)), output=output)


def without_frozen(arm: Arm) -> dict[str, object]:
    """An arm's settings less those that only a frozen backbone has."""
    return {key: value for key, value in arm.settings.items() if key.rpartition(".")[2] != "layers"}


def tfidf_pace(ground: ExperimentContext, train: Records, valid: Records) -> Throughput:
    import sklearn.feature_extraction.text  # noqa: F401  # imported before the clock starts

    known = [label_numbers(rows, ground.task_config) for rows in (train, valid)]
    if len(set(map(int, known[0]))) < 2:
        return Throughput()
    began = time.perf_counter()
    fitted = TfidfClassifier(ground.task_config.classes).fit(
        input_texts(train), known[0], input_texts(valid), known[1], seed=0
    )
    middle = time.perf_counter()
    fitted.probabilities(input_texts(valid))
    return Throughput(text=(time.perf_counter() - middle) / max(1, len(valid)), fitting=middle - began)


def trial_seconds(
    place: GridPoint, chosen: RunConfig | None, pace: Throughput, *, train: Records, valid: int, test: int
) -> float:
    """What a cell of `place.labels` training rows, so many validation rows and so many test rows takes."""
    labels = place.labels
    if chosen is None:
        return pace.fitting * max(1.0, labels / ROWS) + pace.text * (labels + valid + test)
    settings = chosen.train
    if settings.minutes is not None:
        return 60 * settings.minutes + pace.output * test
    if settings.batch_tokens is None:
        each = math.ceil(labels / settings.batch)
    else:
        characters = sum(map(len, train.documents)) * labels / max(1, len(train))
        each = math.ceil(characters / CHARACTERS / settings.batch_tokens)
    steps = settings.steps or math.ceil((settings.epochs or 1.0) * each)
    shown = pace.row * EXPLAINED if place.analyze_errors else 0.0
    if chosen.transfer.freeze:
        return steps * HEAD + pace.row * (labels + valid) + pace.output * test + shown
    times = math.ceil(steps / settings.validate_every) if settings.validate_every else 10
    return steps * pace.step + pace.row * times * valid + pace.output * test + shown


def grid_seconds(
    ground: ExperimentContext, places: Sequence[GridPoint], paces: dict[str, Throughput] | None = None
) -> float:
    """All cells that are not in their files yet, one after the other; `paces` by run, measured unless known."""
    paces = {} if paces is None else paces
    settings: dict[str, RunConfig | None] = {}  # which hardly differ between seeds
    total = 0.0
    for place in places:
        if (ground.folder / "cells" / f"{place.name}-{place.seed}.json").is_file():
            continue
        if place.name not in settings:
            settings[place.name] = trial_config(
                ground, place, subset(ground.splits.train, place.labels, seed=place.seed)
            )
        if (model := str(place.arm.run)) not in paces:  # arms of one run share its model
            paces[model] = measure_throughput(ground, place.arm)
        sizes = {"valid": min(place.labels, len(ground.splits.valid)), "test": len(ground.eval_records)}
        total += trial_seconds(place, settings[place.name], paces[model], train=ground.splits.train, **sizes)
    return total


def format_duration_range(seconds: float) -> str:
    """`about 6 to 9 minutes`, with the range that the estimate has been found to need."""
    low, high = LOW * seconds, HIGH * seconds
    if high < 100:
        return f"about {max(1, round(low))} to {max(2, round(high))} seconds"
    low, high, unit = (low / 60, high / 60, "minutes") if high < 6000 else (low / 3600, high / 3600, "hours")
    shown = [
        f"{value:.0f}" if value >= 9.5 or abs(value - round(value)) < 0.2 else f"{value:.1f}" for value in (low, high)
    ]
    return f"about {shown[0]} to {shown[1]} {unit}"
