"""`headstock report`: what a run or a comparison came to, as one page."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.verb import Common, verb


def report(
    common: Common,
    folder: Annotated[Path, typer.Argument(help="A run, or what compare made.", show_default=False)],
    samples: Annotated[int, typer.Option("--samples", help="Texts a language model is to generate for it.")] = 3,
) -> dict[str, Any]:
    """Write report.html: one page with charts that opens anywhere, also without a network."""
    from headstock.study.report import write_report
    from headstock.train.run import Run

    run, texts = Run(folder), []
    if samples > 0 and run.finished() and run.exists() and speaks(run):
        from headstock.train.loaded import load

        common.say(f"{samples} texts from {folder}")
        made = load(folder, device=common.device).generate([""], samples=samples, seed=common.seed or 0)
        texts = [row.text for row in made]
    written = write_report(folder, texts)
    common.show(str(written))
    return {"report": str(written)}


def speaks(run: Any) -> bool:
    """Whether the run is a language model that writes from left to right."""
    from headstock.tasks.task import TASKS

    objective = run.config().get("task", {}).get("name")
    return run.results().get("kind") in (None, "pretrain") and objective is not None and TASKS.get(objective).generates


def add_to(app: typer.Typer) -> None:
    verb(app)(report)
