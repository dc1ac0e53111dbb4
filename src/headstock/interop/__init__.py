"""Import and export of models: Hugging Face folders, ONNX, GGUF and the course lab's checkpoints."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.config import read_settings
from headstock.errors import UserError, did_you_mean, suggest_path
from headstock.io import FolderLayout, check_inputs, check_replaceable

if TYPE_CHECKING:
    from headstock.train.run_folder import RunFolder

FORMATS = ("huggingface", "onnx", "gguf", "lab")
MARKER = "headstock.json"  # identifies an export whose other files do not
# every file an export may contain: a folder with any other file is not replaced
HUGGINGFACE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "modeling_headstock.py")
TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json")
ONNX = ("model.onnx", "model.onnx.data", "model_int8.onnx", "model.json")
LAB = ("model.pt", "dict.txt", "sentencepiece.model", MARKER)
GGUF = ("model.gguf", MARKER)
LAYOUT: FolderLayout = dict.fromkeys((*HUGGINGFACE, *TOKENIZER, *ONNX, *LAB, *GGUF, "README.md"))


def export_run(
    run: "str | Path | RunFolder",
    folder: str | Path | None = None,
    *,
    to: str = "huggingface",
    int8: bool = False,
    measure: str | Path | None = None,
    embedding: bool = False,
    custom_code: bool = False,
    overwrite: bool = False,
    push: str | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Export a finished run with identical outputs; a run that the format cannot represent exactly is refused.

    `int8`, `measure` and `embedding` are for ONNX: quantized weights, the labelled file on which their loss of accuracy
    is measured, and a graph that returns text embeddings instead of the output of the run's head. `custom_code` is for
    Hugging Face: a classification head that transformers does not have becomes a module in the folder.

    `push` uploads the export to the repository ORG/NAME of the Hugging Face Hub; with `dry_run` it is only listed.
    """
    if push is None:
        if private or dry_run:
            raise UserError(f"{'--dry-run' if dry_run else '--private'}: requires --push ORG/NAME")
        if folder is None:
            raise UserError("expected a folder to create, or --push ORG/NAME")
        return write_export(run, Path(folder), to, int8, measure, embedding, custom_code, overwrite=overwrite)
    from headstock.interop.hub import check_push_target, push_folder

    repo = check_push_target(push)
    if to != "huggingface":
        raise UserError(f"--push {push}: requires --to huggingface, not --to {to}")
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / "export" if folder is None else Path(folder)
        result = write_export(
            run, target, to, int8, measure, embedding, custom_code, overwrite=overwrite, location=repo
        )
        return result | {"push": push_folder(target, repo, private=private, dry_run=dry_run)}


def write_export(
    run: "str | Path | RunFolder",
    target: Path,
    to: str,
    int8: bool,
    measure: str | Path | None,
    embedding: bool,
    custom_code: bool,
    *,
    overwrite: bool,
    location: str | None = None,
) -> dict[str, Any]:
    """Write the folder of an export; its card says how to load it from `location`, by default that folder."""
    from headstock.train.run_folder import RunFolder, open_run

    if to not in FORMATS:
        raise UserError(f"--to {to}: must be one of {', '.join(FORMATS)}{did_you_mean(to, FORMATS)}")
    onnx_options = {"--int8": int8, "--measure": measure is not None, "--embedding": embedding}
    if to != "onnx" and any(onnx_options.values()):
        option = next(option for option, is_set in onnx_options.items() if is_set)
        raise UserError(f"{option}: requires --to onnx, not --to {to}")
    if custom_code and to != "huggingface":
        raise UserError(f"--custom-code: requires --to huggingface, not --to {to}")
    source = run if isinstance(run, RunFolder) else open_run(run)
    check_target(target, overwrite=overwrite)
    if target.exists():
        check_inputs(target, [source.path, *([measure] if measure is not None else [])])
    if to == "onnx":
        from headstock.interop.onnx import export_onnx

        file = None if measure is None else Path(measure)
        return export_onnx(source, target, int8=int8, measure=file, embedding=embedding)
    if to == "gguf":
        from headstock.interop.gguf import export_gguf

        return export_gguf(source, target)
    if to == "lab":
        from headstock.interop.lab import export_lab

        return export_lab(source, target)
    from headstock.interop.huggingface import export_folder

    return export_folder(source, target, custom_code=custom_code, location=location)


def import_run(
    path: str | Path,
    *,
    out: str | Path,
    dictionary: str | Path | None = None,
    sentencepiece: str | Path | None = None,
    overwrite: bool = False,
) -> "RunFolder":
    """Import a Hugging Face folder, a model of the Hub (hf://ORG/NAME[@REVISION]) or a lab checkpoint as a run.

    `dictionary` and `sentencepiece` are the lab's dict.txt and model, if they are not in the checkpoint's folder.
    """
    from headstock.train.run_folder import RunFolder, is_hub_name
    from headstock.train.session import check_inputs_outside, check_output_folder

    source, run = Path(path), RunFolder(Path(out))
    if not is_hub_name(path) and not source.exists():
        siblings = source.parent.glob("*") if source.parent.is_dir() else ()
        raise UserError(f"{path}: no such folder or file{suggest_path(source.name, (p.name for p in siblings))}")
    if run.path.exists() and not overwrite:
        raise UserError(f"{out}: exists already; choose another folder or use --overwrite")
    check_inputs_outside(run, [source, dictionary, sentencepiece])
    check_output_folder(run, resume=False, overwrite=overwrite)
    if is_hub_name(path):
        from headstock.interop.hub import import_hub_run

        check_no_lab_files(path, dictionary, sentencepiece)
        return import_hub_run(path, run.path)
    if source.is_file():
        if source.suffix not in (".pt", ".pth"):
            raise UserError(f"{path}: expected a Hugging Face folder or a lab checkpoint (.pt), got {source.suffix}")
        from headstock.interop.lab import import_lab

        return import_lab(source, run.path, dictionary=dictionary, sentencepiece=sentencepiece)
    check_no_lab_files(path, dictionary, sentencepiece)
    if (source / "data.json").is_file():
        raise UserError(f"{path}: is already a run folder")
    if not (source / "config.json").is_file():
        raise UserError(f"{path}: expected a Hugging Face folder, but it has no config.json")
    from headstock.interop.huggingface import import_folder

    return import_folder(source, run.path)


def check_no_lab_files(path: str | Path, *files: str | Path | None) -> None:
    if any(file is not None for file in files):
        raise UserError(f"{path}: is no lab checkpoint (.pt), which --dictionary and --sentencepiece require")


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything but an earlier export, and that only with `overwrite`."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; an export is a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{folder}: exists already; choose another folder or use --overwrite")
    if (folder / "data.json").exists():
        raise UserError(f"{folder}: is a run folder and is not replaced; choose another folder")
    if not is_export(folder):
        raise UserError(f"{folder}: is not an export of Headstock and is not replaced; choose another folder")
    check_replaceable(folder, LAYOUT)


def is_export(folder: Path) -> bool:
    """Whether a folder was exported by Headstock, according to its marker or JSON files."""

    def keys(name: str) -> set[str]:
        try:
            return set(read_settings(folder / name))
        except UserError:
            return set()

    onnx = (folder / "model.onnx").is_file() and {"kind", "inputs", "outputs"} <= keys("model.json")
    return (folder / MARKER).is_file() or "headstock" in keys("config.json") or onnx


def mismatches(actual: Mapping[str, Any], required: Mapping[str, Any], section: str = "") -> list[str]:
    """The settings that differ from what a format requires; a tuple lists alternatives."""
    problems = []
    for name, value in required.items():
        alternatives = value if isinstance(value, tuple) else (value,)
        if actual[name] not in alternatives:
            expected = " or ".join(map(format_setting, alternatives))
            problems.append(f"{section}{name} is {format_setting(actual[name])}, not {expected}")
    return problems


def format_setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def missing_dependency(name: str) -> UserError:
    return UserError(f"this needs {name}, which is not installed: pip install 'headstock[interop]'")
