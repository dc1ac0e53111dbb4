"""All formats give the same words and tags, and invalid lines are reported with their location."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.data.tagged import read_tagged
from headstock.errors import UserError

WORDS = [["Anne", "voit", "l'", "été", "."], ["Paris", "!"]]
TAGS = [["PROPN", "VERB", "DET", "NOUN", "PUNCT"], ["PROPN", "PUNCT"]]
ZSTD = zstandard.ZstdCompressor()
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": ZSTD.compress}

UNIVERSAL = """\
# sent_id = 1
# text = Anne va au lac.
1\tAnne\tAnne\tPROPN\t_\t_\t2\tnsubj\t_\t_
2\tva\taller\tVERB\t_\t_\t0\troot\t_\t_
3-4\tau\t_\t_\t_\t_\t_\t_\t_\t_
3\tà\tà\tADP\t_\t_\t5\tcase\t_\t_
4\tle\tle\tDET\t_\t_\t5\tdet\t_\t_
5\tlac\tlac\tNOUN\t_\t_\t2\tobl\t_\t_
5.1\tva\taller\tVERB\t_\t_\t_\t_\t_\t_

# sent_id = 2
1\t#\t#\tSYM\t_\t_\t0\troot\t_\t_
2\t_\t_\tPUNCT\t_\t_\t1\tpunct\t_\t_
"""


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def conll(separator: str = "\t", words=WORDS, tags=TAGS) -> str:
    lines = [[f"{w}{separator}{t}\n" for w, t in zip(*pair, strict=True)] for pair in zip(words, tags, strict=True)]
    return "\n".join("".join(of_one) for of_one in lines)


def table(name: str) -> str:
    if name.endswith(".jsonl"):
        return "".join(json.dumps({"tokens": w, "tags": t}) + "\n" for w, t in zip(WORDS, TAGS, strict=True))
    tab = "\t" if name.endswith(".tsv") else ","
    rows = [f"{' '.join(w)}{tab}{' '.join(t)}" for w, t in zip(WORDS, TAGS, strict=True)]
    return "\n".join([f"tokens{tab}tags", *rows])


@pytest.mark.parametrize("suffix", [".conll", ".txt", ".bio", ".iob", ".pos", ".tsv", ""])
@pytest.mark.parametrize("separator", ["\t", " ", "   "])
def test_conll_with_one_word_per_line(tmp_path, suffix, separator):
    records = read_tagged(write(tmp_path, f"train{suffix}", "\n\n" + conll(separator) + "\n\n\n"))
    assert records.columns == {"tokens": WORDS, "tags": TAGS}
    assert records.lines == [3, 9] and records.has_labels
    assert records.display_texts == ["Anne voit l' été .", "Paris !"]
    assert records.location(1).endswith(f"train{suffix}:9")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv"])
def test_tables(tmp_path, name):
    records = read_tagged(write(tmp_path, name, table(name)))
    assert records.columns == {"tokens": WORDS, "tags": TAGS}
    assert records.lines == ([1, 2] if name.endswith("jsonl") else [2, 3])


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"words": WORDS, "ner_tags": [[1, 0, 0, 0, 0], [1, 0]]}), tmp_path / "a.parquet")
    records = read_tagged(tmp_path / "a.parquet", columns={"tokens": "words", "tags": "ner_tags"})
    assert records.columns == {"tokens": WORDS, "tags": [["1", "0", "0", "0", "0"], ["1", "0"]]}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("name", ["a.conll", "a.jsonl"])
def test_compressed(tmp_path, compression, name):
    data = conll() if name == "a.conll" else table(name)
    records = read_tagged(write(tmp_path, name + compression, COMPRESS[compression](data.encode())))
    assert records.columns == {"tokens": WORDS, "tags": TAGS}


def test_universal_dependencies(tmp_path):
    path = write(tmp_path, "a.conllu", UNIVERSAL)
    records = read_tagged(path)
    assert records.columns["tokens"] == [["Anne", "va", "à", "le", "lac"], ["#", "_"]]
    assert records.columns["tags"] == [["PROPN", "VERB", "ADP", "DET", "NOUN"], ["SYM", "PUNCT"]]
    assert records.lines == [3, 12]
    relations = read_tagged(path, columns={"tags": "8"}).columns["tags"]
    assert relations == [["nsubj", "root", "case", "det", "obl"], ["root", "punct"]]


def test_universal_dependencies_without_tags(tmp_path):
    bare = "1\tOui\t_\t_\t_\t_\t_\t_\t_\t_\n"
    assert not read_tagged(write(tmp_path, "a.conllu", bare)).has_labels
    partly_tagged = bare + "\n" + bare.replace("_", "INTJ", 2)
    with pytest.raises(UserError, match=r"half.conllu:1: a word without a tag"):
        read_tagged(write(tmp_path, "half.conllu", partly_tagged))


def test_conll_2003_documents_and_column_numbers(tmp_path):
    text = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\n# # B-NP O\n\n# id = 7\nrejects VBZ B-VP O\n"
    text += "-DOCSTART- -X- O\nGerman JJ B-NP B-MISC\n"
    records = read_tagged(write(tmp_path, "eng.txt", text))
    assert records.columns["tokens"] == [["EU", "#"], ["rejects"], ["German"]]
    assert records.columns["tags"] == [["B-ORG", "O"], ["O"], ["B-MISC"]]
    assert records.lines == [3, 7, 9]
    parts = read_tagged(tmp_path / "eng.txt", columns={"tokens": "1", "tags": "2"}).columns["tags"]
    assert parts == [["NNP", "#"], ["VBZ"], ["JJ"]]


def test_hashes_that_are_words(tmp_path):
    text = "# a comment\n#mood\tX\nbad\tADJ\n\n# another\n#\tSYM\n"
    assert read_tagged(write(tmp_path, "a.conll", text)).columns["tokens"] == [["#mood", "bad"], ["#"]]


def test_words_alone_have_no_tags(tmp_path):
    records = read_tagged(write(tmp_path, "test.conll", "Les\n1 000\nvoix\n\nOui\n"))
    assert records.columns == {"tokens": [["Les", "1 000", "voix"], ["Oui"]]} and not records.has_labels
    records = read_tagged(write(tmp_path, "a.jsonl", '{"tokens": ["a b", "c"], "tags": null}\n"d e"\n'))
    assert records.columns == {"tokens": [["a b", "c"], ["d", "e"]]}


def test_words_with_spaces_are_kept_between_tabs(tmp_path):
    records = read_tagged(write(tmp_path, "a.conll", "1 000\tNUM\nde nouveau\tADV\n"))
    assert records.columns == {"tokens": [["1 000", "de nouveau"]], "tags": [["NUM", "ADV"]]}


def test_named_tags_must_exist_if_strict(tmp_path):
    words = write(tmp_path, "a.conll", "Oui\n")
    with pytest.raises(UserError, match=r"a.conll:1: --columns tags=2, but the line has 1 column"):
        read_tagged(words, columns={"tags": "2"})
    assert not read_tagged(words, columns={"tags": "2"}, strict=False).has_labels
    rows = write(tmp_path, "a.jsonl", '{"tokens": ["a"]}\n')
    with pytest.raises(UserError, match="no column 'pos'"):
        read_tagged(rows, columns={"tags": "pos"})
    assert not read_tagged(rows, columns={"tags": "pos"}, strict=False).has_labels


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.conll", "a\tX\nb\n", r"a.conll:2: expected 2 columns as above, found 1"),
        ("a.conll", "a X\n\nb c Y\n", r"a.conll:3: expected 2 columns as above, found 3"),
        ("a.conll", "a\n\nb Y\n", r"a.conll:3: expected 1 column as above, found 2"),  # partly tagged
        ("a.conll", "a\tX\n\tY\n", r"a.conll:2: the word \(column 1\) is blank"),
        ("a.conll", "a\tX\nb\t\n", r"a.conll:2: the tag of 'b' \(column 2\) is blank"),
        ("a.conll", "a\tX\nb\nc\td\te\n", r"2 values cannot be used(.|\n)*a.conll:2(.|\n)*a.conll:3"),
        ("a.conll", "", "no words"),
        ("a.conll", "# only\n\n", "no words"),
        ("a.odd", "It was late.\nHe slept on.\n\nThen he woke up.", r"a\.odd: .*suffix \.odd"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["X"]}', r"a.jsonl:1: tags has 1 tags for 2 words"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["X"]}\n{"tokens": ["b"]}', r"a.jsonl:2: tags is missing"),
        ("a.jsonl", '{"tokens": ["a", " "]}', r"a.jsonl:1: tokens is a list in which word 2 is blank"),
        ("a.jsonl", '{"tokens": ["a", 3]}', r"a.jsonl:1: tokens is a list in which word 2 is 3, expected text"),
        ("a.jsonl", '{"tokens": []}', r"a.jsonl:1: tokens is blank"),
        ("a.jsonl", '{"tokens": 3}', r"a.jsonl:1: tokens is 3, expected a list of words"),
        ("a.csv", "tokens,tags\na b,X Y\nc d,X\n", r"a.csv:3: tags has 1 tags for 2 words"),
        ("a.csv", "words,tags\na,X\n", r"no column 'tokens'"),
        ("a.csv", "tokens,tags\n", "no rows"),
    ],
)
def test_invalid_tagged_data_is_reported_with_its_location(tmp_path, name, data, message):
    with pytest.raises(UserError, match=message):
        read_tagged(write(tmp_path, name, data))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tags": "pos"}, "numbers from 1, such as tokens=1,tags=4"),
        ({"tags": "0"}, "numbers from 1"),
        ({"tag": "2"}, "unknown name 'tag'; did you mean 'tags'"),
        ({"tokens": "3"}, "tokens=3, but the line has 2 columns"),
    ],
)
def test_wrong_columns_of_conll(tmp_path, columns, message):
    with pytest.raises(UserError, match=message):
        read_tagged(write(tmp_path, "a.conll", conll()), columns=columns)


def test_a_missing_file_gets_a_suggestion(tmp_path):
    write(tmp_path, "train.conll", conll())
    with pytest.raises(UserError, match=r"no such file; did you mean 'train.conll'"):
        read_tagged(tmp_path / "trian.conll")


word = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1).filter(
    lambda w: not w.startswith(("#", "-DOCSTART-"))
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(word, st.sampled_from("ABC")), min_size=1), min_size=1))
def test_written_sentences_are_read_back(tmp_path_factory, sentences):
    words, tags = [[w for w, _ in pairs] for pairs in sentences], [[t for _, t in pairs] for pairs in sentences]
    path = write(tmp_path_factory.getbasetemp(), "written.conll", conll(words=words, tags=tags))
    assert read_tagged(path).columns == {"tokens": words, "tags": tags}


def test_skip_blank_drops_rows_without_words(tmp_path):
    rows = [{"tokens": ["a"], "tags": ["X"]}, {"tokens": [], "tags": []}, {"tokens": ["b"], "tags": ["Y"]}]
    path = write(tmp_path, "t.jsonl", "\n".join(map(json.dumps, rows)))
    records = read_tagged(path, skip_blank=True)
    assert (records.columns["tokens"], records.columns["tags"], records.skipped) == ([["a"], ["b"]], [["X"], ["Y"]], 1)
