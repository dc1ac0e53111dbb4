"""The commands in README and docs/ exist with their options."""

import re
from pathlib import Path

import pytest
import typer

from headstock.cli.app import app, find_verbs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:^(?: {4})?\$ |^ {4}|`|; )headstock ((?!\.)[^`;|#\n]+)", re.MULTILINE)


def unknown_parts(text: str) -> list[str]:
    """Verbs and options of the commands in a text that the program does not have."""
    find_verbs()
    root, unknown = typer.main.get_command(app), []
    for match in COMMAND.finditer(re.sub(r"\\\n\s*", "", text)):  # with continued lines
        words = re.split(r"\s", match[1].replace("…", "...").replace('"', " ").replace("'", " "))
        command = root
        for word in words:
            if not word or word.startswith("-") or not hasattr(command, "commands"):
                break
            if word not in command.commands:
                unknown += [word] if word.isidentifier() and word.islower() else []
                break
            command = command.commands[word]
        if command is root:
            continue
        options = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
        names = [word.partition("=")[0].rstrip(".,)") for word in words if re.match(r"--[a-z]", word)]
        unknown += [f"{command.name} {name}" for name in names if name not in options | {"--help"}]
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page):
    assert unknown_parts(page.read_text(encoding="utf-8")) == []


def test_a_command_that_does_not_exist_is_found():
    text = "    headstock explian params\n    $ headstock translate RUN --align x.svg      # --comment\n"
    text += "    $ headstock finetune RUN --train x.csv \\\n          --valid y.csv --minutes 6\n"
    assert unknown_parts(text) == ["explian", "translate --align", "finetune --minutes"]
