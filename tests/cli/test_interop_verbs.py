"""`headstock export` and `headstock import` as they are typed."""

import json

import torch

from tests.interop.small import small_run

GPT = {"norm": "pre", "positions": "learned"}


def test_export_and_import_round_trip(call, tmp_path):
    run = small_run(tmp_path / "run", GPT, {"name": "causal"})
    out, err = call("export", run.path, "--to", "huggingface", tmp_path / "there")
    assert "GPT2LMHeadModel" in out and 'pipeline("text-generation"' in out and "as GPT2LMHeadModel" in err
    out, _ = call("import", tmp_path / "there", "--out", tmp_path / "back", "--json", "-q")
    output = json.loads(out.splitlines()[-1])
    assert output["run"] == str(tmp_path / "back") and output["parameters"]["total"] > 1000
    out, _ = call("generate", tmp_path / "back", "ab", "--max-tokens", 3, "--json")
    assert json.loads(out.splitlines()[-1])["texts"]
    from headstock.train.run_folder import RunFolder

    mine, theirs = run.weights(), RunFolder(tmp_path / "back").weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_mistakes_are_reported_in_one_line(call, tmp_path):
    run = small_run(tmp_path / "run", GPT | {"norm": "post"}, {"name": "causal"})
    _, err = call("export", run.path, "--to", "huggingface", tmp_path / "there", code=2)
    assert "model.norm is 'post', not 'pre'" in err and err.count("\n") == 1
    _, err = call("export", run.path, "--to", "onxx", tmp_path / "there", code=2)
    assert "did you mean 'onnx'" in err
    _, err = call("export", run.path, "--measure", "rows.csv", tmp_path / "there", code=2)
    assert "--measure: requires --to onnx" in err
    _, err = call("export", run.path, "--embedding", tmp_path / "there", code=2)
    assert "--embedding: requires --to onnx" in err
    _, err = call("import", tmp_path / "nothing", "--out", tmp_path / "back", code=2)
    assert "no such folder or file" in err
    _, err = call("import", run.path, "--out", tmp_path / "back", code=2)
    assert "is already a run folder" in err
    _, err = call("import", tmp_path, "--out", tmp_path / "back", code=2)
    assert "no config.json" in err
    (tmp_path / "back").mkdir()
    _, err = call("import", run.path, "--out", tmp_path / "back", code=2)
    assert "--overwrite" in err
