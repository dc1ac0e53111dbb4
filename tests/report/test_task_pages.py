"""The reports of all tasks, with their own nouns and metrics."""

import copy
import html
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

import headstock
from headstock.experiments.compare import LAYOUT, compare
from headstock.experiments.trial_evaluation import add_error_analysis
from headstock.io import unknown_entries
from headstock.report.compare_page import available_metrics, fill_in_defaults
from headstock.report.highlighted_text import make_passage
from headstock.report.pages import write_report
from headstock.train.run_folder import RunFolder
from tests.experiments.small import SETTINGS, SMALL
from tests.report.browsing import Outline, check_sound, view_page

NAMES = ("pair", "tag", "answer", "layers", "tuned tag", "tuned answer")  # for texts see test_compare_page
NOUNS = {"pair": "pairs", "tag": "sentences", "answer": "questions"}
CHARTS_OF_ERRORS = {"confusion", "lengths", "calibration", "risk_coverage"}


def draw_one_arm(folder: Path, arms: int = 2) -> Path:
    """Leave the errors of the last arms, but charts of the first of these alone: the others have the same ones."""
    path = folder / "results.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    first, *others = list(results["details"]["arms"].items())[-arms:]
    without_charts = {
        name: {key: value for key, value in details.items() if key not in CHARTS_OF_ERRORS} for name, details in others
    }
    results["details"]["arms"] = dict([first]) | without_charts
    results["cells"] = [cell if cell["arm"] == first[0] else cell | {"epochs": []} for cell in results["cells"]]
    path.write_text(json.dumps(results), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def reports(compared, stock, files, task_files, tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("reports")
    folders = {task: Path(shutil.copytree(out, home / task)) for task, (_, out) in compared.items()}
    for folder in folders.values():
        draw_one_arm(folder)
    compare(stock, **files, out=home / "layers", features=["0", "last", "mix"], **SMALL)
    folders["layers"] = draw_one_arm(home / "layers", arms=3)
    for task in ("tag", "answer"):
        folders[f"tuned {task}"] = out = home / f"tuned-{task}"
        headstock.finetune(stock, **task_files[task], out=out, task=task, settings=SETTINGS)
        add_error_analysis(RunFolder(out))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: write_report(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", NAMES)
def test_task_pages_are_valid_and_open_in_both_widths_and_colour_schemes(reports, browser, name):
    page = Outline(reports[name])
    check_sound(page)
    assert "None" not in re.sub(r"None found", "", page.text)
    for width, scheme in ((390, "dark"), (1280, "light")):
        view = view_page(browser, reports[name], width=width, scheme=scheme)
        assert view.is_sound() and view.charts


@pytest.mark.parametrize("task", NOUNS)
def test_pages_use_the_nouns_of_the_task(reports, task):
    text = " ".join(Outline(reports[task]).text.split())
    assert f"evaluated on 30 test {NOUNS[task]}" in text
    assert f"Leakage: are the test {NOUNS[task]} in the pretraining text?" in text
    assert not re.search(r"\b(test|validation|training|labelled|measured) texts?\b", text)


@pytest.mark.parametrize("task", ["tag", "answer"])
def test_the_primary_metric_comes_first(reports, compared, task):
    results, _ = compared[task]
    page = Outline(reports[task])
    text = " ".join(page.text.split())
    expected = {"tag": ("F1", "accuracy"), "answer": ("F1", "exact match")}[task]
    assert tuple(available_metrics(results).values()) == expected
    assert "F1 in percent" in text
    assert "Differences of F1 in points" in text
    for row in results["summary"]:
        for key in available_metrics(results):
            assert f"{100 * row[key]:.1f}%" in text
    assert 'data-chart="f1"' in reports[task].read_text()
    assert (reports[task].parent / "figures" / "f1.svg").is_file()


def shown_details(page: Path) -> list[dict]:
    details = json.loads((page.parent / "results.json").read_text(encoding="utf-8"))["details"]["arms"]
    assert len(details) == 2
    return list(details.values())


def test_errors_are_highlighted_in_their_text(reports):
    for task in ("tag", "answer"):
        source = reports[task].read_text(encoding="utf-8")
        for details in shown_details(reports[task]):
            for mistake in details["mistakes"]:
                for begin, end, kind in mistake["marks"]:
                    text = html.escape(mistake["text"][begin:end], quote=True)
                    assert f'<mark class="{kind}">{text.replace("&#x27;", "&#39;")}</mark>' in source
    text = Outline(reports["answer"]).text
    assert "Confusions of classes" not in text and "Labels that may be wrong" not in text
    for details in shown_details(reports["answer"]):
        assert all(mistake["question"] in text for mistake in details["mistakes"])
    assert "Confusions of tags" in Outline(reports["tag"]).text


def test_pages_of_fine_tuned_runs_show_the_primary_metric_first(reports):
    for task, first in (("tag", "F1"), ("answer", "F1")):
        source = reports[f"tuned {task}"].read_text()
        assert re.findall(r"<dt>([^<]+)</dt>", source)[0] == first
        assert "Most confident errors" in source
        assert ("confusion matrix" in source) == (task == "tag")
    assert "exact match" in Outline(reports["tuned answer"]).text


def test_feature_arms_are_shown_together(reports):
    source = reports["layers"].read_text()
    page = Outline(reports["layers"])
    (label,) = {attributes["aria-label"] for tag, attributes in page.tags if attributes.get("data-chart") == "accuracy"}
    assert all(f"frozen {layers} " in label for layers in ("0", "last", "mix"))
    assert "As features with 8 labels, " in page.text
    assert "which layers are the best features?" in page.text
    assert source.count('class="panel"') == 3


def test_results_of_early_versions_render(reports, tmp_path):
    old = copy.deepcopy(json.loads((reports["layers"].parent / "results.json").read_text()))
    old |= {"details": {}, "cells": [cell | {"epochs": []} for cell in old["cells"]]}  # unaffected charts
    new = copy.deepcopy(old)
    del old["metric"]
    for row in old["summary"]:
        for key in ("metric", "score", "accuracy_low", "accuracy_high"):
            del row[key]
    for row in old["cells"]:
        row["valid_accuracy"] = row.pop("valid_score")
        del row["score"]
    pages = []
    for name, results in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
        pages.append(write_report(tmp_path / name).read_text())
    assert pages[0] == pages[1]
    fill_in_defaults(old)
    assert old["summary"][0]["score"] == old["summary"][0]["accuracy"]


def test_marked_text_is_escaped():
    passage = make_passage("a <b> & c", marks=[[2, 5, "said"], [4, 7, "true"], [8, 9, "<i>"]])
    assert passage.shown == 'a <mark class="said">&lt;b&gt;</mark><mark class="true"> &amp;</mark> c'
    folded = make_passage("x" * 300 + "yes" + "z" * 900, marks=[[298, 304, "said"]], preview=300)
    assert folded.shown.endswith('<mark class="said">xx</mark>')
    assert folded.rest.startswith('<mark class="said">yesz</mark>')


def test_a_comparison_folder_contains_only_known_files(reports, compared):
    for task in compared:
        folder = reports[task].parent
        assert unknown_entries(folder, LAYOUT) == []
        assert list((folder / "figures").iterdir()) != []
