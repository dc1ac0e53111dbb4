"""Reports are tested with the layout of charts that users see, where names and numbers are unusual."""

import pytest

from headstock.report import theme


@pytest.fixture(scope="module")
def chart_layout():
    """Charts of reports are laid out as for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theme, "LAYOUT", "constrained")
        yield
