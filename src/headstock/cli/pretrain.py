"""`headstock pretrain`: from text to a language model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, ConfigFile, Documents, Overwrite, Resume, Settings, text_column


def pretrain(
    common: Common,
    out: Annotated[Path, typer.Option("--out", help="The run folder to make, such as runs/mine.")],
    corpus: Annotated[list[str] | None, typer.Argument(help="Files, folders, globs, or - for standard input.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="Where to start: gpt-nano, modern-mini, ...")] = None,
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="What is learned: causal (go on), masked (fill), hybrid (both) or both-ways."),
    ] = None,
    nsp: Annotated[
        bool | None, typer.Option("--nsp/--no-nsp", help="Masked: also tell whether one text follows another.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Length of the run in steps,")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="or in passes over the text,")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="or in minutes.")] = None,
    set_: Settings = None,
    config: ConfigFile = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Use this one instead of training one.")] = None,
    start: Annotated[str | None, typer.Option("--start", help="Begin with the model and weights of this run.")] = None,
    valid: Annotated[list[str] | None, typer.Option("--valid", help="Held-out text of your own.")] = None,
    documents: Documents = None,
    column: Column = None,
    columns: Columns = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Grow a language model from text, into a run folder.

    Example: headstock pretrain corpus.txt --out runs/mine --preset gpt-nano --minutes 5
    """
    from headstock.config import parse_setting
    from headstock.errors import quoted
    from headstock.inference.samples import sample_lines
    from headstock.report.pages import write_report
    from headstock.tasks.base import TASKS
    from headstock.train.callbacks import on_screen, summary
    from headstock.train.pretrain import pretrain as work
    from headstock.train.run_folder import RunFolder, check_resumable, open_run

    settings = dict(parse_setting(text) for text in set_ or [])
    options = {
        "train.steps": steps,
        "train.epochs": epochs,
        "train.minutes": minutes,
        "train.seed": common.seed,
        "task.nsp": nsp,
        "data.valid": valid,
        "data.documents": documents,
        "data.column": text_column(columns, column),
    }
    settings |= {key: value for key, value in options.items() if value is not None}
    if resume:
        check_resumable(RunFolder(out))
    if minutes and corpus and not (preset or config or start or tokenizer or (resume and out.exists())):
        check_first(RunFolder(out), settings, resume=resume, overwrite=overwrite)
        settings = sized(corpus, minutes, objective, settings, common)
    with on_screen(quiet=common.quiet) as callbacks:
        results = work(
            corpus or (),
            out=out,
            preset=preset,
            objective=objective,
            config_file=config,
            tokenizer=tokenizer,
            start=start,
            settings=settings,
            resume=resume,
            overwrite=overwrite,
            device=common.device,
            callbacks=callbacks,
            say=common.say,
        )
    results |= {"run": str(out)}  # a run that was finished elsewhere and copied here remembers its old name
    if common.leads:
        write_report(out)
    common.tell(
        f"{results['run']}: {results['steps']:,} steps in {results['seconds']:.0f} s, "
        f"{results['tokens_per_second']:,.0f} tokens/s | {summary(results['metrics'])}"
    )
    for line in sample_lines(results.get("samples", [])):
        common.show(f"  {line}")
    task = TASKS.get(open_run(out).config()["task"]["name"])
    if task.generates:
        common.show(f'try: headstock generate {quoted(out)} "Once"')
    if task.fills:
        common.show(f'try: headstock fill {quoted(out)} "Once [MASK] a time"')
    return results


def check_first(run: Any, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Find what a planned run would be refused for, before the plan is made and shown."""
    from dataclasses import fields

    from headstock import config
    from headstock.train.pretrain import check_folder
    from headstock.train.settings import TrainSettings

    check_folder(run, resume=resume, overwrite=overwrite)
    known = {part.name for part in fields(TrainSettings)}
    named = {key.removeprefix("train."): value for key, value in settings.items()}
    config.build(TrainSettings, {name: value for name, value in named.items() if name in known}, at="train")


def sized(
    corpus: list[str], minutes: float, objective: str | None, settings: dict[str, Any], common: Common
) -> dict[str, Any]:
    """The settings of a plan under those that were named; as they were where a size was named among them."""
    from headstock.planner.planner import flat, plan
    from headstock.planner.summary import why

    size = ("model.", "tokenizer.", "task.", "vocabulary", "depth", "width", "context", "heads", "hidden", "family")
    if "-" in corpus or any(key.startswith(size) for key in settings) or not common.leads:
        return settings
    made = plan(
        corpus,
        device=common.device,
        minutes=minutes,
        objective=objective,
        documents=settings.get("data.documents"),
        column=settings.get("data.column"),
    )
    common.say(why(made))
    chosen = {key: value for key, value in flat(made.tree).items() if key not in ("train.steps", "data.corpus")}
    bare = {key.rpartition(".")[2] for key in settings}
    return {key: value for key, value in chosen.items() if key.rpartition(".")[2] not in bare} | settings


def add_to(app: typer.Typer) -> None:
    verb(app)(pretrain)
