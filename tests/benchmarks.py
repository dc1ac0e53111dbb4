"""Loads the scripts of benchmarks/ and scripts/ as modules, and runs them in this process."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def load_benchmark(name: str, *, folder: str = "benchmarks") -> ModuleType:
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / folder))  # the scripts import each other
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
        del sys.modules[name]
    return module


def run_benchmark(name: str, *arguments: object) -> None:
    """Run a script as if from the command line."""
    module, before = load_benchmark(name), sys.argv
    sys.argv = [f"{name}.py", *map(str, arguments)]
    try:
        module.main()
    finally:
        sys.argv = before


def load_script(name: str) -> ModuleType:
    return load_benchmark(name, folder="scripts")
