"""Fine-tunes a run on the GLUE tasks of a folder and averages their scores, as GLUE does."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headstock import config
from headstock.data.glue import GlueTask, find_tasks, glue_tasks, read_rows
from headstock.errors import UserError
from headstock.experiments.grid import explain_interruption, lock_experiment
from headstock.inference.pipeline import Pipeline, load
from headstock.intervals import item_interval
from headstock.io import FolderLayout, sha256, write_json, write_text
from headstock.rng import generator
from headstock.train.callbacks import Callback
from headstock.train.finetune import finetune
from headstock.train.metrics import metrics_with_intervals
from headstock.train.run_folder import LAYOUT as RUN_LAYOUT
from headstock.train.run_folder import RunFolder, open_run

logger = logging.getLogger(__name__)

LAYOUT: dict[str, FolderLayout | None] = {  # everything a GLUE folder may contain
    "results.json": None,
    "data": {"*": {"*.jsonl": None, "key.json": None}},
    "runs": {"*": RUN_LAYOUT},
}


def glue(
    run: str | Path,
    folder: str | Path,
    *,
    out: str | Path,
    tasks: Sequence[str] | None = None,
    rows: int | None = None,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Fine-tune a run on each GLUE task in `folder` and measure it on the development rows.

    A tenth of the training rows selects the epoch, so that the development rows stay unseen. `rows` limits the training
    rows of each task. Finished tasks are kept in `out`: repeating the call continues where it stopped, and a call with
    another run or other options is refused. Returns the contents of results.json.
    """
    if rows is not None and rows < 20:
        raise UserError(f"--rows {rows}: must be 20 or more")
    source, target = open_run(run), Path(out)
    selected = glue_tasks(tasks)
    folders, missing = find_tasks(Path(folder), selected)
    if not folders:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise UserError(f"{folder}: no GLUE task found ({reasons})")
    for name, reason in missing.items():
        logger.info(f"{name} is left out: {reason}")
    scores: dict[str, Any] = {}
    options = dict(settings or {}) | {"train.seed": seed}
    key = task_key(source, rows=rows, seed=seed, settings=settings or {})
    for name in folders:
        check_key(target, name, key)
    interruption = explain_interruption(lambda: f"{len(scores)} of {len(folders)} tasks are finished in {target}")
    with lock_experiment(target), interruption:
        for task in selected:
            if task.name in folders:
                files = convert_files(folders[task.name], task, target / "data" / task.name, rows=rows, seed=seed)
                write_json(key_file(target, task.name), key)
                scores[task.name] = run_task(source, task, files, target, options, device, callbacks)
                shown = ", ".join(f"{name} {100 * value:.1f}" for name, value in scores[task.name]["metrics"].items())
                logger.info(f"{task.name}: {shown}")
    results = {"kind": "glue", "run": str(source), "folder": str(folder), "seed": seed, "rows": rows}
    results |= {"settings": settings or {}, "tasks": scores, "missing": missing, **average(scores)}
    write_json(target / "results.json", results)
    return results


def task_key(source: RunFolder, *, rows: int | None, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What the results of a task depend on besides its files."""
    weights = sha256(source.weights_file) if source.weights_file.is_file() else None
    key = {"run": str(source), "weights": weights, "rows": rows, "seed": seed, "settings": settings}
    return dict(json.loads(json.dumps(key)))  # as it is read back


def key_file(out: Path, name: str) -> Path:
    return out / "data" / name / "key.json"


def check_key(out: Path, name: str, key: dict[str, Any]) -> None:
    """Reject a folder with a run of the same task from other weights or options."""
    file = key_file(out, name)
    if not RunFolder(out / "runs" / name).exists() or not file.is_file():
        return
    stored = config.read_settings(file)
    changed = [part for part in ("weights", "rows", "seed", "settings") if stored.get(part) != key[part]]
    if changed:
        names = {"weights": f"the run {stored.get('run')}"}
        was = ", ".join(names.get(part) or f"{part} {stored.get(part)}" for part in changed)
        raise UserError(f"{out}: has results of {was} for {name}; name another --out")


def convert_files(folder: Path, task: GlueTask, out: Path, *, rows: int | None, seed: int) -> dict[str, Path]:
    """The task's files as .jsonl tables, by file name without its ending; at most `rows` training rows."""
    files = {}
    for name in ("train.tsv", *task.dev):
        table = read_rows(folder / name, task)
        if name == "train.tsv" and rows is not None and rows < len(table):
            chosen = sorted(generator(seed, "glue", task.name).permutation(len(table))[:rows].tolist())
            table = [table[index] for index in chosen]
        path = out / f"{Path(name).stem}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table))
        files[path.stem] = path
    return files


def run_task(
    source: RunFolder,
    task: GlueTask,
    files: dict[str, Path],
    out: Path,
    settings: dict[str, Any],
    device: str,
    callbacks: Sequence[Callback],
) -> dict[str, Any]:
    """Fine-tune on one task, unless that is done, and measure the model on its development files."""
    run = RunFolder(out / "runs" / task.name)
    dev = [files[Path(name).stem] for name in task.dev]
    logger.info(f"{task.name}: {task.task} in {run}")
    results = finetune(
        source.path,
        task=task.task,
        train=files["train"],
        test=dev[0],
        out=run.path,
        settings=settings,
        resume=run.exists(),
        device=device,
        callbacks=callbacks,
    )
    pipeline = load(run.path, device=device)
    metrics: dict[str, float] = {}
    intervals: dict[str, list[float]] = {}
    counts = {"dev": 0}
    for path in dev:
        suffix = path.stem.removeprefix("dev")  # _matched or _mismatched
        measured = dev_metrics(pipeline, task, path)
        counts["dev"] += measured["rows"]
        for name in task.metrics:
            metrics[f"{name}{suffix}"] = measured[name]
            intervals[f"{name}{suffix}"] = measured["intervals"][name]
    return {
        "metrics": metrics,
        "intervals": intervals,
        "score": float(np.mean(list(metrics.values()))),
        "majority": measured.get("majority"),
        "train_rows": sum(1 for _ in files["train"].open(encoding="utf-8")),
        "dev_rows": counts["dev"],
        "seconds": results["seconds"],
    }


def dev_metrics(pipeline: Pipeline, task: GlueTask, path: Path) -> dict[str, Any]:
    """The metrics of a development file with intervals; with F1 of the positive class where GLUE uses it."""
    labelled = pipeline.labelled_task()
    records = labelled.read_file(path, config=labelled.config)
    labelled.check(records)
    data = labelled.prepare(records)
    outputs = pipeline.outputs(data)
    metrics = metrics_with_intervals(labelled, data, outputs)
    if "f1" in task.metrics:
        positive = labelled.config.classes.index(task.positive)
        actual, predicted = data.labels == positive, np.stack(outputs).argmax(1) == positive
        f1 = item_interval(2.0 * (actual & predicted), actual.astype(float) + predicted)
        metrics["f1"], metrics["intervals"]["f1"] = f1.mean, [f1.low, f1.high]
    return metrics


def average(scores: dict[str, Any]) -> dict[str, Any]:
    """GLUE's score: the mean over tasks of the mean of each task's metrics.

    The development rows of the tasks are independent, so the squared half-widths of their intervals add up; those of
    the metrics of one task are not, so their mean counts.
    """
    values = [task["score"] for task in scores.values()]
    widths = [
        np.mean([(high - low) / 2 for low, high in task["intervals"].values() if low is not None])
        for task in scores.values()
    ]
    mean, half = float(np.mean(values)), math.sqrt(float(np.sum(np.square(widths)))) / len(values)
    return {"average": mean, "average_low": mean - half, "average_high": mean + half}
