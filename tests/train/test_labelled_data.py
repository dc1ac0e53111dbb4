"""Labelled rows: stratified and nested subsets, held-out rows, splits and fingerprints."""

import json
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headstock.data.records import Records
from headstock.errors import UserError
from headstock.logs import messages_to
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.train.labelled_data import LabelledSplits, hold_out, read_splits, stratified_order, subset
from headstock.train.settings import LabelledSettings

# many classes of very different sizes, where a naive interleaving would drift from the shares
uneven = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(
    lambda sizes: [f"class {number}" for number, size in enumerate(sizes) for _ in range(size)]
)
seeds = st.integers(0, 2**32)


def records(labels) -> Records:
    columns = {"text": [f"text {i}" for i in range(len(labels))], "label": list(labels)}
    return Records("rows.csv", list(range(2, len(labels) + 2)), columns)


@given(uneven.flatmap(st.permutations), seeds)
@example(["common"] * 40 + list("abcdefghij"), 0)
def test_every_prefix_is_stratified(labels, seed):
    order = stratified_order(labels, seed=seed)
    assert sorted(order) == list(range(len(labels)))
    totals, counts = Counter(labels), Counter()
    for count, row in enumerate(order, 1):
        counts[labels[row]] += 1
        for label, size in totals.items():
            assert abs(counts[label] - count * size / len(labels)) < 1


@given(uneven, seeds, st.data())
def test_subsets_are_nested(labels, seed, data):
    rows = records(labels)
    fewer = data.draw(st.integers(0, len(labels)))
    count = data.draw(st.integers(fewer, len(labels)))
    small, large = subset(rows, fewer, seed=seed), subset(rows, count, seed=seed)
    assert (len(small), len(large)) == (fewer, count)
    assert set(small.lines) <= set(large.lines)
    assert large.lines == sorted(large.lines)  # in the order of the file
    assert subset(rows, count, seed=seed) == large


def test_seeds_select_different_rows():
    rows = records(["a", "b"] * 30)
    subsets = [subset(rows, 20, seed=seed).lines for seed in range(4)]
    assert len({tuple(lines) for lines in subsets}) == 4
    assert subset(rows, None, seed=1) is rows
    with pytest.raises(UserError, match=r"rows.csv: 61 labels .* 60"):
        subset(rows, 61, seed=0)


def test_the_first_rows_have_different_classes_for_different_seeds():
    labels = [f"class {number}" for number in range(10) for _ in range(5)]
    first = {frozenset(labels[row] for row in stratified_order(labels, seed=seed)[:3]) for seed in range(20)}
    assert len(first) > 5


# Reading


def write(path, rows, columns=("text", "label")):
    path.write_text("\n".join([",".join(columns), *(",".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return str(path)


ROWS = [(f"text {i}", "yes" if i % 4 else "no") for i in range(40)]


def read(settings: LabelledSettings, *, seed=0, separator=None) -> tuple[LabelledSplits, list[str]]:
    lines: list[str] = []
    with messages_to(lines.append):
        return read_splits(settings, Classify, ClassifyConfig(separator=separator), seed=seed), lines


def test_without_a_validation_file_rows_are_held_out(tmp_path):
    train = write(tmp_path / "train.csv", ROWS)
    splits, messages = read(LabelledSettings(train=train, valid_fraction=0.2))
    assert (len(splits.train), len(splits.valid)) == (32, 8)
    assert sorted(splits.train.lines + splits.valid.lines) == list(range(2, 42))
    assert Counter(splits.valid.labels) == {"yes": 6, "no": 2}
    assert len(messages) == 1 and f"8 of 40 rows of {train} are held out" in messages[0]
    again, other = (read(LabelledSettings(train=train, valid_fraction=0.2), seed=seed)[0] for seed in (0, 1))
    assert again.valid == splits.valid
    assert other.valid != splits.valid


def test_a_single_row_cannot_be_split(tmp_path):
    with pytest.raises(UserError, match="1 rows are too few to hold some out; name a --valid file"):
        read(LabelledSettings(train=write(tmp_path / "train.csv", ROWS[:1])))


def test_every_class_keeps_a_training_row():
    labels = ["yes"] * 20 + ["no"] * 20 + [f"rare {i}" for i in range(12)]
    for seed in range(5):
        held = hold_out(records(labels), 0.2, seed=seed)
        assert len(held) == 10
        assert {labels[row] for row in range(52) if row not in held} == set(labels)
    pairs = [f"{first}|{second}" for first in "abcd" for second in "efgh"]  # distinct rows of shared classes
    assert len(hold_out(records(pairs), 0.25, seed=0, separator="|")) == 4


def test_separate_files_are_used_completely(tmp_path):
    train, valid, test = (write(tmp_path / f"{name}.csv", ROWS[:n]) for name, n in (("a", 8), ("b", 5), ("c", 3)))
    splits, messages = read(LabelledSettings(train=train, valid=valid, test=test))
    assert splits.test is not None
    assert [len(rows) for rows in (splits.train, splits.valid, splits.test)] == [8, 5, 3]
    assert messages == []
    description = splits.describe()
    assert description["train"] == {"file": train, "rows": 8, "classes": {"no": 2, "yes": 6}}
    assert description["test"]["rows"] == 3


def test_unlabelled_rows_are_accepted_only_for_testing(tmp_path):
    train = write(tmp_path / "train.csv", ROWS)
    unlabelled = write(tmp_path / "unlabelled.csv", [("only text",)], columns=("text",))
    splits, messages = read(LabelledSettings(train=train, valid=train, test=unlabelled))
    assert splits.test is not None
    assert splits.test.labels is None
    assert messages == [f"{unlabelled} has no labels: it is predicted, not evaluated"]
    assert splits.describe()["test"] == {"file": unlabelled, "rows": 1, "classes": None}
    for files, why in (
        ({"train": unlabelled}, "to train on"),
        ({"train": train, "valid": unlabelled}, "to validate on"),
    ):
        with pytest.raises(UserError, match=rf"unlabelled.csv: has no labels {why}"):
            read(LabelledSettings(**files))
    with pytest.raises(UserError, match="name a file with --train"):
        read(LabelledSettings())


def test_a_test_file_may_lack_the_label_column(tmp_path):
    columns = ("text=review", "label=stars")
    train = write(tmp_path / "train.csv", ROWS, columns=("review", "stars"))
    test = write(tmp_path / "test.csv", [("a film", "12")], columns=("review", "label"))
    splits, _ = read(LabelledSettings(train=train, valid=train, test=test, columns=columns))
    assert splits.test is not None
    assert splits.test.texts == ["a film"]
    assert splits.test.labels is None  # its column `label` is not the label column
    with pytest.raises(UserError, match=r"test.csv: .*'stars'"):  # elsewhere the label column is required
        read(LabelledSettings(train=train, valid=test, columns=columns))
    other = write(tmp_path / "other.csv", [("a film", "12")], columns=("text", "stars"))
    with pytest.raises(UserError, match=r"other.csv: no column 'review'"):  # the text column is always required
        read(LabelledSettings(train=train, valid=train, test=other, columns=columns))


def test_the_fingerprint_depends_on_texts_and_labels_only(tmp_path):
    train = write(tmp_path / "train.csv", ROWS)
    splits, _ = read(LabelledSettings(train=train, valid=train))
    moved = tmp_path / "moved.jsonl"
    moved.write_text("".join(json.dumps({"label": label, "text": text}) + "\n" for text, label in ROWS))
    assert read(LabelledSettings(train=str(moved), valid=train))[0].fingerprint() == splits.fingerprint()
    for changed in ([("text 0", "yes"), *ROWS[1:]], [("text 00", "no"), *ROWS[1:]], ROWS[:-1], ROWS[::-1]):
        write(tmp_path / "train.csv", changed)
        assert read(LabelledSettings(train=train, valid=str(moved)))[0].fingerprint() != splits.fingerprint()


def test_questions_on_the_same_context_are_held_out_together():
    contexts = [f"text {i // 4}" for i in range(40)]
    rows = Records("q", list(range(40)), {"context": contexts, "question": ["?"] * 40, "answers": [[]] * 40})
    held = hold_out(rows, 0.2, seed=0)
    assert 8 <= len(held) < 12
    held_contexts = {contexts[row] for row in held}
    assert held_contexts.isdisjoint(contexts[row] for row in range(40) if row not in held)
    assert hold_out(rows, 0.2, seed=0) == held != hold_out(rows, 0.2, seed=1)


def test_a_regression_target_is_rejected_before_rows_are_held_out(tmp_path, messages):
    file = tmp_path / "scores.csv"
    rows = [f"text {number},{number % 101 / 20:.2f}" for number in range(119)]
    file.write_text("\n".join(["text,label", *rows]) + "\n")
    with pytest.raises(UserError, match=r"scores.csv: .* 101 distinct values in 119 rows"):
        read_splits(LabelledSettings(str(file)), Classify, ClassifyConfig(), seed=0)
    assert messages == []
    splits = read_splits(LabelledSettings(str(file)), Classify, ClassifyConfig(many_classes=True), seed=0)
    assert len(splits.train) + len(splits.valid) == 119
