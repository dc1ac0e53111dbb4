"""All formats give the same documents, and invalid files are reported with their location."""

import builtins
import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import unicodedata
from pathlib import Path

import pytest
import zstandard

from headstock.data.corpus import Corpus, Document, read_corpus
from headstock.errors import UserError

TEXTS = ["Le chat dort.", 'Ça alors, il dit "non" !', "Été comme hiver, il neige."]
ZSTD = zstandard.ZstdCompressor()
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": ZSTD.compress}


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


def as_csv(delimiter: str) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerows([("id", "text"), *enumerate(TEXTS)])
    return file.getvalue().encode()


def as_parquet() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": [0, 1, 2], "text": TEXTS}), file)
    return file.getvalue()


def content(suffix: str) -> bytes:
    if suffix == ".txt":
        return "\n".join(TEXTS).encode()
    if suffix == ".jsonl":
        return "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()
    return as_parquet() if suffix == ".parquet" else as_csv("\t" if suffix == ".tsv" else ",")


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def refusal(path: str | Path, **settings) -> str:
    """The error message, raised at once or while reading."""
    with pytest.raises(UserError) as caught:
        texts(read_corpus(path, **settings))
    return str(caught.value)


@pytest.mark.parametrize("compression", ["", *COMPRESS])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_documents(tmp_path, suffix, compression):
    data = content(suffix)
    path = write(tmp_path, f"reviews{suffix}{compression}", COMPRESS[compression](data) if compression else data)
    corpus = read_corpus(path)
    assert texts(corpus) == TEXTS
    assert texts(corpus) == TEXTS  # it can be read again
    header = suffix in (".csv", ".tsv")
    assert [document.line for document in corpus] == ([2, 3, 4] if header else [1, 2, 3])


def test_documents_have_source_and_line(tmp_path):
    path = write(tmp_path, "a.txt", "one\n\n\ntwo\nthree\n")
    assert list(read_corpus(path, documents="line"))[1:] == [
        Document("two", str(path), 4),
        Document("three", str(path), 5),
    ]
    assert list(read_corpus(path, documents="block")) == [
        Document("one", str(path), 1),
        Document("two\nthree", str(path), 4),
    ]
    assert texts(read_corpus(path, documents="file")) == ["one\n\n\ntwo\nthree"]


def test_documents_do_not_depend_on_the_chunk_size(tmp_path, monkeypatch):
    expected = [f"paragraph {i}\nénd {i}" for i in range(200)]
    path = write(tmp_path, "a.txt", "\r\n \r\n".join(expected))
    data = list(read_corpus(path, documents="block"))
    assert [document.text for document in data] == expected
    for size in (1, 2, 7, 64):
        monkeypatch.setattr("headstock.data.formats.READ_BYTES", size)
        assert list(read_corpus(path, documents="block")) == data
        assert len(list(read_corpus(path, documents="line"))) == 400


def test_auto_guesses_the_document_unit_and_describes_it(tmp_path):
    lines = write(tmp_path, "lines.txt", "a b\nc d\n\ne f\n" + "g h\n" * 100)
    blocks = write(tmp_path, "blocks.txt", "a\nb\nc\n\nd\ne\n\nf\ng\n")
    assert read_corpus(lines).describe() == f"documents are lines (guessed from {lines})"
    assert read_corpus(blocks).describe() == f"documents are blocks between blank lines (guessed from {blocks})"
    assert texts(read_corpus(blocks)) == ["a\nb\nc", "d\ne", "f\ng"]
    assert read_corpus(blocks, documents="line").describe() == "documents are lines (as requested)"
    for i in range(12):
        write(tmp_path, f"essays/{i:02}.txt", f"Title {i}\nFirst line.\nSecond line.\n")
    essays = read_corpus(tmp_path / "essays")
    assert essays.describe() == "documents are whole files (guessed from 12 small files)"
    assert texts(essays)[1] == "Title 1\nFirst line.\nSecond line."
    table = write(tmp_path, "t.jsonl", '{"text": "x"}\n')
    assert read_corpus(table).describe() == "documents are the rows of column 'text'"


def test_a_catalog_corpus_is_split_at_blank_lines(tmp_path):
    """However long its documents are: the first lines of a play have no blank line."""
    play = "\n".join(f"line {i}" for i in range(2000))
    corpus = write(tmp_path, "corpus.txt", f"{play}\n\n{play} and\n")
    assert read_corpus(corpus).describe().startswith("documents are lines (guessed")
    write(tmp_path, "SOURCE.json", '{"files": {"corpus.txt": "0"}}')
    assert texts(read_corpus(corpus)) == [play, f"{play} and"]
    assert read_corpus(corpus).describe() == "documents are blocks between blank lines (as the catalog writes them)"
    other = write(tmp_path, "other.txt", play)
    assert read_corpus(other).describe().startswith("documents are lines (guessed")


def test_text_is_nfc_normalized_and_otherwise_unchanged_by_default(tmp_path):
    decomposed = unicodedata.normalize("NFD", "Élève à l'ÉCOLE, ça et là\n")
    path = write(tmp_path, "a.txt", decomposed)
    assert texts(read_corpus(path)) == ["Élève à l'ÉCOLE, ça et là"]
    assert texts(read_corpus(path, lowercase=True)) == ["élève à l'école, ça et là"]
    assert texts(read_corpus(path, strip_accents=True)) == ["Eleve a l'ECOLE, ca et la"]
    hindi = write(tmp_path, "h.txt", "हिन्दी\n")
    assert texts(read_corpus(hindi, strip_accents=True)) == ["हिन्दी"]  # vowel signs are not accents


def test_byte_order_mark_is_dropped(tmp_path):
    assert texts(read_corpus(write(tmp_path, "a.txt", "\ufeffun\ndeux"))) == ["un", "deux"]
    assert texts(read_corpus(write(tmp_path, "a.csv", "\ufefftext\nun\n"))) == ["un"]


def test_table_rows(tmp_path):
    path = write(tmp_path, "a.jsonl", '"bare"\n\n{"text": null}\n{"text": "", "n": 1}\n{"text": " two\\nlines "}')
    assert [(document.text, document.line) for document in read_corpus(path)] == [("bare", 1), ("two\nlines", 5)]
    path = write(tmp_path, "b.csv", 'n;review\n1;"a, b\nand ""c"""\n2;' + "x" * 200_000 + "\n")
    rows = list(read_corpus(path, column="review"))
    assert [(row.text, row.line) for row in rows] == [('a, b\nand "c"', 2), ("x" * 200_000, 4)]
    path = write(tmp_path, "c.tsv", 'n\ttext\n1\t"Open quote only\n2\tsaid "no"\n')
    assert texts(read_corpus(path)) == ['"Open quote only', 'said "no"']
    late = "".join(f"{i}\tplain\n" for i in range(500)) + '9\t"Else?" "No."\n'
    assert texts(read_corpus(write(tmp_path, "late.tsv", "n\ttext\n" + late)))[-1] == '"Else?" "No."'


def test_folders_and_globs(tmp_path):
    for name in ("b/two.txt", "a/one.txt", "a/notes.doc", ".hidden/no.txt", "c/empty.txt"):
        write(tmp_path, name, "" if "empty" in name else f"from {name}")
    assert texts(read_corpus(tmp_path)) == ["from a/one.txt", "from b/two.txt"]
    assert texts(read_corpus(f"{tmp_path}/*/tw*.txt")) == ["from b/two.txt"]
    twice = read_corpus([tmp_path, tmp_path / "a" / "one.txt"])
    assert [path.name for path in twice.files()] == ["one.txt", "two.txt"]


def test_standard_input_can_be_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    corpus = read_corpus("-", cache=tmp_path)
    assert texts(corpus) == texts(corpus) == ["one", "two"]
    assert next(iter(corpus)).source == "-"
    same = write(tmp_path, "elsewhere.txt", "one\ntwo\n")
    assert corpus.fingerprint() == read_corpus(same).fingerprint()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "three"}\n')))
    assert texts(read_corpus("-", cache=tmp_path)) == ["three"]
    assert "standard input is empty" in refusal("-", cache=tmp_path)


def test_fingerprint_depends_on_content_and_options_not_on_paths(tmp_path):
    first, second = write(tmp_path, "here/a.txt", "x\ny"), write(tmp_path, "there/b.txt", "x\ny")
    fingerprint = read_corpus(first).fingerprint()
    assert read_corpus(second).fingerprint() == fingerprint
    assert read_corpus(first, documents="line").fingerprint() == fingerprint  # as guessed
    assert read_corpus(first, documents="file").fingerprint() != fingerprint
    assert read_corpus(first, lowercase=True).fingerprint() != fingerprint
    write(tmp_path, "there/b.txt", "x\nz")
    assert read_corpus(second).fingerprint() != fingerprint


def test_missing_files_are_reported_together_with_the_nearest_names(tmp_path):
    write(tmp_path, "reviews.txt", "x")
    message = refusal([tmp_path / "review.txt", tmp_path / "zzz" / "a.txt"])
    assert f"{tmp_path}/review.txt: no such file or folder; did you mean 'reviews.txt'?" in message
    assert f"{tmp_path}/zzz/a.txt: no such file or folder" in message
    (tmp_path / "none").mkdir()
    assert "no readable files in this folder" in refusal(tmp_path / "none")
    assert "the pattern matches nothing" in refusal(f"{tmp_path}/*.csv")
    assert "the suffix .doc is not known" in refusal(write(tmp_path, "a.doc", "x"))
    assert "did you mean 'block'" in refusal(tmp_path / "reviews.txt", documents="blocks")


def test_a_text_in_place_of_a_path_is_refused():
    with pytest.raises(UserError, match="cannot be read"):
        read_corpus("This is the text itself. " * 40)


def test_invalid_text_is_reported_with_its_location(tmp_path):
    assert refusal(write(tmp_path, "a.txt", "")).endswith("a.txt: empty")
    assert refusal(write(tmp_path, "a.txt.gz", gzip.compress(b""))).endswith("a.txt.gz: empty")
    assert "no documents" in refusal(write(tmp_path, "b.txt", " \n\n"))
    assert "binary: NUL byte at offset 3" in refusal(write(tmp_path, "c.txt", b"abc\0d"))
    assert "looks like UTF-16" in refusal(write(tmp_path, "d.txt", "hello".encode("utf-16")))
    good = ("ligne é\n" * 300_000).encode()  # several chunks, so that line numbers continue across them
    message = refusal(write(tmp_path, "e.txt", good + b"caf\xe9\n"))
    assert f"e.txt:300001: not UTF-8: byte 0xe9 at offset {len(good) + 3};" in message
    message = refusal(write(tmp_path, "e.txt.xz", lzma.compress(good + b"caf\xe9\n", preset=0)))
    assert f"e.txt.xz:300001: not UTF-8: byte 0xe9 at offset {len(good) + 3} of the decompressed file" in message


@pytest.mark.parametrize("compression", COMPRESS)
def test_truncated_and_damaged_compressed_files_are_refused(tmp_path, compression):
    data = COMPRESS[compression]("".join(f"line {i * i}\n" for i in range(50_000)).encode())
    assert len(texts(read_corpus(write(tmp_path, f"w.txt{compression}", data)))) == 50_000
    concatenated = read_corpus(write(tmp_path, f"w2.txt{compression}", data + data))  # as written by `cat`
    assert len(texts(concatenated)) == 100_000
    assert "truncated or damaged" in refusal(write(tmp_path, f"a.txt{compression}", data[: len(data) // 2]))
    assert "truncated or damaged" in refusal(write(tmp_path, f"b.txt{compression}", data[:-3]))
    assert "truncated or damaged" in refusal(write(tmp_path, f"c.txt{compression}", b"plain text, not packed"))


def test_malformed_tables_are_reported_with_their_row(tmp_path):
    assert "a.jsonl:2: invalid JSON: Expecting" in refusal(write(tmp_path, "a.jsonl", '{"text": "x"}\n{"text": \n'))
    assert "a.jsonl:2: no column 'text' (columns: 'b')" in refusal(write(tmp_path, "a.jsonl", '"x"\n{"b": 1}\n'))
    assert "a.jsonl:1: column 'text' contains int" in refusal(write(tmp_path, "a.jsonl", '{"text": 3}'))
    assert "a.jsonl:1: expected an object or a string, found list" in refusal(write(tmp_path, "a.jsonl", "[1]"))
    assert "a.jsonl:1: half of a surrogate pair" in refusal(write(tmp_path, "a.jsonl", r'"\ud800"'))
    message = refusal(write(tmp_path, "a.csv", "id,texte\n1,x\n"))
    assert message.endswith("a.csv: no column 'text'; did you mean 'texte'? (columns: 'id', 'texte')")
    assert "a.csv:3: expected 2 fields as in the header, found 3" in refusal(
        write(tmp_path, "a.csv", "id,text\n1,x\n2,y,z\n")
    )
    assert "a.csv:2: not a valid csv row" in refusal(write(tmp_path, "a.csv", 'id,text\n1,"never closed\n'))


def test_broken_parquet(tmp_path):
    data = as_parquet()
    assert "not a parquet file" in refusal(write(tmp_path, "a.parquet", data[:-20]))
    message = refusal(write(tmp_path, "a.parquet", data), column="txt")
    assert message.endswith("no column 'txt'; did you mean 'text'? (columns: 'id', 'text')")
    assert "a.parquet:1: column 'id' contains int" in refusal(write(tmp_path, "a.parquet", data), column="id")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "needs: pip install 'headstock[tables]'" in refusal(write(tmp_path, "a.parquet", b"PAR1"))


def test_a_url_is_read_like_a_file_and_downloaded_again_when_it_changes(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))
    url = "memory://corpora/books.txt.gz"
    for content in ("un\ndeux\n", "trois\n"):
        fsspec.filesystem("memory").pipe("/corpora/books.txt.gz", gzip.compress(content.encode()))
        corpus = read_corpus(url, documents="line")
        assert texts(corpus) == content.split()
        assert corpus.names() == [url]
    assert refusal("memory://corpora/none.txt") == "memory://corpora/none.txt: no such file"
    assert refusal("nosuch://a.txt").startswith("nosuch://a.txt: cannot be opened")
