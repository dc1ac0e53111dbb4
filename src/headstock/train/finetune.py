"""From a pretrained run and a few labels to a classifier in a run folder of its own."""

import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock import __version__, config
from headstock.errors import UserError
from headstock.files import write_text
from headstock.model.fixed import Fixed
from headstock.model.model import Model
from headstock.tasks.classify import Classify, Labelled, balanced_weights, find_classes, label_numbers
from headstock.tasks.task import TASKS
from headstock.text.records import Records
from headstock.text.tokenizer import Tokenizer
from headstock.train import watch as watching
from headstock.train.card import write_card
from headstock.train.labelled import Splits, read_splits
from headstock.train.loop import Event, Watch, row_length, train
from headstock.train.metrics import as_predictions, metrics_of
from headstock.train.predict import features, probabilities
from headstock.train.pretrain import build_model, check_folder, pretrain, same_settings, start_settings
from headstock.train.progress import Progress
from headstock.train.run import Run, open_run
from headstock.train.settings import RunConfig, make_config, place_settings
from headstock.train.world import World, join_world, leave_world

Say = Callable[[str], None]

COMMON = {"batch": 16, "schedule": "linear", "warmup": 0.1, "beta2": 0.999, "weight_decay": 0.01}
COMMON |= {"valid_tokens": 10**12, "log_every": 10**9, "keep": 1, "tensorboard": False}
# what each way to begin needs to do well; found on the validation rows of short film quotes
BY_KIND: dict[str, dict[str, Any]] = {
    "pretrained": {"lr": 3e-4, "epochs": 4.0},
    "scratch": {"lr": 1e-3, "epochs": 8.0},
    "frozen": {"lr": 1e-3, "epochs": 40.0, "weight_decay": 0.0},
}


@dataclass
class Data:
    """What the loop reads: the task's own form of the training and validation rows."""

    train: Any
    valid: Any


@dataclass
class Fitted:
    """A trained classifier and how it came about."""

    model: Model
    task: Classify
    progress: Progress
    epochs: list[dict[str, Any]]  # accuracy and loss in training and validation, epoch by epoch
    length: int

    def probabilities(self, data: Any, *, dtype: str = "auto") -> np.ndarray:
        return probabilities(self.model, self.task, data, length=self.length, dtype=dtype)

    @property
    def best_epoch(self) -> int | None:
        return next((row["epoch"] for row in self.epochs if row["step"] == self.progress.best_step), None)


def finetune(
    run: str | Path,
    *,
    train: str | Path | None = None,
    out: str | Path,
    task: str = "classify",
    valid: str | Path | None = None,
    test: str | Path | None = None,
    columns: dict[str, str] | None = None,
    init: str | None = None,
    freeze: bool | None = None,
    config_file: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    watch: Sequence[Watch] = (),
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Put a new head on a run's backbone and train both on labelled texts; returns the new run's results.

    `init="scratch"` takes the architecture without the weights, `freeze` trains the head alone. All else is a
    setting, such as `{"pool": "mean", "lr": 2e-4, "layer_decay": 0.8, "ensemble": 3}`.
    """
    target, source = Run(Path(out)), open_run(run)
    files = {"data.train": train, "data.valid": valid, "data.test": test}
    given = {key: str(value) for key, value in files.items() if value is not None} | (settings or {})
    given |= {"data.columns": [f"{ours}={theirs}" for ours, theirs in columns.items()]} if columns else {}
    given |= {"transfer.init": init} if init else {}
    given |= {"transfer.freeze": freeze} if freeze is not None else {}
    check_folder(target, resume=resume, overwrite=overwrite)
    going_on = resume and target.exists()
    world = join_world(device)  # which waits for all processes: each has looked at the folder before one makes it
    try:
        if going_on:
            asked = make_config(same_settings(target, given))
        else:
            asked = gather_config(source, task, config_file, given)
        splits = read_splits(asked.data, separator=asked.task.separator, seed=asked.train.seed, say=say)
        chosen = settle(asked, splits.train)
        tokenizer, weights = check(source, chosen, splits)
        if going_on and target.data()["fingerprint"] != splits.fingerprint():
            changed = "the labelled files are not what they were when the run began"
            raise UserError(f"{target}: {changed}, so it cannot go on")
        if going_on and target.finished():
            say(f"{target} is finished: nothing to resume")
            return target.results()
        if world.leads and not going_on:
            card = {"fingerprint": splits.fingerprint(), "tokenizer": tokenizer.fingerprint, **splits.describe()}
            # the length as it was asked for: settled for these rows, it would contradict the same words at a resume
            target.begin(replace(chosen, train=asked.train).plain(), tokenizer, card)
        world.wait()
        if chosen.transfer.adapt_steps:
            weights = adapt(target, source, chosen, splits.train, device, watch, say)
        return work(target, chosen, tokenizer, weights, splits, world, watch, say)
    finally:
        leave_world(world)


def check(source: Run, chosen: RunConfig, splits: Splits) -> tuple[Tokenizer, dict[str, Tensor] | None]:
    """What is taken over from the source; what is wrong with it or with a label is found before anything is made."""
    for records in (splits.train, splits.valid, splits.test):
        if records is not None and records.labels is not None:
            label_numbers(records, chosen.task)
    if chosen.transfer.adapt_steps:
        start_settings(source)
    return source.tokenizer(), None if chosen.transfer.init == "scratch" else source.weights()


# Settings


def gather_config(source: Run, task: str, file: str | Path | None, given: dict[str, Any]) -> RunConfig:
    """The source's model, the task's defaults, a file and options, as one checked whole."""
    theirs = source.config()
    opening = theirs["task"].get("opening") or TASKS.get(theirs["task"]["name"]).opening
    tree: dict[str, Any] = {
        "model": theirs["model"],
        "task": {"name": task, "opening": opening},
        "data": {},
        "transfer": {"run": str(source)},
        "train": {},
    }
    tree = config.merge(tree, config.read_settings(Path(file)) if file else {}, {"transfer": {"run": str(source)}})
    return complete(config.merge(tree, place_settings(given, tree)))


def complete(tree: dict[str, Any]) -> RunConfig:
    """Fill in what a way to begin needs to do well, and check that the parts go together."""
    transfer, asked = tree["transfer"], tree["train"]
    kind = "frozen" if transfer.get("freeze") else transfer.get("init", "pretrained")
    defaults = COMMON | BY_KIND.get(kind, {})
    if asked.get("steps") or asked.get("minutes"):
        defaults.pop("epochs", None)
    tree = config.merge(tree, {"train": defaults | asked})
    if transfer.get("bidirectional") is not None:
        tree = config.merge(tree, {"model": {"causal": not transfer["bidirectional"]}})
    causal = tree["model"].get("causal", True)
    tree["task"] = {"pool": "last" if causal else "mean"} | tree["task"]
    chosen = make_config(tree)
    settings = chosen.train
    if transfer.get("freeze") and (settings.unfreeze or settings.layer_decay != 1):
        name = "unfreeze" if settings.unfreeze else "layer_decay"
        raise UserError(f"train.{name}: with --freeze there is nothing to train below the head, so it has no meaning")
    if chosen.task.pool == "cls" and causal:
        raise UserError("task.pool: a causal model's first mark sees no text; use last, mean or bidirectional=true")
    context = getattr(chosen.model, "context", None)
    if settings.length and context and settings.length > context:
        raise UserError(f"train.length: {settings.length} is longer than model.context {context}")
    return chosen


def settle(chosen: RunConfig, records: Records) -> RunConfig:
    """What only the labelled rows can tell: the classes, their weights, and how long an epoch is."""
    task = chosen.task
    if not task.classes:
        task = replace(task, classes=find_classes(records, task.separator))
    if task.balance and not task.class_weights:
        task = replace(task, class_weights=balanced_weights(label_numbers(records, task), len(task.classes)))
    return replace(chosen, task=task, train=with_length(chosen, len(records)))


def with_length(chosen: RunConfig, rows: int) -> Any:
    """Epochs enough for the least number of steps, and a validation after each."""
    settings = chosen.train
    steps = math.ceil(rows / settings.batch)
    if settings.steps is None and settings.minutes is None:
        epochs = max(settings.epochs or 1.0, math.ceil(chosen.transfer.least_steps / steps))
        settings = replace(settings, epochs=float(epochs))
    every = settings.validate_every or steps
    return replace(settings, validate_every=every)


# Work


def adapt(
    target: Run, source: Run, chosen: RunConfig, records: Records, device: str, watch: Sequence[Watch], say: Say
) -> dict[str, Tensor]:
    """Go on pretraining on the task's own texts, in a run folder inside the new one; returns the new weights."""
    inner = target.adapted
    if not inner.finished():
        say(f"adapting to the {len(records):,} training texts for {chosen.transfer.adapt_steps:,} steps")
        texts = target.path / "adapt.txt"
        write_text(texts, "\n".join(" ".join(text.split()) for text in records.plain) + "\n")
        own = source.config()["train"]["lr"]
        settings = {"train.steps": chosen.transfer.adapt_steps, "train.lr": chosen.transfer.adapt_lr or own / 3}
        settings |= {"train.seed": chosen.train.seed, "data.documents": "line", "train.tensorboard": False}
        pretrain(
            texts,
            out=inner.path,
            start=source.path,
            settings=settings,
            resume=True,
            device=device,
            watch=watch,
            say=say,
        )
    return inner.weights()


def work(
    target: Run,
    chosen: RunConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor] | None,
    splits: Splits,
    world: World,
    watch: Sequence[Watch],
    say: Say,
) -> dict[str, Any]:
    """Train one model, or several from as many seeds, measure them together, and write down what came out."""
    began = time.monotonic()
    task = Classify(chosen.task, tokenizer)
    data = Data(task.prepare(splits.train), task.prepare(splits.valid))
    count = chosen.transfer.ensemble
    fitted: list[Fitted] = []
    for number in range(count):
        run, member = target, chosen
        if count > 1:
            run = target.member(number)
            member = replace(chosen, train=replace(chosen.train, seed=chosen.train.seed + number))
            member = replace(member, transfer=replace(chosen.transfer, ensemble=1))
            say(f"model {number + 1} of {count}, seed {member.train.seed}")
            if world.leads and not run.exists():
                run.begin(member.plain(), tokenizer, target.data())
            world.wait()
        fitted.append(fit_in(run, member, tokenizer, weights, data, world, watch, say))
    seconds = max(time.monotonic() - began, sum(f.progress.seconds for f in fitted))  # also before an interruption
    results = describe(target, chosen, fitted, data, splits, world, seconds)
    if world.leads:
        target.write_results(results)
        write_card(target)
    return results


def fit_in(
    run: Run,
    chosen: RunConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor] | None,
    data: Data,
    world: World,
    watch: Sequence[Watch],
    say: Say,
) -> Fitted:
    """`fit`, with its metrics and checkpoints in a run's folder."""
    with ExitStack() as stack:
        watchers = list(watch) if world.leads else []
        if world.leads:
            watchers.append(watching.log_metrics(run))
            if chosen.train.tensorboard:
                watchers.append(stack.enter_context(watching.tensorboard(run)))
        fitted = fit(chosen, tokenizer, weights, data, run=run, world=world, watch=watchers, say=say)
    fitted.epochs = epochs_of(run)  # of the whole run, also what lies before an interruption
    return fitted


def fit(
    chosen: RunConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor] | None,
    data: Data,
    *,
    run: Run | None,
    world: World,
    watch: Sequence[Watch] = (),
    say: Say = lambda line: None,
) -> Fitted:
    """Train one classifier. Frozen, the backbone reads each text once and the head learns from what it saw."""
    model, task = build_model(chosen, tokenizer)
    assert isinstance(task, Classify)
    if weights is not None:
        model.load_backbone(weights, source=chosen.transfer.run)
    model.to(world.device)
    length, settings = row_length(model, chosen.train), chosen.train
    epochs: list[dict[str, Any]] = []
    watchers = [*watch, remember(epochs)]
    if chosen.transfer.freeze:
        say(f"the frozen backbone reads {len(data.train.tokens) + len(data.valid.tokens):,} texts, once")
        look = partial(features, model, task, length=length, dtype=settings.dtype)
        seen = Data(look(data.train), look(data.valid))
        head = Model(Fixed(model.backbone), dict(model.heads.items()))
        progress = train(head, task, seen, settings, run=run, world=world, watch=watchers, say=say)
        if run is not None and world.leads:
            run.save_weights(model.tensors())
    else:
        progress = train(model, task, data, settings, run=run, world=world, watch=watchers, say=say)
    return Fitted(model.eval(), task, progress, epochs, length)


EPOCH = ("step", "epoch", "train_accuracy", "train_loss", "valid_accuracy", "valid_loss")


def remember(epochs: list[dict[str, Any]]) -> Watch:
    """Keeps accuracy and loss of every epoch."""

    def hear(event: Event) -> None:
        if event.kind == "valid":
            p = event.progress
            values = (p.step, event.epoch, p.train["accuracy"], p.train["loss"], p.valid["accuracy"], p.valid["loss"])
            epochs.append(dict(zip(EPOCH, values, strict=True)))

    return hear


def epochs_of(run: Run) -> list[dict[str, Any]]:
    """The same from a run's metrics."""
    return [{name: row[name] for name in EPOCH} for row in run.read_metrics() if "valid_accuracy" in row]


# Results


def describe(
    target: Run,
    chosen: RunConfig,
    fitted: list[Fitted],
    data: Data,
    splits: Splits,
    world: World,
    seconds: float,
) -> dict[str, Any]:
    """Metrics on the validation and test rows, of all models together; unlabelled test rows are predicted."""
    first, task = fitted[0], fitted[0].task
    valid = metrics_of(task.config, together(fitted, data.valid, chosen), data.valid.labels)
    measured = {"valid": valid}
    if splits.test is not None:
        test = task.prepare(splits.test)
        found = together(fitted, test, chosen)
        if world.leads:
            target.write_predictions(as_predictions(task.config, found))
        if test.labels is not None:
            measured["test"] = metrics_of(task.config, found, test.labels)
    on = "test" if "test" in measured else "valid"
    tokens, steps = (sum(getattr(f.progress, name) for f in fitted) for name in ("tokens", "step"))
    busy = sum(f.progress.seconds - f.progress.aside for f in fitted)
    return {
        "kind": "finetune",
        "run": str(target),
        "task": task.name,
        "from": chosen.transfer.run,
        "steps": steps,
        "best_step": first.progress.best_step,
        "best_epoch": first.best_epoch,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / max(1e-9, busy), 1),
        "train_loss": first.epochs[-1]["train_loss"] if first.epochs else None,
        "valid_loss": valid["loss"],
        "perplexity": None,  # not defined for a classifier
        "bits_per_byte": None,
        "measured_on": on,
        "metrics": measured[on],
        **measured,
        "classes": list(task.config.classes),
        "epochs": first.epochs,
        "parameters": sizes(first.model, frozen=chosen.transfer.freeze),
        "device": str(world.device),
        "processes": world.size,
        "versions": {"headstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def keep_fitted(
    run: Run, chosen: RunConfig, tokenizer: Tokenizer, fitted: Fitted, splits: Splits, world: World
) -> None:
    """Make a run folder of a classifier that was trained without one."""
    card = {"fingerprint": splits.fingerprint(), "tokenizer": tokenizer.fingerprint, **splits.describe()}
    run.begin(chosen.plain(), tokenizer, card)
    run.save_weights(fitted.model.tensors())
    data = Data(None, fitted.task.prepare(splits.valid))
    run.write_results(describe(run, chosen, [fitted], data, splits, world, fitted.progress.seconds))
    write_card(run)


def together(fitted: list[Fitted], data: Labelled, chosen: RunConfig) -> np.ndarray:
    """The mean of all models' probabilities."""
    return np.mean([f.probabilities(data, dtype=chosen.train.dtype) for f in fitted], axis=0)


def sizes(model: Model, *, frozen: bool) -> dict[str, int]:
    """Parameters by part, and how many of them learn."""
    counted = model.sizes()
    still = counted["base"] if frozen else 0
    return counted | {"trainable": counted["total"] - still, "frozen": still}
