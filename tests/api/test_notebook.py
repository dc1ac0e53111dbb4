"""A notebook that is really executed shows progress while it trains, and the result as a table with a chart."""

import pytest

CELLS = [
    """
import headstock
texts = ["Anne likes Paris.", "Ben sees the sea.", "Zoë is at home."] * 30
tiny = {"depth": 1, "width": 16, "heads": 2, "hidden": 32, "context": 32, "vocabulary": 300, "tensorboard": False}
run = headstock.pretrain(texts, out="runs/p", steps=6, log_every=2, validate_every=3, report=False, **tiny)
""",
    "run",
    """
rows = [(f"A {word} film, take {i}.", label) for word, label in (("warm", "pos"), ("dull", "neg")) for i in range(20)]
arms = ["frozen", "tfidf"]
headstock.compare(run.run, train=rows, out="runs/c", labels=20, seeds=2, arms=arms, epochs=1, report=False)
""",
    "headstock.load(run.run).generate('Anne', max_tokens=3)",
]


def test_a_notebook_shows_progress_and_results(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    client = nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()

    def html(cell: int, kind: str) -> str:
        outputs = [output for output in book.cells[cell].outputs if output.output_type == kind]
        return "".join(output.data["text/html"] for output in outputs)

    bar = html(0, "display_data")
    assert "<progress" in bar and "6/6 steps" in bar and "loss" in bar and "step 3:" in bar and "tokenizer:" in bar
    assert "<svg" in html(1, "execute_result") and "perplexity" in html(1, "execute_result")
    assert "<progress" in html(2, "display_data")
    table = html(2, "execute_result")
    assert "<svg" in table and "TF-IDF" in table and "20 labels" in table
    assert "<td" in html(3, "execute_result")
    streams = [output for cell in book.cells for output in cell.outputs if output.output_type == "stream"]
    assert not streams, streams
