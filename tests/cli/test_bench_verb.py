"""`bench` from the command line: every part runs, and is kept with what it was measured on."""

import json


def test_everything_is_measured_and_kept(call, tmp_path):
    kept = tmp_path / "bench.json"
    parts = [word for part in ("start", "store", "train", "decode", "read") for word in ("--only", part)]
    out, _ = call("bench", "--quick", "--device", "cpu", "--out", kept, *parts, "--json")
    output = json.loads(out.splitlines()[-1])
    assert json.loads(kept.read_text())["results"] == output["results"]
    assert {"date", "device", "versions"} <= output.keys() and output["quick"]
    works = [row["work"].split()[0] for row in output["results"]]
    assert {"headstock", "building", "training", "decoding", "fine-tuning", "classifying", "embedding"} == set(works)
    assert all(row["value"] > 0 for row in output["results"])


def test_a_table_is_shown(call, tmp_path):
    out, _ = call("bench", "--quick", "--device", "cpu", "--only", "start", "--out", tmp_path / "bench.json")
    assert "headstock --help" in out and "torch" in out


def test_mistakes_are_one_line(call, tmp_path):
    for arguments, named in (
        (["--only", "everything"], "start, store"),
        (["--out", "bench.txt"], ".json"),
        (["--growth", "--out", "growth.json"], ".svg"),
        (["--only", "peers", "--nanogpt", tmp_path], "model.py"),
        (["--only", "peers", "--peers", tmp_path / "none"], "none"),
    ):
        _, err = call("bench", "--quick", *arguments, code=2)
        assert named in err and len(err.splitlines()) == 1
