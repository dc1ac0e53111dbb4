"""`headstock export` and `headstock import`."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import Overwrite, RunOut, RunPath

logger = logging.getLogger(__name__)


@command("Exchange")
def export(
    common: Common,
    run: RunPath,
    folder: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    to: Annotated[str, "huggingface, onnx or lab."] = "huggingface",
    int8: Annotated[bool, "With onnx: also write an int8 model."] = False,
    measure: Annotated[Path | None, "With --int8: labelled file on which to measure its accuracy."] = None,
    embedding: Annotated[bool, "With onnx: export text embeddings instead of the run's head."] = False,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Export a run to Hugging Face, ONNX Runtime or the course lab.

    Example: headstock export runs/reviews --to huggingface reviews-hf
    """
    from headstock.interop import export_run

    result = export_run(run, folder, to=to, int8=int8, measure=measure, embedding=embedding, overwrite=overwrite)
    architecture = f" as {result['architecture']}" if "architecture" in result else ""
    common.show(f"{folder}: {run} for {to}{architecture}")
    for line in result.get("try", []):
        common.show(f"  {line}")
    return {"run": str(run), "to": to, "folder": str(folder), **result}


@command("Exchange")
def import_(
    common: Common,
    path: Annotated[Path, typer.Argument(help="A Hugging Face folder, or the lab's .pt file.", show_default=False)],
    out: RunOut,
    dictionary: Annotated[Path | None, "Lab checkpoint: its dict.txt, if not in the same folder."] = None,
    sentencepiece: Annotated[Path | None, "Lab checkpoint: its .model, if not in the same folder."] = None,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Import a model from Hugging Face or the course lab.

    Example: headstock import downloads/bert-base-uncased --out runs/bert
    """
    from headstock.interop import import_run

    run = import_run(path, out=out, dictionary=dictionary, sentencepiece=sentencepiece, overwrite=overwrite)
    results = run.results()
    common.show(f"{run}: {results['parameters']['total']:,} parameters from {path}")
    return {"run": str(run), **{key: results[key] for key in ("kind", "from", "parameters") if key in results}}
