"""`headstock demo`: the whole story on real data."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.verb import Common, verb


def demo(
    common: Common,
    out: Annotated[Path, typer.Option("--out", help="The run folder to make.")] = Path("runs/demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
) -> dict[str, Any]:
    """Grow a small Shakespeare model here in two minutes, and let it speak."""
    from headstock.study.demo import tell

    return tell(
        out,
        overwrite=overwrite,
        device=common.device,
        seed=common.seed or 0,
        quiet=common.quiet,
        say=common.say,
        show=common.show,
    )


def add_to(app: typer.Typer) -> None:
    verb(app)(demo)
