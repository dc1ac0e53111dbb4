"""Masked and hybrid objectives in training: the masking schedule, resuming, compiling and the command line."""

import json
import sys
from functools import partial

import pytest
import torch

import headstock
from headstock.cli import main
from headstock.errors import UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.masked import MaskedConfig, MaskedLM
from headstock.train.distributed import DistributedContext
from headstock.train.loop import train
from headstock.train.metrics import format_metrics
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from tests.tasks.small import model_for

OBJECTIVES = {
    "spans": {"task.name": "masked", "unit": "span", "fraction_start": 0.5},
    "words": {"task.name": "masked", "unit": "word", "fraction_start": 0.05, "transform": True},
    "pairs": {"task.name": "masked", "nsp": True, "fraction_start": 0.4, "micro_batch": 4},
    "electra": {"task.name": "electra", "generator_width": 0.5, "generator_depth": 1, "optimizer": "muon"},
    "hybrid": {"task.name": "hybrid", "causal_share": 0.5, "fraction_start": 0.3, "dropout": 0.1},
}


class Stopped(Exception):
    pass


def stop_after(step):
    def callback(event):
        if event.kind == "step" and event.state.step == step:
            raise Stopped

    return callback


def test_masked_fraction_follows_progress_except_in_validation(stores, monkeypatch):
    tokenizer, splits = stores
    task = MaskedLM(MaskedConfig(fraction=0.15, fraction_start=0.6), tokenizer)
    model, calls, fraction = model_for(task), [], task.masker.fraction
    monkeypatch.setattr(task.masker, "fraction", lambda progress: calls.append(progress) or fraction(progress))
    settings = TrainSettings(steps=4, batch=8, length=32, validate_every=9)
    train(model, task, splits, settings, run=None, distributed=DistributedContext(torch.device("cpu")))
    assert [progress for progress in calls if progress < 1] == [0, 0.25, 0.5, 0.75]  # training steps
    assert calls[4:] and set(calls[4:]) == {1.0}  # validation

    def is_masked(progress, seed):
        task.progress = progress
        examples = task.examples(splits.train, length=32, seed=seed)
        return examples.batch(range(len(examples))).labels["token"] != IGNORE_INDEX

    assert is_masked(0.0, 1).sum() > 3 * is_masked(1.0, 1).sum()
    assert not (is_masked(1.0, 1) & ~is_masked(0.5, 1)).any()
    assert torch.equal(is_masked(0.0, None), is_masked(1.0, None))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_resumed_run_is_bit_identical(corpus, tmp_path, tiny, name):
    settings = tiny | OBJECTIVES[name] | {"validate_every": 4, "weights": "last"}
    headstock.pretrain(corpus, out=tmp_path / "complete", settings=settings)
    with pytest.raises(Stopped):
        headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, callbacks=[stop_after(7)])
    headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, resume=True)
    complete, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("complete", "cut"))
    assert complete == resumed


def test_compiled_losses_are_the_same(corpus, tmp_path, tiny, monkeypatch):
    """Of ELECTRA, which has a network within a head; those of the others are compared in tests of the execution."""
    torch._dynamo.reset()  # earlier compilations count against a limit
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    losses = {}
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        settings = tiny | OBJECTIVES["electra"] | {"compile": compiled, "steps": 3, "depth": 1, "log_every": 1}
        headstock.pretrain(corpus, out=out, settings=settings)
        losses[compiled] = [row["loss"] for row in RunFolder(out).read_metrics() if "loss" in row]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


# On the command line


@pytest.mark.parametrize(
    ("options", "metrics"),
    [
        (["--objective", "masked"], {"perplexity"}),
        (["--preset", "bert-nano", "--nsp"], {"perplexity", "next_accuracy"}),
        (
            ["--preset", "bert-nano", "--objective", "hybrid", "--no-nsp"],
            {"perplexity", "masked_perplexity", "causal_perplexity", "bits_per_byte"},
        ),
    ],
)
def test_each_objective_reports_its_metrics(corpus, tmp_path, tiny, capsys, monkeypatch, options, metrics):
    set_options = [f"--set={key}={json.dumps(value)}" for key, value in tiny.items()]
    arguments = ["headstock", "pretrain", str(corpus), "--out", str(tmp_path / "run"), *options, *set_options, "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit_info:
        main()
    out, err = capsys.readouterr()
    assert not exit_info.value.code, err
    results = json.loads(out.splitlines()[-1])
    assert (
        set(results) & {"next_accuracy", "masked_perplexity", "causal_perplexity", "bits_per_byte"} | {"perplexity"}
        == metrics
    )
    hybrid, pairs = "masked_perplexity" in metrics, "next_accuracy" in metrics
    assert ("masked ppl" in err) == hybrid
    assert ("next accuracy" in err) == pairs
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert ("headstock generate" in card) == hybrid
    assert "headstock fill" in card
    assert ("next accuracy" in card) == pairs
    model = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["model"]
    assert model["causal"] is False
    assert model["segments"] == (2 if "bert-nano" in options else 0)


def test_format_metrics_shows_each_perplexity_once():
    line = format_metrics({"loss": 1.0, "perplexity": 3.0, "causal_perplexity": 3.0, "masked_perplexity": 2.0})
    assert line == "valid loss 1.000 | causal ppl 3.000 | masked ppl 2.000"
    line = format_metrics({"loss": 1.0, "perplexity": 2.0, "accuracy": 0.5, "next_loss": 0.1, "next_accuracy": 0.75})
    assert line == "valid loss 1.000 | valid ppl 2.000 | accuracy 0.500 | next accuracy 0.750"


def test_all_invalid_settings_are_reported(corpus, tmp_path, tiny):
    invalid = {"task.fraction": 1.5, "task.unit": "spam", "task.span_mean": 20}
    with pytest.raises(UserError) as error:
        headstock.pretrain(corpus, out=tmp_path / "run", objective="masked", settings=tiny | invalid)
    assert "task.unit: must be one of 'token', 'word', 'span', not 'spam'; did you mean 'span'?" in str(error.value)
    del invalid["task.unit"]
    with pytest.raises(UserError) as error:
        headstock.pretrain(
            corpus, out=tmp_path / "run", objective="hybrid", settings=tiny | invalid | {"causal_share": 2}
        )
    for name in ("task.fraction", "task.span_mean", "task.causal_share"):
        assert name in str(error.value)
