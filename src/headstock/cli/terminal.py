"""Writing to standard output and standard error: wrapped prose, any encoding, full disks and closed pipes."""

import codecs
import io
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from headstock.errors import WorkError

NEAREST = "headstock.nearest"  # the name of our error handler
ASCII = {"…": "...", "–": "-", "—": "-", "−": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "→": "->", "×": "x"}


def set_up() -> None:
    """Read UTF-8, and write what an output encoding lacks in the nearest ASCII form instead of failing."""
    codecs.register_error(NEAREST, _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NEAREST)
    if isinstance(sys.stdin, io.TextIOWrapper) and not _is_utf(sys.stdin):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def takes_unicode() -> bool:
    """Whether standard output can write every character."""
    return sys.stdout is None or _is_utf(sys.stdout)


def _is_utf(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(character: str) -> str:
    """The nearest ASCII text: for dots and lines of charts and tables their like, for letters an escape."""
    if character in ASCII:
        return ASCII[character]
    if "\u2800" <= character <= "\u28ff":  # braille
        return " " if character == "\u2800" else "*"
    if "\u2500" <= character <= "\u257f":  # box drawing
        return {"─": "-", "━": "-", "│": "|", "┃": "|"}.get(character, "+")
    return character.encode("ascii", "backslashreplace").decode("ascii")


def write_out(text: str, *, end: str = "\n") -> None:
    """Write to standard output; a failure is one clear error, and a reader that left is a BrokenPipeError."""
    with writing():
        print(text, end=end, flush=True)


@contextmanager
def writing() -> Iterator[None]:
    """Around whatever writes to standard output."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as wrong:
        discard(sys.stdout)
        raise WorkError(f"standard output: {wrong.strerror or wrong}") from None


def write_error(text: str) -> None:
    """Write to standard error; where that fails, nobody can be told, and the work goes on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO | None) -> None:
    """Send what a stream still holds, and all that follows, nowhere: the interpreter flushes it once more at exit."""
    if stream is not None:
        with suppress(OSError, ValueError):  # no file of the operating system, or closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def wrapped(text: str, stream: TextIO | None) -> str:
    """Prose as it stands, but on a terminal broken between words; a file or pipe gets its lines whole."""
    if stream is None or not stream.isatty():
        return text
    width = _columns(stream)
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    bare = line.lstrip()
    indent = line[: len(line) - len(bare)]
    return textwrap.fill(
        bare,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def _columns(stream: TextIO) -> int:
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named):
        return int(named)
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80
