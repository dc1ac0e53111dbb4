"""All formats give the same questions, answers are at their offsets, and invalid data is reported."""

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.data.qa import read_questions
from headstock.errors import UserError

CONTEXT = "Anne lives in Paris. Paul lives in Rome, not in Paris."
QUESTION = "Where does Anne live?"
ZSTD = zstandard.ZstdCompressor()
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": ZSTD.compress}


def write(folder: Path, name: str, data) -> Path:
    path = folder / name
    path.write_bytes(
        data if isinstance(data, bytes) else (data if isinstance(data, str) else json.dumps(data)).encode()
    )
    return path


def squad(*entries: dict, context: str = CONTEXT) -> dict:
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": [{"context": context, "qas": list(entries)}]}]}


def entry(answers, question=QUESTION, **fields) -> dict:
    return {"question": question, "answers": answers, **fields}


def answer_at(start, text="Paris") -> dict:
    return {"text": text, "answer_start": start}


def read_one(folder, answers, suffix=".jsonl"):
    """The answers to one question of a table."""
    row = {"context": CONTEXT, "question": QUESTION, "answers": answers}
    if suffix == ".jsonl":
        path = write(folder, "a.jsonl", row)
    else:
        path = folder / "a.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(row), list(row.values())])
    return read_questions(path).columns.get("answers")


def test_squad(tmp_path):
    first = entry([answer_at(14), answer_at(48)], id="q1")
    second = entry([answer_at(35, "Rome")], "Where does Paul live?", id=2)
    data = squad(first, second)
    data["data"].append(squad(entry([answer_at(0, "Été")]), context="Été")["data"][0])
    records = read_questions(write(tmp_path, "train.json", data))
    assert records.columns["context"] == [CONTEXT, CONTEXT, "Été"]
    assert records.columns["question"] == [QUESTION, "Where does Paul live?", QUESTION] == records.display_texts
    assert records.columns["id"] == ["q1", "2", "3"]  # the last is its number
    assert records.columns["answers"][0] == [{"text": "Paris", "start": 14}, {"text": "Paris", "start": 48}]
    assert records.lines == [1, 2, 3] and records.has_labels
    assert [records.location(i).partition("train.json")[2] for i in range(3)] == [
        ": question 1 (id q1)",
        ": question 2 (id 2)",
        ": question 3",
    ]
    assert records.select([2, 0]).location(1) == records.location(0)


def test_squad2_has_questions_without_an_answer(tmp_path):
    impossible = entry([], is_impossible=True, plausible_answers=[answer_at(14)])
    records = read_questions(write(tmp_path, "a.json", squad(impossible, entry([answer_at(14)], is_impossible=False))))
    assert records.columns["answers"] == [[], [{"text": "Paris", "start": 14}]]
    bare = {"question": QUESTION, "is_impossible": True}
    assert read_questions(write(tmp_path, "b.json", squad(bare))).columns["answers"] == [[]]


def test_questions_without_answers_are_unlabelled(tmp_path):
    records = read_questions(write(tmp_path, "a.json", squad({"question": QUESTION, "id": "x"})))
    assert not records.has_labels and set(records.columns) == {"context", "question", "id"}
    rows = write(tmp_path, "a.csv", f'context,question\n"{CONTEXT}",{QUESTION}\n')
    assert not read_questions(rows).has_labels
    with pytest.raises(UserError, match="no column 'gold'"):
        read_questions(rows, columns={"answers": "gold"})
    assert not read_questions(rows, columns={"answers": "gold"}, strict=False).has_labels


@pytest.mark.parametrize("compression", COMPRESS)
def test_compressed(tmp_path, compression):
    data = COMPRESS[compression](json.dumps(squad(entry([answer_at(14)]))).encode())
    assert len(read_questions(write(tmp_path, f"a.json{compression}", data))) == 1


@pytest.mark.parametrize(
    "answers",
    [
        {"text": ["Paris"], "answer_start": [14]},
        {"text": "Paris", "answer_start": 14},
        {"text": ["Paris"]},
        [{"text": "Paris", "answer_start": 14}],
        [{"text": "Paris", "start": 14}],
        [{"text": "Paris"}],
        ["Paris"],
        "Paris",
    ],
)
def test_accepted_forms_of_answers(tmp_path, answers):
    expected = [[{"text": "Paris", "start": 14}]]
    assert read_one(tmp_path, answers) == expected
    assert read_one(tmp_path, answers if answers == "Paris" else json.dumps(answers), ".csv") == expected


def test_no_answers_in_tables(tmp_path):
    for none in ([], {"text": [], "answer_start": []}):
        assert read_one(tmp_path, none) == [[]]
        assert read_one(tmp_path, json.dumps(none), ".csv") == [[]]
    assert read_one(tmp_path, None) is None
    assert read_one(tmp_path, "", ".csv") is None


def test_parquet_with_other_names(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    answers = [{"text": ["Rome"], "answer_start": [35]}, {"text": [], "answer_start": []}]
    columns = {"passage": [CONTEXT] * 2, "question": ["Where?", "Why?"], "answers": answers, "key": ["a", "b"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    records = read_questions(tmp_path / "a.parquet", columns={"context": "passage", "id": "key"})
    assert records.columns["answers"] == [[{"text": "Rome", "start": 35}], []]
    assert records.columns["id"] == ["a", "b"]
    assert records.location(1).endswith("a.parquet:2")


@pytest.mark.parametrize(
    ("offset", "expected"), [(13, 14), (15, 14), (40, 48), (-1, 14), (1000, 48), (31, 14), (32, 48)]
)
def test_a_wrong_answer_offset_is_moved_to_the_nearest_occurrence(tmp_path, caplog, offset, expected):
    caplog.set_level("INFO", logger="headstock")
    assert read_one(tmp_path, [answer_at(offset)]) == [[{"text": "Paris", "start": expected}]]
    (message,) = caplog.messages
    assert message.startswith("moved 1 answer ")
    assert message.endswith(f'a.jsonl:1: "Paris" from {offset} to {expected}')


def test_only_moved_answers_are_counted(tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    path = write(
        tmp_path,
        "a.json",
        squad(entry([answer_at(14), answer_at(13)], id="x"), entry([answer_at(47)]), entry([answer_at(48)])),
    )
    read_questions(path)
    (message,) = caplog.messages
    assert message.startswith("moved 2 answers ")
    assert "question 1 (id x)" in message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            squad(entry([answer_at(3, "Oslo")], id="q7")),
            r'question 1 \(id q7\): answers "Oslo" is not at offset 3 \(found "e li"',
        ),
        (squad(entry([answer_at("3")])), r'the offset "3", expected an integer'),
        (squad(entry([answer_at(True)])), r"the offset true"),
        (squad(entry([answer_at(0, " ")])), r"question 1: answers contains a text that is blank"),
        (squad(entry([{"answer_start": 3}])), r'contains {"answer_start": 3}, expected {"text"'),
        (squad(entry(3)), r"question 1: answers is or contains 3"),
        (squad(entry([], question=" ")), r"question 1: question is blank"),
        (squad({"answers": []}), r"question 1: question is blank"),
        (squad(entry([]), context=""), r"data\[0\].paragraphs\[0\].context is blank"),
        (squad(entry([]), {"question": "Why?"}), r"question 2: answers is missing .*empty list"),
        (squad(), r"a.json: no questions"),
        ({"data": [{"paragraphs": [{"context": "a"}]}]}, r"data\[0\].paragraphs\[0\]: no 'qas' \(found: 'context'\)"),
        ({"data": [{"title": "T"}]}, r"data\[0\]: no 'paragraphs'"),
        ({"data": [{"paragraphs": {}}]}, r"data\[0\].paragraphs: expected a list, found {}"),
        ({"data": [3]}, r"data\[0\]: expected an object, found 3"),
        ({"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}, r"context: expected text, found 3"),
        ({"data": [{"paragraphs": [{"context": "a", "qas": ["b"]}]}]}, r"qas\[0\]: expected an object"),
        ({"rows": []}, r"no 'data' \(found: 'rows'\); expected SQuAD's layout"),
        ([], r"expected an object, found \[\]"),
        ('{"data": [\n  oops', r"a.json:2: invalid JSON: Expecting value at column 3 \(expected"),
        ('{"a": 1}\n{"a": 2}', r"a.json:2: invalid JSON: Extra data.*\.jsonl"),
    ],
)
def test_invalid_squad_json_is_refused(tmp_path, data, message):
    with pytest.raises(UserError, match=message):
        read_questions(write(tmp_path, "a.json", data))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", {"context": "a", "question": "b", "answers": "c"}, r'a.jsonl:1: answers "c" does not occur in the'),
        ("a.jsonl", {"context": " ", "question": "b"}, r"a.jsonl:1: context is blank"),
        ("a.jsonl", {"context": "a", "question": None}, r"a.jsonl:1: question is blank"),
        ("a.jsonl", {"context": "a", "answers": []}, r"no column 'question'"),
        (
            "a.jsonl",
            {"context": "a", "question": "b", "answers": {"text": ["a", "a"], "answer_start": [0]}},
            r"has 2 texts but 1 offsets",
        ),
        ("a.jsonl", {"context": "a", "question": "b", "answers": {"text": 3}}, r'is {"text": 3}, expected'),
        ("a.csv", "context,question,answers\na,b,a\na,b,\n", r"a.csv:3: answers is missing"),
        ("a.csv", "context,question,answers\n", r"no rows"),
        ("a.csv", 'context,question,answers\na,b,"[oops"\n', r'a.csv:2: answers "\[oops" does not occur'),
        ("a.xml", "<a/>", r"a\.xml: .*suffix \.xml .*\.json in SQuAD"),
    ],
)
def test_invalid_question_tables_are_refused(tmp_path, name, data, message):
    with pytest.raises(UserError, match=message):
        read_questions(write(tmp_path, name, data))


def test_several_problems_are_reported_together(tmp_path):
    bad = [entry([answer_at(0, "Oslo")], id=f"q{i}") for i in range(8)]
    with pytest.raises(UserError) as error:
        read_questions(write(tmp_path, "a.json", squad(*bad)))
    assert "8 values cannot be used" in str(error.value)
    assert "(id q4)" in str(error.value) and "and 3 more" in str(error.value)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text("ab é", min_size=1).filter(str.strip), st.integers(-3, 40), st.integers(1, 5), st.integers(-9, 50))
def test_answers_always_occur_at_their_offset(tmp_path_factory, context, start, length, offset):
    text = context[start : start + length] if start >= 0 else "b"
    path = write(tmp_path_factory.getbasetemp(), "a.json", squad(entry([answer_at(offset, text)]), context=context))
    if not text.strip() or text not in context:
        with pytest.raises(UserError):
            read_questions(path)
        return
    [[answer]] = read_questions(path).columns["answers"]
    assert answer["text"] == text and context.startswith(text, answer["start"])
    occurrences = [i for i in range(len(context)) if context.startswith(text, i)]
    assert abs(answer["start"] - offset) == min(abs(i - offset) for i in occurrences)


def test_skip_blank_drops_blank_questions_and_contexts(tmp_path):
    row = {"context": CONTEXT, "question": QUESTION, "answers": []}
    rows = [row, row | {"question": " "}, row | {"context": ""}]
    records = read_questions(write(tmp_path, "q.jsonl", "\n".join(map(json.dumps, rows))), skip_blank=True)
    assert (len(records), records.skipped) == (1, 2)
    records = read_questions(write(tmp_path, "q.json", squad(entry([]), entry([], question=""))), skip_blank=True)
    assert (len(records), records.skipped, len(records.locations)) == (1, 1, 1)
