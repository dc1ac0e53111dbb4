"""`headstock compare`: does pretraining pay here?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, ConfigFile, Settings, SkipBlank, Test, Train, Valid, named_columns


def compare(
    common: Common,
    out: Annotated[Path, typer.Option("--out", help="The folder to keep everything in; a stopped one goes on.")],
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Pretrained runs, or reviews-en, which ships with Headstock.")
    ] = None,
    train: Train = None,
    valid: Valid = None,
    test: Test = None,
    task: Annotated[str | None, typer.Option("--task", help="classify, pair, tag, answer or translate.")] = None,
    arms: Annotated[str | None, typer.Option("--arms", help="scratch,pretrained,frozen,tfidf unless given.")] = None,
    features: Annotated[
        str | None, typer.Option("--features", help="Frozen arms by layers: last,sum4,concat4,mix or numbers.")
    ] = None,
    labels: Annotated[str | None, typer.Option("--labels", help="Numbers of labels, such as 100,400,1600.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="How often everything is repeated; 5.")] = None,
    columns: Columns = None,
    column: Column = None,
    skip_blank: SkipBlank = False,
    leakage: Annotated[
        str | None, typer.Option("--leakage", help="Test texts seen in pretraining: exclude, keep, or skip the search.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Measure on at most so many test rows.")] = None,
    set_: Settings = None,
    config: ConfigFile = None,
) -> dict[str, Any]:
    """Compare pretrained, frozen, from scratch and TF-IDF on your labels, and say with intervals what pays.

    Example: headstock compare reviews-en --train train.csv --valid valid.csv --test test.csv --labels 100,400 --out out
    """
    from headstock.config import parse_setting
    from headstock.experiments.compare import compare as work
    from headstock.experiments.compare_table import comparison_table, runs_table
    from headstock.report.pages import write_report
    from headstock.train.callbacks import one_line
    from headstock.train.finetune_config import labelled_task

    with one_line(quiet=common.quiet) as callbacks:
        results = work(
            [str(run) for run in runs or []],
            train=train,
            valid=valid,
            test=test,
            out=out,
            task=task,
            arms=names(arms) if arms else None,
            features=names(features) if features else None,
            labels=counts(labels) if labels else None,
            seeds=seeds,
            seed=common.seed,
            columns=named_columns(columns, column, main=labelled_task(task or "classify").input_column),
            skip_blank=skip_blank or None,
            leakage=leakage,
            rows=rows,
            config_file=config,
            settings=dict(parse_setting(text) for text in set_ or []),
            device=common.device,
            callbacks=callbacks,
            say=common.say,
        )
    page = write_report(out)
    common.show(comparison_table(results))
    if results["runs"]:
        common.show(runs_table(results["runs"]))
    for line in [*results["verdicts"], *results["notes"]]:
        common.tell(line)
    common.show(f"report: {page}")
    return results | {"report": str(page)}


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def counts(text: str) -> list[int]:
    from headstock.errors import UserError

    try:
        return [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--labels {text}: wanted numbers with commas between, such as 100,400,1600") from None


def add_to(app: typer.Typer) -> None:
    verb(app)(compare)
