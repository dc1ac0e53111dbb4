"""`headstock report`: what a run or a comparison came to, as one page."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb


def report(
    common: Common,
    folder: Annotated[Path, typer.Argument(help="A run, or what compare made.", show_default=False)],
    samples: Annotated[
        int | None,
        typer.Option("--samples", help="Texts a language model is to generate for it; 3 where the run has no samples."),
    ] = None,
) -> dict[str, Any]:
    """Write report.html: one page with charts that opens anywhere, also without a network."""
    from headstock.report.pages import write_report
    from headstock.train.run_folder import RunFolder

    run, texts = RunFolder(folder), []
    if run.is_finished() and run.exists() and speaks(run):
        count = samples if samples is not None else 0 if run.results().get("samples") else 3
    else:
        count = 0
    if count > 0:
        from headstock.inference.pipeline import load

        common.say(f"{count} texts from {folder}")
        made = load(folder, device=common.device).generate([""], samples=count, seed=common.seed or 0)
        texts = [row.text for row in made]
    written = write_report(folder, texts)
    common.show(str(written))
    return {"report": str(written)}


def speaks(run: Any) -> bool:
    """Whether the run is a language model that writes from left to right."""
    from headstock.tasks.base import TASKS

    objective = run.config().get("task", {}).get("name")
    return run.results().get("kind") in (None, "pretrain") and objective is not None and TASKS.get(objective).generates


def add_to(app: typer.Typer) -> None:
    verb(app)(report)
