"""Imports point down only, and what is heavy is imported where it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import headstock

ROOT = Path(headstock.__file__).parent
LAYERS = [
    {"errors", "config", "registry", "files", "randomness", "distributed"},
    {"text", "model", "page"},
    {"tasks"},
    {"train"},
    {"study", "explain", "exchange", "serve"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
HEAVY = {"sympy", "matplotlib", "sklearn", "fastapi", "uvicorn", "transformers", "onnx", "pyarrow", "tensorboard"}


def imports(file: Path):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            if node.module == "headstock":
                yield from ((node, f"headstock.{alias.name}") for alias in node.names)
            else:
                yield node, node.module
        elif isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)


def breaks(file: Path, home: str) -> list[str]:
    found = []
    for _, module in imports(file):
        if module.startswith("headstock."):
            other = module.split(".")[1]
            if other in RANK and other != home and RANK[other] >= RANK[home] and RANK[home] > 0:
                found.append(f"{file.name} ({home}) imports {module}")
            if RANK[home] == 0 and RANK.get(other, 0) > 0:
                found.append(f"{file.name} ({home}) imports {module}")
    return found


def test_imports_point_down():
    wrong = []
    for file in ROOT.rglob("*.py"):
        home = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if home not in ("__init__", "__main__"):
            assert home in RANK, f"{home} has no place in the layers"
            wrong += breaks(file, home)
    assert wrong == []


def test_a_break_is_noticed(tmp_path):
    file = tmp_path / "batch.py"
    file.write_text("from headstock.train.loop import train\n")
    assert breaks(file, "model")
    file.write_text("from headstock.text.store import Store\n")  # text and model do not know each other
    assert breaks(file, "model")


def test_the_model_stands_on_torch_alone():
    for file in (ROOT / "model").rglob("*.py"):
        used = {module.split(".")[0] for _, module in imports(file)}
        assert not used & (HEAVY | {"rich", "typer", "numpy", "tokenizers"}), file


def test_help_does_not_wait_for_torch():
    code = "import sys; sys.argv = ['headstock', '--help']; from headstock.cli.app import app; "
    code += "app(standalone_mode=False); assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules), 'heavy'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pretrain" in done.stdout
