"""Terminal output: encodings, full disks, closed pipes, several processes, and line wrapping."""

import io
import json
import os
import subprocess
import sys

import pytest

from headstock.cli.terminal import wrapped
from headstock.io import rank_and_size
from headstock.train.run_folder import BUNDLED_RUNS

SHOW = ["tokenizer", "show", str(BUNDLED_RUNS / "reviews-en"), "le café …"]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def start(*arguments: str, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment: str):
    """Run a command in its own process, with these environment variables."""
    return subprocess.run(
        [sys.executable, "-m", "headstock", *arguments],
        stdout=stdout,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
        timeout=60,
    )


def test_characters_outside_the_encoding_become_ascii():
    process = start(*SHOW, PYTHONIOENCODING="ascii")
    assert (process.returncode, process.stderr) == (0, b"")
    assert b"\\xe9" in process.stdout and b"..." in process.stdout
    output = start(*SHOW, "--json", PYTHONIOENCODING="ascii")
    assert "".join(json.loads(output.stdout.splitlines()[-1])["sample"][:4]) == "le café"


@pytest.mark.parametrize("arguments", [["--help"], [], SHOW, [*SHOW, "--json"], ["data", "list"]])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_reported_in_one_line(arguments):
    with open("/dev/full", "wb") as full:
        process = start(*arguments, stdout=full)
    assert process.returncode == 1
    assert len(process.stderr.splitlines()) == 1 and b"standard output" in process.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_failing_stderr_changes_no_result():
    with open("/dev/full", "wb") as full:
        assert start(*SHOW, stderr=full).returncode == 0
        assert start("data", "get", "nosuch", stderr=full).returncode == 2


@pytest.mark.parametrize(("arguments", "code"), [(SHOW, 0), (["data", "get", "nosuch", "--json"], 2)])
def test_a_closed_pipe_is_no_error(arguments, code):
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*arguments, stdout=writer)
    os.close(writer)
    assert process.returncode == code and b"Traceback" not in process.stderr


def test_ranks_need_the_complete_torchrun_environment(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in TORCHRUN.items():
        assert rank_and_size() == (0, 1)
        monkeypatch.setenv(name, value)
    assert rank_and_size() == (1, 2)
    monkeypatch.setenv("RANK", "first")
    assert rank_and_size() == (0, 1)


def test_only_distributed_verbs_are_silent_on_other_ranks(call, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert "le" in call(*SHOW)[0]
    assert "nosuch.txt" in call("pretrain", "nosuch.txt", "--out", "x", code=2)[1]
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "le" in call(*SHOW)[0]
    assert call("pretrain", "nosuch.txt", "--out", "x", "--nosuch", code=2) == ("", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["pretrain", "", "--out", "run"],
        ["pretrain", "text.txt", "--out", ""],
        ["pretrain", "text.txt", "", "--out", "run"],
        ["pretrain", "text.txt", "--out", "run", "--valid="],
        ["plan", ""],
        ["sweep", "", "--grid", "lr=1,2", "--out", "run"],
        ["finetune", "reviews-en", "--train", "", "--out", "run"],
        ["compare", "reviews-en", "--train", "rows.csv", "--test", "", "--out", "run"],
        ["generate", "", "Once"],
        ["predict", "reviews-en", "--file", ""],
        ["evaluate", "reviews-en", ""],
        ["tokenizer", "train", "", "--out", "words.json"],
        ["explain", "params", ""],
        ["export", "reviews-en", ""],
    ],
)
def test_an_empty_path_is_refused(arguments, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Anne sees Paris. " * 50)
    assert "empty" in call(*arguments, code=2)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_is_wrapped_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prose = "   With 300 labels " + "pretraining adds 6.1 points (4.2 to 7.9) over scratch, " * 4
    lines = wrapped(f"{prose}\nshort", Terminal()).split("\n")
    assert all(len(line) <= 80 for line in lines) and len(lines) > 3
    assert all(line.startswith("   ") for line in lines[:-1])
    assert " ".join(" ".join(lines).split()) == " ".join(f"{prose} short".split())
    path = "/".join(["folder"] * 20)
    assert path in wrapped(f"report: {path} and more words", Terminal()).split("\n")
    assert wrapped(prose, io.StringIO()) == prose
