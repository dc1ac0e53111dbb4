"""`headstock demo`, `compare`, `sweep`, `report` and `bench`."""

import logging
from pathlib import Path
from typing import Annotated, Any, Unpack

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import (
    ON_HELP,
    TASK_HELP,
    ClusterOptions,
    Columns,
    ConfigOptions,
    Corpus,
    ExperimentOut,
    LabelledFileOptions,
    LabelWords,
    ModelOptions,
    PretrainSettings,
    SettingOptions,
    Slices,
    Task,
)
from headstock.errors import UserError

logger = logging.getLogger(__name__)

# types of keys in results.json, which may have been edited
OBJECTS = ("metrics", "intervals", "parameters", "versions", "valid", "test", "settings", "data", "marginals")
LISTS = ("samples", "curve", "train_curve", "warnings", "classes", "arms", "runs", "labels", "cells", "points")
RESULT_TYPES: dict[str, type] = dict.fromkeys((*OBJECTS, "details"), dict) | dict.fromkeys((*LISTS, "summary"), list)


@command("Start", distributed=True)
def demo(
    common: Common,
    sentences: Annotated[list[str] | None, typer.Argument(help="Your own sentences to classify at the end.")] = None,
    out: Annotated[Path, "Folder for all results."] = Path("runs/demo"),
    minutes: Annotated[float, "Approximate duration."] = 5.5,
    overwrite: Annotated[bool, "Start again if the folder exists."] = False,
) -> dict[str, Any]:
    """See what pretraining is worth, on film reviews, in minutes."""
    from headstock.experiments.demo import run_demo

    if minutes <= 0:
        raise UserError(f"--minutes {minutes}: must be above 0")
    return run_demo(
        out,
        minutes=minutes,
        sentences=sentences or [],
        overwrite=overwrite,
        device=common.device,
        seed=common.seed or 0,
        quiet=common.quiet,
        show=common.show_prose,
    )


class CompareOptions(LabelledFileOptions, ConfigOptions, ClusterOptions):
    seeds: Annotated[int | None, "Repetitions of every cell, each with its own seed; 5."]
    skip_blank: Annotated[bool | None, "Skip rows with a blank text or label."]
    leakage: Annotated[str | None, "Test texts found in the pretraining text: exclude, keep or skip."]
    rows: Annotated[int | None, "Measure on at most this many test rows."]
    slices: Slices


@command("Compare and measure", distributed=True)
def compare(
    common: Common,
    out: ExperimentOut,
    settings: SettingOptions,
    columns: Columns,
    runs: Annotated[
        list[str] | None, typer.Argument(help="Pretrained runs, the bundled reviews-en, or hf://ORG/NAME.")
    ] = None,
    task: Task = None,
    arms: Annotated[str | None, "Default: scratch,pretrained,frozen,tfidf; also lora, setfit and prompt."] = None,
    features: Annotated[str | None, "Frozen arms by layers: last,sum4,concat4,mix or layer numbers."] = None,
    prompt: Annotated[str | None, "Template of the prompt arm: '{text} It was [MASK].'"] = None,
    label_words: LabelWords = None,
    labels: Annotated[str | None, "Training set sizes, such as 100,400,1600."] = None,
    **options: Unpack[CompareOptions],
) -> dict[str, Any]:
    """Compare pretraining with training from scratch and TF-IDF.

    The report has confidence intervals for every difference between the arms: pretrained, lora, frozen, scratch and
    tfidf, and for few labels setfit (contrastive pairs) and prompt (label words in a template).

    Example: headstock compare reviews-en --train train.csv --valid valid.csv --test test.csv --labels 100,400 --out out
    """
    from headstock.experiments import compare as experiment
    from headstock.experiments.terminal_tables import comparison_table, runs_table, slice_table
    from headstock.report.pages import write_report
    from headstock.train.callbacks import status_line
    from headstock.train.resolve import labelled_task

    with status_line(quiet=common.quiet) as callbacks:
        results = experiment.compare(
            runs or [],
            out=out,
            task=task,
            arms=split_names(arms),
            features=split_names(features),
            prompt=prompt,
            label_words=split_names(label_words),
            labels=split_counts(labels),
            seed=common.seed,
            columns=columns.names(main=labelled_task(task or "classify").input_column),
            settings=settings.to_dict(),
            device=common.device,
            callbacks=callbacks,
            **options,
        )
    page = write_report(out)
    common.show(comparison_table(results))
    for part in results["slices"][: len(results["settings"]["compare"]["slices"])]:
        common.show(slice_table(results, part))
    if results["runs"]:
        common.show(runs_table(results["runs"]))
    for line in [*results["verdicts"], *results["notes"]]:
        common.show_prose(line)
    common.show(f"report: {page}")
    return results | {"report": str(page)}


def split_names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


def split_counts(text: str | None) -> list[int] | None:
    try:
        return [int(part.replace("_", "")) for part in text.split(",")] if text else None
    except ValueError:
        raise UserError(f"--labels {text}: expected numbers separated by commas, such as 100,400,1600") from None


class SweepOptions(ModelOptions, ClusterOptions):
    run: Annotated[str | None, "Fine-tune this run instead of pretraining."]
    task: Annotated[str | None, f"With --run: {TASK_HELP}"]
    train: Annotated[Path | None, "With --run: labelled texts."]
    valid: Annotated[list[str] | None, "Rows or text by which points are ranked."]
    sample: Annotated[int | None, "Try this many points; lr=1e-4..1e-2 is then a range."]
    method: Annotated[str | None, "grid, random, tpe, or asha (random, the worse ones stopped early)."]
    reduction: Annotated[int | None, "asha: one in this many points goes on at each rung; 3."]
    seeds: Annotated[int | None, "Repetitions of each point, each with its own seed; 3."]
    folds: Annotated[int | None, "Fine-tuning: cross-validate each point on this many folds of --train and --valid."]
    repeats: Annotated[int | None, "Repetitions of the cross-validation with other folds; 1."]
    out_of_fold: Annotated[str | None, "Save the out-of-fold predictions of the best point or of all; best."]
    by: Annotated[str | None, "Rank pretraining by loss or bits_per_byte."]
    keep: Annotated[bool | None, "Keep every run, not only the best."]


@command("Compare and measure", distributed=True)
def sweep(
    common: Common,
    out: ExperimentOut,
    settings: PretrainSettings,
    columns: Columns,
    corpus: Corpus = None,
    grid: Annotated[list[str] | None, "A setting and its values: lr=1e-3,3e-3; repeatable."] = None,
    **options: Unpack[SweepOptions],
) -> dict[str, Any]:
    """Search a grid of settings and rank the points.

    Points are compared with confidence intervals over seeds. Pretraining is ranked by validation loss, fine-tuning by
    the task's metric on the validation rows. Run the same command again to resume an interrupted sweep.

    Instead of all points of a grid, --sample N tries N points: at random, proposed by TPE from earlier results
    (--method tpe), or at random with successive halving (--method asha).

    Example: headstock sweep corpus.txt --grid depth=2,4 --grid lr=1e-3,3e-3 --steps 500 --out sweeps/mine
    Example: headstock sweep corpus.txt --method tpe --sample 20 --grid lr=1e-4..1e-2 --grid depth=1..6 --out sweeps/tpe
    """
    from headstock.data.records import parse_columns
    from headstock.experiments import sweep as experiment
    from headstock.experiments.terminal_tables import sweep_table
    from headstock.report.pages import write_report
    from headstock.train.callbacks import status_line
    from headstock.train.resolve import labelled_task

    names, column = parse_columns(columns.columns) if columns.columns else None, columns.column
    if options["run"] is not None:
        names, column = columns.names(main=labelled_task(options["task"] or "classify").input_column), None
    elif options["config_file"] is None and names and set(names) == {"text"}:
        names, column = None, columns.text()
    with status_line(quiet=common.quiet) as callbacks:
        results = experiment.sweep(
            corpus or (),
            grid=merged_grid(grid or []),
            out=out,
            columns=names,
            seed=common.seed,
            settings=settings.to_dict() | ({"data.column": column} if column is not None else {}),
            device=common.device,
            callbacks=callbacks,
            **options,
        )
    page = write_report(out)
    common.show(sweep_table(results))
    for line in [results["verdict"], *results["notes"]]:
        common.show_prose(line)
    if results["best"]:
        common.show(f"best run: {results['best']['run']}")
    common.show(f"report: {page}")
    return results | {"report": str(page)}


def merged_grid(texts: list[str]) -> dict[str, str]:
    """All --grid options as one mapping from settings to values."""
    from headstock.experiments.sweep_settings import parse_grid

    pairs = [parse_grid(text) for text in texts]
    keys = [key for key, _ in pairs]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise UserError(f"--grid {', '.join(repeated)}: given twice; list all values at once: --grid lr=1e-3,3e-3")
    return dict(pairs)


@command("Compare and measure")
def report(
    common: Common,
    folder: Annotated[Path, typer.Argument(help="A run, a comparison or a sweep.", show_default=False)],
    samples: Annotated[int | None, "Texts to generate for the page; default 3 if the run has none."] = None,
) -> dict[str, Any]:
    """Write report.html: results and charts on one page."""
    from jinja2 import UndefinedError

    from headstock.config import malformed_as_user_error
    from headstock.report.pages import write_report
    from headstock.train.run_folder import RunFolder

    run, texts, count = RunFolder(folder), [], 0
    if run.is_finished():
        check_results(run)
    if run.is_finished() and run.exists() and is_generator(run):
        count = samples if samples is not None else 0 if run.results().get("samples") else 3
    if count > 0:
        from headstock.cli.input_files import load

        logger.info("generating %d texts from %s", count, folder)
        pipeline = load(folder, device=common.device)
        texts = [row.text for row in pipeline.generate([""], samples=count, seed=common.seed or 0)]
    with malformed_as_user_error(folder / "results.json", "the results of a run, a comparison or a sweep"):
        try:
            page = write_report(folder, texts)
        except UndefinedError as error:
            raise ValueError(error) from error
    common.show(str(page))
    return {"report": str(page)}


def check_results(run: Any) -> None:
    """Refuse a results.json, which may have been edited, if a table or a list in it is something else."""
    results = run.results()
    for key, expected in RESULT_TYPES.items():
        if results.get(key) is not None and not isinstance(results[key], expected):
            what = "an object" if expected is dict else "a list"
            raise UserError(f"{run.path / 'results.json'}: {key}: must be {what}, not {results[key]!r:.60}")


def is_generator(run: Any) -> bool:
    """Whether a run is a pretrained left-to-right language model."""
    from headstock.tasks.base import TASKS

    objective = run.config().get("task", {}).get("name")
    return run.results().get("kind") in (None, "pretrain") and objective is not None and TASKS.get(objective).generates


def bench_files(options: dict[str, Any]) -> list[Path]:
    """The files of an --out; those of the default name are always replaced."""
    out = options["out"]
    return [] if out is None else [out, *([out.with_suffix(".json")] if options["growth"] else [])]


@command("Compare and measure", writes=bench_files)
def bench(
    common: Common,
    quick: Annotated[bool, "Take seconds: a check that everything runs."] = False,
    only: Annotated[list[str] | None, "start, store, train, decode, read or peers; repeatable."] = None,
    out: Annotated[Path | None, "Write the results to this .json file."] = None,
    growth: Annotated[bool, "Measure how cost grows with size, as a chart."] = False,
    megabytes: Annotated[float, "With --growth: size of the largest store."] = 300,
    peers: Annotated[Path | None, "Folder of peer scripts; default benchmarks/."] = None,
    nanogpt: Annotated[Path | None, "Folder with nanoGPT's model.py."] = None,
    on: Annotated[str | None, typer.Option("--on", metavar="ray[:ADDRESS]", help=ON_HELP)] = None,
) -> dict[str, Any]:
    """Measure the speed of this machine.

    Covers training, fine-tuning, decoding, prediction, embedding, start-up and the token store. With --on ray, the
    nodes of a cluster are measured instead: each part is a task that has a node to itself.

    Example: headstock bench --out bench.json
    Example: headstock bench --growth --out growth.svg
    """
    from headstock.experiments.bench import runner, scaling

    suffix = ".svg" if growth else ".json"
    out = out or Path(f"{'growth' if growth else 'bench'}{suffix}")
    if out.suffix != suffix:
        raise UserError(f"--out {out}: must end in {suffix}")
    if growth:
        if on is not None:
            raise UserError(f"--on {on}: --growth measures this machine alone; leave out one of the two")
        if megabytes < 1:
            raise UserError(f"--megabytes {megabytes}: must be 1 or more")
        steps = 4 if quick else scaling.STEPS
        results = scaling.measure_scaling(device=common.device, megabytes=megabytes, steps=steps)
        scaling.write_scaling_chart(results, out)
        common.show(f"{out} and {out.with_suffix('.json')}")
        return results | {"chart": str(out)}
    results = runner.bench(device=common.device, quick=quick, only=only, peers=peers, nanogpt=nanogpt, out=out, on=on)
    common.show(runner.bench_table(results))
    common.show(str(out))
    return results | {"file": str(out)}
