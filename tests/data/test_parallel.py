"""Translation pairs from tables and pairs of files; problems are reported with their location."""

import gzip
import json
import lzma

import pytest

from headstock.data.parallel import read_parallel
from headstock.errors import UserError

PAIRS = [("Go.", "Va !"), ("I saw a cat.", "J'ai vu un chat."), ("Zoë is here.", "Zoë est ici.")]
LANGUAGES = {"source": "en", "target": "fr"}


def table(path, rows, *, header=("source", "target"), delimiter="\t"):
    lines = [delimiter.join(row) for row in ([header] if header else []) + list(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_pair(folder, rows, *, compression="", stem="train"):
    opened = {"": open, ".gz": gzip.open, ".xz": lzma.open}[compression]
    for column, end in enumerate(("en", "fr")):
        with opened(folder / f"{stem}.{end}{compression}", "wt", encoding="utf-8") as file:
            file.writelines(row[column] + "\n" for row in rows)
    return folder / stem


def pairs_of(records):
    assert records.has_labels
    return list(zip(records.columns["source"], records.columns["target"], strict=True))


def test_every_layout_gives_the_same_rows(tmp_path):
    lines = "".join(json.dumps({"source": a, "target": b}, ensure_ascii=False) + "\n" for a, b in PAIRS)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    with lzma.open(tmp_path / "rows.tsv.xz", "wt", encoding="utf-8") as file:
        file.write("source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS))
    files = [tmp_path / "rows.jsonl", tmp_path / "rows.tsv.xz", table(tmp_path / "rows.tsv", PAIRS)]
    for file in files:
        assert pairs_of(read_parallel(file)) == PAIRS, file.name
    renamed = table(tmp_path / "named.tsv", PAIRS, header=("en", "fr"))
    assert pairs_of(read_parallel(renamed, columns=LANGUAGES)) == PAIRS


def test_a_tsv_that_begins_with_a_sentence_has_no_header(tmp_path):
    records = read_parallel(table(tmp_path / "bare.tsv", PAIRS, header=None))
    assert pairs_of(records) == PAIRS
    assert records.location(0).endswith("bare.tsv:1")
    three = table(tmp_path / "three.tsv", [(*row, "CC-BY, someone") for row in PAIRS], header=None)
    assert pairs_of(read_parallel(three, columns={"source": "2", "target": "1"})) == [(b, a) for a, b in PAIRS]
    with pytest.raises(UserError, match=r"three.tsv:1: --columns target=4, but the row has 3"):
        read_parallel(three, columns={"source": "1", "target": "4"})
    with pytest.raises(UserError, match="no column 'source'"):  # two words may be a header
        read_parallel(table(tmp_path / "header.tsv", PAIRS, header=("en", "fr")))


@pytest.mark.parametrize("compression", ["", ".gz", ".xz"])
def test_a_pair_of_files_is_found_by_stem_or_by_either_file(tmp_path, compression):
    stem = write_pair(tmp_path, PAIRS, compression=compression)
    for path in (stem, f"{stem}.en{compression}", f"{stem}.fr{compression}"):
        assert pairs_of(read_parallel(path, columns=LANGUAGES)) == PAIRS
    reversed_pairs = read_parallel(stem, columns={"source": "fr", "target": "en"})
    assert pairs_of(reversed_pairs) == [(b, a) for a, b in PAIRS]


def test_a_source_without_target_is_unlabelled_unless_strict(tmp_path):
    (tmp_path / "test.en").write_text("Go.\nStay.\n")
    records = read_parallel(tmp_path / "test", columns=LANGUAGES, strict=False)
    assert not records.has_labels and records.display_texts == ["Go.", "Stay."]
    with pytest.raises(UserError, match=r"test\.fr: no such file; .*test\.en needs it"):
        read_parallel(tmp_path / "test", columns=LANGUAGES)
    (tmp_path / "lines.txt").write_text("Go.\nStay.\n")
    assert not read_parallel(tmp_path / "lines.txt").has_labels
    assert not read_parallel(table(tmp_path / "one.tsv", [("Go.",)], header=("source",))).has_labels


def test_files_of_different_lengths_are_refused_with_both_counts(tmp_path):
    write_pair(tmp_path, PAIRS)
    (tmp_path / "train.fr").write_text("Va !\n")
    with pytest.raises(UserError, match=r"train\.en has 3 lines, but .*train\.fr has 1"):
        read_parallel(tmp_path / "train", columns=LANGUAGES)


def test_a_blank_side_is_reported_with_file_and_line(tmp_path):
    write_pair(tmp_path, [PAIRS[0], ("Stay.", " "), ("", "Reste.")])
    with pytest.raises(UserError) as error:
        read_parallel(tmp_path / "train", columns=LANGUAGES)
    assert "train.fr:2: target is blank" in str(error.value)
    assert "train.en:3: source is blank" in str(error.value)
    with pytest.raises(UserError, match=r"rows\.tsv:3: target is blank"):
        read_parallel(table(tmp_path / "rows.tsv", [PAIRS[0], ("Stay.", "")]))
    with pytest.raises(UserError, match=r"bare\.tsv:2: target is blank"):
        read_parallel(table(tmp_path / "bare.tsv", [PAIRS[0], ("Stay.", "")], header=None))


def test_unpaired_files_are_refused_with_a_hint(tmp_path):
    with pytest.raises(UserError, match="only one column"):
        read_parallel(table(tmp_path / "one.tsv", [("Go now.",), ("Stay here.",)], header=None))
    write_pair(tmp_path, PAIRS)
    with pytest.raises(UserError, match=r"--columns source=en,target=fr"):
        read_parallel(tmp_path / "train.en")
    with pytest.raises(UserError, match=r"no such file.*train\.de and train\.fr"):
        read_parallel(tmp_path / "train", columns={"source": "de", "target": "fr"})
    with pytest.raises(UserError, match="unknown name 'taget'"):
        read_parallel(tmp_path / "train", columns={"source": "en", "taget": "fr"})
    (tmp_path / "empty.en").touch()
    (tmp_path / "empty.fr").touch()
    with pytest.raises(UserError, match="no rows"):
        read_parallel(tmp_path / "empty", columns=LANGUAGES)


def test_documents_contain_both_sides(tmp_path):
    records = read_parallel(table(tmp_path / "rows.tsv", PAIRS))
    assert records.documents == [source for source, _ in PAIRS] + [target for _, target in PAIRS]
    assert records.select([2]).columns == {"source": ["Zoë is here."], "target": ["Zoë est ici."]}


def test_skip_blank_drops_rows_with_a_blank_side(tmp_path):
    write_pair(tmp_path, [("a", "b"), (" ", "c"), ("d", ""), ("e", "f")])
    records = read_parallel(tmp_path / "train", columns={"source": "en", "target": "fr"}, skip_blank=True)
    assert (pairs_of(records), records.skipped) == ([("a", "b"), ("e", "f")], 2)
    records = read_parallel(table(tmp_path / "t.tsv", [("a", "b"), ("", "c")]), skip_blank=True)
    assert (pairs_of(records), records.skipped) == ([("a", "b")], 1)
