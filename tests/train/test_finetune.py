"""A new head on a pretrained backbone: what is taken over, what learns, and what is written down."""

import csv
import json
import random
import shutil
import signal
from dataclasses import replace

import pytest
import torch

import headstock
from headstock.data.labelled_texts import read_records
from headstock.errors import ConfigError, UserError
from headstock.tasks.classify import Classify
from headstock.train.distributed import DistributedContext
from headstock.train.finetune import finetune
from headstock.train.fit import LabelledData
from headstock.train.loop import train
from headstock.train.metrics import majority_warning
from headstock.train.models import build_model, build_task
from headstock.train.resolve import resolve_finetune_config
from headstock.train.run_folder import RunFolder
from headstock.train.settings import make_config
from tests.commands import set_options
from tests.conftest import TINY
from tests.train.processes import start_command, start_ranks

QUICK = {"least_steps": 0, "epochs": 3, "lr": 5e-3}
STILL = {"least_steps": 0, "epochs": 2, "lr": 1e-30}  # too small a rate to move a single bit of a weight
PLACES = {"sea": "the sea", "town": "Paris", "home": "home"}


@pytest.fixture(scope="session")
def causal(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stocks") / "causal"
    headstock.pretrain(corpus, out=out, settings=TINY | {"steps": 10, "seed": 7})
    return out


@pytest.fixture(scope="session")
def masked(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stocks") / "masked"
    headstock.pretrain(corpus, out=out, objective="masked", settings=TINY | {"steps": 10, "seed": 7})
    return out


def sentences(count: int, seed: int, labels=("sea", "town")) -> list[tuple[str, str]]:
    """Texts of one to four sentences, labelled by the place in the last."""
    pick = random.Random(seed)

    def sentence(place: str) -> str:
        return f"{pick.choice(['Anne', 'Ben', 'Zoë'])} {pick.choice(['sees', 'likes', 'finds'])} {place}."

    rows = []
    for number in range(count):
        label = labels[number % len(labels)]
        before = [sentence(pick.choice(list(PLACES.values()))) for _ in range(pick.randint(0, 3))]
        rows.append((" ".join([*before, sentence(PLACES[label])]), label))
    return rows


def write(path, rows, columns=("text", "label")):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    counts = {"train": 48, "valid": 30, "test": 30}
    return {name: write(folder / f"{name}.csv", sentences(n, n + len(name))) for name, n in counts.items()}


@pytest.fixture
def learn(files, tmp_path):
    """Fine-tune into a folder of this test, on the files that all share unless others are given."""

    def learn(source, name="run", settings=QUICK, **given):
        split = {"train": files["train"], "valid": files["valid"]} | given
        return finetune(source, out=tmp_path / name, settings=settings, **split)

    return learn


def weights(run):
    return RunFolder(run).weights()


def backbone(run):
    return {name: tensor for name, tensor in weights(run).items() if name.startswith("backbone.")}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# What is taken over, and what learns


@pytest.mark.parametrize("stock", ["causal", "masked"])
def test_the_backbone_is_the_sources_unless_it_begins_from_scratch(stock, request, learn, tmp_path):
    source = request.getfixturevalue(stock)
    learn(source, "taken", STILL)
    assert same(backbone(tmp_path / "taken"), backbone(source))
    learn(source, "scratch", STILL, init="scratch")
    scratch, own = backbone(tmp_path / "scratch"), backbone(source)
    assert scratch.keys() == own.keys()
    matrices = [name for name, tensor in own.items() if tensor.dim() == 2]
    assert not any(torch.equal(scratch[name], own[name]) for name in matrices)


def test_scratch_needs_no_weights_to_begin_with(causal, learn, tmp_path):
    shutil.copytree(causal, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    learn(tmp_path / "bare", settings=STILL | {"epochs": 1}, init="scratch")
    with pytest.raises(UserError, match=r"has no model.safetensors yet"):
        learn(tmp_path / "bare", "taken", STILL)
    assert not (tmp_path / "taken").exists()


def test_it_learns_and_says_all_that_the_contract_promises(causal, learn, files, tmp_path):
    done = learn(causal, settings=QUICK | {"epochs": 8, "lr": 0.01}, test=files["test"])
    assert done["test"]["accuracy"] > 0.75
    assert done == RunFolder(tmp_path / "run").results()
    assert headstock.finetune is finetune
    promised = "run steps tokens seconds tokens_per_second train_loss valid_loss perplexity bits_per_byte metrics"
    assert set(promised.split()) <= set(done)
    assert done["run"] == str(tmp_path / "run")
    assert done["steps"] == 8 * 3  # 48 rows, 16 at a time
    assert done["metrics"] == done["test"]
    assert done["metrics"]["rows"] == 30
    for name in ("accuracy", "macro_f1"):
        low, high = done["test"]["intervals"][name]
        assert 0 <= low <= done["test"][name] <= high <= 1
    promised = "config.json tokenizer.json model.safetensors metrics.jsonl results.json README.md checkpoints"
    assert set(promised.split()) <= {path.name for path in (tmp_path / "run").iterdir()}
    base, head = sum(t.numel() for t in backbone(causal).values()), 16 * 2 + 2
    assert done["parameters"] == {
        "base": base,
        "label": head,
        "total": base + head,
        "trainable": base + head,
        "frozen": 0,
    }


def test_the_best_epoch_is_what_is_kept(causal, learn, tmp_path):
    """Validation labels are turned round here, so that what is learned makes it worse."""
    turned = [(text, {"sea": "town", "town": "sea"}[label]) for text, label in sentences(30, 2)]
    valid = write(tmp_path / "valid.csv", turned)
    done = learn(causal, settings=QUICK | {"epochs": 8, "lr": 0.01}, valid=valid)
    curve = [row["valid_accuracy"] for row in done["epochs"]]
    assert len(curve) == 8
    assert curve[-1] < max(curve)
    assert done["best_epoch"] < 8
    assert done["valid"]["accuracy"] == max(curve)
    assert headstock.load(tmp_path / "run").evaluate(valid)["accuracy"] == max(curve)


def test_training_stops_when_it_gets_no_better(causal, learn):
    done = learn(causal, settings=STILL | {"epochs": 20, "patience": 2})
    assert len(done["epochs"]) == 3
    assert done["best_epoch"] == 1


class EvalBackbone(Classify):
    """The plain way to train a head alone: the backbone reads every batch anew, in eval mode, without gradients."""

    def pooled_features(self, model, batch, **options):
        model.backbone.eval()
        with torch.no_grad():
            return super().pooled_features(model, batch, **options)

    def examples(self, data, *, length, seed=None, epoch=0):
        texts = super().examples(data, length=length, seed=seed, epoch=epoch)
        del texts.lengths  # vectors have none, and it is the order of the rows that is to be the same
        return texts


@pytest.mark.parametrize(("stock", "pool"), [("causal", "last"), ("masked", "mean")])
def test_frozen_is_training_the_head_alone(stock, pool, request, learn, files, tmp_path):
    source, run = request.getfixturevalue(stock), RunFolder(tmp_path / "run")
    settings = QUICK | {"pool": pool, "lr": 0.05, "model.dropout": 0.3}
    done = learn(source, settings=settings, freeze=True)
    assert same(backbone(run.path), backbone(source))
    assert done["parameters"]["trainable"] == 34
    assert done["parameters"]["frozen"] == done["parameters"]["base"]

    chosen = make_config(run.config())
    model = build_model(chosen, build_task(chosen, run.tokenizer()))
    model.load_backbone(RunFolder(source).weights(), source="the stock")
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    task = EvalBackbone(chosen.task, run.tokenizer())
    rows = {name: read_records(files[name]) for name in ("train", "valid")}
    data = LabelledData(*(task.prepare(rows[name]) for name in ("train", "valid")))
    train(
        model,
        task,
        data,
        replace(chosen.train, validate_every=3),
        run=None,
        distributed=DistributedContext(torch.device("cpu")),
    )
    for name, tensor in model.tensors().items():
        torch.testing.assert_close(weights(run.path)[name], tensor, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model.heads["label"].linear.weight, torch.zeros(2, 16), atol=0.05)  # it did learn


def test_init_scratch_does_not_go_with_adapting(causal, learn, tmp_path):
    with pytest.raises(ConfigError, match=r"adapt_steps.*scratch"):
        learn(causal, settings=QUICK | {"adapt_steps": 4}, init="scratch")
    assert not (tmp_path / "run").exists()


# How a text is read


@pytest.mark.parametrize("pool", ["last", "cls", "mean", "max", "concat"])
def test_every_pool_reads_the_text(causal, masked, learn, tmp_path, pool):
    sources = [masked] if pool == "cls" else [masked, causal]
    for source in sources:
        learn(source, source.name, STILL | {"pool": pool})
        width = 48 if pool == "concat" else 16
        assert weights(tmp_path / source.name)["heads.label.linear.weight"].shape == (2, width)
        found = headstock.load(tmp_path / source.name).probabilities(["Anne sees Paris.", "Anne sees the sea."])
        assert abs(found[0] - found[1]).max() > 0


def test_a_causal_backbone_can_look_both_ways(causal, masked, learn, tmp_path):
    texts = ["Anne sees Paris.", "Anne sees the sea."]
    with pytest.raises(UserError, match="pool"):
        learn(causal, settings=STILL | {"pool": "cls"})
    assert not (tmp_path / "run").exists()
    learn(causal, "cls", STILL | {"pool": "cls", "bidirectional": True})
    one, other = headstock.load(tmp_path / "cls").probabilities(texts)
    assert abs(one - other).max() > 0  # the opening mark sees what follows it
    for source, both in ((causal, True), (masked, False)):
        found = []
        for name, way in (("own", None), ("turned", both)):
            learn(source, f"{source.name}-{name}", STILL | {"pool": "mean", "bidirectional": way})
            found.append(headstock.load(tmp_path / f"{source.name}-{name}").probabilities(texts))
        assert RunFolder(tmp_path / f"{source.name}-turned").config()["model"]["causal"] is not both
        assert same(backbone(tmp_path / f"{source.name}-turned"), backbone(source))
        assert abs(found[0] - found[1]).max() > 1e-5  # the same weights, read the other way


def test_pooling_follows_the_direction_unless_given(causal, masked):
    for source, given, pool in (
        (causal, {}, "last"),
        (masked, {}, "mean"),
        (causal, {"bidirectional": True}, "mean"),
        (masked, {"bidirectional": False}, "last"),
        (causal, {"pool": "max"}, "max"),
    ):
        assert resolve_finetune_config(RunFolder(source), "classify", None, given).task.pool == pool


# How it learns


@pytest.mark.parametrize(("preset", "causal"), [("bert-nano", False), ("gpt-nano", True), ("classic", True)])
def test_a_preset_that_was_never_pretrained_looks_as_its_objective_would_have_it(preset, causal):
    classes = {"task.classes": ["bad", "good"]}
    assert resolve_finetune_config(None, "classify", None, dict(classes), preset=preset).model.causal == causal
    other = resolve_finetune_config(None, "classify", None, classes | {"model.causal": not causal}, preset=preset)
    assert other.model.causal != causal  # what is set by hand goes before


def test_settings_of_learning_are_recorded_and_do_what_they_say(causal, learn, tmp_path):
    before = backbone(causal)
    top = next(name for name in before if ".1." in name and before[name].dim() == 2)  # of the second of two blocks

    def moved(name):
        after = backbone(tmp_path / name)
        return [float((after[part] - before[part]).abs().max()) for part in ("backbone.tokens.weight", top)]

    learn(causal, "plain", QUICK)
    learn(causal, "decayed", QUICK | {"layer_decay": 0.1})
    learn(causal, "held", QUICK | {"unfreeze": 100.0})
    learn(causal, "opened", QUICK | {"unfreeze": 1.0, "weights": "last"})
    assert moved("decayed")[0] < 0.1 * moved("plain")[0]
    assert moved("decayed")[1] > 0
    assert moved("held") == [0, 0]  # no layer's turn came
    assert moved("opened")[1] > 0
    assert moved("opened")[0] == 0  # in three epochs, only the two highest stages had theirs
    recorded = {name: RunFolder(tmp_path / name).config()["train"] for name in ("decayed", "opened")}
    assert recorded["decayed"]["layer_decay"] == 0.1
    assert recorded["opened"]["unfreeze"] == 1.0


def test_classes_can_weigh_differently(causal, learn, files, tmp_path):
    uneven = write(tmp_path / "uneven.csv", [row for row in sentences(40, 5) if row[1] == "town"] + sentences(10, 6))
    learn(causal, "balanced", QUICK | {"balance": True, "label_smoothing": 0.1}, train=uneven)
    recorded = RunFolder(tmp_path / "balanced").config()
    assert recorded["task"]["class_weights"] == pytest.approx([30 / (2 * 5), 30 / (2 * 25)])
    assert recorded["train"]["label_smoothing"] == 0.1
    given = QUICK | {"classes": ["sea", "town"], "class_weights": [0.0, 1.0], "weights": "last", "epochs": 8}
    learn(causal, "one", given)  # what the sea says counts for nothing, so all is town
    assert {row["label"] for row in headstock.load(tmp_path / "one").predict([t for t, _ in sentences(8, 1)])} == {
        "town"
    }


def test_label_smoothing_keeps_it_from_being_sure(causal, learn, tmp_path):
    texts = [text for text, _ in sentences(20, 3)]
    sure = {}
    for smoothing in (0.0, 0.5):
        learn(
            causal, str(smoothing), QUICK | {"epochs": 6, "lr": 0.01, "label_smoothing": smoothing, "weights": "last"}
        )
        sure[smoothing] = headstock.load(tmp_path / str(smoothing)).probabilities(texts).max(1).mean()
    assert sure[0.5] < sure[0.0]


def test_a_small_file_is_read_more_often(causal, learn, files, tmp_path):
    done = learn(causal, settings={"epochs": 2, "least_steps": 10})
    assert done["steps"] == 12  # three a pass
    assert len(done["epochs"]) == 4


# Several models, and more pretraining first


def test_an_ensemble_says_the_mean_of_its_members_wherever_it_lies(causal, learn, tmp_path):
    done = learn(causal, settings=QUICK | {"ensemble": 2, "seed": 5})
    texts = [text for text, _ in sentences(9, 4)]
    members = [headstock.load(tmp_path / "run" / "members" / str(n)) for n in (0, 1)]
    parts = [member.probabilities(texts) for member in members]
    assert [member.config.train.seed for member in members] == [5, 6]
    assert abs(parts[0] - parts[1]).max() > 1e-3
    assert done["steps"] == 2 * 9
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "run", tmp_path / "there" / "moved")
    moved = headstock.load(tmp_path / "there" / "moved")
    assert moved.probabilities(texts) == pytest.approx((parts[0] + parts[1]) / 2, abs=1e-7)
    assert moved.evaluate() == done["valid"] | {"file": moved.config.data.valid}


def test_adapting_goes_on_pretraining_on_the_tasks_own_texts(causal, learn, files, tmp_path):
    learn(causal, settings=STILL | {"adapt_steps": 6, "adapt_lr": 0.01})
    adapted = tmp_path / "run" / "adapted"
    assert RunFolder(adapted).results()["steps"] == 6
    assert RunFolder(adapted).config()["train"]["lr"] == 0.01
    assert not same(backbone(adapted), backbone(causal))
    assert same(backbone(tmp_path / "run"), backbone(adapted))
    read = (tmp_path / "run" / "adapt.txt").read_text(encoding="utf-8").splitlines()
    assert read == [text for text, _ in sentences(48, 48 + len("train"))]
    with pytest.raises(UserError, match="is a fine-tuned run"):
        learn(tmp_path / "run", "again", STILL | {"adapt_steps": 6})
    assert not (tmp_path / "again").exists()
    learn(tmp_path / "run", "again", STILL)  # its backbone can be taken over all the same
    assert same(backbone(tmp_path / "again"), backbone(adapted))


# Labels of every kind


def test_several_labels_at_once(causal, learn, files, tmp_path):
    def both(count, seed):
        rows = []
        for (one, a), (other, b) in zip(
            sentences(count, seed), sentences(count, seed + 1, ["home", "sea", "town"]), strict=True
        ):
            rows.append((f"{one.split('. ')[-1]} {other.split('. ')[-1]}", "|".join(sorted({a, b}))))
        return rows

    train, valid, test = (write(tmp_path / f"{n}.csv", both(48, n)) for n in (1, 3, 5))
    settings = QUICK | {"separator": "|", "epochs": 12, "lr": 0.01}
    done = learn(causal, settings=settings, train=train, valid=valid, test=test)
    assert done["classes"] == ["home", "sea", "town"]
    assert done["test"]["micro_f1"] > 0.7
    told = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert len(told) == 48
    for row in told:
        assert row["labels"] == [name for name, p in row["probabilities"].items() if p > 0.5]
        assert row["label"] == "|".join(row["labels"])
    exact = [set(row["labels"]) == set(label.split("|")) for row, (_, label) in zip(told, both(48, 5), strict=True)]
    assert done["test"]["accuracy"] == pytest.approx(sum(exact) / 48)
    assert headstock.load(tmp_path / "run").predict("Anne sees the sea.")[0].keys() == told[0].keys()


def test_labels_that_are_numbers_and_more_than_two(causal, learn, tmp_path):
    stars = {"sea": 10, "town": 2, "home": -1}
    for name, seed in (("train", 1), ("valid", 2)):
        rows = [{"text": text, "label": stars[label]} for text, label in sentences(60, seed, list(PLACES))]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    split = {name: tmp_path / f"{name}.jsonl" for name in ("train", "valid")}
    done = learn(causal, settings=QUICK | {"epochs": 15, "lr": 0.01}, **split)
    assert done["classes"] == ["-1", "2", "10"]
    assert done["valid"]["accuracy"] > 0.6
    told = headstock.load(tmp_path / "run").predict("Zoë finds the sea.")[0]
    assert list(told["probabilities"]) == ["-1", "2", "10"]
    assert sum(told["probabilities"].values()) == pytest.approx(1, abs=1e-5)


# Rows that are held out, and rows without labels


def test_without_a_validation_file_rows_are_held_out(causal, learn, files, tmp_path, messages):
    done = learn(causal, valid=None, settings=QUICK | {"valid_fraction": 0.25})
    assert done["valid"]["rows"] == 12
    assert any("12 of 48 rows" in line for line in messages)
    assert done["measured_on"] == "valid"
    assert headstock.load(tmp_path / "run").evaluate()["accuracy"] == done["valid"]["accuracy"]


def test_unlabelled_rows_are_predicted_in_their_order(causal, learn, files, tmp_path):
    rows = sentences(25, 8)
    bare = write(tmp_path / "bare.csv", [(text,) for text, _ in rows], columns=("text",))
    done = learn(causal, test=bare)
    assert "test" not in done
    assert done["metrics"] == done["valid"]
    told = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert told == headstock.load(tmp_path / "run").predict([text for text, _ in rows])


# Stopped, and gone on with


class Stopped(Exception):
    pass


def stop_after(count):
    """Stop at so many steps, whichever part of the work they are made in."""
    steps = []

    def hear(event):
        if event.kind == "step":
            steps.append(event)
            if len(steps) == count:
                raise Stopped

    return hear


MODES = {
    "plain": ({}, (5,)),
    "frozen": ({"freeze": True}, (5,)),
    "opened": ({"settings": QUICK | {"unfreeze": 1.0, "layer_decay": 0.7}}, (7,)),
    "averaged": ({"settings": QUICK | {"ema": 0.9, "validate_every": 2}}, (5,)),
    "ensemble": ({"settings": QUICK | {"ensemble": 2}}, (4, 8)),
    "adapted": ({"settings": QUICK | {"adapt_steps": 6, "epochs": 2}}, (3, 8)),
    "patient": ({"settings": STILL | {"patience": 2, "epochs": 9}}, (5,)),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_ends_in_the_same_bits(causal, learn, tmp_path, mode, messages):
    given, stops = MODES[mode]
    whole = learn(causal, "whole", **given)
    for count in stops:
        with pytest.raises(Stopped):
            learn(causal, "cut", **given, resume=True, callbacks=[stop_after(count)])
    messages.clear()
    cut = learn(causal, "cut", **given, resume=True)
    assert any(line.startswith("resuming from") for line in messages)
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("model.safetensors"))
    for file in files:
        if "checkpoints" not in file.parts:
            assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes()
    clocks = {"run", "seconds", "tokens_per_second"}
    assert {k: v for k, v in cut.items() if k not in clocks} == {k: v for k, v in whole.items() if k not in clocks}
    assert learn(causal, "cut", **given, resume=True) == cut  # it is finished


def test_kill_9_and_resume(causal, files, tmp_path):
    """A real command, killed as soon as there is something to go on from."""
    split, settings = {"train": files["train"], "valid": files["valid"]}, {"epochs": 40, "lr": 0.003, "seed": 4}
    finetune(causal, out=tmp_path / "whole", settings=settings, **split)
    cut = tmp_path / "cut"
    words = ["finetune", causal, "--out", cut, "--quiet"]
    words += [word for options in (split, settings) for name, value in options.items() for word in (f"--{name}", value)]
    process = start_command(tmp_path / "process", *words)
    process.wait_until(lambda: list((cut / "checkpoints").glob("step-*")))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (cut / "results.json").exists()
    finetune(causal, out=cut, settings=settings, resume=True, **split)
    assert (cut / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    measured = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in run.read_metrics() if "valid_loss" in row]
        for run in (RunFolder(tmp_path / "whole"), RunFolder(cut))
    ]
    assert measured[0] == measured[1]
    assert [row["step"] for row in measured[1]] == list(range(3, 121, 3))
    assert RunFolder(cut).results()["seconds"] >= RunFolder(cut).read_metrics()[-1]["seconds"]  # the clock went on too
    assert not list(tmp_path.rglob("*.partial"))


def test_resuming_with_other_settings_or_other_rows_is_refused(causal, learn, files, tmp_path):
    own = write(tmp_path / "own.csv", sentences(48, 1))
    with pytest.raises(Stopped):
        learn(causal, train=own, callbacks=[stop_after(5)])
    with pytest.raises(UserError, match=r"task.pool is \"last\", not \"mean\"; train.lr is 0.005, not 0.5"):
        learn(causal, train=own, settings={"lr": 0.5, "pool": "mean"}, resume=True)
    with pytest.raises(UserError, match=r"transfer.freeze is false, not true"):
        learn(causal, train=own, settings={}, freeze=True, resume=True)
    write(own, [*sentences(47, 1), ("Anne sees Paris.", "sea")])
    with pytest.raises(UserError, match="the labelled files have changed"):
        learn(causal, train=own, resume=True)


def test_the_same_words_resume_what_they_began(causal, learn, tmp_path):
    """Also where the file was so small that it is read more often than the words say."""
    asked = {"epochs": 2, "least_steps": 20}
    with pytest.raises(Stopped):
        learn(causal, settings=asked, callbacks=[stop_after(5)])
    assert learn(causal, settings=asked, resume=True)["steps"] == 21


def test_a_runs_own_config_repeats_it(causal, learn, files, tmp_path):
    first = learn(causal, settings=QUICK | {"balance": True, "seed": 3, "bidirectional": True}, test=files["test"])
    again = finetune(causal, out=tmp_path / "again", config_file=tmp_path / "run" / "config.json")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
    assert again["test"] == first["test"]
    assert RunFolder(tmp_path / "again").config() == RunFolder(tmp_path / "run").config()


def test_config_says_which_stock_was_used(causal, learn, tmp_path):
    learn(causal, settings=STILL)
    shutil.copytree(causal, tmp_path / "other")
    finetune(tmp_path / "other", out=tmp_path / "again", config_file=tmp_path / "run" / "config.json")
    assert RunFolder(tmp_path / "again").config()["transfer"]["run"] == str(tmp_path / "other")


def test_two_processes_learn_what_one_does(causal, files, tmp_path):
    settings = QUICK | {"adapt_steps": 4, "task.dropout": 0.0}
    splits = {"train": files["train"], "valid": files["valid"]}
    finetune(causal, out=tmp_path / "one", settings=settings, **splits)
    options = [word for name, file in splits.items() for word in (f"--{name}", file)]
    command = ["finetune", causal, "--out", tmp_path / "two", "--device", "cpu", *options, *set_options(settings)]
    ranks = start_ranks(tmp_path / "rank", 2, *command)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    one, two = (RunFolder(tmp_path / name) for name in ("one", "two"))
    assert two.results()["processes"] == 2
    assert [row["step"] for row in two.results()["epochs"]] == [3, 6, 9]  # and only one of them logs
    for name in ("train_loss", "valid_loss"):
        curves = [[row[name] for row in run.results()["epochs"]] for run in (one, two)]
        assert curves[1] == pytest.approx(curves[0], abs=1e-4)


# Refused before a folder is made


@pytest.mark.parametrize("size", [{"model.depth": 3}, {"model.width": 32}, {"model.context": 64}])
def test_sizes_that_the_weights_do_not_fit_leave_no_folder(causal, learn, tmp_path, size):
    (name, value) = next(iter(size.items()))
    with pytest.raises(UserError, match=rf"{name}={value} .*--init scratch"):
        learn(causal, settings=STILL | size)
    assert not (tmp_path / "run").exists()
    learn(causal, settings=STILL | {"epochs": 1})  # the corrected call is not in the way of anything


def test_a_model_no_better_than_the_commonest_class_is_said_to_be_so(causal, learn, tmp_path):
    rows = write(tmp_path / "rows.csv", [*sentences(12, 1, ["sea"]), *sentences(4, 2, ["town"])])
    done = learn(causal, settings=STILL | {"epochs": 1}, train=rows, valid=rows)
    assert done["metrics"]["majority"] == 0.75
    assert done["metrics"]["majority_class"] == "sea"
    said = majority_warning(done["metrics"])
    assert said and "75.0%" in said and "'sea'" in said
    assert said in RunFolder(tmp_path / "run").model_card.read_text()
    assert majority_warning({"accuracy": 0.9, "majority": 0.75, "majority_class": "sea"}) is None
    clear = {"accuracy": 0.9, "majority": 0.75, "majority_class": "sea", "intervals": {"accuracy": [0.7, 1.0]}}
    assert "not clearly above" in (majority_warning(clear) or "")
