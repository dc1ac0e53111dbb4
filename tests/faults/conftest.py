"""Fixtures of the fault tests."""

import json
import os
from collections.abc import Callable

import pytest

from tests.faults.fuzzing import Target
from tests.faults.harness import RESULTS, amount, is_full

__all__ = ["amount"]


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    """`record(fault, what, **figures)` appends a row to the results; call it after the assertions, with their counts.

    `fault` is the number in the table of docs/evidence/reliability.md, `what` says in a few words what was provoked,
    and the figures are shown under their names:
    `record(1, "kill -9 at random moments", kills=50, bit_identical_resumes=50)`.
    """

    def record(fault: int, what: str, **figures: int | float | str) -> None:
        if path := os.environ.get(RESULTS):
            row = {"fault": fault, "what": what, "size": "full" if is_full() else "ci", **figures}
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    return record


@pytest.fixture(scope="session")
def targets(tmp_path_factory) -> dict[str, list[Target]]:
    """The readers that get hostile files, by kind, with a valid input for each."""
    from tests.faults.targets import make_targets

    return make_targets(tmp_path_factory.mktemp("valid"))
