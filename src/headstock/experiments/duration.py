"""Estimates how long a comparison takes on this machine: times a few steps and extrapolates."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headstock.data.records import Records
from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.arms.tfidf import fit_tfidf, input_texts
from headstock.experiments.compare_settings import Arm, bare_name
from headstock.experiments.compare_trials import ExperimentContext, GridPoint, trial_config
from headstock.experiments.grid import ResultCache
from headstock.experiments.trial_evaluation import fit_run
from headstock.logs import muted
from headstock.planner.machine import synchronize
from headstock.train.callbacks import Event
from headstock.train.resolve import CHARACTERS_PER_TOKEN
from headstock.train.settings import RunConfig

STEPS, WARMUP_STEPS = 12, 2
TRAIN_ROWS = 64
PREDICTED_ROWS = 16
HEAD_STEP_SECONDS = 0.003  # one optimizer step of a head on cached features
PROMPTS_PER_ROW = 2  # an arm that is not trained reads a row once for each label word
ERROR_ANALYSIS_ROWS = 100  # analysing errors costs about as much as reading this many rows
# Two complete comparisons took 0.7 and 0.9 times the estimated processor time. The upper end allows for other
# programs; on a machine that becomes much busier it takes longer.
LOW, HIGH = 0.7, 1.5


@dataclass(frozen=True)
class Throughput:
    """Measured times in seconds."""

    step: float = 0.0  # one optimizer step of the whole model
    row: float = 0.0  # reading one row
    output: float = 0.0  # predicting one row; a translator generates token by token
    text: float = 0.0  # TF-IDF features of one text
    fitting: float = 0.0  # fitting the TF-IDF classifiers on few rows


def measure_throughput(context: ExperimentContext, arm: Arm) -> Throughput:
    """Train an arm for a few steps on rows of the comparison and discard the model."""
    train, valid = context.rows(TRAIN_ROWS, seed=0)
    if arm.run is None:
        return tfidf_throughput(context, train, valid)
    # all kinds but scratch are timed as a pretrained arm, without `layers`: validation gives the time to read a row
    kind, own = "scratch" if arm.kind == "scratch" else "pretrained", ARM_KINDS.get(arm.kind)
    dropped = {"layers", *own.defaults}  # such as the rank of LoRA
    settings = {key: arm.settings[key] for key in arm.settings if own.is_finetuned and bare_name(key) not in dropped}
    point = GridPoint(replace(arm, kind=kind, settings=settings), len(train), seed=0)
    config = trial_config(context, point, train)
    assert config is not None
    short = replace(config.train, steps=STEPS, epochs=None, minutes=None, validate_every=STEPS, ema=0.0)
    device = context.distributed.device
    step_times, valid_seconds = [time.perf_counter()], [0.0]

    def record_time(event: Event) -> None:
        synchronize(device)
        if event.kind == "step":
            step_times.append(time.perf_counter())
        elif event.kind == "valid":
            valid_seconds.append(time.perf_counter() - step_times[-1])

    with muted():
        fitted, _ = fit_run(
            arm.run,
            type(context.task),
            replace(config, train=short, transfer=replace(config.transfer, soup=1)),
            train,
            valid,
            distributed=context.distributed,
            callbacks=[record_time],
        )
    rows = fitted.task.prepare(valid.select(range(min(PREDICTED_ROWS, len(valid)))))
    start = time.perf_counter()
    fitted.outputs(rows, dtype=short.dtype)
    output = (time.perf_counter() - start) / max(1, len(rows))
    steps = [after - before for before, after in pairwise(step_times)][WARMUP_STEPS:]
    # the mean, not the median: on a busy machine some steps take much longer
    return Throughput(step=statistics.mean(steps), row=valid_seconds[-1] / max(1, len(valid)), output=output)


def tfidf_throughput(context: ExperimentContext, train: Records, valid: Records) -> Throughput:
    import sklearn.feature_extraction.text  # noqa: F401  # imported before the clock starts

    if len(set(train.columns["label"])) < 2:
        return Throughput()
    start = time.perf_counter()
    model = fit_tfidf(context, train, valid, seed=0)
    fitted = time.perf_counter()
    model.outputs(input_texts(valid))
    return Throughput(text=(time.perf_counter() - fitted) / max(1, len(valid)), fitting=fitted - start)


def trial_seconds(
    point: GridPoint, config: RunConfig | None, speed: Throughput, *, train: Records, valid: int, test: int
) -> float:
    """The estimated time of one trial with the given numbers of validation and test rows."""
    labels = point.labels
    if config is None and point.arm.run is not None:
        return PROMPTS_PER_ROW * speed.row * (valid + test)
    if config is None:
        return speed.fitting * max(1.0, labels / TRAIN_ROWS) + speed.text * (labels + valid + test)
    settings, models = config.train, config.transfer.soup
    if settings.minutes is not None:
        return models * 60 * settings.minutes + speed.output * test
    if settings.batch_tokens is None:
        steps_per_epoch = math.ceil(labels / settings.batch)
    else:
        characters = sum(map(len, train.documents)) * labels / max(1, len(train))
        steps_per_epoch = math.ceil(characters / CHARACTERS_PER_TOKEN / settings.batch_tokens)
    steps = settings.steps or math.ceil((settings.epochs or 1.0) * steps_per_epoch)
    analysis = speed.row * ERROR_ANALYSIS_ROWS if point.analyze_errors else 0.0
    if config.transfer.freeze:
        return models * (steps * HEAD_STEP_SECONDS + speed.row * (labels + valid)) + speed.output * test + analysis
    validations = math.ceil(steps / settings.validate_every) if settings.validate_every else 10
    return models * (steps * speed.step + speed.row * validations * valid) + speed.output * test + analysis


def grid_seconds(
    context: ExperimentContext, points: Sequence[GridPoint], speeds: dict[str, Throughput] | None = None
) -> float:
    """The estimated time of all trials without a cached result; `speeds` by run are measured where missing."""
    cache, speeds = ResultCache(context.folder), {} if speeds is None else speeds
    configs: dict[str, RunConfig | None] = {}  # seeds of a point hardly differ
    total = 0.0
    for point in points:
        if cache.path(point).is_file():
            continue
        if point.run_name not in configs:
            train, _ = context.rows(point.labels, point.seed)
            configs[point.run_name] = trial_config(context, point, train)
        if (run := str(point.arm.run)) not in speeds:  # arms of one run share its model
            speeds[run] = measure_throughput(context, point.arm)
        sizes = {"valid": min(point.labels, len(context.splits.valid)), "test": len(context.eval_records)}
        total += trial_seconds(point, configs[point.run_name], speeds[run], train=context.splits.train, **sizes)
    return total


def format_duration_range(seconds: float) -> str:
    """`about 6 to 9 minutes`."""
    low, high = LOW * seconds, HIGH * seconds
    if high < 100:
        return f"about {max(1, round(low))} to {max(2, round(high))} seconds"
    low, high, unit = (low / 60, high / 60, "minutes") if high < 6000 else (low / 3600, high / 3600, "hours")
    ends = [f"{end:.0f}" if end >= 9.5 or abs(end - round(end)) < 0.2 else f"{end:.1f}" for end in (low, high)]
    return f"about {ends[0]} to {ends[1]} {unit}"
