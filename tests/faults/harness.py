"""The size at which fault tests run: small in `make test`, the full size in `make faults`."""

import os

SIZE = "HEADSTOCK_FAULTS"  # environment variable: "full", or nothing for the CI size
RESULTS = "HEADSTOCK_FAULTS_RESULTS"  # environment variable: a JSON-lines file to which results are appended


def is_full() -> bool:
    return os.environ.get(SIZE) == "full"


def amount(ci: int, full: int) -> int:
    """How often a fault is provoked: the first number in `make test`, the second in `make faults`."""
    return full if is_full() else ci
