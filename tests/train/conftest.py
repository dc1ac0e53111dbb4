"""Fixtures of the training tests."""

from collections.abc import Iterator

import pytest

from headstock.logs import messages_to


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """The log messages of the package, in order."""
    lines: list[str] = []
    with messages_to(lines.append):
        yield lines
