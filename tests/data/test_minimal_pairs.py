"""Minimal pairs: BLiMP's tables and tars, Winograd schemas, and malformed files."""

import io
import json
import lzma
import tarfile

import pytest

from headstock.data.minimal_pairs import MinimalPair, read_minimal_pairs
from headstock.data.winograd import substitute
from headstock.errors import UserError


def lines(*rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def pair(number: int = 0, **columns) -> dict:
    return {"sentence_good": f"Cats sleep {number}.", "sentence_bad": f"Cats sleeps {number}.", **columns}


def tar(path, members: dict[str, bytes], mode: str) -> None:
    with tarfile.open(path, mode) as file:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))


def test_tables_folders_globs_and_tars_give_the_same_pairs(tmp_path):
    first = lines(
        *(pair(i, UID="agreement", linguistics_term="verbs", field="syntax", pairID=str(i)) for i in range(5))
    )
    second = lines(*(pair(i + 5, UID="islands") for i in range(3)))
    folder = tmp_path / "pairs"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(first)
    (folder / "b.jsonl.xz").write_bytes(lzma.compress(second))
    (folder / "notes.txt").write_text("not these")
    pairs = read_minimal_pairs([folder])
    assert [p.good for p in pairs] == [f"Cats sleep {i}." for i in range(8)]
    assert pairs[0].groups == {"UID": "agreement", "linguistics_term": "verbs", "field": "syntax"}
    assert pairs[6] == MinimalPair("Cats sleep 6.", "Cats sleeps 6.", f"{folder / 'b.jsonl.xz'}:2", {"UID": "islands"})
    members = {"data/a.jsonl": first, "../b.jsonl": second, "readme.md": b"x", "data/._a.jsonl": b"\0"}
    for name, mode in (("all.tar.xz", "w:xz"), ("all.tar.gz", "w:gz"), ("all.tar", "w")):
        tar(tmp_path / name, members, mode)
        from_tar = read_minimal_pairs([tmp_path / name])
        assert [(p.good, p.bad, p.groups) for p in from_tar] == [(p.good, p.bad, p.groups) for p in pairs]
    assert from_tar[1].location == f"{tmp_path / 'all.tar'}/data/a.jsonl:2"
    assert not (tmp_path.parent / "b.jsonl").exists()  # nothing is unpacked to disk
    assert read_minimal_pairs([str(folder / "*.xz"), folder / "a.jsonl"])[3:] == pairs[:5]


def test_rows_are_sampled_evenly_from_each_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(*map(pair, range(100))))
    (tmp_path / "b.jsonl").write_bytes(lines(*map(pair, range(3))))
    pairs = [int(p.good.split()[-1][:-1]) for p in read_minimal_pairs([tmp_path], rows=4)]
    assert pairs == [0, 25, 50, 75, 0, 1, 2]


SCHEMA = """<schema><text><txt1>{txt1}</txt1><pron> {pron} </pron><txt2>{txt2}</txt2></text>
<answers><answer>{a} </answer><answer> {b}</answer></answers><correctAnswer> {right}  </correctAnswer></schema>"""


def collection(tmp_path, *schemas: str, head: str = '<?xml version="1.0" encoding="ISO-8859-1"?>'):
    path = tmp_path / "schemas.xml"
    path.write_bytes(f"{head}\n<collection>{''.join(schemas)}</collection>".encode("latin-1"))
    return path


def test_schemas_become_texts_with_each_candidate_in_place(tmp_path):
    cup = {"txt1": "The cup\nis not in  the sac because", "txt2": "is too é large. ", "a": "The cup", "b": "the sac"}
    first = SCHEMA.format(pron="it", right="A.", **cup)
    second = SCHEMA.format(txt1="Tom met Ray and kept", pron="his", txt2="coat.", a="Tom", b="Ray", right="B")
    pairs = read_minimal_pairs([collection(tmp_path, first, second)])
    assert pairs[0].good == "The cup is not in the sac because the cup is too é large."
    assert pairs[0].bad == "The cup is not in the sac because the sac is too é large."
    assert pairs[1].good == "Tom met Ray and kept Ray's coat."
    assert pairs[1].bad == "Tom met Ray and kept Tom's coat."
    for pair in pairs:
        for text, continuation in zip((pair.good, pair.bad), pair.continuation, strict=True):
            assert text[continuation:] in (" is too é large.", " coat.")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("He left because", "he", "was late.", "The man"), "He left because the man was late."),
        (("They met.", "She", "left.", "the nurse"), "They met. The nurse left."),
        (("We saw", "them", ".", "The foxes"), "We saw the foxes."),
        (("Bob paid.", "He", "is kind.", "Charlie's"), "Bob paid. Charlie is kind."),
        (("Stretching", "her", "back, she smiled.", "the girl"), "Stretching the girl's back, she smiled."),
        (("He told", "her", "to go.", "Ann"), "He told Ann to go."),
        (("He told", "her", ".", "Ann"), "He told Ann."),
        (("He took", "its", "key.", "Emma's"), "He took Emma's key."),
        (("", "It", "fell.", "the vase"), "The vase fell."),
        (("So", "his", '"Dibs!" was slow.', "Dan"), 'So Dan\'s "Dibs!" was slow.'),
    ],
)
def test_candidates_are_inflected_for_their_position(parts, expected):
    text, continuation = substitute(*parts)
    assert text == expected
    assert expected[continuation:].strip() == parts[2]


def test_malformed_files_are_reported_in_one_line(tmp_path):
    def refusal(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError) as error:
            read_minimal_pairs([tmp_path / name])
        assert "\n" not in str(error.value)
        return str(error.value).replace(f"{tmp_path}/", "")

    other = {"sentence_godo": "a", "sentence_bad": "b"}
    assert refusal("a.jsonl", lines(other)).startswith(
        "a.jsonl:1: no column 'sentence_good'; did you mean 'sentence_godo'?"
    )
    assert refusal("b.jsonl", lines(pair(), {"sentence_good": "a"})).startswith("b.jsonl:2: no column 'sentence_bad'")
    assert refusal("c.jsonl", lines(pair(), pair(sentence_bad=" "))).startswith("c.jsonl:2: sentence_bad is ")
    assert refusal("d.jsonl", lines([1])) == (
        "d.jsonl:1: expected an object with sentence_good and sentence_bad, found list"
    )
    assert refusal("e.jsonl", b'{"sentence_good": ').startswith("e.jsonl:1: invalid JSON")
    assert refusal("f.jsonl", b"").startswith("f.jsonl: no rows")
    assert "expected .jsonl with sentence_good" in refusal("g.csv", b"a,b\n")
    assert refusal("h.xml", b"<collection><schema></collection>").startswith("h.xml: not valid XML")
    assert refusal("i.xml", b"<collection/>").startswith("i.xml: contains no <schema>")
    schema = {"txt1": "a", "pron": "it", "txt2": "b", "a": "x", "b": "y"}
    assert refusal("j.xml", SCHEMA.format(right="C", **schema).encode()) == (
        "j.xml: schema 1: correctAnswer is 'C', expected A or B"
    )
    assert "two answers, found 1" in refusal("k.xml", SCHEMA.format(right="A", **schema | {"b": ""}).encode())
    assert "damaged" in refusal("l.tar.xz", lzma.compress(b"x" * 900)[:40])
    assert "contains no .jsonl file" in refusal("m.tar", b"\0" * 10240)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_doctype_is_refused(tmp_path, encoding):
    bomb = '<!DOCTYPE c [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]><collection>&b;</collection>'
    path = tmp_path / "bomb.xml"
    path.write_bytes(f'<?xml version="1.0" encoding="{encoding}"?>{bomb}'.encode(encoding))
    with pytest.raises(UserError, match="DOCTYPE"):
        read_minimal_pairs([path])


def test_missing_paths_are_reported(tmp_path):
    (tmp_path / "pairs.jsonl").write_bytes(lines(pair()))
    with pytest.raises(UserError, match=r"no such file or folder; did you mean 'pairs.jsonl'"):
        read_minimal_pairs([tmp_path / "pair.jsonl"])
    with pytest.raises(UserError, match="the pattern matches nothing"):
        read_minimal_pairs([str(tmp_path / "*.tar")])
    with pytest.raises(UserError, match="no minimal pairs"):
        read_minimal_pairs([])
    with pytest.raises(UserError, match="--rows 0"):
        read_minimal_pairs([tmp_path], rows=0)
