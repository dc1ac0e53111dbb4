"""`headstock import`: what others made, as a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Overwrite


def take_in(
    common: Common,
    path: Annotated[Path, typer.Argument(help="A Hugging Face folder, or the lab's .pt file.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The run folder to make, such as runs/bert.")],
    dictionary: Annotated[
        Path | None, typer.Option("--dictionary", help="Of a lab checkpoint: its dict.txt, if not beside it.")
    ] = None,
    sentencepiece: Annotated[
        Path | None, typer.Option("--sentencepiece", help="Of a lab checkpoint: its .model, if not beside it.")
    ] = None,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Make a run folder of a model that was made elsewhere; every verb works on it then.

    Example: headstock import downloads/bert-base-uncased --out runs/bert
    """
    from headstock.interop import import_run

    run = import_run(
        path, out=out, dictionary=dictionary, sentencepiece=sentencepiece, overwrite=overwrite, say=common.say
    )
    results = run.results()
    common.show(f"{run}: {results['parameters']['total']:,} parameters from {path}")
    return {"run": str(run), **{key: results[key] for key in ("kind", "from", "parameters") if key in results}}


def add_to(app: typer.Typer) -> None:
    verb(app, "import")(take_in)
