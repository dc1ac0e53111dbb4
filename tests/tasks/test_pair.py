"""Pairs of texts: how they stand in a row, which of them a token is of, and that both are really read."""

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
from headstock.tasks.pair import Pair, PairConfig, truncate_pair
from headstock.tasks.special_tokens import segment_ids
from tests.model.small import small_backbone, stir

LETTERS = "abcdefghij"
TOKENIZER = train_tokenizer([LETTERS] * 3, TokenizerSettings(kind="char", vocabulary=40, min_frequency=1))
CLS, SEP = TOKENIZER.cls, TOKENIZER.sep


def make(**config):
    return Pair(PairConfig(**({"classes": ("no", "yes"), "opening": "cls"} | config)), TOKENIZER)


def prepared(task, *pairs):
    columns = {"text": [a for a, _ in pairs], "text_b": [b for _, b in pairs]}
    return task.prepare(Records("t", list(range(len(pairs))), columns), labelled=False)


def model_for(task, **backbone):
    stock = small_backbone(0, vocabulary=TOKENIZER.vocabulary, context=32, causal=False, **backbone)
    heads = task.heads(stock)
    stir(heads["label"], seed=0, spread=0.5)
    return Model(stock, heads).eval()


def test_a_row_is_both_texts_with_marks_and_segments():
    task = make()
    batch = task.examples(prepared(task, ("ab", "cde"), ("a", "b")), length=32).batch([0, 1])
    ids = TOKENIZER.encode
    assert batch.tokens[0].tolist() == [CLS, *ids("ab"), SEP, *ids("cde"), SEP]
    assert batch.segments[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.segments[1, :5].tolist() == [0, 0, 0, 1, 1]
    assert batch.padding[1].tolist() == [False] * 5 + [True] * 3


def test_an_opening_mark_that_is_also_the_separator_starts_no_second_text():
    row = torch.tensor([[7, 1, 2, 7, 3, 7]])
    assert segment_ids(row, 7).tolist() == [[0, 0, 0, 0, 1, 1]]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 40))
def test_the_longer_text_loses_its_end_first(one, other, room):
    first, second = truncate_pair(list(range(one)), list(range(other)), room=room)
    assert first == list(range(len(first))) and second == list(range(len(second)))
    assert len(first) + len(second) == min(room, one + other)
    if one <= room // 2:
        assert len(first) == one  # what is short is kept whole
    if other <= room // 2:
        assert len(second) == other


def test_both_texts_their_order_and_the_segments_count():
    task = make(pool="mean")
    model = model_for(task, segments=2)
    data = prepared(task, ("abc", "def"), ("abc", "dea"), ("def", "abc"))
    told = np.stack(
        [row.detach().numpy() for row in task.outputs(model, task.examples(data, length=32).batch([0, 1, 2]))]
    )
    assert abs(told[0] - told[1]).max() > 1e-4
    assert abs(told[0] - told[2]).max() > 1e-4
    batch = task.examples(data, length=32).batch([0])
    batch.segments = torch.zeros_like(batch.segments)
    assert abs(task.outputs(model, batch)[0].detach().numpy() - told[0]).max() > 1e-4


def test_a_backbone_without_segments_reads_pairs_too():
    task = make(pool="mean")
    data = prepared(task, ("abc", "def"), ("abc", "defghij"))
    examples = task.examples(data, length=32)
    model = model_for(task)
    both = task.outputs(model, examples.batch([0, 1]))
    for i in range(2):
        assert torch.allclose(both[i], task.outputs(model, examples.batch([i]))[0], atol=1e-5)


def test_a_bare_text_is_no_pair():
    with pytest.raises(UserError, match="a row of this run is two texts"):
        make().columns_of(["one text"])


def test_pairs_are_learned_that_neither_text_alone_could_tell(corpus, tiny, tmp_path):
    """The label says whether both texts are the same word: a head that reads one of them stays at chance."""
    words = ["Anne", "Ben", "Paris"]
    rows = [(a, b, "same" if a == b else "other") for a in words for b in words for _ in range(1 + (a == b))] * 8
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "text_b", "label"), *rows])
    headstock.pretrain(corpus, out=tmp_path / "stock", objective="masked", settings=tiny | {"steps": 2}, device="cpu")
    settings = {"epochs": 20, "lr": 5e-3, "batch": 8, "pool": "mean"}
    results = headstock.finetune(
        tmp_path / "stock", task="pair", train=path, valid=path, out=tmp_path / "run", settings=settings, device="cpu"
    )
    assert results["metrics"]["accuracy"] > 0.8
    said = headstock.load(tmp_path / "run").predict([("Ben", "Ben"), ("Anne", "Ben")])
    assert [row["label"] for row in said] == ["same", "other"]
