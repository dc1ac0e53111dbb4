"""Bundled runs: small, complete and usable."""

import json

import pytest
import torch

import headstock
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.train.bundled_runs import pack
from headstock.train.resolve import resolve_finetune_config, resolve_with_data
from headstock.train.run_folder import BUNDLED_RUNS, RunFolder, bundled_run_names, open_run

SIZES = {"general-en": 40_000_000, "reviews-en": 20_000_000, "reviews-en-uncased": 20_000_000}  # bytes at most


@pytest.mark.parametrize("name", bundled_run_names())
def test_bundled_runs_are_small_and_complete(name):
    run = open_run(name)
    assert str(run) == name
    assert sum(file.stat().st_size for file in run.path.iterdir()) < SIZES[name]
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float16}
    assert run.data()["tokenizer"] == run.tokenizer().fingerprint
    assert "samples" not in run.results()  # excerpts of the text, whose licence may forbid copies
    text = "".join(file.read_text() for file in run.path.iterdir() if file.suffix in (".json", ".md"))
    assert "/tmp" not in text and "/home" not in text  # no local paths
    assert all(corpus.startswith("catalog:") for corpus in run.config()["data"]["corpus"])


def test_reviews_en_fills_masks_sensibly():
    pipeline = headstock.load("reviews-en", device="cpu")
    tokenizer = pipeline.tokenizer
    ids = [tokenizer.cls, *tokenizer.encode("The acting in this"), tokenizer.mask, *tokenizer.encode(" is terrible.")]
    from headstock.model.batch import Batch

    with torch.inference_mode():
        hidden = pipeline.model(Batch(torch.tensor([ids]))).hidden
        scores = pipeline.model.heads["token"](hidden[0, ids.index(tokenizer.mask)])
    candidates = [tokenizer.decode([number]).strip() for number in scores.topk(5).indices.tolist()]
    assert {"movie", "film"} <= set(candidates)


def test_general_en_knows_more_than_films():
    texts = ["Paris is the [MASK] of France.", "The king was [MASK] by his son.", "The acting in this [MASK] is poor."]
    expected = ["capital", "succeeded", "film"]
    for filled, word in zip(headstock.load("general-en", device="cpu").fill(texts), expected, strict=True):
        assert word.strip() in [candidate.token.strip() for candidate in filled.fills[0]]


def test_reviews_en_uncased_ignores_case_and_accents():
    texts = ["The acting in this [MASK] is terrible.", "THE ACTING in this [MASK] is térrible."]
    one, other = headstock.load("reviews-en-uncased", device="cpu").fill(texts)
    assert {"film", "movie"} <= {candidate.token for candidate in one.fills[0]}
    assert [c.token for c in one.fills[0]] == [c.token for c in other.fills[0]]
    assert other.filled.startswith("THE ACTING") and other.filled.endswith("térrible.")


def test_similar_names_are_suggested_and_folders_win(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="did you mean 'reviews-en'"):
        open_run("reviews-em")
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "reviews-en"
    own.mkdir()
    (own / "config.json").write_text("{}")
    assert open_run("reviews-en").path.resolve() == own


def test_packing_keeps_settings_and_weights(tmp_path):
    source = open_run("reviews-en")
    pack(source, tmp_path / "own")
    packed = RunFolder(tmp_path / "own")
    assert packed.results()["run"] == "own"
    assert packed.config() == source.config()
    assert all(torch.equal(packed.weights()[name], tensor) for name, tensor in source.weights().items())
    assert json.loads((BUNDLED_RUNS / "reviews-en" / "results.json").read_text())["run"] == "reviews-en"


@pytest.mark.parametrize(("options", "epochs"), [({}, 25.0), ({"epochs": 1.0}, 1.0), ({"steps": 7}, None)])
def test_an_explicit_number_of_epochs_is_not_extended(options, epochs):
    rows = Records("rows", list(range(64)), {"text": ["a"] * 64, "label": ["x", "y"] * 32})
    run_config = resolve_with_data(resolve_finetune_config(open_run("reviews-en"), "classify", None, options), rows)
    assert run_config.train.epochs == epochs  # 25 epochs are a hundred steps of sixteen rows


def test_the_tokenizer_command_opens_bundled_runs(call):
    assert json.loads(call("tokenizer", "show", "reviews-en", "a film", "--json")[0])["sample"] == ["a", " film"]
    assert "reviews-en" in call("tokenizer", "show", "reviws-en", "a film", code=2)[1]
