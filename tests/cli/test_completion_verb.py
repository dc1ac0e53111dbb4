"""Completions and man page: all commands and options are in them, and real shells complete with them."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import headstock
from headstock.cli.command_tree import command_tree
from headstock.cli.completion import SCRIPTS
from headstock.cli.man_page import man_page

bash = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


@pytest.fixture(scope="module")
def root():
    return command_tree()


@pytest.fixture(scope="module")
def bash_script(root, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "headstock"
    path.write_text(SCRIPTS["bash"](root))
    return path


def bash_completions(script: Path, *words: str, folder: Path | None = None) -> list[str]:
    code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _headstock; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "--norc", "-c", code, "bash", str(script), "headstock", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split("\n")[:-1]


@bash
def test_bash_completes_commands_options_and_names(bash_script, tmp_path):
    (tmp_path / "my corpus.txt").touch()

    def complete(*words):
        return bash_completions(bash_script, *words, folder=tmp_path)

    assert complete("pretr") == ["pretrain"]
    assert set(complete("data", "")) == {"list", "get"}
    assert complete("data", "get", "tiny") == ["tiny-shakespeare"]
    assert complete("pretrain", "x.txt", "--over") == ["--overwrite"]
    assert complete("--quiet", "cache", "clear", "--old") == ["--older-than"]
    assert complete("pretrain", "--preset", "gpt-m") == ["gpt-mini"]
    assert complete("explain", "layer", "--way", "") == ["forward", "backward"]
    assert complete("fill", "rev") == ["reviews-en", "reviews-en-uncased"]
    assert complete("pretrain", "my") == ["my corpus.txt"]
    assert complete("pretrain", "--out", "my") == [""]  # bash completes files itself


@bash
def test_a_terminal_completes(bash_script):
    """A real bash with readline: the Tab key."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "dumb", "PS1": "$ "}
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    output = b""
    os.write(terminal, f"source {bash_script}\nheadstock finet\t--trai\t data.csv --preset modern-sm\t".encode())
    deadline = time.monotonic() + 60
    while b"--preset modern-small" not in output and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 4096)
    os.write(terminal, b"\x15exit\n")
    os.close(terminal)
    os.waitpid(process, 0)
    assert b"headstock finetune --train  data.csv --preset modern-small" in output.replace(b"\x07", b"")


def test_every_command_and_option_is_in_every_script(root):
    for shell, script in SCRIPTS.items():
        text = script(root)
        for info in root.walk():
            assert all(re.search(rf"\b{re.escape(word)}\b", text) for word in info.words), (shell, info.words)
            for name in (name for option in info.options for name in option.names):
                fish = f"-l {name[2:]} " if name.startswith("--") else f"-s {name[1:]} "
                assert (fish if shell == "fish" else name) in text, (shell, info.words, name)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_accepts_its_script(shell, root, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (tmp_path / "script").write_text(SCRIPTS[shell](root))
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_verb_prints_a_script(call, refused, root):
    assert call("completion", "zsh")[0] == SCRIPTS["zsh"](root)
    assert "did you mean 'bash'" in refused("completion", "bsh")


def test_the_man_page_has_every_command_option_and_variable(root):
    page = man_page().replace(r"\-", "-")
    for info in root.walk():
        assert f".SS headstock {' '.join(info.words)}\n" in page or not info.words
        assert all(rf"\fB{name}\fR" in page for option in info.options if info.words for name in option.names)
    assert page.isascii()
    source = "\n".join(path.read_text(encoding="utf-8") for path in Path(headstock.__file__).parent.rglob("*.py"))
    variables = set(re.findall(r"[\"'](HEADSTOCK_[A-Z_]+)[\"']", source)) - {"HEADSTOCK_SERVE"}  # of its own processes
    assert variables and all(rf"\fB{name}\fR" in page for name in variables)
