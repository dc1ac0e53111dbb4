"""Every objective of the masked family through the one loop: the schedule, resuming, compiling and the command line."""

import json
import sys
from functools import partial

import pytest
import torch

import headstock
from headstock.cli import main
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
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
    "hybrid": {"task.name": "hybrid", "causal_share": 0.5, "fraction_start": 0.3, "dropout": 0.1},
}


class Stopped(Exception):
    pass


def stop_after(step):
    def hear(event):
        if event.kind == "step" and event.state.step == step:
            raise Stopped

    return hear


def test_the_hidden_share_follows_the_run_and_validation_does_not(corpus, monkeypatch):
    text = read_corpus(corpus)
    tokenizer = train_tokenizer((document.text for document in text), TokenizerSettings(vocabulary=300))
    stores = build_split_stores(text, tokenizer)
    task = MaskedLM(MaskedConfig(fraction=0.15, fraction_start=0.6), tokenizer)
    model, told, share = model_for(task), [], task.masker.fraction
    monkeypatch.setattr(task.masker, "fraction", lambda done: told.append(done) or share(done))
    settings = TrainSettings(steps=4, batch=8, length=32, validate_every=9)
    train(model, task, stores, settings, run=None, distributed=DistributedContext(torch.device("cpu")))
    assert [done for done in told if done < 1] == [0, 0.25, 0.5, 0.75]  # of the steps, one after the other
    assert told[4:] and set(told[4:]) == {1.0}  # of the validation

    def hidden(done, seed):
        task.progress = done
        examples = task.examples(stores.train, length=32, seed=seed)
        return examples.batch(range(len(examples))).labels["token"] != IGNORE_INDEX

    assert hidden(0.0, 1).sum() > 3 * hidden(1.0, 1).sum()
    assert not (hidden(1.0, 1) & ~hidden(0.5, 1)).any()
    assert torch.equal(hidden(0.0, None), hidden(1.0, None))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_ends_in_the_same_bits(corpus, tmp_path, tiny, name):
    settings = tiny | OBJECTIVES[name] | {"validate_every": 4, "weights": "last"}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    with pytest.raises(Stopped):
        headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, callbacks=[stop_after(7)])
    headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, resume=True)
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


@pytest.mark.parametrize("name", ["spans", "hybrid"])
def test_compiled_gives_the_same_losses(corpus, tmp_path, tiny, monkeypatch, name):
    torch._dynamo.reset()  # what other tests compiled counts against a limit
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    losses = {}
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        settings = tiny | OBJECTIVES[name] | {"compile": compiled, "steps": 3, "depth": 1, "log_every": 1}
        headstock.pretrain(corpus, out=out, settings=settings)
        losses[compiled] = [row["loss"] for row in RunFolder(out).read_metrics() if "loss" in row]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


# On the command line


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        (["--objective", "masked"], {"perplexity"}),
        (["--preset", "bert-nano", "--nsp"], {"perplexity", "next_accuracy"}),
        (
            ["--preset", "bert-nano", "--objective", "hybrid", "--no-nsp"],
            {"perplexity", "masked_perplexity", "causal_perplexity", "bits_per_byte"},
        ),
    ],
)
def test_each_objective_tells_its_own_numbers(corpus, tmp_path, tiny, capsys, monkeypatch, asked, numbers):
    options = [f"--set={key}={json.dumps(value)}" for key, value in tiny.items()]
    words = ["headstock", "pretrain", str(corpus), "--out", str(tmp_path / "run"), *asked, *options, "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    told = json.loads(out.splitlines()[-1])
    assert (
        set(told) & {"next_accuracy", "masked_perplexity", "causal_perplexity", "bits_per_byte"} | {"perplexity"}
        == numbers
    )
    hybrid, pairs = "masked_perplexity" in numbers, "next_accuracy" in numbers
    assert ("masked ppl" in err) == hybrid
    assert ("next accuracy" in err) == pairs
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert ("headstock generate" in card) == hybrid
    assert "headstock fill" in card
    assert ("next accuracy" in card) == pairs
    model = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["model"]
    assert model["causal"] is False
    assert model["segments"] == (2 if "bert-nano" in asked else 0)


def test_the_screen_shows_both_perplexities_once():
    shown = format_metrics({"loss": 1.0, "perplexity": 3.0, "causal_perplexity": 3.0, "masked_perplexity": 2.0})
    assert shown == "valid loss 1.000 | causal ppl 3.000 | masked ppl 2.000"
    shown = format_metrics({"loss": 1.0, "perplexity": 2.0, "accuracy": 0.5, "next_loss": 0.1, "next_accuracy": 0.75})
    assert shown == "valid loss 1.000 | valid ppl 2.000 | accuracy 0.500 | next accuracy 0.750"


def test_every_wrong_setting_is_named(corpus, tmp_path, tiny):
    wrong = {"task.fraction": 1.5, "task.unit": "spam", "task.span_mean": 20}
    with pytest.raises(UserError) as caught:
        headstock.pretrain(corpus, out=tmp_path / "run", objective="masked", settings=tiny | wrong)
    assert "task.unit: must be one of 'token', 'word', 'span', not 'spam'; did you mean 'span'?" in str(caught.value)
    del wrong["task.unit"]
    with pytest.raises(UserError) as caught:
        headstock.pretrain(
            corpus, out=tmp_path / "run", objective="hybrid", settings=tiny | wrong | {"causal_share": 2}
        )
    for where in ("task.fraction", "task.span_mean", "task.causal_share"):
        assert where in str(caught.value)
