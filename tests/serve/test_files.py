"""Tables that are uploaded and come back with predictions."""

import csv
import io
import json
import threading

import httpx
import pytest

from headstock.serve.files import safe_cell
from tests.experiments.small import MAKERS, make_rows


@pytest.mark.parametrize("cell", ["=1+1", "+1-1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "=", "-"])
def test_cells_that_a_spreadsheet_would_run_are_quoted(cell):
    assert safe_cell(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-1.5", "+3", "-2e-5", "a=1", "'=1", "", " =1", -1.5, 3, None])
def test_other_cells_stay(cell):
    assert safe_cell(cell) == cell


def upload(url, model, content, *, name="rows.csv", keep=False, columns=None, **options):
    params = {"model": model, "name": name, "keep": keep} | ({"columns": columns} if columns else {})
    return httpx.post(f"{url}/v1/files", params=params, content=content, timeout=60, **options)


def table(rows) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def parse(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_table_comes_back_as_the_command_line_predicts_it(served, runs, tmp_path, call):
    url, names = served
    texts = [text for text, _ in make_rows(150, name="file")]
    (tmp_path / "rows.csv").write_bytes(table([["text"], *([text] for text in texts)]))
    answer = upload(url, names["classify"], (tmp_path / "rows.csv").read_bytes())
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/csv")
    out = tmp_path / "predictions.csv"
    call("predict", runs["classify"], "--file", tmp_path / "rows.csv", "--out", out, "--device", "cpu")
    for own, expected in zip(parse(answer.text), parse(out.read_text(encoding="utf-8")), strict=True):
        assert own.keys() == expected.keys() and own["label"] == expected["label"]
        assert all(abs(float(own[key]) - float(expected[key])) < 1e-4 for key in own if key != "label")


def test_columns_are_kept_and_formulas_disarmed(served):
    url, names = served
    rows = [["id", "text", "=1+1"], ["1", "Ben likes the sea", "=cmd()"], ["2", "", "x"], ["3", "@now", "-7"]]
    answer = parse(upload(url, names["classify"], table(rows), keep=True).text)
    assert [row["id"] for row in answer] == ["1", "3"]  # the blank row is skipped
    assert answer[0]["'=1+1"] == "'=cmd()" and answer[1]["text"] == "'@now" and answer[1]["'=1+1"] == "-7"
    assert all(row["label"] for row in answer)


def test_columns_are_named_as_for_predict(served):
    url, names = served
    rows = table([["text", "review"], ["Ben likes the sea", "Anne hates the rain"]])
    by_name = [upload(url, names["classify"], rows, columns=columns) for columns in (None, "text=review")]
    assert by_name[0].text != by_name[1].text  # another column was read
    wrong = upload(url, names["classify"], rows, columns="text=nothing")
    assert wrong.status_code == 422 and "nothing" in wrong.text and "--columns" not in wrong.text


def test_rows_of_two_texts_are_read(served):
    url, names = served
    rows = MAKERS["pair"](70, name="file")
    content = "\n".join(json.dumps(row) for row in rows).encode()
    answer = parse(upload(url, names["pair"], content, name="rows.jsonl").text)
    assert len(answer) == len(rows) and all(row["label"] for row in answer)


def test_progress_is_streamed_and_another_request_is_answered_meanwhile(served):
    url, names = served
    content = table([["text"], *(["Ben likes the sea"] for _ in range(20_000))])
    events = []
    with httpx.stream(
        "POST",
        f"{url}/v1/files",
        params={"model": names["classify"]},
        content=content,
        headers={"Accept": "text/event-stream"},
        timeout=60,
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                events.append(json.loads(line[5:]))
            if len(events) == 3:  # leaving now cancels the rest
                body = {"model": names["classify"], "input": "Ben likes the sea"}
                assert httpx.post(f"{url}/v1/predict", json=body, timeout=30).status_code == 200
                break
    assert events[0]["rows"] == 20_000 and 0 < events[1]["done"] < events[2]["done"] < 20_000
    assert upload(url, names["classify"], table([["text"], ["again"]])).status_code == 200  # the lock is free


@pytest.mark.parametrize(
    ("content", "name", "problem"),
    [
        (b"text\n" + b"x" * 20_000_001, "rows.csv", "20,0"),
        (b"a,b\n1,2\n", "rows.csv", "text"),
        (b"text\n", "rows.csv", "rows.csv"),
        (b"text\nhello\n", "../../etc/passwd", "must end in"),
        (b"\xff\xfe\x00", "rows.csv", "rows.csv"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_clear_message(served, content, name, problem):
    url, names = served
    answer = upload(url, names["classify"], content, name=name)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 422 and problem in message
    assert "/tmp" not in message and "Traceback" not in message and "headstock-" not in message


def test_a_run_without_a_head_predicts_no_table(served):
    url, names = served
    assert upload(url, names["causal"], b"text\nhello\n").status_code == 422


def test_several_files_of_one_run_wait_for_each_other(served):
    url, names = served
    content, answers = table([["text"], *([f"Ben sees {i}"] for i in range(130))]), []
    threads = [
        threading.Thread(target=lambda: answers.append(upload(url, names["classify"], content))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(parse(answer.text)) for answer in answers] == [130] * 3
