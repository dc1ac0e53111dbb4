"""What verbs read: runs and texts."""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.errors import UserError

if TYPE_CHECKING:
    from headstock.inference.pipeline import Pipeline


def load(run: str | Path, **options: Any) -> "Pipeline":
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
