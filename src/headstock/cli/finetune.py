"""`headstock finetune`: a new head on a pretrained backbone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import (
    Column,
    Columns,
    ConfigFile,
    Overwrite,
    Resume,
    Settings,
    SkipBlank,
    Test,
    Train,
    Valid,
    named_columns,
)


def finetune(
    common: Common,
    out: Annotated[Path, typer.Option("--out", help="The run folder to make, such as runs/reviews.")],
    run: Annotated[
        Path | None, typer.Argument(help="The pretrained run, or a stock that ships with Headstock (reviews-en).")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Without a run: what a new model is made like (seq2seq-mini).")
    ] = None,
    train: Train = None,
    valid: Valid = None,
    test: Test = None,
    task: Annotated[str, typer.Option("--task", help="classify, pair, tag, answer or translate.")] = "classify",
    init: Annotated[str | None, typer.Option("--init", help="Begin with pretrained weights or from scratch.")] = None,
    freeze: Annotated[bool, typer.Option("--freeze", help="Train the head alone.")] = False,
    pool: Annotated[str | None, typer.Option("--pool", help="last, cls, mean, max or concat.")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the labelled texts.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="The highest learning rate.")] = None,
    layer_decay: Annotated[
        float | None, typer.Option("--layer-decay", help="Each layer's share of the learning rate above it.")
    ] = None,
    adapt_steps: Annotated[
        int | None, typer.Option("--adapt-steps", help="First pretrain on the task's own texts for so many steps.")
    ] = None,
    ensemble: Annotated[int | None, typer.Option("--ensemble", help="Average so many models, one a seed.")] = None,
    columns: Columns = None,
    column: Column = None,
    skip_blank: SkipBlank = False,
    set_: Settings = None,
    config: ConfigFile = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Put a new head on a pretrained run and train it on labelled texts, into a run folder of its own.

    Example: headstock finetune reviews-en --train train.csv --valid valid.csv --test test.csv --out runs/mine
    """
    from headstock.config import parse_setting
    from headstock.errors import quoted
    from headstock.experiments.error_report import add_error_analysis
    from headstock.report.pages import write_report
    from headstock.train.callbacks import on_screen
    from headstock.train.finetune import finetune as work
    from headstock.train.finetune_config import labelled_task
    from headstock.train.model_card import measured_lines
    from headstock.train.run_folder import RunFolder, check_resumable

    settings = dict(parse_setting(text) for text in set_ or [])
    options = {
        "task.pool": pool,
        "train.epochs": epochs,
        "train.lr": lr,
        "train.layer_decay": layer_decay,
        "train.seed": common.seed,
        "transfer.adapt_steps": adapt_steps,
        "transfer.ensemble": ensemble,
    }
    settings |= {key: value for key, value in options.items() if value is not None}
    if resume:
        check_resumable(RunFolder(out))
    with on_screen(quiet=common.quiet) as callbacks:
        results = work(
            run,
            preset=preset,
            train=train,
            valid=valid,
            test=test,
            task=task,
            out=out,
            columns=named_columns(columns, column, main=labelled_task(task).input_column),
            skip_blank=skip_blank,
            init=init,
            freeze=freeze or None,
            config_file=config,
            settings=settings,
            resume=resume,
            overwrite=overwrite,
            device=common.device,
            callbacks=callbacks,
            say=common.say,
        )
    results |= {"run": str(out)}  # a run that was finished elsewhere and copied here remembers its old name
    if common.leads:
        add_error_analysis(RunFolder(out), device=common.device)
        write_report(out)
    done = f"{results['steps']:,} steps in {results['seconds']:.0f} s, best epoch {results['best_epoch']}"
    common.tell(f"{results['run']}: {done}")
    for side in ("valid", "test"):
        if side in results:
            for line in measured_lines(side, results[side]):
                common.tell(line)
    learned = labelled_task(results["task"])
    common.show(f"report: {RunFolder(out).report}")
    common.show(f"try: headstock {learned.use} {quoted(out)} {learned.example}")
    return results


def add_to(app: typer.Typer) -> None:
    verb(app)(finetune)
