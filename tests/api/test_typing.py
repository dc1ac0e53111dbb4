"""py.typed is true: mypy and pyright accept a script with every public name, and refuse every mistake of another."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headstock

HERE = Path(__file__).parent
SCRIPT, WRONG = HERE / "typed_script.py", HERE / "wrong_types.py"
CACHE = HERE.parents[1] / ".mypy_cache" / "typed_scripts"  # kept: most of the time is reading the package
MYPY = """
[mypy]
strict = true
follow_imports = skip
[mypy-headstock.*]
follow_imports = normal
ignore_errors = true
"""  # other packages take minutes to read
CONFIG = """
[tool.pyright]
pythonVersion = "3.11"
venvPath = "{venvs}"
venv = "{venv}"
extraPaths = ["{source}"]
"""


def mypy_lines(tmp_path) -> set[tuple[str, int]]:
    """The files and lines in which mypy finds errors."""
    config = tmp_path / "mypy.ini"
    config.write_text(MYPY)
    done = run("mypy", "--config-file", str(config), "--cache-dir", str(CACHE), str(SCRIPT), str(WRONG))
    return {(Path(file).name, int(line)) for file, line in re.findall(r"^(\S+\.py):(\d+): error", done, re.MULTILINE)}


def pyright_lines(tmp_path) -> set[tuple[str, int]]:
    pytest.importorskip("pyright")
    venv = Path(sys.prefix)
    source = Path(headstock.__file__).parents[1]
    (tmp_path / "pyproject.toml").write_text(CONFIG.format(venvs=venv.parent, venv=venv.name, source=source))
    done = run("pyright", "--project", str(tmp_path), "--outputjson", str(SCRIPT), str(WRONG))
    found = json.loads(done[done.index("{") :])["generalDiagnostics"]
    errors = [row for row in found if row["severity"] == "error"]
    return {(Path(row["file"]).name, row["range"]["start"]["line"] + 1) for row in errors}


def run(module: str, *options: str) -> str:
    return subprocess.run([sys.executable, "-m", module, *options], capture_output=True, text=True, cwd=HERE).stdout


def marked_lines() -> set[tuple[str, int]]:
    lines = WRONG.read_text(encoding="utf-8").splitlines()
    return {(WRONG.name, number) for number, line in enumerate(lines, 1) if "# wrong" in line}


@pytest.mark.parametrize("check", [mypy_lines, pyright_lines])
def test_type_checkers(check, tmp_path):
    assert check(tmp_path) == marked_lines()


def test_the_script_uses_every_public_name():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(headstock.__all__) <= used


def test_names_are_the_same_for_type_checkers():
    source = ast.parse(Path(headstock.__file__).read_text(encoding="utf-8"))
    imports = {
        alias.asname: node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("headstock.")
        for alias in node.names
    }
    assert imports == headstock._HOMES
    for name, module in imports.items():
        assert getattr(headstock, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'pretrian'"):
        headstock.pretrian  # type: ignore[attr-defined]  # noqa: B018
