"""`headstock demo`: the whole story on real data."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb


def demo(
    common: Common,
    sentences: Annotated[list[str] | None, typer.Argument(help="Sentences of your own to classify at the end.")] = None,
    out: Annotated[Path, typer.Option("--out", help="The folder to keep everything in.")] = Path("runs/demo"),
    minutes: Annotated[
        float,
        typer.Option("--minutes", help="About how long; the range for this machine is said first."),
    ] = 5.5,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew if the folder is there.")] = False,
) -> dict[str, Any]:
    """Does pretraining pay? The whole story on real film reviews, in minutes, on this machine."""
    from headstock.errors import UserError
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
        say=common.say,
        show=common.tell,
    )


def add_to(app: typer.Typer) -> None:
    verb(app)(demo)
