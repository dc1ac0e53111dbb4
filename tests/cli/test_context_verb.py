"""`headstock explain context` on a trained run."""


def test_context_of_a_run(pretrained, tmp_path, result, refused):
    run, results = pretrained
    output = result("explain", "context", run, run, "--targets", 30, "--out", tmp_path / "c.svg")
    first = output["runs"][0]
    assert len(output["runs"]) == 2 and {"first", "last", "loss"} <= first["positions"][0].keys()
    assert first["contexts"][0]["context"] == 1 and output["targets"] == 30
    assert abs(first["loss"] - results["metrics"]["loss"]) < 1e-3  # the run's own validation text
    assert (tmp_path / "c.svg").read_text().startswith("<svg xmlns")
    (tmp_path / "short.txt").write_text("Hi.\n")
    message = refused("explain", "context", run, "--data", tmp_path / "short.txt", "--max-context", 20)
    assert "no document of this text has 20 tokens" in message
