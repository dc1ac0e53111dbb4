"""Errors meant for the user. Any other exception that escapes is a bug in Headstock."""

import difflib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_MESSAGE = 8000  # characters of an error, which may quote a file
# what could rewrite a terminal or reverse a line: control characters but \n and \t, and overrides of the direction
CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
MIN_SIMILARITY = 0.75  # of two file stems, for one to be suggested in place of the other


class HeadstockError(Exception):
    """An error that the command line prints as one line, without a traceback."""

    exit_code = 1
    from_any_rank = False  # True: every process prints it, not only rank 0

    def __init__(self, message: object = ""):
        text = printable(str(message))
        more = len(text) - MAX_MESSAGE
        super().__init__(text if more <= 0 else f"{text[:MAX_MESSAGE]} ... ({more:,} more characters)")


class WorkError(HeadstockError):
    """The input was valid but the work failed: full disk, no network, a loss that is not finite.

    `result` is what is known nevertheless; --json prints it with the message.
    """

    def __init__(self, message: object = "", *, result: dict[str, Any] | None = None):
        super().__init__(message)
        self.result = result or {}


class LostProcessError(WorkError):
    """Another process of the process group does not respond. It may be rank 0, so every process reports it."""

    from_any_rank = True


class DivergenceError(WorkError):
    """The loss is no longer finite, usually because the learning rate is too high."""


class UserError(HeadstockError):
    """A mistake the user can fix. The message names the place, what was expected and what was found."""

    exit_code = 2


class ConfigError(UserError):
    """One or more invalid settings, reported together with their paths."""

    def __init__(self, problems: Iterable[tuple[str, str]]):
        self.problems = list(problems)
        lines = [f"{path}: {problem}" if path else problem for path, problem in self.problems]
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} invalid settings:", *lines]))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[tuple[str, str]]]]:
        return type(self), (self.problems,)  # by default the message, which is no argument; Ray sends errors pickled


def printable(text: str) -> str:
    """Text with control characters escaped as in JSON, so that what a file contains cannot control the terminal."""
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'causal'?`, or an empty string if no candidate is similar."""
    similar = difflib.get_close_matches(name, list(candidates), n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def suggest_path(name: str, candidates: Iterable[str]) -> str:
    """Like `did_you_mean` for files and folders, which are compared without their suffix."""
    stem = Path(name).stem.lower()
    ratios = {
        other: difflib.SequenceMatcher(None, stem, Path(other).stem.lower()).ratio() for other in sorted(candidates)
    }
    best = max(ratios, key=ratios.__getitem__, default="")
    return f"; did you mean {best!r}?" if ratios.get(best, 0.0) >= MIN_SIMILARITY else ""


def shell_quote(path: str | Path) -> str:
    """A path or name quoted for the shell, for hints that can be copied."""
    return shlex.quote(str(path))
