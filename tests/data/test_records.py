"""All formats give the same labelled rows, and invalid rows are reported with their location."""

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.data.labelled_texts import read_records, stream_texts
from headstock.data.records import Records, parse_columns
from headstock.errors import UserError

TEXTS = ["Très bon, « à lire ».", 'Il dit "non"', " Été comme hiver "]
STARS = ["5", "1", "5"]
ZSTD = zstandard.ZstdCompressor()
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": ZSTD.compress}


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def as_table(rows: list[list[str]], delimiter: str = ",") -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue().encode()


def as_parquet(**columns: list) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def content(suffix: str) -> bytes:
    """The same rows in each format, with the columns in another order."""
    if suffix == ".parquet":
        return as_parquet(id=[0, 1, 2], stars=[5, 1, 5], review=TEXTS)
    if suffix == ".jsonl":
        rows = [{"stars": int(star), "review": text} for text, star in zip(TEXTS, STARS, strict=True)]
        return "\n".join(json.dumps(row) for row in rows).encode()
    table = [["id", "stars", "review"], *([str(i), STARS[i], TEXTS[i]] for i in range(3))]
    return as_table(table, "\t" if suffix == ".tsv" else ",")


def refusal(path: str | Path, **settings) -> str:
    with pytest.raises(UserError) as caught:
        read_records(path, **settings)
    return str(caught.value)


def stream_refusal(path: str | Path, **settings) -> str:
    with pytest.raises(UserError) as caught:
        list(stream_texts(path, **settings))
    return str(caught.value)


@pytest.mark.parametrize("compression", ["", *COMPRESS])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_table_gives_the_same_rows(tmp_path, suffix, compression):
    data = content(suffix)
    path = write(tmp_path, f"train{suffix}{compression}", COMPRESS[compression](data) if compression else data)
    columns = {"text": "review", "label": "stars"}
    records = read_records(path, columns=columns)
    header = suffix in (".csv", ".tsv")
    assert (records.texts, records.labels, len(records)) == (TEXTS, STARS, 3)
    assert records.lines == ([2, 3, 4] if header else [1, 2, 3])
    assert records.location(1) == f"{path}:{3 if header else 2}"
    assert list(stream_texts(path, columns=columns)) == list(zip(records.lines, TEXTS, strict=True))


def test_rows_can_be_selected_in_any_order(tmp_path):
    records = read_records(write(tmp_path, "a.csv", "text,label\nun,a\n\ndeux,b\ntrois,c\n"))
    selected = records.select(i for i in (2, 0))
    assert selected == Records(records.source, [5, 2], {"text": ["trois", "un"], "label": ["c", "a"]})
    assert selected.location(0) == f"{records.source}:5"
    assert len(records.select([])) == 0


def test_a_chart_of_block_elements_is_no_sentencepiece_text(tmp_path):
    texts = ["progress ▁▂▃ of the job", "▁▂▃ is progress", "plain"]
    path = write(tmp_path, "rows.jsonl", "".join(json.dumps({"text": text, "label": "a"}) + "\n" for text in texts))
    assert read_records(path).display_texts == texts


def test_sentencepiece_texts_are_detokenized_for_display_only(tmp_path):
    pieces = "▁J ' ai ▁lu , ▁c ' est ▁pharmaci enne ."
    records = read_records(write(tmp_path, "a.csv", as_table([["text"], [pieces], ["deux  mots "]])))
    assert records.texts == [pieces, "deux  mots "]
    assert records.display_texts == ["J'ai lu, c'est pharmacienne.", "deux  mots "]


# Two files


@pytest.mark.parametrize("name", ["train", "train.review.spm"])
def test_lab_texts_and_labels_are_found_by_stem(tmp_path, name):
    write(tmp_path, "train.review.spm", "▁Un ▁liv re\n▁Non\n")
    write(tmp_path, "train.label", " 1\r\n0\n")
    write(tmp_path, "train.notes", "more than one file begins with train")
    records = read_records(tmp_path / name)
    assert (records.texts, records.labels, records.display_texts) == (
        ["▁Un ▁liv re", "▁Non"],
        ["1", "0"],
        ["Un livre", "Non"],
    )
    assert records.location(1) == f"{tmp_path}/train.review.spm:2"
    assert list(stream_texts(tmp_path / name)) == [(1, "▁Un ▁liv re"), (2, "▁Non")]


def test_texts_are_found_beside_a_label_file_compressed_or_not(tmp_path):
    write(tmp_path, "a.raw.gz", gzip.compress(b"x\ny\n"))
    write(tmp_path, "a.label.xz", lzma.compress(b"1\n2\n"))
    for path in (tmp_path / "a", tmp_path / "a.raw.gz"):
        assert read_records(path).labels == ["1", "2"]
        assert read_records(path, optional=()).labels is None
    write(tmp_path, "b.txt", "x\ny\n")
    assert read_records(tmp_path / "b.txt").labels is None
    write(tmp_path, "b.label", "p\nq\n")
    assert read_records(tmp_path / "b.txt").labels == ["p", "q"]
    (tmp_path / "c").mkdir()  # a folder of that name does not hide the files
    write(tmp_path, "c.review.spm", "▁x\n")
    assert read_records(tmp_path / "c").texts == ["▁x"]


def test_texts_without_labels(tmp_path):
    path = write(tmp_path, "test.review.spm", "▁Un\n")
    assert read_records(tmp_path / "test").labels is None
    message = refusal(path, required=("text", "label"), optional=())
    assert message == f"{path}: no labels (expected test.label beside it, or a table with labels)"
    message = refusal(path, required=("text", "text_b"))
    assert message.startswith(f"{path}: one text per line, so no text_b (expected a table, .jsonl")
    assert read_records(path, columns={"text": "review", "label": "stars"}).texts == [
        "▁Un"
    ]  # column names apply to tables only


@pytest.mark.parametrize(("texts", "labels"), [(3, 2), (1, 2), (2, 0)])
def test_uneven_files_are_refused_with_both_counts(tmp_path, texts, labels):
    write(tmp_path, "train.review.spm", "▁x\n" * texts)
    write(tmp_path, "train.label", "1\n" * labels)
    message = refusal(tmp_path / "train")
    assert f"train.review.spm has {texts} lines, but {tmp_path}/train.label has {labels};" in message


def test_problems_name_the_file_they_are_in(tmp_path):
    write(tmp_path, "train.review.spm", "▁x\n \n▁z\n")
    write(tmp_path, "train.label", "1\n1\n\n")
    message = refusal(tmp_path / "train")
    assert f"\n  {tmp_path}/train.review.spm:2: text is blank" in message
    assert f"\n  {tmp_path}/train.label:3: label is blank" in message


# Values


def test_labels_become_text(tmp_path):
    values = [1, True, False, 2.5, "  oui ", "a|b", 10**20]
    rows = [{"text": f"t{i}", "label": value} for i, value in enumerate(values)]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_records(path).labels == ["1", "true", "false", "2.5", "oui", "a|b", "1" + "0" * 20]
    parquet = write(tmp_path, "a.parquet", as_parquet(text=["x", "y"], label=[True, False]))
    assert read_records(parquet).labels == ["true", "false"]


def test_lists_of_labels_need_a_separator(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "x", "label": ["a ", "b"]}\n{"text": "y", "label": 3}\n')
    assert read_records(path, separator="|").labels == ["a|b", "3"]
    message = refusal(path)
    assert f'{path}:1: label is the list ["a ", "b"], expected one label (lists need separator="|")' in message
    path = write(tmp_path, "b.jsonl", '{"text": "x", "label": ["a|b", "c"]}\n')
    assert "is a list with 'a|b', which contains the separator '|'" in refusal(path, separator="|")
    none = write(tmp_path, "c.jsonl", '{"text": "x", "label": []}\n{"text": "y", "label": null}\n')
    assert read_records(none, separator="|").labels == ["", ""]  # a row may have no label
    assert "expected one label" in refusal(none)
    parquet = write(tmp_path, "a.parquet", as_parquet(text=["x"], label=[["a", "b"]]))
    assert read_records(parquet, separator="|").labels == ["a|b"]


def test_values_that_cannot_be_used_are_reported_together(tmp_path):
    table = [["review", "label"], ["x", "1"], ["  ", "1"], ["y", " "]]
    message = refusal(write(tmp_path, "a.csv", as_table(table)), columns={"text": "review"})
    assert message.splitlines() == [
        f"{tmp_path}/a.csv: 2 values cannot be used; for each, correct or remove the row, or skip blank rows with "
        "--skip-blank:",
        f"  {tmp_path}/a.csv:3: text (column 'review') is blank",
        f"  {tmp_path}/a.csv:4: label is blank",
    ]
    many = write(tmp_path, "b.csv", as_table([["text", "label"], *([f"x{i}", ""] for i in range(12))]))
    lines = refusal(many).splitlines()
    assert len(lines) == 7
    assert (lines[5], lines[6]) == (f"  {many}:6: label is blank", "  and 7 more")
    one = refusal(write(tmp_path, "c.txt", "x\n\ny\n"))
    assert one.startswith(f"{tmp_path}/c.txt:2: text is blank; correct or remove the row")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"text": "x", "label": null}', "2: label is blank"),
        ('{"text": "x", "label": NaN}', "2: label is blank"),
        ('{"text": "x"}', "2: label is missing"),
        ('{"label": "a"}', "2: text is missing"),
        ('{"text": null, "label": "a"}', "2: text is blank"),
        ('{"text": 3, "label": "a"}', "2: text is 3, expected text"),
        ('{"text": "x", "label": {"a": 1}}', '2: label is {"a": 1}, expected a label'),
        ('{"text": "\\ud800", "label": "a"}', "2: text contains half of a surrogate pair"),
        ("[1]", "2: expected an object or a string, found list"),
        ("{", "2: invalid JSON"),
    ],
)
def test_an_invalid_jsonl_row_is_reported_with_its_line(tmp_path, row, problem):
    path = write(tmp_path, "a.jsonl", f'{{"text": "é", "label": "a"}}\n{row}\n')
    assert f"{path}:{problem}" in refusal(path)


def test_rows_must_agree_on_optional_columns(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "x"}\n{"text": "y", "label": "a"}\n')
    assert f"{path}:1: label is missing" in refusal(path)
    path = write(tmp_path, "b.jsonl", '"bare"\n{"text": "y"}\n')
    assert read_records(path) == Records(str(path), [1, 2], {"text": ["bare", "y"]})
    assert f"{path}:1: text_b is missing" in refusal(path, required=("text", "text_b"))


@given(
    rows=st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1).filter(str.strip),
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1).filter(str.strip),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_written_rows_are_read_back(rows):
    """Quotes, delimiters, line ends and unusual spaces are preserved; only labels are stripped."""
    with tempfile.TemporaryDirectory() as folder:
        table = write(Path(folder), "a.csv", as_table([["text", "label"], *map(list, rows)]))
        lines = "\n".join(json.dumps({"text": text, "label": label}) for text, label in rows)
        for path in (table, write(Path(folder), "a.jsonl", lines)):
            records = read_records(path)
            assert records.texts == [text for text, _ in rows]
            assert records.labels == [label.strip() for _, label in rows]
            assert [text for _, text in stream_texts(path)] == records.texts
        starts = read_records(table).lines
        ends = [*starts[1:], 1 + table.read_bytes().count(b"\n")]
        spans = [1 + text.count("\n") + label.count("\n") for text, label in rows]
        assert [end - start for start, end in zip(starts, ends, strict=True)] == spans


# Columns


def test_required_columns_are_configurable(tmp_path):
    path = write(tmp_path, "a.csv", "text,text_b,label\nun,deux,x\n")
    assert read_records(path, required=("text", "text_b")).columns == {
        "text": ["un"],
        "text_b": ["deux"],
        "label": ["x"],
    }
    path = write(tmp_path, "b.tsv", "en\tfr\nyes\toui\n")
    columns = {"source": "en", "target": "fr"}
    records = read_records(path, columns=columns, required=("source", "target"), optional=())
    assert records.columns == {"source": ["yes"], "target": ["oui"]}
    swapped = read_records(write(tmp_path, "c.csv", "label,text\nx,1\n"), columns={"text": "label", "label": "text"})
    assert (swapped.texts, swapped.labels) == (["x"], ["1"])


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.csv", "review,stars\nx,1\n"), ("a.jsonl", '{"review": "x", "stars": 1}\n'), ("a.parquet", None)],
)
def test_a_missing_column_error_lists_the_available_columns(tmp_path, name, data):
    path = write(tmp_path, name, data or as_parquet(review=["x"], stars=[1]))
    message = f"{path}: no column 'text' (columns: 'review', 'stars'); name the right column with --columns text=NAME"
    assert refusal(path) == stream_refusal(path) == message
    assert read_records(path, columns={"text": "review"}).labels is None
    message = refusal(path, columns={"text": "review", "label": "star"})
    assert "no column 'star'; did you mean 'stars'?" in message and message.endswith("--columns label=NAME")
    message = refusal(path, required=("text", "text_b"))
    assert "'text'" in message and "'text_b'" in message and message.endswith("--columns text=NAME,text_b=NAME")


@pytest.mark.parametrize(
    "rows",
    [
        [["Un livre vraiment très beau à lire", "bon"], ["Non", "mauvais"]],
        [["Oui", "bon"], ["Non", "mauvais"], ["Bof", "bon"]],
        [["Oui", "1"], ["Non", "0"]],
    ],
)
def test_a_table_without_header_is_recognised(tmp_path, rows):
    hint = "as the first line looks like data, insert a header line such as text,label"
    assert refusal(write(tmp_path, "a.csv", as_table(rows))).endswith(hint)
    assert "looks like data" not in refusal(write(tmp_path, "b.csv", as_table([["id", "review text"], *rows])))


def test_a_repeated_column_is_refused(tmp_path):
    path = write(tmp_path, "a.csv", "text,label,label\nx,1,2\n")
    assert refusal(path) == f"{path}: more than one column is called 'label'"
    assert list(stream_texts(path)) == [(2, "x")]


def test_column_options_are_parsed(tmp_path):
    assert parse_columns("text=review, label = my stars") == {"text": "review", "label": "my stars"}
    assert parse_columns("text=a=b") == {"text": "a=b"}
    for text, part in [("review", "'review'"), ("text=", "'text='"), ("=x", "'=x'"), ("text=x,", "''"), ("", "''")]:
        with pytest.raises(UserError, match=f"expected pairs such as text=review,label=stars, found {part}"):
            parse_columns(text)
    with pytest.raises(UserError, match="'text' is given twice"):
        parse_columns("text=a,text=b")
    path = write(tmp_path, "a.csv", "text\nx\n")
    message = "--columns: unknown name 'txet'; did you mean 'text'? (the names are text, label)"
    assert refusal(path, columns={"txet": "x"}) == stream_refusal(path, columns={"txet": "x"}) == message
    assert "column 'text' cannot be both" in refusal(path, columns={"label": "text"})


# Files


def test_missing_and_unreadable_files(tmp_path):
    write(tmp_path, "train.csv", "text\nx\n")
    assert refusal(tmp_path / "trian.csv") == f"{tmp_path}/trian.csv: no such file; did you mean 'train.csv'?"
    assert read_records(tmp_path / "train").source == f"{tmp_path}/train.csv"
    write(tmp_path, "train.tsv", "text\nx\n")
    assert refusal(tmp_path / "train").endswith("train: no such file; give one of train.csv, train.tsv")
    assert refusal(tmp_path).endswith("expected a file, found a folder")
    assert refusal(tmp_path / "no" / "a.csv").endswith(f"no such file, and no folder {tmp_path}/no")
    assert "the suffix .doc is not known" in refusal(write(tmp_path, "a.doc", "x"))
    assert "only labels" in refusal(write(tmp_path, "train.label", "1\n"))
    assert "cannot be read" in refusal("a whole text in place of a name " * 200)
    with pytest.raises(UserError, match="no such file"):
        stream_texts(tmp_path / "none.csv")  # at once, not at the first text


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.csv", "", "the file is empty"),
        ("a.csv", "text,label\n", "only a header"),
        ("a.tsv", "text\tlabel\n", "only a header"),
        ("a.jsonl", "\n\n", "the file is empty"),
        ("a.txt", "", "the file is empty"),
        ("a.parquet", None, "the file is empty"),
    ],
)
def test_files_without_rows(tmp_path, name, data, reason):
    path = write(tmp_path, name, as_parquet(text=[], label=[]) if data is None else data)
    assert refusal(path) == stream_refusal(path) == f"{path}: no rows ({reason})"


def test_format_errors_name_file_and_line(tmp_path):
    assert "a.csv:3: expected 2 fields as in the header, found 3" in refusal(
        write(tmp_path, "a.csv", "text,label\nx,1\ny,z,1\n")
    )
    write(tmp_path, "b.review.spm", "▁x\n▁y\n")
    write(tmp_path, "b.label", b"1\n\xe9\n")
    assert "b.label:2: not UTF-8: byte 0xe9" in refusal(tmp_path / "b")


# Streams


def test_blank_lines_are_empty_texts_in_a_stream(tmp_path):
    assert list(stream_texts(write(tmp_path, "a.txt", "un\n\n \t\n deux \n\n"))) == [
        (1, "un"), (2, ""), (3, ""), (4, " deux "), (5, ""),
    ]  # fmt: skip
    path = write(tmp_path, "a.csv", 'text\nx\n""\ny\n')
    assert stream_refusal(path) == (
        f"{path}:3: text is blank; correct or remove the row, or skip blank rows with --skip-blank"
    )


def test_standard_input_is_one_text_per_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO('un\n\n{"text": "deux"}\r\né'.encode())))
    assert list(stream_texts("-")) == [(1, "un"), (2, ""), (3, '{"text": "deux"}'), (4, "é")]
    assert stream_refusal("-") == "-: no rows (the file is empty)"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"un\n\xe9\n")))
    assert stream_refusal("-").startswith("-:2: not UTF-8")


class Pipe(io.RawIOBase):
    """Returns one line per read; reading before a line is available fails."""

    def __init__(self):
        self.written: list[bytes] = []

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        assert self.written, "reads ahead of the available line"
        line = self.written.pop()
        buffer[: len(line)] = line
        return len(line)


def test_a_pipe_is_processed_line_by_line(monkeypatch):
    pipe = Pipe()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(pipe)))
    texts = stream_texts("-")
    for text in ("un", "deux"):
        pipe.written.append(f"{text}\n".encode())
        assert next(texts)[1] == text


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".txt"])
def test_a_stream_does_not_read_ahead(tmp_path, monkeypatch, suffix):
    """An invalid last line is reported only after the lines before it."""
    monkeypatch.setattr("headstock.data.formats.READ_BYTES", 1 << 12)
    row = {".csv": "{}\n", ".jsonl": '{{"text": "{}"}}\n', ".txt": "{}\n"}[suffix]
    head = "text\n" if suffix == ".csv" else ""
    body = head + "".join(row.format(f"text {i}") for i in range(5000))
    path = write(tmp_path, f"a{suffix}", body.encode() + b"\xe9\n")
    texts = stream_texts(path)
    assert [next(texts)[1] for _ in range(4000)] == [f"text {i}" for i in range(4000)]
    with pytest.raises(UserError, match="not UTF-8"):
        list(texts)


# Blank rows


def test_skip_blank_drops_and_counts_blank_rows(tmp_path):
    table = write(tmp_path, "a.csv", as_table([["text", "label"], ["x", "1"], [" ", "1"], ["y", ""], ["z", "2"]]))
    rows = read_records(table, skip_blank=True)
    assert (rows.texts, rows.labels, rows.lines, rows.skipped) == (["x", "z"], ["1", "2"], [2, 5], 2)
    lines = write(tmp_path, "a.jsonl", '{"text": "x"}\n{"text": null}\n{"label": "1"}\n{"text": "y"}\n')
    assert read_records(lines, skip_blank=True, optional=()).texts == ["x", "y"]
    with pytest.raises(UserError, match=r"b.csv: all 2 rows are blank"):
        read_records(write(tmp_path, "b.csv", as_table([["text"], [" "], ["\t"]])), skip_blank=True)
    with pytest.raises(UserError, match=r"c.jsonl:2: label is the list"):  # other problems are still refused
        read_records(
            write(tmp_path, "c.jsonl", '{"text": "x", "label": "1"}\n{"text": "y", "label": [1]}\n'), skip_blank=True
        )


@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_blank_rows_of_a_stream_can_be_skipped(tmp_path, name):
    path = write(tmp_path, name, as_table([["text"], ["x"], [" "], ["y"]]) if name == "a.csv" else "text\nx\n \ny\n")
    skipped: list[int] = []
    assert [text for _, text in stream_texts(path, skipped=skipped)][-2:] == ["x", "y"]
    assert skipped == [3]
