"""A new verb is one new file: a toy in a folder of its own runs like the built-in ones."""

import json
import subprocess
import sys

import pytest

TOY = '''
"""`headstock count`: a toy verb."""

import logging
from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import Columns
from headstock.errors import UserError

logger = logging.getLogger("headstock.cli.count")


@command("Toys")
def count(
    common: Common,
    text: Annotated[str, typer.Argument(help="Any text.")],
    columns: Columns,
    letter: Annotated[str, "The letter to count."] = "a",
) -> dict[str, Any]:
    """Count a letter in a text."""
    if len(letter) != 1:
        raise UserError(f"--letter {letter}: must be one letter")
    logger.info("counting %s", letter)
    common.show(f"{text.count(letter)}")
    return {"count": text.count(letter), "seed": common.seed, "device": common.device, "columns": columns.names()}
'''
PROGRAM = "import sys, headstock.cli as cli; cli.__path__.append(sys.argv.pop(1)); cli.main()"


@pytest.fixture
def headstock(tmp_path):
    (tmp_path / "toy_verb.py").write_text(TOY)

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr

    return run


def test_a_toy_verb_is_listed_in_the_help(headstock):
    out, _ = headstock("--help")
    assert "Toys:" in out and "Count a letter in a text." in out
    out, _ = headstock("count", "--help")
    assert all(f"--{name}" in out for name in ("letter", "columns", "json", "quiet", "seed", "device", "debug"))


def test_a_toy_verb_takes_the_common_options(headstock):
    assert headstock("count", "banana") == ("3\n", "counting a\n")
    out, err = headstock("count", "banana", "--json", "--quiet", "--seed", "7", "--device", "cpu", "--column", "x")
    assert json.loads(out) == {"count": 3, "seed": 7, "device": "cpu", "columns": {"text": "x"}}
    assert err == ""


def test_mistakes_with_a_toy_verb_end_with_exit_code_2(headstock):
    out, err = headstock("count", "banana", "--letter", "an", "--json", code=2)
    assert err == "headstock: --letter an: must be one letter\n"
    assert json.loads(out) == {"error": "--letter an: must be one letter"}
    assert "--letter" in headstock("count", "banana", "--leter", "a", code=2)[1]
