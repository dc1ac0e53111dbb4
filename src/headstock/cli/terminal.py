"""Writing to standard output and standard error: wrapped prose, any encoding, full disks and closed pipes."""

import codecs
import io
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from headstock.errors import WorkError, printable

ERROR_HANDLER = "headstock.ascii"
ASCII = {"…": "...", "–": "-", "—": "-", "−": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "→": "->", "×": "x"}


def set_up() -> None:
    """Read UTF-8, and replace characters that the output encoding lacks by similar ASCII instead of failing."""
    codecs.register_error(ERROR_HANDLER, _replace_with_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERROR_HANDLER)
    if isinstance(sys.stdin, io.TextIOWrapper) and not _is_utf(sys.stdin):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def takes_unicode() -> bool:
    """Whether standard output can encode every character."""
    return sys.stdout is None or _is_utf(sys.stdout)


def _is_utf(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _replace_with_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(character: str) -> str:
    """Similar ASCII text: dots and lines of charts and tables are replaced, letters escaped."""
    if character in ASCII:
        return ASCII[character]
    if "\u2800" <= character <= "\u28ff":  # braille
        return " " if character == "\u2800" else "*"
    if "\u2500" <= character <= "\u257f":  # box drawing
        return {"─": "-", "━": "-", "│": "|", "┃": "|"}.get(character, "+")
    return character.encode("ascii", "backslashreplace").decode("ascii")


def write_out(text: str, *, end: str = "\n") -> None:
    """Write to standard output. Raises WorkError on failure, BrokenPipeError if the reader has exited.

    Control characters in texts and labels reach files and pipes, but not a terminal.
    """
    with writing():
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        print(printable(text) if is_terminal else text, end=end, flush=True)


class PrintableCells:
    """A table or other renderable of rich with the control characters in its text escaped."""

    def __init__(self, content: Any):
        self.content = content

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


@contextmanager
def writing() -> Iterator[None]:
    """Turn a failure to write to standard output into a WorkError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise WorkError(f"standard output: {error.strerror or error}") from None


def write_error(text: str) -> None:
    """Write to standard error; a failure is ignored, since it cannot be reported."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO | None) -> None:
    """Redirect a stream to the null device, because the interpreter flushes it once more at exit."""
    if stream is not None:
        with suppress(OSError, ValueError):  # not a real file, or closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def wrapped(text: str, stream: TextIO | None) -> str:
    """Text wrapped to the width of a terminal; unchanged for a file or pipe."""
    if stream is None or not stream.isatty():
        return text
    width = _columns(stream)
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def _columns(stream: TextIO) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80
