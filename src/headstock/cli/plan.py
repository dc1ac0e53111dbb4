"""`headstock plan`: what to train on this text, and what it will take."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Column, Columns, Documents, text_column


def plan(
    common: Common,
    corpus: Annotated[list[str], typer.Argument(help="Files, folders or globs.")],
    minutes: Annotated[float | None, typer.Option("--minutes", help="How long training may take.")] = None,
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="causal, masked, hybrid, both-ways or denoise; proposed unless named."),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Make 50 or more real steps here, and correct it.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the settings to this .toml file.")] = None,
    documents: Documents = None,
    column: Column = None,
    columns: Columns = None,
) -> dict[str, Any]:
    """Propose a model and a length of training for a text, and predict its time and memory.

    Example: headstock plan corpus.txt --minutes 30 --probe --out mine.toml
    """
    from headstock.errors import UserError, quoted
    from headstock.experiments.recipe import to_toml
    from headstock.io import write_text
    from headstock.planner.planner import plan as work
    from headstock.planner.summary import heading, table, told

    if out is not None and out.suffix != ".toml":
        raise UserError(f"--out {out}: must end in .toml")
    made = work(
        corpus,
        device=common.device,
        minutes=minutes,
        objective=objective,
        probe=probe,
        documents=documents,
        column=text_column(columns, column),
        seed=common.seed,
        say=common.say,
    )
    common.show(table(made))
    for line in told(made):
        common.tell(line)
    recipe = to_toml(made.tree, heading(made))
    if out is not None:
        write_text(out, recipe)
        common.show(f"try: headstock pretrain --config {quoted(out)} --out runs/mine")
    else:
        common.show()
        common.show(recipe)
    return made.plain() | ({"recipe": str(out)} if out is not None else {})


def add_to(app: typer.Typer) -> None:
    verb(app, writes=lambda given: [given["out"]])(plan)
