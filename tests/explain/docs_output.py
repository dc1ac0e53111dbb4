"""The commands in docs/explanation/transformer.md and their output.

`python -m tests.explain.docs_output` regenerates the output.

A command is an indented line after a `$`; its output is the indented block below.
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
PAGE = ROOT / "docs" / "explanation" / "transformer.md"
PROMPT = "    $ headstock "


def make_run(folder: Path) -> None:
    """Train the run of the page from its recipe."""
    (folder / "recipes").mkdir()
    for name in ("animals.toml", "animals.txt"):
        shutil.copy(ROOT / "recipes" / name, folder / "recipes" / name)
    headstock.pretrain(out="runs/animals", config_file="recipes/animals.toml", device="cpu")


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Every command of a page with the output quoted below it."""
    commands: list[tuple[str, list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(PROMPT):
            commands.append((line.removeprefix(PROMPT), []))
            inside = True
        elif inside and (line.startswith("    ") or not line):
            commands[-1][1].append(line.removeprefix("    "))
        else:
            inside = False
    return [(command, "\n".join(lines).strip("\n").splitlines()) for command, lines in commands]


def regenerate(text: str, output_of: Callable[[str], str]) -> str:
    """The page with the current output of its commands."""
    lines, skipping = [], False
    for line in text.splitlines():
        if line.startswith(PROMPT):
            output = output_of(line.removeprefix(PROMPT)).rstrip("\n").splitlines()
            lines += [line, "", *(f"    {row}".rstrip() for row in output), ""]
            skipping = True
        elif not skipping or (line and not line.startswith("    ")):
            lines.append(line)
            skipping = False
    return "\n".join(lines) + "\n"


def output_of(command: str) -> str:
    from headstock.cli.app import main

    out = io.StringIO()
    sys.argv = ["headstock", *shlex.split(command), "-q", "--device", "cpu"]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    return out.getvalue()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_run(Path(folder))
        PAGE.write_text(regenerate(PAGE.read_text(encoding="utf-8"), output_of), encoding="utf-8")
