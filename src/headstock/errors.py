"""Every error a user can meet. Anything else that escapes is our bug."""

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

NEAR = 0.75  # similarity of two stems from which one may be a slip for the other


class HeadstockError(Exception):
    """What the command line prints in one line, without a traceback."""

    exit_code = 1
    from_any_rank = False  # whether every process says it, and not only rank 0, which speaks for all


class WorkError(HeadstockError):
    """The input was right but the work could not be finished: a full disk, no network, a loss that is not a number."""


class LostProcessError(WorkError):
    """Another process of the process group does not answer. It may be rank 0, so every other one says so."""

    from_any_rank = True


class DivergenceError(WorkError):
    """The loss is no longer a number, mostly because the learning rate is too high."""


class UserError(HeadstockError):
    """A mistake the user can fix; says where, what was wanted and what came."""

    exit_code = 2


class ConfigError(UserError):
    """One or more settings are wrong; lists them all, each with its path."""

    def __init__(self, problems: Iterable[tuple[str, str]]):
        self.problems = list(problems)
        lines = [f"{where}: {what}" for where, what in self.problems]
        if len(lines) == 1:
            super().__init__(lines[0])
        else:
            super().__init__("\n  ".join([f"{len(lines)} settings are wrong:", *lines]))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'causal'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def suggest_path(name: str, known: Iterable[str]) -> str:
    """The same for files and folders, which are near by their stems: a shared ending such as .txt says little."""
    stem = Path(name).stem.lower()
    near = {other: difflib.SequenceMatcher(None, stem, Path(other).stem.lower()).ratio() for other in sorted(known)}
    best = max(near, key=near.__getitem__, default="")
    return f"; did you mean {best!r}?" if near.get(best, 0.0) >= NEAR else ""


def shell_quote(path: str | Path) -> str:
    """A path or name as one word of a shell's command line, for hints that can be copied."""
    return shlex.quote(str(path))
