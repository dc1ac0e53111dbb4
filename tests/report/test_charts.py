"""The charts of the reports."""

import pytest

from headstock.report import charts
from headstock.report.theme import arm_styles

STYLE = arm_styles([{"name": "run", "kind": "pretrained"}])["run"]


def epochs(count: int) -> list[dict[str, float]]:
    return [{"epoch": epoch, "train_accuracy": 0.6, "valid_accuracy": 0.5} for epoch in range(1, count + 1)]


@pytest.mark.parametrize("points", [1, 2])
def test_a_legend_names_only_what_is_visible(points):
    """A curve of one point has no line, so it needs a marker."""
    curve = [(step, 1.0 / step) for step in range(1, points + 1)]
    figures = [charts.loss(curve, curve, wide=True), charts.training([(STYLE, [epochs(points)])], "accuracy")]
    for figure in figures:
        (axes,) = figure.axes
        lines, names = axes.get_legend_handles_labels()
        assert names == ["training", "validation"]
        assert all(len(line.get_xdata()) > 1 or line.get_marker() not in (None, "None") for line in lines)
