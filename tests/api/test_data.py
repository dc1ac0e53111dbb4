"""Data in memory becomes files that runs read, and what cannot be read is refused with its row and column."""

import json
from pathlib import Path

import numpy as np
import pytest

import headstock
from headstock.api.data import corpus_paths, labelled_file, labelled_files, split_files
from headstock.errors import UserError
from headstock.io import cache_folder

PAIRS = [("good film", "pos"), ("bad film", "neg")]
ROWS = [{"text": text, "label": label} for text, label in PAIRS]


def saved(path: str) -> list[dict]:
    assert Path(path).parent == cache_folder() / "memory"
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def test_pairs_dicts_and_generators_are_the_same_file():
    first = labelled_file(PAIRS)
    assert saved(first) == ROWS
    assert labelled_file(ROWS) == labelled_file(iter(PAIRS)) == first
    assert labelled_file(PAIRS[:1]) != first


def test_frames_of_pandas_and_polars():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    columns = {"review": ["Très bien", "ligne\u2028deux\n"], "stars": [5, 1], "day": ["2024-01-01", None]}
    names = {"text": "review", "label": "stars"}
    first = labelled_file(pandas.DataFrame(columns), columns=names)
    assert saved(first)[0] == {"review": "Très bien", "stars": 5, "day": "2024-01-01"}
    assert labelled_file(polars.DataFrame(columns), columns=names) == first
    categories = pandas.DataFrame({"text": ["a", "b"], "label": pandas.Categorical(["x", "y"])})
    categories["when"] = pandas.to_datetime(["2024-01-01", None])
    assert saved(labelled_file(categories))[1] == {"text": "b", "label": "y", "when": None}
    with pytest.raises(UserError, match="call collect"):
        labelled_file(polars.LazyFrame(columns))  # type: ignore[arg-type]


def test_class_labels_of_a_dataset_become_names():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "tags": datasets.Sequence(datasets.ClassLabel(names=["O", "PER"])),
            "label": datasets.ClassLabel(names=["neg", "pos"]),
        }
    )
    rows = {"tokens": [["Anne", "sees"], ["it"]], "tags": [[1, 0], [0]], "label": [1, -1]}
    dataset = datasets.Dataset.from_dict(rows, features=features).with_format("numpy")
    path = labelled_file(dataset, inputs=("tokens",), target="tags")
    assert saved(path) == [
        {"tokens": ["Anne", "sees"], "tags": ["PER", "O"], "label": "pos"},
        {"tokens": ["it"], "tags": ["O"], "label": None},
    ]
    with pytest.raises(UserError, match=r"'train'.*pass one of its values"):
        labelled_file(datasets.DatasetDict({"train": dataset}))


def test_scalars_of_numpy_become_plain_values():
    rows = [{"text": np.str_("a"), "label": np.int64(3), "scores": np.array([0.5, 1])}]
    rows += [{"text": "b", "label": np.bool_(True), "scores": [np.float32(0.5)], "picture": object()}]
    assert saved(labelled_file(rows)) == [
        {"text": "a", "label": 3, "scores": [0.5, 1.0]},
        {"text": "b", "label": True, "scores": [0.5]},
    ]


def test_a_str_is_a_path_and_a_list_may_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    assert corpus_paths("no such file") == ["no such file"]
    assert corpus_paths(Path("x")) == ["x"]
    assert corpus_paths(["a.txt", "*.txt", "s3://b/c", "catalog:imdb", "-"]) == [
        *("a.txt", "*.txt", "s3://b/c", "catalog:imdb", "-")
    ]
    assert corpus_paths([Path("any name")]) == ["any name"]
    assert corpus_paths(["typo.txt"]) == ["typo.txt"]  # reported as a missing file, not learned as a text
    assert saved(corpus_paths(["a text", "Is it? [yes]"])[0]) == [{"text": "a text"}, {"text": "Is it? [yes]"}]
    with pytest.raises(UserError, match=r'"a.txt" is a path, but "a text" is none.*Path objects.*dicts'):
        corpus_paths(["a text", "a.txt"])
    assert saved(corpus_paths([{"text": "a.txt"}])[0]) == [{"text": "a.txt"}]
    assert labelled_files(["a.txt"]) == ["a.txt"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "train: no rows"),
        ([{"txt": "a", "label": 1}], r"train\[0\]: no column 'text'; did you mean 'txt'\? \(columns: 'txt', 'label'\)"),
        ([*PAIRS, (None, "pos")], r"train\[2\]: column 'text' has no value .*skip_blank=True"),
        ([*PAIRS, None], r"train\[2\]: column 'text' has no value"),
        ([*PAIRS, ("  ", "pos")], r"train\[2\]: column 'text' is blank"),
        ([*PAIRS, ("text", None)], r"train\[2\]: column 'label' has no value .*as in other rows; skip_blank=True"),
        ([*PAIRS, ("text", float("nan"))], r"train\[2\]: column 'label' has no value \(None or NaN\)"),
        (["only", "texts"], "train: no column 'label'"),
        ([("a", "b", "c", "d")], r"train\[0\]: is a tuple of 4, expected a text, a tuple \(text, label\)"),
        ([("a", object())], r"train\[0\]: column 'label' is a object"),
        ([("\ud800", "b")], "surrogate"),
        ({"text": ["a"]}, "a dict with 'text', expected rows"),
        (3, "train: a int, expected a path"),
    ],
)
def test_rows_that_cannot_be_used(rows, message):
    folder = cache_folder() / "memory"
    before = set(folder.glob("*"))
    with pytest.raises(UserError, match=message):
        labelled_file(rows, name="train", labelled=True, skip_blank=False)
    assert set(folder.glob("*")) == before


def test_download_resolves_names_and_leaves_paths(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text\n")
    assert headstock.download(str(file)) == file == headstock.download(file)
    copy = headstock.download(file.as_uri())
    assert copy != file and copy.read_text() == "text\n"
    with pytest.raises(UserError, match="tiny-shakespeare"):
        headstock.download("catalog:tiny-shakespear")


def test_splits_have_the_columns_of_the_task():
    files = split_files("translate", train=[("a", "b")], test=["c"])
    assert saved(files["train"] or "") == [{"source": "a", "target": "b"}]
    assert saved(files["test"] or "") == [{"source": "c"}]
    assert files["valid"] is None
    with pytest.raises(UserError, match=r"valid\[0\]: is a tuple of 1, expected a tuple \(text, text_b, label\)"):
        split_files("pair", train=[("a", "b", "yes")], valid=[("a",)])
    with pytest.raises(UserError, match="no such task; did you mean 'classify'"):
        split_files("clasify", train=PAIRS)
