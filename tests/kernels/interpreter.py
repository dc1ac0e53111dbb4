"""Triton kernels on a CPU, where Triton only pretends: in a process of its own, since Triton decides that once."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def interpret(module: str) -> None:
    """Call `interpreted` of a test module; skipped without Triton, or with one that does not go with this NumPy."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton")
    code = f"from {module} import interpreted; interpreted()"
    surroundings = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=surroundings, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter cannot count to a number of this NumPy's")
    assert done.returncode == 0, done.stderr
