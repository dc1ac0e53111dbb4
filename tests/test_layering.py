"""Imports point down only, and what is heavy is imported where it is used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import headstock
from headstock.tasks.base import TASKS

ROOT = Path(headstock.__file__).parent
LAYERS = [
    {"errors", "config", "registry", "io", "rng", "intervals", "markdown", "logs", "signals", "ray_cluster"}
    | {"results", "cache_use", "option_names"},
    {"kernels"},
    {"model", "data"},
    {"decoding"},
    {"tasks"},
    {"cost"},
    {"train"},
    {"inference"},
    {"report"},
    {"planner"},
    {"experiments", "explain", "interop", "maintenance"},
    {"serve"},
    {"api"},
    {"sklearn", "huggingface"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
HEAVY = {"sympy", "matplotlib", "sklearn", "fastapi", "uvicorn", "transformers", "onnx", "pyarrow", "tensorboard"}
HEAVY |= {"optuna", "faiss", "ray", "mlflow", "wandb", "datasets", "pandas"}


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


def upward_imports(file: Path, home: str, name: str) -> set[str]:
    """`FILE -> PACKAGE` for each import of a package that is not below the file's own."""
    packages = {module.split(".")[1] for _, module in imports(file) if module.startswith("headstock.")}
    return {f"{name} -> {other}" for other in packages - {home} if other in RANK and RANK[other] >= RANK[home] > 0} | {
        f"{name} -> {other}" for other in packages if RANK[home] == 0 and RANK.get(other, 0) > 0
    }


def test_imports_point_down():
    upward = set()
    for file in ROOT.rglob("*.py"):
        home = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if home not in ("__init__", "__main__"):
            assert home in RANK, f"{home} is in no layer"
            upward |= upward_imports(file, home, file.relative_to(ROOT).as_posix())
    assert not upward


def test_a_break_is_noticed(tmp_path):
    file = tmp_path / "batch.py"
    file.write_text("from headstock.train.loop import train\n")
    assert upward_imports(file, "model", "batch.py")
    file.write_text("from headstock.data.token_store import TokenStore\n")  # data and model do not know each other
    assert upward_imports(file, "model", "batch.py")


def test_the_model_stands_on_torch_alone():
    for file in (ROOT / "model").rglob("*.py"):
        used = {module.split(".")[0] for _, module in imports(file)}
        assert not used & (HEAVY | {"rich", "typer", "numpy", "tokenizers"}), file


def test_help_does_not_wait_for_torch():
    code = "import sys; sys.argv = ['headstock', '--help']; from headstock.cli.app import find_verbs, run; "
    code += "find_verbs(); run(); assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules), 'heavy'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pretrain" in done.stdout


def task_dependencies(source: str, names: set[str], classes: set[str]) -> list[str]:
    """Code that depends on which task it has: type checks, comparisons with task names, tables keyed by them."""

    def constants(node: ast.expr) -> set[str]:
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}

    def is_task(node: ast.expr) -> bool:
        return re.search(r"(task|objective)('\])?(\.name|\['name'\])?$", ast.unparse(node)) is not None

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            if classes & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(map(is_task, operands)) and any(constants(one) & names for one in operands):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            if len(keys) > 1 and set(keys) <= names:
                found.append(ast.unparse(node))
    return found


def test_nothing_outside_the_tasks_depends_on_which_task_it_has():
    names, classes = set(TASKS.names()), {TASKS.get(name).__name__ for name in TASKS.names()} | {"LabelledTask"}
    allowed = {"interop/lab.py"}  # the lab's format has two heads
    for file in ROOT.rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith("tasks/") and name not in allowed:
            assert task_dependencies(file.read_text(encoding="utf-8"), names, classes) == [], name


def test_a_dependency_on_a_task_is_noticed():
    for source in (
        "isinstance(loaded.task, Classify)",
        "issubclass(cls, LabelledTask | Tag)",
        "config.objective == 'masked'",
        "settings['task']['name'] == 'masked'",
        "task in ('masked', 'classify')",
        "{'masked': 1, 'classify': 2}",
    ):
        assert task_dependencies(source, {"masked", "classify"}, {"Classify", "Tag", "LabelledTask"}), source
    for source in ("isinstance(rows, Records)", "kind == 'masked'", "task.lens == 'tag'", "{'masked': 1, 'rows': 2}"):
        assert not task_dependencies(source, {"masked", "classify", "tag"}, {"Classify"}), source
