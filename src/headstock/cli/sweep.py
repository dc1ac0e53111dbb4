"""`headstock sweep`: which settings are best?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, ConfigFile, Documents, Settings, Train, named_columns, text_column


def sweep(
    common: Common,
    out: Annotated[Path, typer.Option("--out", help="The folder to keep everything in; a stopped one goes on.")],
    corpus: Annotated[list[str] | None, typer.Argument(help="Text to pretrain on; or else name a --run.")] = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="A setting and its values: lr=1e-3,3e-3; may be repeated.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", help="Draw so many points; then lr=1e-4..1e-2 is a range.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="How often each point is repeated; 3.")] = None,
    by: Annotated[str | None, typer.Option("--by", help="Rank pretraining by loss or bits_per_byte.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep every run, not only the best one.")] = False,
    run: Annotated[str | None, typer.Option("--run", help="Fine-tune this run instead of pretraining.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="With --run: classify, pair, tag or answer.")] = None,
    train: Train = None,
    valid: Annotated[
        list[str] | None, typer.Option("--valid", help="What points are ranked by: labelled rows, or held-out text.")
    ] = None,
    columns: Columns = None,
    preset: Annotated[str | None, typer.Option("--preset", help="Where to start: gpt-nano, modern-mini, ...")] = None,
    objective: Annotated[str | None, typer.Option("--objective", help="causal, masked or hybrid.")] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Use this one instead of training one.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Length of each training in steps,")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="or in passes over the text or rows,")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="or in minutes.")] = None,
    documents: Documents = None,
    column: Column = None,
    set_: Settings = None,
    config: ConfigFile = None,
) -> dict[str, Any]:
    """Try a grid of settings, or a random sample of it, with several seeds each, and rank them with intervals.

    Pretraining is ranked by validation loss, fine-tuning by the task's metric on the validation rows, never on test
    rows. The same command goes on where it was stopped.

    Example: headstock sweep corpus.txt --grid depth=2,4 --grid lr=1e-3,3e-3 --steps 500 --out sweeps/mine
    """
    from headstock.config import parse_setting
    from headstock.data.records import parse_columns
    from headstock.experiments.grid import parse_grid
    from headstock.experiments.sweep import sweep as work
    from headstock.experiments.sweep_summary import ranked_table
    from headstock.report.pages import write_report
    from headstock.train.callbacks import one_line
    from headstock.train.finetune_config import labelled_task

    settings = dict(parse_setting(text) for text in set_ or [])
    options: dict[str, Any] = {"train.steps": steps, "train.epochs": epochs, "train.minutes": minutes}
    named = parse_columns(columns) if columns else None
    if run is not None:
        named, column = named_columns(columns, column, main=labelled_task(task or "classify").input_column), None
    elif config is None and named and set(named) == {"text"}:
        named, column = None, text_column(columns, column)
    options |= {"data.documents": documents, "data.column": column}
    settings |= {key: value for key, value in options.items() if value is not None}
    with one_line(quiet=common.quiet) as callbacks:
        results = work(
            corpus or (),
            grid=gathered([parse_grid(text) for text in grid or []]),
            out=out,
            run=run,
            task=task,
            train=train,
            valid=valid,
            columns=named,
            preset=preset,
            objective=objective,
            tokenizer=tokenizer,
            sample=sample,
            seeds=seeds,
            seed=common.seed,
            by=by,
            keep=keep or None,
            config_file=config,
            settings=settings,
            device=common.device,
            callbacks=callbacks,
            say=common.say,
        )
    page = write_report(out)
    common.show(ranked_table(results))
    for line in [results["verdict"], *results["notes"]]:
        common.tell(line)
    if results["best"]:
        common.show(f"the best run: {results['best']['run']}")
    common.show(f"report: {page}")
    return results | {"report": str(page)}


def gathered(pairs: list[tuple[str, str]]) -> dict[str, str]:
    from headstock.errors import UserError

    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise UserError(f"--grid {', '.join(twice)}: named twice; put all values in one, such as --grid lr=1e-3,3e-3")
    return dict(pairs)


def add_to(app: typer.Typer) -> None:
    verb(app)(sweep)
