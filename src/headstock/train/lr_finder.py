"""The learning-rate range test (Smith 2017): raises the learning rate exponentially and records the loss.

The learning rate rises by the same factor in every step. At first the loss hardly changes, then it falls, and at the
end it diverges; the best learning rates lie where it falls. Nothing is written: the weights of a run stay as they are.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstock.errors import DivergenceError, UserError
from headstock.io import rank_and_size
from headstock.logs import muted
from headstock.tasks.labelled import is_labelled
from headstock.train.callbacks import Callback, Event
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.finetune import check_inputs
from headstock.train.fit import EncodedSplits, fit
from headstock.train.labelled_data import read_splits
from headstock.train.loop import train as train_model
from headstock.train.models import build_lm_objective, build_model, build_task
from headstock.train.pretrain import build_stores, open_or_train_tokenizer, read_corpora
from headstock.train.resolve import (
    labelled_task,
    require_corpus,
    resolve_finetune_config,
    resolve_pretrain_config,
    resolve_with_data,
    with_vocabulary,
)
from headstock.train.run_folder import open_run
from headstock.train.settings import TrainSettings

logger = logging.getLogger(__name__)

MIN_STEPS = 20
RUNNING_DECAY = 0.9  # of the running mean that decides when to stop:
DIVERGED_FROM_FIRST, DIVERGED_FROM_BEST = 1.25, 4.0  # at this multiple of the first loss, or of the best running mean
SMOOTHING = 0.03  # standard deviation of the Gaussian that smooths the curve, as a fraction of its steps
MIN_FALL = 0.02  # of the first loss; with less there is nothing to suggest
VALLEY_START = 0.1  # of the fall of the loss, from which it counts as the valley
NEVER = 10**9

Run = Callable[[TrainSettings, Sequence[Callback]], Any]  # trains with these settings


@dataclass(frozen=True)
class LRFinderResult:
    """The curve of a learning-rate range test and the learning rates it suggests."""

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestions: dict[str, float]  # valley, steepest and minimum; empty if the loss did not fall
    diverged: bool  # True if the test stopped early, because the loss rose
    note: str  # what limits the suggestions; empty if nothing does

    @property
    def suggestion(self) -> float | None:
        """The suggestion to start with."""
        return self.suggestions.get("valley")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"suggestion": self.suggestion}


def lr_find(
    corpus: str | Path | Sequence[str | Path] = (),
    *,
    run: str | Path | None = None,
    task: str = "classify",
    train: str | Path | None = None,
    columns: dict[str, str] | None = None,
    preset: str | None = None,
    objective: str | None = None,
    tokenizer: str | Path | None = None,
    config_file: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    min_lr: float = 1e-6,
    max_lr: float = 1.0,
    steps: int = 100,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
) -> LRFinderResult:
    """Train for up to `steps` steps while the learning rate rises from `min_lr` to `max_lr`.

    With text, a new model is pretrained; with `run` and `train`, the run is fine-tuned. Settings are those of
    `pretrain` and `finetune`. The test stops early when the loss diverges.
    """
    if not 0 < min_lr < max_lr < math.inf:
        raise UserError(f"min_lr and max_lr: must be above 0 and rise, not {min_lr:g} and {max_lr:g}")
    if steps < MIN_STEPS:
        raise UserError(f"steps: must be {MIN_STEPS} or more, not {steps}")
    if rank_and_size()[1] > 1:
        raise UserError("a learning-rate range test runs in one process; start it without torchrun")
    distributed, options = DistributedContext(choose_device(device)), dict(settings or {})
    if run is None:
        if train is not None:
            raise UserError(f"--train {train}: fine-tuning needs --run, the run to start from")
        options |= {"task.name": objective} if objective else {}
        options |= {"tokenizer.file": str(tokenizer)} if tokenizer else {}
        paths = [str(corpus)] if isinstance(corpus, str | Path) else [str(path) for path in corpus]
        options |= {"data.corpus": paths} if paths else {}
        base, execute = prepare_pretraining(preset, config_file, options, distributed)
    else:
        given = {"--preset": preset, "--objective": objective, "--tokenizer": tokenizer, "text": corpus}
        if extra := next((name for name, value in given.items() if value), None):
            raise UserError(f"{extra}: applies to pretraining, not to --run {run}")
        options |= {"data.train": str(train)} if train else {}
        options |= {"data.columns": [f"{name}={column}" for name, column in columns.items()]} if columns else {}
        base, execute = prepare_finetuning(run, task, config_file, options, distributed)
    lrs, losses, diverged = range_test(base, execute, min_lr, max_lr, steps, callbacks)
    return analyse(lrs, losses, diverged=diverged)


def prepare_pretraining(
    preset: str | None, config_file: str | Path | None, options: dict[str, Any], distributed: DistributedContext
) -> tuple[TrainSettings, Run]:
    config = require_corpus(resolve_pretrain_config(preset, config_file, options))
    corpus, valid = read_corpora(config)
    tokenizer = open_or_train_tokenizer(config.tokenizer, corpus.sample_texts())
    config = with_vocabulary(config, tokenizer)
    task = build_task(config, tokenizer)
    stores = build_stores(config, task, corpus, valid)

    def execute(settings: TrainSettings, callbacks: Sequence[Callback]) -> None:
        model = build_model(config, task)
        train_model(model, task, stores, settings, run=None, distributed=distributed, callbacks=callbacks)

    return config.train, execute


def prepare_finetuning(
    run: str | Path,
    name: str,
    config_file: str | Path | None,
    options: dict[str, Any],
    distributed: DistributedContext,
) -> tuple[TrainSettings, Run]:
    source = open_run(run)
    config = resolve_finetune_config(source, name, config_file, options)
    splits = read_splits(config.data, labelled_task(name), config.task, seed=config.train.seed)
    config = resolve_with_data(config, splits.train)
    task = build_task(config, source.tokenizer())
    assert is_labelled(task)
    weights = check_inputs(source, config, task, splits)
    data = EncodedSplits(task.prepare(splits.train), task.prepare(splits.valid))

    def execute(settings: TrainSettings, callbacks: Sequence[Callback]) -> None:
        member = replace(config, train=settings)
        fit(
            member,
            task,
            weights,
            data,
            run=None,
            distributed=distributed,
            objective=build_lm_objective(source, member),
            callbacks=callbacks,
        )

    return config.train, execute


# The test


class Finished(Exception):
    """The test is over, before the run that it is made of would validate."""


def range_test(
    base: TrainSettings, execute: Run, min_lr: float, max_lr: float, steps: int, callbacks: Sequence[Callback]
) -> tuple[list[float], list[float], bool]:
    """The learning rates and the losses of the steps, and whether the loss diverged."""
    settings = replace(
        base,
        steps=steps,
        epochs=None,
        minutes=None,
        lr=max_lr,
        lr_floor=min_lr / max_lr,
        schedule="range_test",
        warmup=0.0,
        unfreeze=None,
        patience=None,
        ema=0.0,
        weights="last",
        log_every=1,
        validate_every=NEVER,
        checkpoint_every=NEVER,
        tensorboard=False,
    )
    lrs, losses, running = list[float](), list[float](), list[float]()

    def record(event: Event) -> None:
        if event.kind != "log":
            return
        lrs.append(event.lr)
        losses.append(event.state.loss)
        weight = 1 - RUNNING_DECAY
        mean = losses[-1] if not running else RUNNING_DECAY * running[-1] + weight * losses[-1]
        running.append(mean)
        if mean > min(DIVERGED_FROM_FIRST * losses[0], DIVERGED_FROM_BEST * min(running)):
            raise DivergenceError("the loss rises")
        if event.state.step >= steps:
            raise Finished

    diverged = False
    with muted():  # spikes are what the test is for
        try:
            execute(settings, [*callbacks, record])
        except Finished:
            pass
        except DivergenceError:
            diverged = True
    if len(losses) < 3:
        raise UserError(f"the loss diverges in the first steps; start from a smaller learning rate than {min_lr:g}")
    return lrs, losses, diverged


# The analysis


def analyse(lrs: Sequence[float], losses: Sequence[float], *, diverged: bool) -> LRFinderResult:
    """Smooth the curve, and suggest learning rates from the part before its minimum."""
    smoothed = smooth(np.asarray(losses, dtype=float))
    lowest = int(np.argmin(smoothed))
    suggestions: dict[str, float] = {}
    note = ""
    if smoothed[0] - smoothed[lowest] < MIN_FALL * abs(smoothed[0]) or lowest < 2:
        note = "the loss does not fall in this range; try a lower --min-lr, or more --steps"
    else:
        falling = smoothed[: lowest + 1]
        slopes = np.gradient(falling, np.log(np.asarray(lrs[: lowest + 1])))
        drop = falling[0] - falling[-1]
        first = int(np.argmax(falling < falling[0] - VALLEY_START * drop))  # before that the loss only drifts
        start, end = (first + edge for edge in longest_decrease(falling[first:]))
        valley = start + (end - start) // 2
        indices = {"valley": valley, "steepest": int(np.argmin(slopes))}
        suggestions = {name: significant(lrs[index]) for name, index in indices.items()}
        suggestions["minimum"] = significant(lrs[lowest] / 10)
        if lowest == len(smoothed) - 1 and not diverged:
            note = "the loss still falls at the end; raise --max-lr for better suggestions"
    return LRFinderResult(list(lrs), list(losses), smoothed.tolist(), suggestions, diverged, note)


def smooth(losses: np.ndarray) -> np.ndarray:
    """A Gaussian mean around each step: unlike a running mean, it does not move the curve to higher rates."""
    width = max(1.0, SMOOTHING * len(losses))
    distances = np.arange(len(losses))[:, None] - np.arange(len(losses))
    weights = np.exp(-0.5 * (distances / width) ** 2)
    return weights @ losses / weights.sum(1)


def longest_decrease(values: np.ndarray) -> tuple[int, int]:
    """The ends of the longest decreasing subsequence, which ignores short rises: the valley of fastai's finder."""
    length, before = np.ones(len(values), dtype=int), np.arange(len(values))
    for i in range(1, len(values)):
        for j in range(i):
            if values[j] > values[i] and length[j] + 1 > length[i]:
                length[i], before[i] = length[j] + 1, j
    start = end = int(np.argmax(length))
    while before[start] != start:
        start = int(before[start])
    return start, end


def significant(value: float) -> float:
    return float(f"{value:.2g}")
