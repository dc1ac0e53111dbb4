"""Escape sequences in texts, labels and names reach files and pipes, but never a terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest

from headstock.cli.terminal import PrintableCells
from headstock.errors import UserError
from headstock.experiments.terminal_tables import comparison_table

# clear the screen, set the window's title, 8-bit CSI, carriage return, bell, reversed text
ESCAPES = "\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\rheadstock: all is well", "\u202edesrever"
HOSTILE = "".join(ESCAPES)
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PROGRAM = """
import sys
from headstock.cli import terminal
from headstock.cli.command import Common, attempt
from headstock.errors import UserError
from rich.table import Table

if sys.argv[2:] == ["unprotected"]:
    terminal.printable = lambda text: text
common, text = Common(), sys.argv[1]
common.show(text)
common.log(text)
table = Table(title=text)
table.add_column(text)
table.add_row(text)
common.show(table)

def work():
    raise UserError(f"{text}: no such label")

attempt(work, common)
attempt(lambda: {"label": text}, Common(json=True))
"""


def in_terminal(*arguments: str) -> str:
    """What a terminal gets from PROGRAM."""
    leader, follower = pty.openpty()
    words = [sys.executable, "-c", PROGRAM, *arguments]
    environment = os.environ | {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"}
    process = subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    received = b""
    try:
        while part := os.read(leader, 1 << 16):
            received += part
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert process.wait() == 0
    return received.decode("utf-8").replace("\r\n", "\n")  # the terminal driver's own line ends


def test_fault_29_escape_sequences_do_not_reach_the_terminal(record):
    output = in_terminal(HOSTILE)
    assert RAW.findall(output) == []
    assert output.count("\\u001b[2J") >= 5  # a result, a message, a table, an error and JSON
    assert RAW.search(in_terminal(HOSTILE, "unprotected"))  # the control
    record(29, "escape sequences in a terminal", sequences=len(ESCAPES), ways_to_print=5, reached_the_terminal=0)


def test_pipes_get_the_text_as_it_is():
    words = [sys.executable, "-c", PROGRAM, HOSTILE]
    output = subprocess.run(words, capture_output=True, check=True).stdout.decode("utf-8")
    assert output.startswith(HOSTILE + "\n")


def test_brackets_in_names_are_no_markup():
    from rich.console import Console

    names = ["run [v2]", "[/bold] x", "[red]scratch[/red]"]
    results = {"metric": "accuracy", "task": "classify", "labels": [100], "measured_rows": 10, "measured_on": "[test]"}
    results["arms"] = [{"name": name} for name in names]
    results["summary"] = [{"arm": name, "labels": 100, "score": 0.5, "low": None, "high": None} for name in names]
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(PrintableCells(comparison_table(results)))
    text = console.export_text()
    assert all(name in text for name in [*names, "[test]"])


def test_errors_are_printable_and_short():
    assert str(UserError("a\x1b[2J\x00\ud800b\tc\nd")) == "a\\u001b[2J\\u0000\\ud800b\tc\nd"
    assert len(str(UserError("x" * 10**6))) < 10_000
    with pytest.raises(UserError, match=r"\\u202e"):
        raise UserError("\u202e")
