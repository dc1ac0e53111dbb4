"""The notebooks of docs/notebooks run from the first cell to the last, and are committed with their outputs.

Here they run on a little data: the metadata of a cell names the variables that nbmake sets after it
(`{"nbmake": {"mock": {"steps": 4}}}`).
"""

import random
import re
import shutil
from pathlib import Path

import pytest

from tests.benchmarks import load_script

scripts = load_script("notebooks")
nbformat = pytest.importorskip("nbformat")
# what the outputs show; a progress bar where a run is trained
EXPECTED = {
    "first-model": [r"<progress", r"4/4 steps", r"step 4: valid loss", r"<svg.*perplexity", r"<td", r"log_likelihood"],
    "pretraining-pays": [r"<progress", r"1/\d+  +16 labels", r"<svg.*TF-IDF.*16 labels", r"difference"],
    "look-inside": [r"<iframe.*2,612,896", r"<iframe.*attention", r"token 9 of 12", r"Predictions after each layer"],
    "translation": [r"18,000 sentences", r"<progress", r"<svg.*BLEU", r"<iframe.*Cross-attention"],
    "scikit-learn": [r"embeddings.*TF-IDF", r"mean_test_score", r"accuracy on the test rows"],
    "huggingface": [r"BertForMaskedLM|masked", r"largest difference: \d(\.\d+)?e-0[5-9]", r"predicted_label"],
}


def write_data(folder):
    """The files that stand for those of the catalog."""
    pick = random.Random(0)
    good, bad = ("warm", "funny", "clever", "moving"), ("dull", "slow", "flat", "silly")
    rows = [
        (f"A {word} film with {pick.randint(2, 9)} actors, take {take}.", "positive" if word in good else "negative")
        for take in range(5)
        for word in good + bad
    ]
    lines = "".join(f'"{text}",{label}\n' for text, label in rows)
    for name in ("train.csv", "test.csv"):
        (folder / name).write_text(f"text,label\n{lines}", encoding="utf-8")
    (folder / "corpus.txt").write_text("\n\n".join(text for text, _ in rows * 4), encoding="utf-8")


def output_text(notebook):
    """All that the outputs show, one output after the other."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output.get("text") or output.data.get("text/html") or output.data["text/plain"] for output in outputs]
    return "\n".join(shown)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    runner = pytest.importorskip("nbmake.nb_run")
    for package in {
        "look-inside": ["pandas"],
        "scikit-learn": ["pandas"],
        "huggingface": ["transformers", "datasets"],
    }.get(name, []):
        pytest.importorskip(package)
    from tests.notebook_kernels import fork_kernels

    fork_kernels(monkeypatch)
    write_data(tmp_path)
    path = Path(shutil.copy(scripts.FOLDER / f"{name}.ipynb", tmp_path))
    result = runner.NotebookRun(path, 300).execute()
    assert result.error is None, result.error.trace
    shown = output_text(result.nb)
    assert [pattern for pattern in EXPECTED[name] if not re.search(pattern, shown, re.DOTALL)] == []
    assert name != "pretraining-pays" or "valid loss" not in shown  # a comparison has a line for each trial
    assert list(scripts.problems(scripts.clean(result.nb))) == []


def test_notebooks_are_committed_with_their_outputs():
    paths = scripts.notebooks()
    assert [path.stem for path in paths] == sorted(EXPECTED)
    for path in paths:
        assert path.stat().st_size <= scripts.MAX_BYTES, path.name
        assert list(scripts.problems(nbformat.read(path, as_version=4))) == [], path.name


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (nbformat.v4.new_output("stream", text="saved in /home/anne/runs\n"), "an absolute path"),
        (nbformat.v4.new_output("stream", name="stderr", text="a warning\n"), "stderr"),
        (nbformat.v4.new_output("error", ename="ValueError", evalue="no"), "ValueError"),
        (nbformat.v4.new_output("display_data", data={"text/html": '<div class="headstock-progress">'}), "progress"),
    ],
)
def test_outputs_that_a_reader_should_not_see_are_found(output, problem):
    cell = nbformat.v4.new_code_cell("1", execution_count=1, outputs=[output])
    assert problem in " ".join(scripts.problems(nbformat.v4.new_notebook(cells=[cell])))
    cell.outputs = [nbformat.v4.new_output("stream", text="runs/mine https://example.org/home/ </tmp>\n")]
    assert list(scripts.problems(nbformat.v4.new_notebook(cells=[cell]))) == []
