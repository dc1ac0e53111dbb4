"""`headstock bench`: every part runs, and the results are written with their environment."""

import json


def test_all_parts_are_measured_and_written(call, tmp_path):
    file = tmp_path / "bench.json"
    parts = [word for part in ("start", "store", "train", "decode", "read") for word in ("--only", part)]
    out, _ = call("bench", "--quick", "--device", "cpu", "--out", file, *parts, "--json")
    output = json.loads(out.splitlines()[-1])
    assert json.loads(file.read_text())["results"] == output["results"]
    assert {"date", "device", "versions"} <= output.keys() and output["quick"]
    works = [row["work"].split()[0] for row in output["results"]]
    assert {"headstock", "building", "training", "decoding", "fine-tuning", "classifying", "embedding"} == set(works)
    assert all(row["value"] > 0 for row in output["results"])


def test_the_table_is_printed(call, tmp_path):
    out, _ = call("bench", "--quick", "--device", "cpu", "--only", "start", "--out", tmp_path / "bench.json")
    assert "headstock --help" in out and "torch" in out


def test_mistakes_are_one_line(call, tmp_path):
    for arguments, fact in (
        (["--only", "everything"], "start, store"),
        (["--out", "bench.txt"], ".json"),
        (["--growth", "--out", "growth.json"], ".svg"),
        (["--only", "peers", "--nanogpt", tmp_path], "model.py"),
        (["--only", "peers", "--peers", tmp_path / "none"], "none"),
    ):
        _, err = call("bench", "--quick", *arguments, code=2)
        assert fact in err and len(err.splitlines()) == 1
