"""Functions for `datasets.Dataset.map`: the results of a run, cached by the weights, in one process or several."""

import pickle

import numpy as np
import pytest

import headstock
from headstock.errors import UserError
from headstock.huggingface import embed_batch, predict_batch, tokenize_batch
from headstock.inference.run_reference import load_reference
from tests.commands import REVIEWS, write_rows
from tests.conftest import TINY

datasets = pytest.importorskip("datasets")
TEXTS = [text for text, _ in REVIEWS]


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "base"
    headstock.pretrain(corpus, out=path, settings=TINY)
    return path


def finetuned(base, folder, **settings):
    rows = write_rows(folder / "rows.csv", REVIEWS)
    options = {"epochs": 2, "least_steps": 0, **settings}
    headstock.finetune(base, train=rows, out=folder / "towns", settings=options, overwrite=True)
    return folder / "towns"


@pytest.fixture
def dataset(tmp_path):
    """A dataset with files, so that `map` caches its results."""
    datasets.Dataset.from_dict({"text": TEXTS, "label": [label for _, label in REVIEWS]}).save_to_disk(
        tmp_path / "rows"
    )
    return datasets.load_from_disk(tmp_path / "rows")


def test_predictions_are_those_of_the_run_and_labels_stay(base, dataset, tmp_path):
    run = finetuned(base, tmp_path)
    mapped = dataset.map(predict_batch(run), batched=True, batch_size=5)
    expected = headstock.load(run).predict(TEXTS)
    assert mapped["predicted_label"][:] == [row["label"] for row in expected]
    for row, prediction in zip(mapped, expected, strict=True):
        assert row["predicted_probabilities"] == pytest.approx(prediction["probabilities"], abs=1e-5)
    assert mapped["label"][:] == dataset["label"][:]
    parallel = dataset.map(predict_batch(run), batched=True, num_proc=2)
    assert parallel["predicted_label"][:] == mapped["predicted_label"][:]


def test_results_are_cached_until_the_weights_change(base, dataset, tmp_path):
    run = finetuned(base, tmp_path)
    first = dataset.map(predict_batch(run), batched=True)
    again = dataset.map(predict_batch(str(run)), batched=True)
    assert first.cache_files == again.cache_files and first._fingerprint == again._fingerprint
    assert dataset.map(predict_batch(run, prefix="p_"), batched=True)._fingerprint != first._fingerprint
    function = predict_batch(run)
    finetuned(base, tmp_path, seed=1)
    load_reference.cache_clear()  # as in another process: this one still has the weights
    assert dataset.map(predict_batch(run), batched=True)._fingerprint != first._fingerprint
    with pytest.raises(UserError, match="other weights"):
        pickle.loads(pickle.dumps(function))({"text": TEXTS})


def test_embeddings_and_token_ids(base, dataset):
    renamed = dataset.rename_column("text", "review")
    columns = {"text": "review"}
    vectors = np.array(renamed.map(embed_batch(base, columns=columns, pool="mean"), batched=True)["embedding"][:])
    assert vectors == pytest.approx(headstock.load(base).embed(TEXTS, pool="mean"), abs=1e-6)
    long = datasets.Dataset.from_dict({"text": ["Anne sees Paris. " * 40, "Ben."]})
    rows = long.map(tokenize_batch(base), batched=True)
    tokenizer = headstock.load(base).tokenizer
    assert len(rows[0]["input_ids"]) == TINY["context"] and rows[1]["input_ids"][1:] == tokenizer.encode("Ben.")
    assert rows[1]["attention_mask"] == [1] * len(rows[1]["input_ids"])
    whole = long.map(tokenize_batch(base, truncate=False), batched=True)
    assert whole[0]["input_ids"][1:] == tokenizer.encode("Anne sees Paris. " * 40)


def test_a_missing_column_is_named(base, dataset):
    with pytest.raises(UserError, match=r"no column 'text'.*'review'"):
        dataset.rename_column("text", "review").map(embed_batch(base), batched=True)
    with pytest.raises(UserError, match="has no head"):
        predict_batch(base)({"text": TEXTS})
    with pytest.raises(UserError, match="each token"):
        embed_batch(base, pool="none")
