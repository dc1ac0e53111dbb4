"""`headstock export` and `headstock import`."""

import json

import torch

from tests.interop.small import small_run

GPT = {"norm": "pre", "positions": "learned"}


def test_export_and_import_round_trip(call, tmp_path):
    run = small_run(tmp_path / "run", GPT, {"name": "causal"})
    out, err = call("export", run.path, "--to", "huggingface", tmp_path / "exported")
    assert "GPT2LMHeadModel" in out and 'pipeline("text-generation"' in out and "as GPT2LMHeadModel" in err
    out, _ = call("import", tmp_path / "exported", "--out", tmp_path / "imported", "--json", "-q")
    output = json.loads(out.splitlines()[-1])
    assert output["run"] == str(tmp_path / "imported") and output["parameters"]["total"] > 1000
    out, _ = call("generate", tmp_path / "imported", "ab", "--max-tokens", 3, "--json")
    assert json.loads(out.splitlines()[-1])["texts"]
    from headstock.train.run_folder import RunFolder

    expected, weights = run.weights(), RunFolder(tmp_path / "imported").weights()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_mistakes_are_reported_in_one_line(call, tmp_path):
    run = small_run(tmp_path / "run", GPT | {"norm": "post"}, {"name": "causal"})
    _, err = call("export", run.path, "--to", "huggingface", tmp_path / "exported", code=2)
    assert "model.norm is 'post', not 'pre'" in err and err.count("\n") == 1
    _, err = call("export", run.path, "--to", "onxx", tmp_path / "exported", code=2)
    assert "did you mean 'onnx'" in err
    _, err = call("export", run.path, "--measure", "rows.csv", tmp_path / "exported", code=2)
    assert "--measure: requires --to onnx" in err
    _, err = call("export", run.path, "--embedding", tmp_path / "exported", code=2)
    assert "--embedding: requires --to onnx" in err
    _, err = call("import", tmp_path / "nothing", "--out", tmp_path / "imported", code=2)
    assert "no such folder or file" in err
    _, err = call("import", run.path, "--out", tmp_path / "imported", code=2)
    assert "is already a run folder" in err
    _, err = call("import", tmp_path, "--out", tmp_path / "imported", code=2)
    assert "no config.json" in err
    (tmp_path / "imported").mkdir()
    _, err = call("import", run.path, "--out", tmp_path / "imported", code=2)
    assert "--overwrite" in err
