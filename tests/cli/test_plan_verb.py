"""`headstock plan`, and `headstock pretrain --minutes`, which uses it."""

import json
import tomllib

import pytest

from headstock.train.run_folder import open_run


@pytest.fixture
def few_steps(monkeypatch):
    from headstock.planner import probe

    monkeypatch.setattr(probe, "STEPS", 8)


def test_a_plan_can_be_run(call, corpus, tmp_path, few_steps):
    recipe = tmp_path / "mine.toml"
    out, _ = call("plan", corpus, "--minutes", "0.01", "--probe", "--device", "cpu", "--out", recipe, "--json")
    output = json.loads(out.splitlines()[-1])
    assert {"parameters", "seconds", "peak_bytes", "tokens_per_second", "config"} <= output.keys()
    assert output["probed"] and tomllib.loads(recipe.read_text()) == output["config"]
    assert set(output["reasons"]) >= {"size", "vocabulary", "batch", "lr", "passes", "objective"}
    out, _ = call("pretrain", "--config", recipe, "--out", tmp_path / "run", "--device", "cpu", "--json", "--quiet")
    results = json.loads(out.splitlines()[-1])
    assert results["steps"] == output["steps"] and results["parameters"]["total"] == output["parameters"]


def test_without_a_file_the_settings_are_shown(call, corpus):
    out, _ = call("plan", corpus, "--minutes", "0.01", "--device", "cpu", "--objective", "masked")
    assert "[train]" in out and 'name = "masked"' in out and "because" in out and "--probe" in out


def test_minutes_alone_plan_the_size(call, corpus, tmp_path):
    _, err = call(
        "pretrain", corpus, "--minutes", "0.01", "--out", tmp_path / "run", "--device", "cpu", "--set", "lr=1e-3"
    )
    lines = [line for line in err.splitlines() if "no preset or size given" in line]
    assert len(lines) == 1 and "parameters" in lines[0] and "stops after 0.01 minutes" in lines[0]
    config = open_run(tmp_path / "run").config()
    assert config["train"]["minutes"] == 0.01 and config["train"]["steps"] is None
    assert config["train"]["lr"] == 1e-3  # settings of the command line have precedence
    assert (config["model"]["depth"], config["model"]["width"], config["model"]["positions"]) == (2, 64, "rotary")


@pytest.mark.parametrize("arguments", [["--preset", "gpt-nano"], ["--set", "depth=1"]])
def test_a_named_size_is_not_planned(call, corpus, tmp_path, arguments):
    small = ["--set", "width=16", "--set", "heads=2", "--set", "vocabulary=300"]
    _, err = call(
        "pretrain", corpus, "--minutes", "0.01", "--out", tmp_path / "run", "--device", "cpu", *arguments, *small
    )
    assert "no preset or size given" not in err
    assert open_run(tmp_path / "run").config()["model"]["positions"] == "learned"


def test_mistakes_are_one_line(call, corpus, tmp_path):
    _, err = call("plan", tmp_path / "none.txt", code=2)
    assert "none.txt" in err and len(err.splitlines()) == 1
    _, err = call("plan", corpus, "--minutes", "0", code=2)
    assert "--minutes" in err
    _, err = call("plan", corpus, "--out", tmp_path / "mine.yaml", code=2)
    assert ".toml" in err
