"""Damaged and hostile files of every kind are refused with one line, fast and in little memory."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.faults.fuzzing import MEGABYTES, SECONDS, Target, fuzz
from tests.faults.harness import amount

INPUTS = {  # by kind of file: in make test, in make faults
    "safetensors": (150, 65_000),
    "tokenizers": (120, 16_000),
    "configs": (100, 14_000),
    "data": (80, 4_400),
    "reports": (8, 600),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_fault_22_fuzzed_files(targets, record, kind):
    outcome = fuzz(targets[kind], amount(*INPUTS[kind]))
    assert outcome.failures == []
    assert outcome.inputs == amount(*INPUTS[kind]) and 0 < outcome.refused < outcome.inputs
    figures = {"refused": outcome.refused, "read": outcome.inputs - outcome.refused, "crashes": 0, "tracebacks": 0}
    figures |= {"slowest": f"{outcome.seconds:.2f} s", "most_memory": f"{outcome.megabytes:.0f} MB"}
    record(22, kind, inputs=outcome.inputs, **figures)


def compute(seconds: float) -> None:
    stop = time.process_time() + seconds
    while time.process_time() < stop:
        pass


VALID = b"valid" * 20
FAULTS = {  # what a bad reader does, and how the failure is called
    "died: exit code -6": os.abort,
    "KeyError": lambda: {}["a traceback"],
    "MemoryError": lambda: bytearray(2 * MEGABYTES << 20),
    "took": lambda: compute(1.1 * SECONDS),
    "SystemExit": sys.exit,
}


def misread(folder: Path) -> None:
    """A reader that accepts the valid input, and has the fault that its folder names."""
    if (folder / "input.txt").read_bytes() != VALID:
        FAULTS[(folder / "fault.txt").read_text()]()


def test_fault_22_a_reader_that_crashes_is_noticed(tmp_path):
    targets = []
    for number, name in enumerate(FAULTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "input.txt").write_bytes(VALID)
        (folder / "fault.txt").write_text(name)
        targets.append(Target(name, folder, ("input.txt",), misread))
    failures = fuzz(targets, len(targets)).failures
    assert all(failure["target"] in failure["error"] for failure in failures)
    assert {failure["target"] for failure in failures} == FAULTS.keys()
