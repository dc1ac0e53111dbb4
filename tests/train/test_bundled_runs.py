"""The stocks that ship: small, whole, and of use."""

import json

import pytest
import torch

import headstock
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.train.bundled_runs import pack
from headstock.train.resolve import resolve_finetune_config, resolve_with_data
from headstock.train.run_folder import BUNDLED_RUNS, RunFolder, bundled_run_names, open_run


@pytest.mark.parametrize("name", bundled_run_names())
def test_a_stock_is_small_and_says_what_it_is(name):
    run = open_run(name)
    assert str(run) == name
    assert sum(file.stat().st_size for file in run.path.iterdir()) < 10_000_000
    assert run.results()["parameters"]["total"] <= 5_000_000
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float16}
    assert run.data()["tokenizer"] == run.tokenizer().fingerprint
    written = "".join(file.read_text() for file in run.path.iterdir() if file.suffix in (".json", ".md"))
    assert "/tmp" not in written and "/home" not in written  # no path of whoever made it
    assert all(corpus.startswith("catalog:") for corpus in run.config()["data"]["corpus"])


def test_reviews_en_knows_films():
    stock = headstock.load("reviews-en", device="cpu")
    tokenizer = stock.tokenizer
    ids = [tokenizer.cls, *tokenizer.encode("The acting in this"), tokenizer.mask, *tokenizer.encode(" is terrible.")]
    from headstock.model.batch import Batch

    with torch.inference_mode():
        hidden = stock.model(Batch(torch.tensor([ids]))).hidden
        scores = stock.model.heads["token"](hidden[0, ids.index(tokenizer.mask)])
    likely = [tokenizer.decode([number]).strip() for number in scores.topk(5).indices.tolist()]
    assert {"movie", "film"} <= set(likely)


def test_a_near_name_is_suggested_and_a_folder_of_that_name_wins(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="did you mean 'reviews-en'"):
        open_run("reviews-em")
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "reviews-en"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    assert open_run("reviews-en").path.resolve() == mine


def test_packing_keeps_what_a_run_is(tmp_path):
    source = open_run("reviews-en")
    pack(source, tmp_path / "mine")
    packed = RunFolder(tmp_path / "mine")
    assert packed.results()["run"] == "mine"
    assert packed.config() == source.config()
    assert all(torch.equal(packed.weights()[name], tensor) for name, tensor in source.weights().items())
    assert json.loads((BUNDLED_RUNS / "reviews-en" / "results.json").read_text())["run"] == "reviews-en"


@pytest.mark.parametrize(("given", "epochs"), [({}, 25.0), ({"epochs": 1.0}, 1.0), ({"steps": 7}, None)])
def test_who_names_a_number_of_epochs_means_it(given, epochs):
    rows = Records("rows", list(range(64)), {"text": ["a"] * 64, "label": ["x", "y"] * 32})
    chosen = resolve_with_data(resolve_finetune_config(open_run("reviews-en"), "classify", None, given), rows)
    assert chosen.train.epochs == epochs  # else enough for a hundred steps of sixteen rows


def test_a_stock_is_known_to_the_tokenizer_verb(call):
    assert json.loads(call("tokenizer", "show", "reviews-en", "a film", "--json")[0])["sample"] == ["a", " film"]
    assert "reviews-en" in call("tokenizer", "show", "reviws-en", "a film", code=2)[1]
