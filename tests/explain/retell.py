"""The commands in docs/transformer.md and what they say; `python -m tests.explain.retell` writes it there again.

A command stands in an indented block of its own, after a `$`; what it says stands below it, indented too.
"""

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import headstock

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "transformer.md"
PROMPT = "    $ headstock "


def make_run(folder: Path) -> None:
    """The run that the page is about, as its recipe makes it."""
    (folder / "recipes").mkdir()
    for name in ("animals.toml", "animals.txt"):
        shutil.copy(ROOT / "recipes" / name, folder / "recipes" / name)
    headstock.pretrain(out="runs/animals", config_file="recipes/animals.toml", device="cpu")


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Every command of a page with the lines that are quoted below it."""
    found: list[tuple[str, list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(PROMPT):
            found.append((line.removeprefix(PROMPT), []))
            inside = True
        elif inside and (line.startswith("    ") or not line):
            found[-1][1].append(line.removeprefix("    "))
        else:
            inside = False
    return [(command, "\n".join(lines).strip("\n").splitlines()) for command, lines in found]


def retold(text: str, say: Callable[[str], str]) -> str:
    """The page with what its commands say now."""
    lines, skipping = [], False
    for line in text.splitlines():
        if line.startswith(PROMPT):
            said = say(line.removeprefix(PROMPT)).rstrip("\n").splitlines()
            lines += [line, "", *(f"    {one}".rstrip() for one in said), ""]
            skipping = True
        elif not skipping or (line and not line.startswith("    ")):
            lines.append(line)
            skipping = False
    return "\n".join(lines) + "\n"


def said_by(command: str) -> str:
    from headstock.cli.app import main

    out = io.StringIO()
    sys.argv = ["headstock", *shlex.split(command), "-q", "--device", "cpu"]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    return out.getvalue()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):
        make_run(Path(made))
        PAGE.write_text(retold(PAGE.read_text(encoding="utf-8"), said_by), encoding="utf-8")
