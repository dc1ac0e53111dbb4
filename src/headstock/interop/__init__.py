"""In from and out to the ecosystem: which format a folder or file is of, and who knows it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.config import read_settings
from headstock.errors import UserError, did_you_mean, suggest_path
from headstock.io import Layout, check_inputs, check_replaceable

if TYPE_CHECKING:
    from headstock.train.run_folder import RunFolder

Say = Callable[[str], None]

FORMATS = ("huggingface", "onnx", "lab")
MARK = "headstock.json"  # in an export whose other files do not say that it is ours
# all that an exported folder may hold: one with anything else in it is not replaced
HUGGINGFACE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json")
ONNX = ("model.onnx", "model.onnx.data", "model_int8.onnx", "model.json")
LAB = ("model.pt", "dict.txt", "sentencepiece.model", MARK)
LAYOUT: Layout = dict.fromkeys((*HUGGINGFACE, *TOKENIZER, *ONNX, *LAB, "README.md"))


def export_run(
    run: "str | Path | RunFolder",
    folder: str | Path,
    *,
    to: str = "huggingface",
    int8: bool = False,
    measure: str | Path | None = None,
    embedding: bool = False,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Write a finished run as others read it, with the same answers; what cannot be said exactly is refused.

    `int8`, `measure` and `embedding` are for ONNX: quantised weights, the labelled file on which their price is
    measured, and what makes vectors of texts instead of what the run's own head says.
    """
    from headstock.train.run_folder import RunFolder, open_run

    if to not in FORMATS:
        raise UserError(f"--to {to}: must be one of {', '.join(FORMATS)}{did_you_mean(to, FORMATS)}")
    asked = {"--int8": int8, "--measure": measure is not None, "--embedding": embedding}
    if to != "onnx" and any(asked.values()):
        given = next(option for option, there in asked.items() if there)
        raise UserError(f"{given}: goes with --to onnx, not with --to {to}")
    source, target = run if isinstance(run, RunFolder) else open_run(run), Path(folder)
    check_target(target, overwrite=overwrite)
    if target.exists():
        check_inputs(target, [source.path, *([measure] if measure is not None else [])])
    if to == "onnx":
        from headstock.interop.onnx import export_onnx

        file = None if measure is None else Path(measure)
        return export_onnx(source, target, int8=int8, measure=file, embedding=embedding, say=say)
    if to == "lab":
        from headstock.interop.lab import export_lab

        return export_lab(source, target, say)
    from headstock.interop.huggingface import export

    return export(source, target, say=say)


def import_run(
    path: str | Path,
    *,
    out: str | Path,
    dictionary: str | Path | None = None,
    sentencepiece: str | Path | None = None,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> "RunFolder":
    """Make a run folder of a Hugging Face folder or of a lab checkpoint, by what lies at `path`.

    `dictionary` and `sentencepiece` are the lab's dict.txt and model, where they do not lie beside its checkpoint.
    """
    from headstock.train.run_folder import RunFolder, check_folder, check_inputs_outside

    source = Path(path)
    if not source.exists():
        near = suggest_path(source.name, (p.name for p in source.parent.glob("*"))) if source.parent.is_dir() else ""
        raise UserError(f"{path}: no such folder or file{near}")
    if RunFolder(Path(out)).path.exists() and not overwrite:
        raise UserError(f"{out}: exists already; replace it with --overwrite, or name another")
    check_inputs_outside(RunFolder(Path(out)), [source, dictionary, sentencepiece])
    check_folder(RunFolder(Path(out)), resume=False, overwrite=overwrite)
    if source.is_file():
        if source.suffix not in (".pt", ".pth"):
            raise UserError(
                f"{path}: wanted a Hugging Face folder or a lab checkpoint (.pt), got a {source.suffix} file"
            )
        from headstock.interop.lab import import_lab

        return import_lab(source, Path(out), dictionary=dictionary, sentencepiece=sentencepiece, say=say)
    if dictionary is not None or sentencepiece is not None:
        raise UserError(f"{path}: is a folder; --dictionary and --sentencepiece go with a lab checkpoint (.pt)")
    if (source / "data.json").is_file():
        raise UserError(f"{path}: is a run folder already, so there is nothing to import")
    if not (source / "config.json").is_file():
        raise UserError(f"{path}: wanted a Hugging Face folder, and this one has no config.json")
    from headstock.interop.huggingface import import_folder

    return import_folder(source, Path(out), say=say)


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what is there, unless that was asked for and it is something that was exported."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; an export is a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{folder}: exists already; replace it with --overwrite, or name another")
    if (folder / "data.json").exists():
        raise UserError(f"{folder}: is a run folder, so it is left alone; name another")
    if not is_export(folder):
        raise UserError(f"{folder}: holds no model that Headstock exported, so it is left alone; name another")
    check_replaceable(folder, LAYOUT)


def is_export(folder: Path) -> bool:
    """Whether a folder was exported here: by the mark in it, or by what its files say."""

    def keys(name: str) -> set[str]:
        try:
            return set(read_settings(folder / name))
        except UserError:
            return set()

    onnx = (folder / "model.onnx").is_file() and {"kind", "inputs", "outputs"} <= keys("model.json")
    return (folder / MARK).is_file() or "headstock" in keys("config.json") or onnx


def needs_extra(missing: str) -> UserError:
    """What is said where a library of the ecosystem is not installed."""
    return UserError(f"this needs {missing}, which is not installed: pip install 'headstock[interop]'")
