"""Tagging runs: trained, evaluated, resumed and used from Python and the command line."""

import json
import random

import numpy as np
import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.train.distributed import Interrupted
from headstock.train.finetune import finetune
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY

QUICK = {"least_steps": 0, "epochs": 6, "lr": 2e-2}
OBJECTIVES = ("causal", "masked", "hybrid")


@pytest.fixture(scope="module", params=OBJECTIVES)
def pretrained(request, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / request.param
    headstock.pretrain(corpus, out=out, objective=request.param, settings=TINY | {"steps": 8, "seed": 5})
    return out


@pytest.fixture(scope="module")
def causal(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "causal"
    headstock.pretrain(corpus, out=out, settings=TINY | {"steps": 8, "seed": 5})
    return out


def sentences(count, seed, *, longest=3):
    """Sentences with the part of speech of each word."""
    pick = random.Random(seed)
    rows = []
    for _ in range(count):
        row = []
        for _ in range(pick.randint(1, longest)):
            row += [(pick.choice(["Anne", "Ben", "Zoë"]), "NAME"), (pick.choice(["sees", "likes", "finds"]), "VERB")]
            row += pick.choice([[("Paris", "NAME")], [("the", "DET"), ("sea", "NOUN")], [("home", "NOUN")]])
            row += [(".", "PUNCT")]
        rows.append(row)
    return rows


def with_entities(rows):
    """The same sentences tagged with entities."""
    kinds = {"Anne": "B-PER", "Ben": "B-PER", "Zoë": "B-PER", "Paris": "B-LOC", "the": "B-LOC", "sea": "I-LOC"}
    return [[(word, kinds.get(word, "O")) for word, _ in row] for row in rows]


def write(path, rows, *, tags=True):
    lines = ["\n".join(f"{word}\t{tag}" if tags else word for word, tag in row) for row in rows]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagged")
    counts = {"train": 40, "valid": 20, "test": 20}
    return {name: write(folder / f"{name}.conll", sentences(n, n + len(name))) for name, n in counts.items()}


def train_tagger(source, out, files, settings=QUICK, **options):
    options = {"train": files["train"], "valid": files["valid"]} | options
    return finetune(source, task="tag", out=out, settings=settings, **options)


def test_a_tagger_learns_evaluates_and_predicts(pretrained, files, tmp_path):
    done = train_tagger(pretrained, tmp_path / "run", files, test=files["test"])
    assert done["headline"] == "accuracy"
    assert done["classes"] == ["DET", "NAME", "NOUN", "PUNCT", "VERB"]
    assert done["test"]["accuracy"] > 0.9
    assert done["valid_loss"] == done["valid"]["loss"]
    low, high = done["test"]["intervals"]["accuracy"]
    assert low <= done["test"]["accuracy"] <= high
    assert done["epochs"][-1]["valid_accuracy"] >= done["epochs"][0]["valid_accuracy"]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "A word tagger (DET, NAME, NOUN, PUNCT, VERB)" in card
    assert "accuracy" in card

    run = headstock.load(tmp_path / "run")
    again = run.evaluate(files["test"])
    assert again["accuracy"] == pytest.approx(done["test"]["accuracy"])
    assert run.evaluate()["loss"] == pytest.approx(done["test"]["loss"], rel=1e-4)
    predictions = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    gold = sentences(20, 24)
    assert [row["tokens"] for row in predictions] == [[word for word, _ in row] for row in gold]
    correct = [
        tag == predicted
        for row, prediction in zip(gold, predictions, strict=True)
        for (_, tag), predicted in zip(row, prediction["tags"], strict=True)
    ]
    assert np.mean(correct) == pytest.approx(done["test"]["accuracy"])

    as_text, as_list = run.predict(["Anne sees Paris.", ["Anne", "sees", "Paris", "."]])
    assert as_text == as_list
    assert as_text["tokens"] == ["Anne", "sees", "Paris", "."]
    assert all(0 <= p <= 1 for p in as_text["probabilities"])


def test_sentences_longer_than_a_row_are_tagged_completely(causal, files, tmp_path):
    longer = {
        name: write(tmp_path / f"{name}.conll", sentences(30, n, longest=9))
        for n, name in enumerate(["train", "valid"])
    }
    done = train_tagger(causal, tmp_path / "run", longer, QUICK | {"length": 12, "epochs": 8})
    assert done["valid"]["accuracy"] > 0.9
    run = headstock.load(tmp_path / "run")
    assert [len(row["tags"]) for row in run.predict([["Anne"] * 70, ["Ben"]])] == [70, 1]


def test_a_frozen_run_trains_only_the_head(causal, files, tmp_path):
    done = train_tagger(causal, tmp_path / "run", files, QUICK | {"layers": "mix"}, freeze=True)
    source, tuned = RunFolder(causal).weights(), RunFolder(tmp_path / "run").weights()
    assert all(torch.equal(tensor, source[name]) for name, tensor in tuned.items() if name.startswith("backbone."))
    assert tuned["heads.tag.mix.weights"].abs().max() > 0  # the layer mix was trained
    assert done["parameters"]["trainable"] == 5 * 16 + 5 + 3 + 1  # scores and biases, a weight for each layer, a scale
    assert headstock.load(tmp_path / "run").evaluate(files["valid"])["accuracy"] == pytest.approx(
        done["valid"]["accuracy"]
    )
    assert done["epochs"][done["best_epoch"] - 1]["valid_accuracy"] == pytest.approx(done["valid"]["accuracy"])


def test_a_resumed_tagger_has_the_same_weights(causal, files, tmp_path):
    class Stopped(Exception):
        pass

    def stop(event):
        if event.kind == "valid" and event.epoch == 3:
            raise Stopped

    train_tagger(causal, tmp_path / "whole", files)
    with pytest.raises((Stopped, Interrupted)):
        train_tagger(causal, tmp_path / "resumed", files, callbacks=[stop])
    done = train_tagger(causal, tmp_path / "resumed", files, resume=True)
    assert done["steps"] == RunFolder(tmp_path / "whole").results()["steps"]
    whole, resumed = RunFolder(tmp_path / "whole").weights(), RunFolder(tmp_path / "resumed").weights()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_entities_have_an_f1_and_ensembles_average(causal, files, tmp_path):
    tagged = {
        name: write(tmp_path / f"{name}.conll", with_entities(sentences(30, n)))
        for n, name in enumerate(["train", "valid"])
    }
    done = train_tagger(causal, tmp_path / "run", tagged, QUICK | {"ensemble": 2, "epochs": 14})
    assert done["headline"] == "f1"
    assert done["valid"]["f1"] > 0.9
    assert "F1 " in (tmp_path / "run" / "README.md").read_text()
    rows = RunFolder(tmp_path / "run").member(0).read_metrics()
    best = min((row for row in rows if "valid_f1" in row), key=lambda row: (-row["valid_f1"], row["valid_loss"]))
    assert best["valid_f1"] > 0.9
    assert best["step"] == RunFolder(tmp_path / "run").results()["best_step"]


# The command line


def test_the_command_line_trains_and_uses_a_tagger(call, causal, files, tmp_path):
    unlabelled = write(tmp_path / "unlabelled.conll", sentences(5, 1), tags=False)
    quick = [f"--set={key}={value}" for key, value in QUICK.items()]
    named = ["--train", files["train"], "--valid", files["valid"], "--test", unlabelled]
    out, _ = call("finetune", causal, "--task", "tag", *named, "--out", tmp_path / "run", *quick)
    assert "valid: accuracy" in out
    assert (tmp_path / "run" / "report.html").is_file()
    call("predict", tmp_path / "run", "--file", unlabelled, "--out", tmp_path / "predicted.jsonl")
    predictions = [json.loads(line) for line in (tmp_path / "predicted.jsonl").read_text().splitlines()]
    assert predictions == [
        json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()
    ]
    out, _ = call("predict", tmp_path / "run", "Anne sees Paris.")
    assert out.splitlines()[0].split("\t")[0] == "Anne"
    assert len(out.splitlines()) == 5  # one word per line, then a blank line


def test_invalid_tags_are_rejected_before_the_folder_is_created(call, causal, files, tmp_path):
    broken = tmp_path / "broken.conll"
    broken.write_text("Anne\tNAME\nsees\n", encoding="utf-8")
    _, err = call("finetune", causal, "--task", "tag", "--train", broken, "--out", tmp_path / "run", code=2)
    assert "broken.conll:2" in err
    uneven = tmp_path / "uneven.jsonl"
    uneven.write_text('{"tokens": ["a", "b"], "tags": ["X", "Y"]}\n{"tokens": ["a", "b"], "tags": ["X"]}\n')
    with pytest.raises(UserError, match=r"uneven.jsonl:2: tags has 1 tags for 2 words"):
        train_tagger(causal, tmp_path / "run", {"train": uneven, "valid": uneven})
    new = write(tmp_path / "new.conll", [[("Anne", "NAMES"), ("sees", "VERB")]])
    with pytest.raises(UserError, match=r"new.conll:1: tag 'NAMES' of word 1, 'Anne', is new.*did you mean 'NAME'"):
        train_tagger(causal, tmp_path / "run", files | {"valid": new})
    assert not (tmp_path / "run").exists()
