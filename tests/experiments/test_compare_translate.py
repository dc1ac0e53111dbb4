"""Comparison of translation: BLEU in trials, summaries and differences with intervals."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

import headstock
from headstock.errors import UserError
from headstock.experiments.compare import compare
from headstock.experiments.terminal_tables import comparison_table
from headstock.logs import messages_to
from headstock.report.pages import write_report
from headstock.tasks.text_metrics import bleu
from tests.experiments.small import fail_if_trained
from tests.tasks.parallel import SMALL, sentences, write

SETTINGS = {"batch_tokens": 400, "lr": 1e-2, "epochs": 2.0, "beams": 1}


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    """A run pretrained on both languages, and a comparison of scratch and pretrained."""
    folder = tmp_path_factory.mktemp("compare")
    raw = folder / "raw.txt"
    raw.write_text("\n".join(text for row in sentences(100, "raw") for text in row))
    settings = SMALL | {"vocabulary": 300, "steps": 20, "lr": 1e-2, "tensorboard": False, "documents": "line"}
    headstock.pretrain(raw, out=folder / "stock", preset="seq2seq-nano", settings=settings)
    files = {name: write(folder / f"{name}.tsv", sentences(n, name)) for name, n in (("train", 60), ("valid", 10))}
    files["test"] = write(folder / "test.tsv", sentences(12, "test"))
    options = {"out": folder / "out", "task": "translate", "settings": SETTINGS, "leakage": "skip", **files}
    progress = []
    with messages_to(progress.append):
        results = compare(folder / "stock", labels=[20, 60], seeds=2, **options)
    return folder, options, results | {"progress": progress}


def test_arms_are_compared_by_bleu_with_intervals(translation):
    _, _, results = translation
    assert results["metric"] == "bleu" and [arm["name"] for arm in results["arms"]] == ["scratch", "pretrained"]
    assert results["labels"] == [20, 60] and len(results["cells"]) == 8
    for row in results["summary"]:
        cells = [cell for cell in results["cells"] if (cell["arm"], cell["labels"]) == (row["arm"], row["labels"])]
        assert row["score"] == row["bleu"] == pytest.approx(np.mean([cell["bleu"] for cell in cells]))
        assert row["low"] <= row["score"] <= row["high"] and row["chrf_low"] <= row["chrf"] <= row["chrf_high"]
        assert all(cell["accuracy"] is None and 0 <= cell["valid_score"] <= 1 for cell in cells)
    for pair in results["pairs"]:
        scores = {row["arm"]: row["score"] for row in results["summary"] if row["labels"] == pair["labels"]}
        assert pair["difference"] == pytest.approx(scores[pair["a"]] - scores[pair["b"]])
        assert pair["low"] <= pair["difference"] <= pair["high"]
    assert all("points" in verdict or "BLEU" in verdict for verdict in results["verdicts"])
    assert any("tok:13a" in note for note in results["notes"])


def test_progress_table_and_verdicts_use_pairs_and_bleu(translation):
    _, _, results = translation
    cells = [line for line in results["progress"] if "seed" in line and "/8" in line]
    assert len(cells) == 8 and all("pairs" in line and "BLEU" in line and "%" not in line for line in cells)
    console = Console(width=100, file=io.StringIO())
    console.print(comparison_table(results))
    for text in (*cells, *results["verdicts"], console.file.getvalue()):
        assert "label" not in text and "%" not in text.replace("95% CI", "")
    assert all("With 20 pairs" in verdict or "With 60 pairs" in verdict for verdict in results["verdicts"])


def test_a_trial_stores_the_counts_of_every_row(translation):
    folder, _, results = translation
    stored = json.loads((folder / "out" / "cells" / "pretrained-60-1.json").read_text())
    counts = np.array(stored["tallies"]["bleu"])
    assert counts.shape == (12, 10)
    cell = next(c for c in results["cells"] if (c["arm"], c["labels"], c["seed"]) == ("pretrained", 60, 1))
    assert float(bleu(counts.sum(0))) == pytest.approx(cell["bleu"]) == pytest.approx(stored["score"])


def test_a_repeated_call_trains_nothing(translation):
    folder, options, results = translation
    again = compare(folder / "stock", labels=[20, 60], seeds=2, callbacks=[fail_if_trained], **options)
    assert again["summary"] == results["summary"] and again["pairs"] == results["pairs"]


def test_the_report_shows_the_worst_translations(translation):
    folder, _, results = translation
    mistakes = results["details"]["arms"]["pretrained"]["mistakes"]
    assert [row["chrf"] for row in mistakes] == sorted(row["chrf"] for row in mistakes)
    assert {"place", "text", "label", "predicted"} <= set(mistakes[0])
    page = write_report(folder / "out").read_text()
    assert "BLEU" in page and "Worst sentences" in page and "reference" in page
    assert "60 pairs" in page and "number of pairs" in page
    pipeline = headstock.load(folder / "out" / "runs" / "pretrained-60")
    assert len(pipeline.translate(["anne sees a dog ."])) == 1


def test_arms_that_cannot_translate_are_refused(translation, tmp_path):
    folder, options, _ = translation
    for arm, message in (("tfidf", "TF-IDF"), ("frozen", "--arms: frozen")):
        with pytest.raises(UserError, match=message):
            compare(
                folder / "stock", labels=[20], seeds=1, arms=["scratch", arm], **(options | {"out": tmp_path / arm})
            )
