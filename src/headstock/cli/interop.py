"""`headstock export` and `headstock import`."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import Overwrite, RunOut, RunPath

logger = logging.getLogger(__name__)

SOURCE_HELP = "A Hugging Face folder, a model of the Hub (hf://ORG/NAME[@REVISION]), or the lab's .pt file."


@command("Exchange")
def export(
    common: Common,
    run: RunPath,
    folder: Annotated[Path | None, typer.Argument(help="Folder to create; optional with --push.")] = None,
    to: Annotated[str, "huggingface, onnx, gguf or lab."] = "huggingface",
    int8: Annotated[bool, "With onnx: also write an int8 model."] = False,
    measure: Annotated[Path | None, "With --int8: labelled file on which to measure its accuracy."] = None,
    embedding: Annotated[bool, "With onnx: export text embeddings instead of the run's head."] = False,
    custom_code: Annotated[
        bool, "With huggingface: allow a classification head that transformers lacks, as a module in the folder."
    ] = False,
    overwrite: Overwrite = False,
    push: Annotated[str | None, "With huggingface: upload to the repository ORG/NAME of the Hugging Face Hub."] = None,
    private: Annotated[bool, "With --push: make a new repository private."] = False,
    dry_run: Annotated[bool, "With --push: list the files instead of uploading them."] = False,
) -> dict[str, Any]:
    """Export a run to Hugging Face, ONNX, GGUF or the course lab.

    Example: headstock export runs/reviews --to huggingface reviews-hf
    """
    from headstock.interop import export_run

    options: dict[str, Any] = {"to": to, "int8": int8, "measure": measure, "embedding": embedding}
    options |= {
        "custom_code": custom_code,
        "overwrite": overwrite,
        "push": push,
        "private": private,
        "dry_run": dry_run,
    }
    result = export_run(run, folder, **options)
    architecture = f" as {result['architecture']}" if "architecture" in result else ""
    upload = result.get("push", {})
    common.show(f"{folder or upload['url']}: {run} for {to}{architecture}")
    for line in result.get("try", []) if folder else []:
        common.show(f"  {line}")
    if upload:
        show_upload(common, upload)
    return {"run": str(run), "to": to, "folder": str(folder) if folder else None, **result}


def show_upload(common: Common, upload: dict[str, Any]) -> None:
    """The files of --push, and where they are or would be."""
    done = "would be uploaded to" if upload["dry_run"] else "uploaded to"
    for file in upload["files"]:
        common.show(f"  {file['bytes']:>13,}  {file['path']}")
    common.show(f"{upload['bytes']:,} bytes {done} {upload['url']}")


@command("Exchange")
def import_(
    common: Common,
    path: Annotated[str, typer.Argument(help=SOURCE_HELP, show_default=False)],
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
