"""The files that verbs read and write: texts, output files, and runs to load."""

import gc
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.errors import UserError

if TYPE_CHECKING:
    from headstock.inference.pipeline import Pipeline


def load(run: Path, **options: Any) -> "Pipeline":
    """`headstock.load`, with garbage collection off while torch is imported.

    The import creates hundreds of thousands of objects that live until the process ends. Without the collector it is
    about 20% faster. A library must not do this to its caller's process; a command may.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        from headstock.inference.pipeline import load as load_pipeline

        gc.freeze()
    finally:
        if enabled:
            gc.enable()
    return load_pipeline(run, **options)


def check_text_source(texts: list[str] | None, file: str | Path | None) -> None:
    """Require texts from exactly one source: arguments, --file, or a pipe."""
    if texts and file:
        raise UserError("give texts or --file, not both")
    if not texts and file is None and sys.stdin.isatty():
        raise UserError("no text: pass it as an argument, with --file, or through a pipe")


def read_texts(texts: list[str] | None, file: Path | None, column: str | None = None) -> list[str]:
    """Texts from the arguments, a file or standard input; blank lines are skipped."""
    from headstock.data.labelled_texts import is_table, stream_texts

    check_text_source(texts, file)
    if texts:
        return texts
    if file is not None and is_table(file):
        lines = [text for _, text in stream_texts(file, columns={"text": column} if column else None, skipped=[])]
    else:
        # universal newlines are translated already; splitlines would also split at characters such as U+2028
        lines = [line for line in read_utf8(file).removeprefix("\ufeff").split("\n") if line.strip()]
    if not lines:
        raise UserError(f"{file or 'standard input'}: no text in it")
    return lines


def read_utf8(file: Path | None) -> str:
    """The text of a file, or of standard input for None or `-`."""
    try:
        return sys.stdin.read() if file is None or str(file) == "-" else file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file or 'standard input'}: not UTF-8 at byte {error.start}") from None


def check_outputs(outputs: Iterable[Path], arguments: Iterable[Any], *, overwrite: bool) -> None:
    """Refuse outputs that exist, unless `overwrite`, and outputs that are inputs of the same command.

    Every argument that is the path of an existing file counts as an input, and so do the files of a run folder.
    """
    inputs = list(existing_paths(arguments))
    for path in outputs:
        if not os.path.lexists(path):
            continue
        if path.is_dir():
            raise UserError(f"--out {path}: is a folder, expected a file")
        for source in inputs:
            if is_part_of(path, source):
                raise UserError(f"--out {path}: is an input of this command ({source}), which is never replaced")
        if not overwrite:
            raise UserError(f"--out {path}: already exists; replace it with --overwrite, or choose another file")


def existing_paths(values: Iterable[Any]) -> Iterable[Path]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from existing_paths(value)
        elif isinstance(value, str | Path) and value != "":
            try:
                if Path(value).exists():
                    yield Path(value)
            except (OSError, ValueError):  # not a file name: too long, or with a NUL
                continue


def is_part_of(path: Path, source: Path) -> bool:
    """Whether a file is the input itself or one of the files of a run folder."""
    from headstock.train.run_folder import RunFolder

    if not source.is_dir():
        return path.exists() and path.samefile(source)
    return RunFolder(source).exists() and RunFolder(source).owns(path)
