"""Model cards: complete, consistent with the run's files, and safe with any label or file name."""

import csv
import json
import re
from pathlib import Path

import pytest

import headstock
from headstock.cost.parameter_table import formula_table
from headstock.data import catalog
from headstock.report.pages import write_report
from headstock.train.model_card import model_without_weights, render_card
from headstock.train.run_folder import BUNDLED_RUNS, RunFolder
from tests.conftest import TINY
from tests.report.browsing import Outline

SECTIONS = ["Data", "Tokenizer", "Architecture", "Training", "Results", "Limits", "Use it here", "Use it elsewhere"]
FAMILIES = {
    "gpt-nano": {},
    "bert-nano": {"objective": "masked"},
    "modern-nano": {},
    "lstm-nano": {},
    "elmo-nano": {"objective": "both-ways"},
    "seq2seq-nano": {"objective": "denoise"},
}


def small(preset: str) -> dict:
    settings = {"width": 16, "depth": 2, "hidden": 24, "batch": 8, "steps": 2, "tensorboard": False, "length": 32}
    settings |= {"tokenizer.vocabulary": 400}
    return settings if preset[:4] in ("lstm", "elmo") else settings | {"heads": 2, "context": 32}


def parameter_counts(card: str) -> dict[str, int]:
    """The numbers in the table of parameters."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| .+ \| ([\d,]+) \|$", card, re.MULTILINE)
    return {name: int(count.replace(",", "")) for name, count in rows}


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_card_has_every_section_and_its_parameters_add_up(corpus, tmp_path, preset):
    done = headstock.pretrain(corpus, out=tmp_path / "run", preset=preset, settings=small(preset), **FAMILIES[preset])
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", card, re.MULTILINE) == SECTIONS
    assert sum(parameter_counts(card).values()) == done["parameters"]["total"]
    data = RunFolder(tmp_path / "run").data()
    assert data["fingerprint"] in card
    assert data["tokenizer"] in card
    assert f"{data['train_bytes']:,} bytes" in card
    assert f"{done['tokens']:,}" in card
    assert ("--to onnx" in card) == (preset.split("-")[0] in ("gpt", "bert", "modern"))
    assert ("--to huggingface" in card) == (preset.split("-")[0] not in ("lstm", "elmo"))
    assert "Headstock only" in card or "--to huggingface" in card


def test_parameter_formulas_depend_on_the_settings(corpus, tmp_path):
    tables = []
    for number, settings in enumerate([{}, {"bias": False, "activation": "swiglu", "positions": "rotary"}]):
        headstock.pretrain(corpus, out=tmp_path / str(number), settings=TINY | {"steps": 1} | settings)
        tables.append(formula_table(model_without_weights(RunFolder(tmp_path / str(number)))))
    assert "N × (4 D² + 2 D F + 9 D + F)" in tables[0]
    assert "N × (4 D² + 3 D F + 2 D)" in tables[1]
    assert "D T" in tables[0]
    assert "D T" not in tables[1]


def test_a_card_has_intervals(corpus, tmp_path):
    done = headstock.pretrain(corpus, out=tmp_path / "run", settings=TINY | {"steps": 1, "batch": 1, "length": 8})
    low, high = done["intervals"]["perplexity"]
    assert low < done["perplexity"] < high
    assert (
        f"valid ppl {done['perplexity']:.3f} ({low:.3f} to {high:.3f})" in (tmp_path / "run" / "README.md").read_text()
    )


def test_the_card_of_a_fine_tuned_run(corpus, tmp_path):
    headstock.pretrain(corpus, out=tmp_path / "source", settings=TINY | {"steps": 2})
    rows = [f"Anne likes number {i},{'odd' if i % 2 else 'even'}" for i in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    settings = {"epochs": 1, "long": "tail", "least_steps": 0}
    files = {"train": tmp_path / "rows.csv", "test": tmp_path / "rows.csv"}
    done = headstock.finetune(tmp_path / "source", **files, out=tmp_path / "run", settings=settings)
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", card, re.MULTILINE) == SECTIONS
    low, high = done["test"]["intervals"]["accuracy"]
    assert f"accuracy {100 * done['test']['accuracy']:.1f}% ({100 * low:.1f} to {100 * high:.1f})" in card
    assert "36 rows (even 18, odd 18)" in card
    assert "pretrained on" in card
    assert "it reads the end" in card
    assert "not evaluated on test rows" not in card
    assert parameter_counts(card)["heads.label"] == 2 * 16 + 2
    assert sum(parameter_counts(card).values()) == done["parameters"]["total"]
    assert render_card(RunFolder(tmp_path / "run")) == card


MARKUP = ("<script>alert(1)</script>", "<img src=x onerror=alert(1)> | `a` *b* [c](d) &lt;")


def test_labels_and_names_are_escaped(corpus, tmp_path):
    """Labels and file names become neither tags nor table cells, in the card and in the report."""
    headstock.pretrain(corpus, out=tmp_path / "source", settings=TINY | {"steps": 1})
    file, run = tmp_path / "rows <b>|`.csv", RunFolder(tmp_path / "my <b> run")
    with file.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([("text", "label"), *((f"Anne {i}", MARKUP[i % 2]) for i in range(40))])
    headstock.finetune(tmp_path / "source", train=file, out=run.path, settings={"epochs": 1, "least_steps": 0})
    card = run.model_card.read_text(encoding="utf-8")
    prose = "\n".join(line for line in card.splitlines() if not line.startswith("    "))
    assert not re.search(r"<|(?<!\\)[*\[]|&lt; |&lt;$", prose.replace("&lt;b&gt;", ""))
    assert r"&lt;img src=x onerror=alert(1)&gt; &#124; \`a\` \*b\* \[c\](d) &amp;lt;" in prose
    assert all(line.count("|") in (0, 3, 4) for line in prose.splitlines())  # tables of two and three columns
    assert "headstock evaluate 'my <b> run' FILE" in card
    write_report(run.path)
    page = Outline(run.report)
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert all(label in page.text for label in MARKUP)


def test_licences_come_from_the_catalog(corpus, tmp_path):
    assert catalog.licence_of("catalog:imdb") == catalog.find_entry("imdb").licence
    assert catalog.licence_of("catalog:imdb/train.csv") == catalog.find_entry("imdb").licence
    assert catalog.licence_of(str(corpus)) is None
    (tmp_path / "corpus.txt").write_text(Path(corpus).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / catalog.CARD).write_text(json.dumps({"licence": "CC BY 4.0, as its makers say"}), encoding="utf-8")
    headstock.pretrain(tmp_path / "corpus.txt", out=tmp_path / "run", settings=TINY | {"steps": 1})
    assert "| licence | CC BY 4.0, as its makers say |" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")


def test_cards_of_bundled_runs_can_be_rendered():
    for folder in BUNDLED_RUNS.iterdir():
        card = render_card(RunFolder(folder))
        assert catalog.find_entry("imdb").licence in card
        assert sum(parameter_counts(card).values()) == RunFolder(folder).results()["parameters"]["total"]
