"""Text pairs: rows, segments, truncation, and that both texts are read."""

import csv

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headstock
from headstock.data.records import Records
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import UserError
from headstock.model.model import Model
from headstock.tasks.pair import Pair, PairConfig
from headstock.tasks.pooled_text import truncate_pair
from headstock.tasks.special_tokens import segment_ids
from tests.model.small import small_backbone, stir

LETTERS = "abcdefghij"
TOKENIZER = train_tokenizer([LETTERS] * 3, TokenizerSettings(kind="char", vocabulary=40, min_frequency=1))
CLS, SEP = TOKENIZER.cls, TOKENIZER.sep


def make_task(**config):
    return Pair(PairConfig(**({"classes": ("no", "yes"), "opening": "cls"} | config)), TOKENIZER)


def prepared(task, *pairs):
    columns = {"text": [a for a, _ in pairs], "text_b": [b for _, b in pairs]}
    return task.prepare(Records("t", list(range(len(pairs))), columns), labelled=False)


def model_for(task, **backbone):
    trunk = small_backbone(0, vocabulary=TOKENIZER.vocabulary, context=32, causal=False, **backbone)
    heads = task.heads(trunk)
    stir(heads["label"], seed=0, spread=0.5)
    return Model(trunk, heads).eval()


def test_row_has_both_texts_special_tokens_and_segments():
    task = make_task()
    batch = task.examples(prepared(task, ("ab", "cde"), ("a", "b")), length=32).batch([0, 1])
    ids = TOKENIZER.encode
    assert batch.tokens[0].tolist() == [CLS, *ids("ab"), SEP, *ids("cde"), SEP]
    assert batch.segments[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.segments[1, :5].tolist() == [0, 0, 0, 1, 1]
    assert batch.padding[1].tolist() == [False] * 5 + [True] * 3


def test_segments_when_bos_equals_separator():
    row = torch.tensor([[7, 1, 2, 7, 3, 7]])
    assert segment_ids(row, 7).tolist() == [[0, 0, 0, 0, 1, 1]]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 40))
def test_longer_text_is_truncated_first(first_length, second_length, room):
    first, second = truncate_pair(list(range(first_length)), list(range(second_length)), room=room)
    assert first == list(range(len(first))) and second == list(range(len(second)))
    assert len(first) + len(second) == min(room, first_length + second_length)
    if first_length <= room // 2:
        assert len(first) == first_length  # a short text is complete
    if second_length <= room // 2:
        assert len(second) == second_length


def test_texts_order_and_segments_matter():
    task = make_task(pool="mean")
    model = model_for(task, segments=2)
    data = prepared(task, ("abc", "def"), ("abc", "dea"), ("def", "abc"))
    outputs = np.stack(
        [row.detach().numpy() for row in task.outputs(model, task.examples(data, length=32).batch([0, 1, 2]))]
    )
    assert abs(outputs[0] - outputs[1]).max() > 1e-4
    assert abs(outputs[0] - outputs[2]).max() > 1e-4
    batch = task.examples(data, length=32).batch([0])
    batch.segments = torch.zeros_like(batch.segments)
    assert abs(task.outputs(model, batch)[0].detach().numpy() - outputs[0]).max() > 1e-4


def test_backbone_without_segments():
    task = make_task(pool="mean")
    data = prepared(task, ("abc", "def"), ("abc", "defghij"))
    examples = task.examples(data, length=32)
    model = model_for(task)
    outputs = task.outputs(model, examples.batch([0, 1]))
    for i in range(2):
        assert torch.allclose(outputs[i], task.outputs(model, examples.batch([i]))[0], atol=1e-5)


def test_single_text_is_refused():
    with pytest.raises(UserError, match="a row of this run is two texts"):
        make_task().columns_of(["one text"])


def test_model_learns_to_compare_two_texts(corpus, tiny, tmp_path):
    """The label is whether both texts are the same word, so that one text alone gives only chance accuracy."""
    words = ["Anne", "Ben", "Paris"]
    rows = [(a, b, "same" if a == b else "other") for a in words for b in words for _ in range(1 + (a == b))] * 8
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "text_b", "label"), *rows])
    headstock.pretrain(corpus, out=tmp_path / "stock", objective="masked", settings=tiny | {"steps": 2}, device="cpu")
    settings = {"epochs": 14, "lr": 7e-3, "batch": 8, "pool": "mean"}
    results = headstock.finetune(
        tmp_path / "stock", task="pair", train=path, valid=path, out=tmp_path / "run", settings=settings, device="cpu"
    )
    assert results["metrics"]["accuracy"] > 0.8
    predictions = headstock.load(tmp_path / "run").predict([("Ben", "Ben"), ("Anne", "Ben")])
    assert [row["label"] for row in predictions] == ["same", "other"]
