"""Slices of labelled rows: columns, patterns, negation, contrast and length."""

import numpy as np
import pytest

from headstock.data.labelled_texts import read_records
from headstock.data.slices import built_in_slices, make_slice
from headstock.errors import UserError

TEXTS = [
    "Un bon livre.",
    "Un bon livre, mais trop long.",
    "Mais pas un chef-d'œuvre",
    "je n’aime rien",
    "It isn't good",
    "dommage, maison triste",
]


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "rows.csv"
    rows = "".join(f'"{text}",{label},{shop}\n' for text, label, shop in zip(TEXTS, "abaaba", "xyxyzx", strict=True))
    path.write_text("text,label,shop\n" + rows, encoding="utf-8")
    return read_records(path)


def rows_of(spec, records, value="with"):
    return np.flatnonzero(make_slice(spec, records, records.display_texts).groups[value]).tolist()


def test_words_and_patterns(records):
    assert rows_of("contains:mais", records) == [1, 2]  # whole words of either case: not "maison"
    assert rows_of("contains:mais,rien", records) == [1, 2, 3]
    assert rows_of("regex:mais", records) == [1, 2, 5]  # control
    assert rows_of("contrast", records) == [1, 2]
    assert rows_of("negation", records) == [2, 3, 4]
    assert rows_of("negation", records, "without") == [0, 1, 5]


def test_columns_are_read_from_the_file_also_after_selection(records):
    assert rows_of("shop", records, "x") == [0, 2, 5]
    assert rows_of("label", records, "b") == [1, 4]
    part = records.select([5, 3])
    assert {value: rows.tolist() for value, rows in make_slice("shop", part, part.display_texts).groups.items()} == {
        "x": [True, False],
        "y": [False, True],
    }


def test_rare_values_of_a_column_are_one_group(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label,id\n" + "".join(f"t{i},a,{max(i, 9)}\n" for i in range(60)), encoding="utf-8")
    groups = make_slice("id", read_records(path), []).groups
    assert len(groups) == 21 and sum(rows.sum() for rows in groups.values()) == 60
    assert groups["9"].sum() == 10


def test_length_bins_cover_every_row_once():
    texts = ["word " * (1 + i % 40) for i in range(200)]
    groups = make_slice("length", None, texts).groups
    assert len(groups) == 4
    assert (np.sum(list(groups.values()), axis=0) == 1).all()
    assert min(rows.sum() for rows in groups.values()) >= 40
    assert next(iter(groups)).startswith("1 to ") and list(groups)[-1].endswith("to 40 words")
    assert list(make_slice("length", None, ["a b"] * 3).groups) == ["2 words"]


def test_built_in_slices_need_enough_rows():
    assert [part.name for part in built_in_slices(["a b", "a b c mais"] * 20)] == ["contrast", "length"]
    assert built_in_slices(["a b", "a b mais"]) == []


@pytest.mark.parametrize("spec", ["contains:", "contains: ,", "regex:(", "regex:", "shops"])
def test_wrong_slices_are_refused(spec, records):
    with pytest.raises(UserError, match="--slice"):
        make_slice(spec, records, records.display_texts)
    if spec == "shops":
        with pytest.raises(UserError, match="did you mean 'shop'"):
            make_slice(spec, records, records.display_texts)
