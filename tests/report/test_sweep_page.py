"""The sweep report for different grids, also with failed points."""

import json
import random
import re
import warnings
from itertools import product
from pathlib import Path

import pytest

from headstock.errors import UserError
from headstock.report.pages import write_report
from headstock.report.sweep_page import limits, scale_of
from tests.report.browsing import Outline, check_sound, follows_colour_scheme, view_page

pytestmark = pytest.mark.usefixtures("chart_layout")
HOSTILE = '<script>alert("x")</script> & "quotes" {{ 7 * 7 }} $\\alpha$'


def make_sweep(grid: dict, *, seeds: int = 3, metric: str = "loss", failed: int = 0) -> dict:
    """A results.json of a sweep with synthetic numbers."""
    rng, points, cells = random.Random(0), [], []
    better = "lower" if metric in ("loss", "bits_per_byte") else "higher"
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for rank, settings in enumerate(combinations):
        is_failed = rank >= len(combinations) - failed
        mean = 0.3 + 0.05 * rank if better == "lower" else 0.9 - 0.03 * rank
        edge = (mean - 0.02, mean + 0.02) if seeds > 1 and not is_failed else (None, None)
        gap = {"mean": 0.05 * rank, "low": 0.05 * rank - 0.07, "high": 0.05 * rank + 0.07}
        gap |= {"low": None, "high": None} if seeds < 2 else {}
        points.append({"settings": settings, "mean": None if is_failed else mean, "low": edge[0], "high": edge[1]})
        points[-1] |= {"seeds": seeds, "failed": int(is_failed), "seconds": 12.0, "parameters": 123_456}
        points[-1]["from_best"] = None if is_failed or not rank else gap
        for seed in range(seeds):
            curve = [] if is_failed else [[step, mean + 3 / step] for step in range(10, 110, 10)]
            score = None if is_failed else mean + rng.gauss(0, 0.01)
            cells.append({"settings": settings, "seed": seed, "score": score, "metrics": {}, "steps": 100})
            cells[-1] |= {
                "seconds": 12.0,
                "parameters": 123_456,
                "curve": curve,
                "failed": "no number" if is_failed else None,
            }
    marginals = {
        key: [
            {
                "value": value,
                "mean": 0.4 + 0.1 * i,
                "low": 0.3 if seeds > 1 else None,
                "high": 0.7 if seeds > 1 else None,
            }
            | {"points": 2}
            for i, value in enumerate(values)
        ]
        for key, values in grid.items()
        if len(values) > 1
    }
    best = {
        "settings": combinations[0],
        "mean": 0.3,
        "low": None,
        "high": None,
        "seed": 0,
        "run": "out/runs/a-0",
        "second": None,
    }
    return {
        "kind": "sweep",
        "of": "pretrain" if better == "lower" else "finetune",
        "title": "depth × lr: gpt-nano on corpus.txt",
        "metric": metric,
        "better": better,
        "followed": "loss",
        "versions": {"headstock": "0.1.0"},
        "seeds": seeds,
        "seconds": 100.0,
        "settings": {"sweep": {"seeds": seeds}, "grid": grid},
        "points": points,
        "cells": cells,
        "best": best,
        "marginals": marginals,
        "verdict": "Best is depth=2.",
        "notes": ["The best was chosen on the same text."],
    }


KINDS = {
    "heat": make_sweep({"depth": [2, 4, 8], "lr": [1e-4, 1e-3, 1e-2, 1e-1]}, failed=1),
    "line": make_sweep({"lr": [1e-4, 1e-3, 1e-2]}, metric="accuracy"),
    "range": make_sweep({"lr": [10 ** (-4 + 0.4 * step) for step in range(8)]}, seeds=1),
    "words": make_sweep({"norm": ["pre", "post"]}, seeds=1),
    "many": make_sweep({"depth": [2, 4], "weight_decay": [0, 0.01, 0.1], "norm": ["pre", "post"]}, metric="f1"),
    "alone": make_sweep({"depth": [2]}, seeds=1),
    "broken": make_sweep({"lr": [1.0, 2.0]}, failed=2) | {"best": None},
    "hostile": make_sweep({HOSTILE: [HOSTILE, "$5"], "x" * 60: [1, 2]}) | {"title": HOSTILE, "verdict": HOSTILE},
}


@pytest.fixture(scope="module")
def pages(chart_layout, tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sweeps")
    reports = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, results in KINDS.items():
            (home / name).mkdir()
            (home / name / "results.json").write_text(json.dumps(results), encoding="utf-8")
            reports[name] = write_report(home / name)
    return reports


@pytest.mark.parametrize("name", KINDS)
def test_sweep_pages_are_valid_and_contain_the_results(pages, name):
    page, results = Outline(pages[name]), KINDS[name]
    check_sound(page)
    assert results["verdict"] in page.text and results["notes"][0] in page.text
    for row in results["points"]:
        if row["mean"] is not None:
            score = f"{100 * row['mean']:.1f}%" if results["better"] == "higher" else f"{row['mean']:.4f}"
            assert score in page.text
    clear = [row for row in results["points"] if row["from_best"] and (row["from_best"]["low"] or 0) > 0]
    assert page.text.count("● ") == len(clear) + (results["seeds"] > 1 and any(row["low"] for row in results["points"]))


def test_two_settings_give_a_heat_map_with_tooltips(pages):
    page = Outline(pages["heat"])
    cells = [attributes for tag, attributes in page.tags if tag == "td" and "title" in attributes]
    assert len(cells) == 12
    assert cells[0]["title"] == "depth=2 lr=0.0001: 0.3000 (0.2800 to 0.3200)"
    assert sum("outline" in attributes["style"] for attributes in cells) == 1
    assert sum("failed" in attributes["title"] for attributes in cells) == 1
    for name in ("line", "words", "many", "alone"):
        assert not [1 for tag, attributes in Outline(pages[name]).tags if "data-heat" in attributes]


CHARTS = {
    "heat": {"by-depth", "by-lr", "learning-wide"},
    "line": {"by-lr-wide", "learning-wide"},
    "range": {"by-lr-wide", "learning-wide"},
    "words": {"by-norm-wide", "learning-wide"},
    "many": {"by-depth", "by-weight-decay", "by-norm", "learning-wide"},
    "alone": {"learning-wide"},
    "broken": set(),
}


@pytest.mark.parametrize("name", KINDS)
def test_sweep_pages_open_on_desktop_and_phone_without_network_requests(pages, browser, name):
    light = view_page(browser, pages[name], width=1280, scheme="light")
    dark = view_page(browser, pages[name], width=390, scheme="dark")
    assert light.is_sound() and dark.is_sound()
    if name in CHARTS:
        assert light.charts == CHARTS[name]
        assert dark.charts == {chart.replace("-wide", "-narrow") for chart in CHARTS[name]}
    assert follows_colour_scheme(light, dark) or not light.charts


def test_the_ticks_of_a_log_axis_are_numbers(pages):
    page = pages["range"].read_text(encoding="utf-8")
    assert "mathdefault" not in page
    assert {">0.0001<", ">0.001<", ">0.01<"} <= {f">{text}<" for text in re.findall(r"<text[^>]*>([^<]*)</text>", page)}


def test_distant_values_use_a_log_scale():
    assert scale_of([1e-4, 1e-2]) == "log"
    assert scale_of([2, 4, 6]) == "linear"
    assert scale_of([0, 0.1]) == "linear"
    assert scale_of([0, 0.01, 0.1]) == "even"  # a log scale has no zero
    assert scale_of(["pre", "post"]) == scale_of([True, False]) == "even"


def test_a_diverging_curve_does_not_flatten_the_others():
    good = [[(1, 5.0), (2, 4.0)], [(1, 5.1), (2, 4.2)]]
    low, high = limits([*good, [(1, 5.0), (2, 1e6)]])
    assert low < 4 and 5.1 < high < 10
    assert limits([[(1, 2.0), (2, 2.0)]]) == (1.5, 2.5)


def test_incomplete_results_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"kind": "sweep", "points": []}')
    with pytest.raises(UserError, match="lacks points, cells"):
        write_report(tmp_path)
