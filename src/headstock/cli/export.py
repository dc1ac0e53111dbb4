"""`headstock export`: a run as others read it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, verb
from headstock.cli.options import Overwrite, RunPath


def export(
    common: Common,
    run: RunPath,
    folder: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="huggingface, onnx or lab.")] = "huggingface",
    int8: Annotated[bool, typer.Option("--int8", help="With onnx: also the model in 8-bit whole numbers.")] = False,
    measure: Annotated[
        Path | None, typer.Option("--measure", help="With --int8: a labelled file that tells what it costs.")
    ] = None,
    embedding: Annotated[
        bool, typer.Option("--embedding", help="With onnx: what makes vectors of texts, whatever head the run has.")
    ] = False,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Write a finished run as Hugging Face, ONNX Runtime or the course lab read it, with the same answers.

    Example: headstock export runs/reviews --to huggingface reviews-hf
    """
    from headstock.interop import export_run

    result = export_run(
        run, folder, to=to, int8=int8, measure=measure, embedding=embedding, overwrite=overwrite, say=common.say
    )
    named = f" as {result['architecture']}" if "architecture" in result else ""
    common.show(f"{folder}: {run} for {to}{named}")
    for line in result.get("try", []):
        common.show(f"  {line}")
    return {"run": str(run), "to": to, "folder": str(folder), **result}


def add_to(app: typer.Typer) -> None:
    verb(app)(export)
