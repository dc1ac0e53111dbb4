"""Runs Triton kernels in Triton's interpreter on a CPU, in a subprocess, since Triton reads the switch at import."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def interpret(module: str) -> None:
    """Call `interpreted` of a test module; skip without Triton, or if its interpreter does not support this NumPy."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton")
    code = f"from {module} import interpreted; interpreted()"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in process.stderr:
        pytest.skip("Triton's interpreter does not support this NumPy")
    assert process.returncode == 0, process.stderr
