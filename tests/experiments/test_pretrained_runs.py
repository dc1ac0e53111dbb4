"""Descriptions of several pretrained runs in a comparison, and notes on what limits comparing them."""

from io import StringIO

import pytest
from rich.console import Console

import headstock
from headstock.experiments.compare import compare
from headstock.experiments.comparison_summary import comparability_notes
from headstock.experiments.terminal_tables import runs_table
from headstock.report.format import compact_number
from headstock.report.pages import write_report
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY
from tests.experiments.small import SMALL, draw_two_arms


@pytest.fixture(scope="module")
def side_by_side(stock, corpus, files, tmp_path_factory):
    """A causal and a hybrid run with the same tokenizer; the second is wider and saw fewer tokens."""
    folder = tmp_path_factory.mktemp("families")
    settings = TINY | {"steps": 5, "width": 32}
    headstock.pretrain(
        corpus, out=folder / "both", objective="hybrid", tokenizer=RunFolder(stock).tokenizer_file, settings=settings
    )
    out = folder / "out"
    results = compare([stock, folder / "both"], **files, out=out, arms=["scratch", "frozen", "tfidf"], **SMALL)
    return stock, folder / "both", results, out


def test_runs_are_described_with_language_modelling_and_task_scores(side_by_side):
    *runs, results, _ = side_by_side
    for run, description in zip(runs, results["runs"], strict=True):
        expected = RunFolder(run).results()
        assert description["run"] == str(run)
        assert description["parameters"] == expected["parameters"]["total"]
        assert description["tokens"] == expected["tokens"]
        assert description["bits_per_byte"] == expected["metrics"]["bits_per_byte"]
        scores = {row["arm"]: row for row in results["summary"]}
        for kind in ("scratch", "frozen"):
            assert description["scores"][kind]["score"] == scores[f"{kind} {run.name}"]["score"]
    assert [row["objective"] for row in results["runs"]] == ["causal", "hybrid"]
    assert results["runs"][1]["masked_perplexity"] > 1
    assert results["runs"][0]["masked_perplexity"] is None


def test_differences_between_runs_are_noted(side_by_side):
    *_, results, _ = side_by_side
    notes = " ".join(results["notes"])
    assert "differ in parameters" in notes
    assert "differ in pretraining tokens" in notes
    assert "tokenizers" not in notes
    same = {"tokenizer": "a", "parameters": 100, "tokens": 1000}
    assert comparability_notes([same, same | {"parameters": 105}]) == []
    assert "compare their bits per byte" in comparability_notes([same, same | {"tokenizer": "b"}])[0]


def test_a_single_run_is_not_described(done):
    assert done[0]["runs"] == []


def test_report_and_terminal_show_the_runs(side_by_side):
    *_, results, out = side_by_side
    page = write_report(draw_two_arms(out)).read_text(encoding="utf-8")
    assert "Pretrained runs" in page
    assert (out / "figures" / "runs-wide.svg").is_file()
    assert runs_table(results["runs"]).row_count == 2


def test_a_long_name_is_wrapped_not_cut(side_by_side):
    name = "a-name-longer-than-its-column-of-the-table"
    console = Console(width=60, file=StringIO())
    console.print(runs_table([description | {"run": name} for description in side_by_side[2]["runs"]]))
    column = [line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert "".join(column) == name * 2


def test_compact_numbers():
    assert [compact_number(n) for n in (40_316_672, 812_400, 96, None)] == ["40.3M", "812.4k", "96", ""]
