"""Fine-tuning: initialization, frozen backbones, pooling, ensembles, labels, resuming and results."""

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
from headstock.report.pages import write_report
from headstock.tasks.classify import Classify
from headstock.train.distributed import DistributedContext
from headstock.train.finetune import finetune
from headstock.train.fit import EncodedSplits
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
UNCHANGED = {"least_steps": 0, "epochs": 1, "lr": 1e-30}  # a learning rate too small to change any weight
LOCATIONS = {"sea": "the sea", "town": "Paris", "home": "home"}


@pytest.fixture(scope="session")
def causal(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "causal"
    headstock.pretrain(corpus, out=out, settings=TINY | {"steps": 10, "validate_every": 2, "seed": 7})
    return out


@pytest.fixture(scope="session")
def masked(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "masked"
    headstock.pretrain(corpus, out=out, objective="masked", settings=TINY | {"steps": 10, "seed": 7})
    return out


def sentences(count: int, seed: int, labels=("sea", "town")) -> list[tuple[str, str]]:
    """Texts of one to four sentences, labelled by the location in the last."""
    pick = random.Random(seed)

    def sentence(location: str) -> str:
        return f"{pick.choice(['Anne', 'Ben', 'Zoë'])} {pick.choice(['sees', 'likes', 'finds'])} {location}."

    rows = []
    for number in range(count):
        label = labels[number % len(labels)]
        before = [sentence(pick.choice(list(LOCATIONS.values()))) for _ in range(pick.randint(0, 3))]
        rows.append((" ".join([*before, sentence(LOCATIONS[label])]), label))
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
def tune(files, tmp_path):
    """Fine-tune into a folder of this test, by default on the shared files."""

    def tune(source, name="run", settings=QUICK, **options):
        split = {"train": files["train"], "valid": files["valid"]} | options
        return finetune(source, out=tmp_path / name, settings=settings, **split)

    return tune


def weights(run):
    return RunFolder(run).weights()


def backbone(run):
    return {name: tensor for name, tensor in weights(run).items() if name.startswith("backbone.")}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Initialization and training


@pytest.mark.parametrize("source_name", ["causal", "masked"])
def test_the_backbone_is_that_of_the_source_unless_trained_from_scratch(source_name, request, tune, tmp_path):
    source = request.getfixturevalue(source_name)
    tune(source, "pretrained", UNCHANGED)
    assert same(backbone(tmp_path / "pretrained"), backbone(source))
    tune(source, "scratch", UNCHANGED, init="scratch")
    scratch, own = backbone(tmp_path / "scratch"), backbone(source)
    assert scratch.keys() == own.keys()
    matrices = [name for name, tensor in own.items() if tensor.dim() == 2]
    assert not any(torch.equal(scratch[name], own[name]) for name in matrices)


def test_training_from_scratch_needs_no_source_weights(causal, tune, tmp_path):
    shutil.copytree(causal, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    tune(tmp_path / "bare", settings=UNCHANGED | {"epochs": 1}, init="scratch")
    with pytest.raises(UserError, match=r"has no model.safetensors yet"):
        tune(tmp_path / "bare", "pretrained", UNCHANGED)
    assert not (tmp_path / "pretrained").exists()


def test_results_are_complete_and_better_than_chance(causal, tune, files, tmp_path):
    done = tune(causal, settings=QUICK | {"epochs": 8, "lr": 0.01}, test=files["test"])
    assert done["test"]["accuracy"] > 0.75
    assert done == RunFolder(tmp_path / "run").results()
    expected = "run steps tokens seconds tokens_per_second train_loss valid_loss perplexity bits_per_byte metrics"
    assert set(expected.split()) <= set(done)
    assert done["run"] == str(tmp_path / "run")
    assert done["steps"] == 8 * 3  # 48 rows, 16 at a time
    assert done["metrics"] == done["test"]
    assert done["metrics"]["rows"] == 30
    for name in ("accuracy", "macro_f1"):
        low, high = done["test"]["intervals"][name]
        assert 0 <= low <= done["test"][name] <= high <= 1
    expected = "config.json tokenizer.json model.safetensors metrics.jsonl results.json README.md checkpoints"
    assert set(expected.split()) <= {path.name for path in (tmp_path / "run").iterdir()}
    base, head = sum(t.numel() for t in backbone(causal).values()), 16 * 2 + 2
    assert done["parameters"] == {
        "base": base,
        "label": head,
        "total": base + head,
        "trainable": base + head,
        "frozen": 0,
    }


def test_the_weights_of_the_best_epoch_are_kept(causal, tune, tmp_path):
    """The validation labels are swapped, so that training makes the metrics worse."""
    swapped = [(text, {"sea": "town", "town": "sea"}[label]) for text, label in sentences(30, 2)]
    valid = write(tmp_path / "valid.csv", swapped)
    done = tune(causal, settings=QUICK | {"epochs": 8, "lr": 0.01}, valid=valid)
    curve = [row["valid_accuracy"] for row in done["epochs"]]
    assert len(curve) == 8
    assert curve[-1] < max(curve)
    assert done["best_epoch"] < 8
    assert done["valid"]["accuracy"] == max(curve)
    assert headstock.load(tmp_path / "run").evaluate(valid)["accuracy"] == max(curve)
    last = tune(causal, "last", QUICK | {"epochs": 8, "lr": 0.01, "weights": "last"}, valid=valid)
    assert last["best_epoch"] == 8 and last["best_step"] == last["steps"]
    assert last["valid"]["accuracy"] == curve[-1]


def test_training_stops_after_validations_without_improvement(causal, tune):
    done = tune(causal, settings=UNCHANGED | {"epochs": 20, "patience": 2})
    assert len(done["epochs"]) == 3
    assert done["best_epoch"] == 1


class EvalBackbone(Classify):
    """A reference for frozen training: the backbone reads every batch again, in eval mode and without gradients."""

    def pooled_features(self, model, batch, **options):
        model.backbone.eval()
        with torch.no_grad():
            return super().pooled_features(model, batch, **options)

    def examples(self, data, *, length, seed=None, epoch=0):
        texts = super().examples(data, length=length, seed=seed, epoch=epoch)
        del texts.lengths  # cached features have none; the order of the rows must be the same
        return texts


@pytest.mark.parametrize(("source_name", "pool"), [("causal", "last"), ("masked", "mean")])
def test_a_frozen_run_trains_only_the_head(source_name, pool, request, tune, files, tmp_path):
    source, run = request.getfixturevalue(source_name), RunFolder(tmp_path / "run")
    settings = QUICK | {"pool": pool, "lr": 0.05, "model.dropout": 0.3}
    done = tune(source, settings=settings, freeze=True)
    assert same(backbone(run.path), backbone(source))
    assert done["parameters"]["trainable"] == 34
    assert done["parameters"]["frozen"] == done["parameters"]["base"]

    run_config = make_config(run.config())
    model = build_model(run_config, build_task(run_config, run.tokenizer()))
    model.load_backbone(RunFolder(source).weights(), source="the source")
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    task = EvalBackbone(run_config.task, run.tokenizer())
    rows = {name: read_records(files[name]) for name in ("train", "valid")}
    data = EncodedSplits(*(task.prepare(rows[name]) for name in ("train", "valid")))
    train(
        model,
        task,
        data,
        replace(run_config.train, validate_every=3),
        run=None,
        distributed=DistributedContext(torch.device("cpu")),
    )
    for name, tensor in model.tensors().items():
        torch.testing.assert_close(weights(run.path)[name], tensor, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model.heads["label"].linear.weight, torch.zeros(2, 16), atol=0.05)  # it did tune


def test_init_scratch_conflicts_with_adapt_steps(causal, tune, tmp_path):
    with pytest.raises(ConfigError, match=r"adapt_steps.*scratch"):
        tune(causal, settings=QUICK | {"adapt_steps": 4}, init="scratch")
    assert not (tmp_path / "run").exists()


# Pooling and direction


@pytest.mark.parametrize("pool", ["last", "cls", "mean", "max", "concat"])
def test_every_pooling_depends_on_the_text(causal, masked, tune, tmp_path, pool):
    sources = [masked] if pool == "cls" else [masked, causal]
    for source in sources:
        tune(source, source.name, UNCHANGED | {"pool": pool})
        width = 48 if pool == "concat" else 16
        assert weights(tmp_path / source.name)["heads.label.linear.weight"].shape == (2, width)
        first, second = headstock.load(tmp_path / source.name).probabilities(["Anne sees Paris.", "Anne sees the sea."])
        assert abs(first - second).max() > 0


def test_the_direction_of_a_backbone_can_be_changed(causal, masked, tune, tmp_path):
    texts = ["Anne sees Paris.", "Anne sees the sea."]
    with pytest.raises(UserError, match="pool"):
        tune(causal, settings=UNCHANGED | {"pool": "cls"})
    assert not (tmp_path / "run").exists()
    tune(causal, "cls", UNCHANGED | {"pool": "cls", "bidirectional": True})
    first, second = headstock.load(tmp_path / "cls").probabilities(texts)
    assert abs(first - second).max() > 0  # the CLS token attends to the text
    for source, bidirectional in ((causal, True), (masked, False)):
        probabilities = []
        for name, setting in (("default", None), ("changed", bidirectional)):
            tune(source, f"{source.name}-{name}", UNCHANGED | {"pool": "mean", "bidirectional": setting})
            probabilities.append(headstock.load(tmp_path / f"{source.name}-{name}").probabilities(texts))
        assert RunFolder(tmp_path / f"{source.name}-changed").config()["model"]["causal"] is not bidirectional
        assert same(backbone(tmp_path / f"{source.name}-changed"), backbone(source))
        assert abs(probabilities[0] - probabilities[1]).max() > 1e-5  # the same weights with the other mask


def test_the_default_pooling_follows_the_direction(causal, masked):
    for source, options, pool in (
        (causal, {}, "last"),
        (masked, {}, "mean"),
        (causal, {"bidirectional": True}, "mean"),
        (masked, {"bidirectional": False}, "last"),
        (causal, {"pool": "max"}, "max"),
    ):
        assert resolve_finetune_config(RunFolder(source), "classify", None, options).task.pool == pool


# Training settings


@pytest.mark.parametrize(("preset", "causal"), [("bert-nano", False), ("gpt-nano", True), ("classic", True)])
def test_a_preset_without_pretraining_has_the_direction_of_its_objective(preset, causal):
    classes = {"task.classes": ["bad", "good"]}
    assert resolve_finetune_config(None, "classify", None, dict(classes), preset=preset).model.causal == causal
    other = resolve_finetune_config(None, "classify", None, classes | {"model.causal": not causal}, preset=preset)
    assert other.model.causal != causal  # an explicit setting wins


def test_layer_decay_and_unfreezing_limit_the_weight_updates(causal, tune, tmp_path):
    before = backbone(causal)
    top = next(name for name in before if ".1." in name and before[name].dim() == 2)  # of the second of two blocks

    def changes(name):
        after = backbone(tmp_path / name)
        return [float((after[part] - before[part]).abs().max()) for part in ("backbone.tokens.weight", top)]

    tune(causal, "plain", QUICK)
    tune(causal, "decayed", QUICK | {"layer_decay": 0.1})
    tune(causal, "frozen", QUICK | {"unfreeze": 100.0})
    tune(causal, "unfrozen", QUICK | {"unfreeze": 1.0, "weights": "last"})
    assert changes("decayed")[0] < 0.1 * changes("plain")[0]
    assert changes("decayed")[1] > 0
    assert changes("frozen") == [0, 0]  # no layer was unfrozen
    assert changes("unfrozen")[1] > 0
    assert changes("unfrozen")[0] == 0  # three epochs unfreeze only the top two stages
    recorded = {name: RunFolder(tmp_path / name).config()["train"] for name in ("decayed", "unfrozen")}
    assert recorded["decayed"]["layer_decay"] == 0.1
    assert recorded["unfrozen"]["unfreeze"] == 1.0


def test_class_weights(causal, tune, files, tmp_path):
    uneven = write(tmp_path / "uneven.csv", [row for row in sentences(40, 5) if row[1] == "town"] + sentences(10, 6))
    tune(causal, "balanced", QUICK | {"balance": True, "label_smoothing": 0.1}, train=uneven)
    recorded = RunFolder(tmp_path / "balanced").config()
    assert recorded["task"]["class_weights"] == pytest.approx([30 / (2 * 5), 30 / (2 * 25)])
    assert recorded["train"]["label_smoothing"] == 0.1
    settings = QUICK | {"classes": ["sea", "town"], "class_weights": [0.0, 1.0], "weights": "last", "epochs": 8}
    tune(causal, "one", settings)  # "sea" has no weight
    assert {row["label"] for row in headstock.load(tmp_path / "one").predict([t for t, _ in sentences(8, 1)])} == {
        "town"
    }


def test_label_smoothing_reduces_confidence(causal, tune, tmp_path):
    texts = [text for text, _ in sentences(20, 3)]
    confidence = {}
    for smoothing in (0.0, 0.5):
        tune(causal, str(smoothing), QUICK | {"epochs": 6, "lr": 0.01, "label_smoothing": smoothing, "weights": "last"})
        confidence[smoothing] = headstock.load(tmp_path / str(smoothing)).probabilities(texts).max(1).mean()
    assert confidence[0.5] < confidence[0.0]


def test_least_steps_adds_epochs(causal, tune, files, tmp_path):
    done = tune(causal, settings={"epochs": 2, "least_steps": 10})
    assert done["steps"] == 12  # three per epoch
    assert len(done["epochs"]) == 4


# Ensembles and adaptation


def test_an_ensemble_averages_its_members_and_can_be_moved(causal, tune, tmp_path):
    done = tune(causal, settings=QUICK | {"ensemble": 2, "seed": 5})
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


def test_a_soup_is_one_model_with_the_mean_weights_of_its_members(causal, tune, files, tmp_path):
    done = tune(causal, settings=QUICK | {"soup": 3, "seed": 5}, test=files["valid"])
    members = [tmp_path / "run" / "members" / str(n) for n in range(3)]
    assert [headstock.load(member).config.train.seed for member in members] == [5, 6, 7]
    mean = {name: sum(weights(member)[name] for member in members) / 3 for name in weights(members[0])}
    assert not same(weights(members[0]), weights(members[1]))
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, mean[name])
    soup = headstock.load(tmp_path / "run")
    assert len(soup.models) == 1 and done["steps"] == 3 * 9 and done["best_epoch"] is None
    assert soup.evaluate() == done["valid"] | {"file": soup.config.data.valid}
    alone = [headstock.load(member).evaluate(files["valid"])["accuracy"] for member in members]
    assert done["members"] == [{"seed": 5 + n, "valid_accuracy": alone[n]} for n in range(3)]
    assert "mean weights of 3 models (seeds 5 to 7)" in (tmp_path / "run" / "README.md").read_text()
    assert done["test"]["accuracy"] == done["valid"]["accuracy"]
    page = write_report(tmp_path / "run").read_text()
    assert "mean weights of 3 models" in page and "Of the first of 3 models." in page


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": "scratch"}, "init scratch"),
        ({"reinit_layers": 1}, "reinit_layers"),
        ({"ensemble": 2}, "ends in one model"),
        ({"lora": 2}, "conflicts with lora"),
        ({"method": "setfit"}, "conflicts with method setfit"),
    ],
)
def test_models_without_a_common_start_are_not_averaged(causal, tune, settings, message):
    with pytest.raises(UserError, match=rf"transfer\.soup: .*{message}"):
        tune(causal, settings={"soup": 2} | settings)


def test_adapting_continues_pretraining_on_the_training_texts(causal, tune, files, tmp_path):
    tune(causal, settings=UNCHANGED | {"adapt_steps": 6, "adapt_lr": 0.01})
    adapted = tmp_path / "run" / "adapted"
    assert RunFolder(adapted).results()["steps"] == 6
    assert RunFolder(adapted).config()["train"]["lr"] == 0.01
    assert not same(backbone(adapted), backbone(causal))
    assert same(backbone(tmp_path / "run"), backbone(adapted))
    read = (tmp_path / "run" / "adapt.txt").read_text(encoding="utf-8").splitlines()
    assert read == [text for text, _ in sentences(48, 48 + len("train"))]
    with pytest.raises(UserError, match="is a fine-tuned run"):
        tune(tmp_path / "run", "again", UNCHANGED | {"adapt_steps": 6})
    assert not (tmp_path / "again").exists()
    tune(tmp_path / "run", "again", UNCHANGED)  # its backbone can be fine-tuned
    assert same(backbone(tmp_path / "again"), backbone(adapted))


# Labels


def test_multiple_labels_per_row(causal, tune, files, tmp_path):
    def both(count, seed):
        rows = []
        for (first, a), (second, b) in zip(
            sentences(count, seed), sentences(count, seed + 1, ["home", "sea", "town"]), strict=True
        ):
            rows.append((f"{first.split('. ')[-1]} {second.split('. ')[-1]}", "|".join(sorted({a, b}))))
        return rows

    train, valid, test = (write(tmp_path / f"{n}.csv", both(48, n)) for n in (1, 3, 5))
    settings = QUICK | {"separator": "|", "epochs": 12, "lr": 0.01}
    done = tune(causal, settings=settings, train=train, valid=valid, test=test)
    assert done["classes"] == ["home", "sea", "town"]
    assert done["test"]["micro_f1"] > 0.7
    predictions = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 48
    for row in predictions:
        assert row["labels"] == [name for name, p in row["probabilities"].items() if p > 0.5]
        assert row["label"] == "|".join(row["labels"])
    exact = [
        set(row["labels"]) == set(label.split("|")) for row, (_, label) in zip(predictions, both(48, 5), strict=True)
    ]
    assert done["test"]["accuracy"] == pytest.approx(sum(exact) / 48)
    assert headstock.load(tmp_path / "run").predict("Anne sees the sea.")[0].keys() == predictions[0].keys()


def test_numeric_labels_and_more_than_two_classes(causal, tune, tmp_path):
    stars = {"sea": 10, "town": 2, "home": -1}
    for name, seed in (("train", 1), ("valid", 2)):
        rows = [{"text": text, "label": stars[label]} for text, label in sentences(60, seed, list(LOCATIONS))]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    split = {name: tmp_path / f"{name}.jsonl" for name in ("train", "valid")}
    done = tune(causal, settings=QUICK | {"epochs": 15, "lr": 0.01}, **split)
    assert done["classes"] == ["-1", "2", "10"]
    assert done["valid"]["accuracy"] > 0.6
    prediction = headstock.load(tmp_path / "run").predict("Zoë finds the sea.")[0]
    assert list(prediction["probabilities"]) == ["-1", "2", "10"]
    assert sum(prediction["probabilities"].values()) == pytest.approx(1, abs=1e-5)


# Held-out and unlabelled rows


def test_without_a_validation_file_rows_are_held_out(causal, tune, files, tmp_path, messages):
    done = tune(causal, valid=None, settings=QUICK | {"valid_fraction": 0.25})
    assert done["valid"]["rows"] == 12
    assert any("12 of 48 rows" in line for line in messages)
    assert done["measured_on"] == "valid"
    assert headstock.load(tmp_path / "run").evaluate()["accuracy"] == done["valid"]["accuracy"]


def test_unlabelled_rows_are_predicted_in_their_order(causal, tune, files, tmp_path):
    rows = sentences(25, 8)
    bare = write(tmp_path / "bare.csv", [(text,) for text, _ in rows], columns=("text",))
    done = tune(causal, test=bare)
    assert "test" not in done
    assert done["metrics"] == done["valid"]
    predictions = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert predictions == headstock.load(tmp_path / "run").predict([text for text, _ in rows])


# Resuming


class Stopped(Exception):
    pass


def stop_after(count):
    """Stop after `count` steps, in whichever phase of the run."""
    steps = []

    def on_event(event):
        if event.kind == "step":
            steps.append(event)
            if len(steps) == count:
                raise Stopped

    return on_event


MODES = {
    "plain": ({}, (5,)),
    "frozen": ({"freeze": True}, (5,)),
    "unfreezing": ({"settings": QUICK | {"unfreeze": 1.0, "layer_decay": 0.7}}, (7,)),
    "averaged": ({"settings": QUICK | {"ema": 0.9, "validate_every": 2}}, (5,)),
    "lora": ({"settings": QUICK | {"lora": 4, "lora_dropout": 0.2, "ema": 0.9, "validate_every": 2}}, (5,)),
    "ensemble": ({"settings": QUICK | {"ensemble": 2}}, (4, 8)),
    "soup": ({"settings": QUICK | {"soup": 2}}, (4, 8)),
    "adapted": ({"settings": QUICK | {"adapt_steps": 6, "epochs": 2}}, (3, 8)),
    "patient": ({"settings": UNCHANGED | {"patience": 2, "epochs": 9}}, (5,)),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_ends_in_the_same_bits(causal, tune, tmp_path, mode, messages):
    options, stops = MODES[mode]
    uninterrupted = tune(causal, "whole", **options)
    for count in stops:
        with pytest.raises(Stopped):
            tune(causal, "cut", **options, resume=True, callbacks=[stop_after(count)])
    messages.clear()
    cut = tune(causal, "cut", **options, resume=True)
    assert any(line.startswith("resuming from") for line in messages)
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.safetensors"))
    for file in files:
        if "checkpoints" not in file.parts:
            assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes()
    clocks = {"run", "seconds", "tokens_per_second", "lora"}
    assert {k: v for k, v in cut.items() if k not in clocks} == {
        k: v for k, v in uninterrupted.items() if k not in clocks
    }
    assert tune(causal, "cut", **options, resume=True) == cut  # it is finished


def test_kill_9_and_resume(causal, files, tmp_path):
    """A real command, killed after its first checkpoint."""
    split, settings = {"train": files["train"], "valid": files["valid"]}, {"epochs": 20, "lr": 0.003, "seed": 4}
    finetune(causal, out=tmp_path / "whole", settings=settings, **split)
    cut = tmp_path / "cut"
    command = ["finetune", causal, "--out", cut, "--quiet"]
    options = (split | settings).items()
    command += [word for name, value in options for word in (f"--{name}", value)]
    process = start_command(tmp_path / "process", *command)
    process.wait_until(lambda: list((cut / "checkpoints").glob("step-*")))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (cut / "results.json").exists()
    finetune(causal, out=cut, settings=settings, resume=True, **split)
    assert (cut / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    validations = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in run.read_metrics() if "valid_loss" in row]
        for run in (RunFolder(tmp_path / "whole"), RunFolder(cut))
    ]
    assert validations[0] == validations[1]
    assert [row["step"] for row in validations[1]] == list(range(3, 61, 3))
    assert (
        RunFolder(cut).results()["seconds"] >= RunFolder(cut).read_metrics()[-1]["seconds"]
    )  # including the time before
    assert not list(tmp_path.rglob("*.partial"))


def test_resuming_with_other_settings_or_rows_is_rejected(causal, tune, files, tmp_path):
    own = write(tmp_path / "own.csv", sentences(48, 1))
    with pytest.raises(Stopped):
        tune(causal, train=own, callbacks=[stop_after(5)])
    with pytest.raises(UserError, match=r"task.pool is \"last\", not \"mean\"; train.lr is 0.005, not 0.5"):
        tune(causal, train=own, settings={"lr": 0.5, "pool": "mean"}, resume=True)
    with pytest.raises(UserError, match=r"transfer.freeze is false, not true"):
        tune(causal, train=own, settings={}, freeze=True, resume=True)
    write(own, [*sentences(47, 1), ("Anne sees Paris.", "sea")])
    with pytest.raises(UserError, match="the labelled files have changed"):
        tune(causal, train=own, resume=True)


def test_resuming_with_another_source_is_rejected(causal, corpus, tune, tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    shutil.copytree(causal, source)
    headstock.pretrain(corpus, out=other, settings=TINY | {"steps": 10, "seed": 8})
    settings = QUICK | {"lora": 2}
    with pytest.raises(Stopped):
        tune(source, settings=settings, callbacks=[stop_after(5)])
    with pytest.raises(UserError, match=r"keeps its own source; it started from .*source, not .*other"):
        tune(other, settings=settings, resume=True)
    shutil.copy(tmp_path / "run" / "data.json", tmp_path / "data.json")
    data = RunFolder(tmp_path / "run").data()
    del data["source_weights"]
    RunFolder(tmp_path / "run").write("data.json", data)  # as in runs of earlier versions, compared by path
    with pytest.raises(UserError, match="keeps its own source"):
        tune(causal, settings=settings, resume=True)
    shutil.copy(tmp_path / "data.json", tmp_path / "run" / "data.json")
    shutil.rmtree(source)
    shutil.copytree(other, source)
    for given in (source, None):
        with pytest.raises(UserError, match=r"its source .* has changed"):
            tune(given, settings=settings, resume=True)
    assert tune(causal, settings=settings, resume=True)["lora"]  # the same weights at another path


def test_a_run_with_inferred_epochs_can_be_resumed(causal, tune, tmp_path):
    """A small file is read for more epochs than the settings say, at the start and at a resume alike."""
    settings = {"epochs": 2, "least_steps": 20}
    with pytest.raises(Stopped):
        tune(causal, settings=settings, callbacks=[stop_after(5)])
    assert tune(causal, settings=settings, resume=True)["steps"] == 21


def test_a_runs_own_config_repeats_it(causal, tune, files, tmp_path):
    first = tune(causal, settings=QUICK | {"balance": True, "seed": 3, "bidirectional": True}, test=files["test"])
    again = finetune(causal, out=tmp_path / "again", config_file=tmp_path / "run" / "config.json")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
    assert again["test"] == first["test"]
    assert RunFolder(tmp_path / "again").config() == RunFolder(tmp_path / "run").config()


def test_config_names_the_source(causal, tune, tmp_path):
    tune(causal, settings=UNCHANGED)
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


# Rejected before the folder is created


@pytest.mark.parametrize("size", [{"model.depth": 3}, {"model.width": 32}, {"model.context": 64}])
def test_sizes_that_the_weights_do_not_fit_leave_no_folder(causal, tune, tmp_path, size):
    (name, value) = next(iter(size.items()))
    with pytest.raises(UserError, match=rf"{name}={value} .*--init scratch"):
        tune(causal, settings=UNCHANGED | size)
    assert not (tmp_path / "run").exists()
    tune(causal, settings=UNCHANGED | {"epochs": 1})  # nothing is left of the rejected run


def test_a_model_no_better_than_the_majority_class_gets_a_warning(causal, tune, tmp_path):
    rows = write(tmp_path / "rows.csv", [*sentences(12, 1, ["sea"]), *sentences(4, 2, ["town"])])
    done = tune(causal, settings=UNCHANGED | {"epochs": 1}, train=rows, valid=rows)
    assert done["metrics"]["majority"] == 0.75
    assert done["metrics"]["majority_class"] == "sea"
    warning = majority_warning(done["metrics"])
    assert warning and "75.0%" in warning and "'sea'" in warning
    assert warning in RunFolder(tmp_path / "run").model_card.read_text()
    assert majority_warning({"accuracy": 0.9, "majority": 0.75, "majority_class": "sea"}) is None
    metrics = {"accuracy": 0.9, "majority": 0.75, "majority_class": "sea", "intervals": {"accuracy": [0.7, 1.0]}}
    assert "not clearly above" in (majority_warning(metrics) or "")
