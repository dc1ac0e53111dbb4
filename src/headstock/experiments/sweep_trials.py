"""One trial of a sweep: a point of the grid, one seed. Made once, then read from its file; in between it can go on."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headstock import __version__
from headstock.data.corpus import Corpus
from headstock.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from headstock.errors import DivergenceError, UserError
from headstock.experiments.compare_trials import read_json, serialize_metric
from headstock.experiments.grid import Point, SweepPlan, file_name
from headstock.io import sha256, write_json
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.train import finetune_config as transfer
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.finetune import save_fit, sizes
from headstock.train.fit import LabelledData, fit
from headstock.train.labelled_data import LabelledSplits, read_splits
from headstock.train.metrics import metrics_with_intervals
from headstock.train.pretrain import corpora, gather_config, pretrain, source_weights, with_vocabulary
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import RunConfig

Say = Callable[[str], None]
Made = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    point: Point
    seed: int

    @property
    def name(self) -> str:
        return f"{file_name(self.point)}-{self.seed}"


class Field(Protocol):
    """What all trials of a sweep share, and how one is made."""

    folder: Path
    metric: str
    lower: bool  # less of the metric is better
    overlap: set[str]  # settings of every point that the grid sets anew
    judge: LabelledTask | None  # knows what is right, where rows are judged one by one

    @property
    def followed(self) -> str: ...  # the metric whose curve is told

    def configure(self, point: Point, seed: int) -> RunConfig:
        """The settings of a trial, checked as far as that can be done without reading anything."""
        ...

    def read(self, configs: Sequence[RunConfig], say: Say) -> None:
        """Read what all trials need; what is wrong with it is found before anything is trained."""
        ...

    def settle(self, chosen: RunConfig) -> RunConfig:
        """The settings with what only the data can tell."""
        ...

    def key(self, chosen: RunConfig) -> str:
        """Changes with anything that could change the trial: settings, data, weights."""
        ...

    def make(self, trial: Trial, chosen: RunConfig, run: RunFolder, callbacks: Sequence[Callback]) -> Made:
        """Train in `run`, which is whole afterwards, and say what came out."""
        ...

    def about(self) -> dict[str, Any]:
        """What results.json says of the data."""
        ...


def run_of(folder: Path, trial: Trial) -> RunFolder:
    return RunFolder(folder / "runs" / trial.name)


def make_trial(
    field: Field, trial: Trial, *, keep: bool, with_run: bool = False, callbacks: Sequence[Callback]
) -> tuple[Made, bool]:
    """A trial from its file, or made now; and whether it was made now.

    With `with_run` its run must be there too; with `keep` that is so, and the run is to stay for good.
    """
    path = field.folder / "cells" / f"{trial.name}.json"
    run, chosen = run_of(field.folder, trial), field.settle(field.configure(trial.point, trial.seed))
    key, kept = field.key(chosen), read_json(path)
    whole = kept.get("key") == key
    keep = keep or (whole and kept["kept"])
    if whole and (kept["failed"] or not (keep or with_run) or run.is_finished()):
        if keep and not kept["kept"]:
            write_json(path, kept := kept | {"kept": True})
        return ranked_by(field, kept), False
    begun = hashlib.sha256(json.dumps([key, chosen.plain()], sort_keys=True).encode()).hexdigest()
    if whole or kept.get("begun") != begun:  # what lies there is no beginning of this trial
        run.remove()
        write_json(path, {"begun": begun})
    began = time.monotonic()
    try:
        made = field.make(trial, chosen, run, callbacks)
        loss = made["metrics"].get("loss", 0.0)
        failed = None if math.isfinite(loss) else "the validation loss is not a finite number"
    except DivergenceError as wrong:
        made, failed = {}, str(wrong).partition(";")[0]
    if failed is not None:
        made = {"metrics": {}, "curves": {}, "parameters": None, "steps": None}
        run.remove()
    else:
        run.remove_checkpoints()
    seconds = {"seconds": round(time.monotonic() - began, 3)}
    made = {"settings": trial.point, "seed": trial.seed} | seconds | made
    made |= {"failed": failed, "kept": keep, "key": key}
    write_json(path, made)
    return ranked_by(field, made), True


def ranked_by(field: Field, made: Made) -> Made:
    """The trial with its score and its curve; kept are all metrics, so that another can be asked for later."""
    return made | {"score": made["metrics"].get(field.metric), "curve": made["curves"].get(field.followed, [])}


def fingerprint(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps({"version": __version__, **parts}, sort_keys=True).encode()).hexdigest()


class Pretraining:
    """Trials that grow a language model each. Text is cut into tokens once, and a tokenizer is trained once, for all
    points that agree on its settings; all are measured on the same held-out text."""

    lower = True

    def __init__(self, plan: SweepPlan, folder: Path, device: str):
        self.plan, self.folder, self.device = plan, folder, device
        self.metric: str = "loss" if plan.sweep.by == "auto" else plan.sweep.by
        self.judge: LabelledTask | None = None
        self.tokenizers: dict[str, Tokenizer] = {}
        self.texts: dict[str, tuple[Corpus, str]] = {}  # by how they are read, with their fingerprints
        self.overlap: set[str] = set()

    def given(self, point: Point, seed: int) -> tuple[str | None, dict[str, Any]]:
        """The preset and the settings of a trial, as `pretrain` takes them."""
        asked, point = self.plan.sweep, dict(point)
        preset = point.pop("preset", self.plan.preset)
        base = {name: value for name, value in self.plan.settings.items() if name not in self.overlap}
        given = {"train.tensorboard": False} | base | point | {"train.seed": seed}
        given |= {"data.corpus": list(asked.corpus)} if asked.corpus else {}
        given |= {"data.valid": list(asked.valid)} if asked.valid else {}
        given |= {"tokenizer.file": asked.tokenizer} if asked.tokenizer else {}
        given |= {"task.name": self.plan.objective} if self.plan.objective else {}
        return preset, given

    def configure(self, point: Point, seed: int) -> RunConfig:
        preset, given = self.given(point, seed)
        return gather_config(preset, self.plan.file, given)

    def read(self, configs: Sequence[RunConfig], say: Say) -> None:
        for chosen in configs:
            self.corpus_of(chosen)
            if self.tokenizer_key(chosen) not in self.tokenizers:
                self.tokenizers[self.tokenizer_key(chosen)] = self.tokenizer_of(chosen, say)
        if self.metric == "loss" and len({one.fingerprint for one in self.tokenizers.values()}) > 1:
            why = "tokenizers differ, and losses of unlike tokens cannot be compared"
            if self.plan.sweep.by == "loss":
                raise UserError(f"--by loss: {why}; rank by bits_per_byte")
            self.metric = "bits_per_byte"
            say(f"{why}: ranked by bits per byte")
        objective = configs[0].objective
        if self.metric == "bits_per_byte" and not TASKS.get(objective).generates:
            raise UserError(
                f"the objective {objective!r} has no bits per byte to rank by, and no other tokenizers to try"
            )

    def corpus_of(self, chosen: RunConfig) -> tuple[Corpus, str]:
        """The text and what tells it from any other; held-out text of its own counts too."""
        data = chosen.plain()["data"]
        way = json.dumps([data["corpus"], data["valid"], data["documents"], data["column"]])
        if way not in self.texts:
            corpus, valid = corpora(chosen)
            self.texts[way] = corpus, corpus.fingerprint() + (valid.fingerprint() if valid else "")
        return self.texts[way]

    def tokenizer_key(self, chosen: RunConfig) -> str:
        settings = chosen.plain()["tokenizer"]
        return fingerprint({"text": self.corpus_of(chosen)[1], "settings": settings})

    def tokenizer_file(self, chosen: RunConfig) -> Path:
        own = chosen.tokenizer.file
        return Path(own) if own else self.folder / "tokenizers" / f"{self.tokenizer_key(chosen)[:16]}.json"

    def tokenizer_of(self, chosen: RunConfig, say: Say) -> Tokenizer:
        path = self.tokenizer_file(chosen)
        if not chosen.tokenizer.file and not path.is_file():
            say(f"training a {chosen.tokenizer.kind} tokenizer of at most {chosen.tokenizer.vocabulary:,} entries")
            train_tokenizer(self.corpus_of(chosen)[0].sample_texts(), chosen.tokenizer).save(path)
        return open_tokenizer(path)

    def settle(self, chosen: RunConfig) -> RunConfig:
        tokenizer = self.tokenizers[self.tokenizer_key(chosen)]
        TASKS.get(chosen.objective)(chosen.task, tokenizer)  # refuses a tokenizer that lacks a mark it needs
        return with_vocabulary(chosen, tokenizer)

    def key(self, chosen: RunConfig) -> str:
        settings, bare = chosen.plain(), ("corpus", "valid")
        settings["data"] = {name: value for name, value in settings["data"].items() if name not in bare}
        tokenizer = self.tokenizers[self.tokenizer_key(chosen)]
        settings["tokenizer"] = tokenizer.fingerprint
        # trials of before were measured as if unknown tokens cost nothing
        charged = {"unknown": "charged"} if tokenizer.can_produce_unk else {}
        return fingerprint({"text": self.corpus_of(chosen)[1], "settings": settings, **charged})

    def make(self, trial: Trial, chosen: RunConfig, run: RunFolder, callbacks: Sequence[Callback]) -> Made:
        preset, given = self.given(trial.point, trial.seed)
        objective, file = given.pop("task.name", None), self.tokenizer_file(chosen)
        results = pretrain(
            out=run.path,
            preset=preset,
            objective=objective,
            config_file=self.plan.file,
            tokenizer=file,
            settings=given,
            resume=True,
            device=self.device,
            callbacks=callbacks,
        )
        rows = run.read_metrics()
        return {
            "metrics": results["metrics"],
            "curves": {
                name: [[row["step"], row[f"valid_{name}"]] for row in rows if f"valid_{name}" in row]
                for name in ("loss", "bits_per_byte")
            },
            "parameters": results["parameters"]["total"],
            "steps": results["steps"],
            "seconds": results["seconds"],  # also of what was done before an interruption
        }

    @property
    def followed(self) -> str:
        return self.metric

    def about(self) -> dict[str, Any]:
        return {"text": sorted({name for corpus, _ in self.texts.values() for name in corpus.names()})}


# what a sweep of fine-tuning decides itself
DECIDED = {
    "seed": "each trial has its own; the first is --seed",
    "classes": "they are those of the training rows",
    "ensemble": "a trial is one model",
    "adapt_steps": "trials begin with a run as it is; adapt it with finetune, then sweep from its adapted/",
    "test": "points are ranked by the validation rows; measure the best on the test rows once, with evaluate",
}


class Finetuning:
    """Trials that each put a head on one run's backbone. They are measured on the validation rows, never on test rows,
    which stay unseen for the one that is chosen."""

    lower = False

    def __init__(self, plan: SweepPlan, folder: Path, device: str):
        self.plan, self.folder = plan, folder
        assert plan.sweep.run is not None
        self.source, self.distributed = open_run(plan.sweep.run), DistributedContext(choose_device(device))
        self.task = transfer.labelled_task(plan.sweep.task)
        self.metric = self.task.primary_metric
        self.tokenizer = self.source.tokenizer()
        self.overlap: set[str] = set()
        self.splits: LabelledSplits
        self.judge: LabelledTask | None = None
        self.weights_hash: str | None = None

    def configure(self, point: Point, seed: int) -> RunConfig:
        asked = self.plan.sweep
        base = {name: value for name, value in self.plan.settings.items() if name not in self.overlap}
        given = base | point | {"train.seed": seed}
        given |= {"data.train": asked.train} if asked.train else {}
        given |= {"data.valid": asked.valid[0]} if asked.valid else {}
        given |= {"data.columns": list(asked.columns)} if asked.columns else {}
        return transfer.resolve_finetune_config(self.source, asked.task, self.plan.file, given)

    def read(self, configs: Sequence[RunConfig], say: Say) -> None:
        first = configs[0]
        if first.data.test:
            raise UserError(f"data.test: cannot be set: {DECIDED['test']}")
        self.splits = read_splits(first.data, self.task, first.task, seed=self.plan.sweep.seed)
        self.judge = self.task(self.settle(first).task, self.tokenizer)
        for records in (self.splits.train, self.splits.valid):
            self.judge.check(records)
        if any(chosen.transfer.init != "scratch" for chosen in configs):
            self.source.check_weights_exist()
            self.weights_hash = sha256(self.source.weights_file)

    def settle(self, chosen: RunConfig) -> RunConfig:
        return transfer.resolve_with_data(chosen, self.splits.train)

    def key(self, chosen: RunConfig) -> str:
        settings = chosen.plain()
        settings.pop("data")  # the rows themselves count, not where they lie
        settings["transfer"].pop("run")
        scratch = chosen.transfer.init == "scratch"
        parts = {"tokenizer": self.tokenizer.fingerprint, "weights": None if scratch else self.weights_hash}
        return fingerprint({"rows": self.splits.fingerprint(), "settings": settings, **parts})

    def make(self, trial: Trial, chosen: RunConfig, run: RunFolder, callbacks: Sequence[Callback]) -> Made:
        task = self.task(chosen.task, self.tokenizer)
        data = LabelledData(task.prepare(self.splits.train), task.prepare(self.splits.valid))
        weights = None if chosen.transfer.init == "scratch" else source_weights(self.source)
        fitted = fit(chosen, self.tokenizer, weights, data, run=None, distributed=self.distributed, callbacks=callbacks)
        found = fitted.outputs(data.valid, dtype=chosen.train.dtype)
        metrics = metrics_with_intervals(task, data.valid, found)
        save_fit(
            run,
            chosen,
            self.tokenizer,
            fitted,
            LabelledSplits(self.splits.train, self.splits.valid, None),
            self.distributed,
        )
        return {
            "metrics": {name: value for name, value in metrics.items() if name != "intervals"},
            "curves": {"loss": [[row["step"], row["valid_loss"]] for row in fitted.epochs]},
            "parameters": sizes(fitted.model, frozen=chosen.transfer.freeze)["total"],
            "steps": fitted.state.step,
            "tallies": {
                task.primary_metric: serialize_metric(task.row_metrics(data.valid, found)[task.primary_metric])
            },
        }

    @property
    def followed(self) -> str:
        return "loss"

    def about(self) -> dict[str, Any]:
        return self.splits.describe()
