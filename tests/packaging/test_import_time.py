"""`import headstock`, the help and the completions do not import heavy modules."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "matplotlib", "sklearn", "scipy", "transformers", "tokenizers", "rich", "ray", "pandas"}


def imported(code: str, *arguments: str) -> set[str]:
    """The top-level modules that a program has imported at its end."""
    code = f"import atexit, sys; atexit.register(lambda: print('|', *sys.modules, file=sys.stderr)); {code}"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stderr.rpartition("|")[2].split()}


def test_the_package():
    modules = imported("import headstock; headstock.__version__, dir(headstock), headstock.UserError")
    assert "headstock" in modules and not modules & (HEAVY | {"typer"})


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["completion", "bash"]], ids=" ".join)
def test_commands_that_must_be_fast(words):
    assert not imported("from headstock.cli import main; main()", *words) & HEAVY


def test_a_heavy_module_is_noticed():
    assert "torch" in imported("import headstock; headstock.load") & HEAVY
