"""Fine-tuning with few labels: auxiliary losses, new top layers and averaged adaptation, in whole runs."""

import shutil

import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.errors import HeadstockError
from headstock.model.batch import Batch
from headstock.train.finetune import finetune
from headstock.train.models import average_weights
from headstock.train.run_folder import RunFolder
from tests.commands import set_options
from tests.conftest import TINY
from tests.experiments.small import read_rows
from tests.train.processes import start_ranks

QUICK = {"epochs": 2, "batch": 16, "lr": 5e-3}
UNCHANGED = {"epochs": 1, "batch": 16, "lr": 1e-30, "dropout": 0.0, "model.dropout": 0.0}  # changes no weight
EVERYTHING = {
    "lm_loss": 0.5,
    "r_drop": 1.0,
    "token_dropout": 0.2,
    "reinit_layers": 1,
    "ema": 0.9,
    "layer_decay": 0.8,
    "label_smoothing": 0.1,
    "micro_batch": 6,
    "schedule": "cosine",
}


@pytest.fixture(scope="module")
def sources(stock, corpus, tmp_path_factory):
    """A causal, a masked and a hybrid run."""
    folder, runs = tmp_path_factory.mktemp("sources"), {"causal": stock}
    masked = {"tied": False, "fraction_start": 0.5, "compile": False}
    for name, further in {"masked": masked, "hybrid": {"transform": True}}.items():
        runs[name] = folder / name
        headstock.pretrain(corpus, out=runs[name], objective=name, settings=TINY | {"steps": 4} | further)
    return runs


@pytest.fixture
def tune(files, tmp_path):
    def tune(source, name="run", settings=QUICK, **options):
        finetune(source, train=files["train"], valid=files["valid"], out=tmp_path / name, settings=settings, **options)
        return RunFolder(tmp_path / name)

    return tune


def backbone(run):
    return {name: tensor for name, tensor in RunFolder(run).weights().items() if name.startswith("backbone.")}


@pytest.mark.parametrize("name", ["causal", "masked", "hybrid"])
def test_all_settings_together_leave_a_run_like_any_other_that_resumes_to_the_same_bits(name, sources, tune, tmp_path):
    settings = QUICK | EVERYTHING | {"keep_every": 1}
    run = tune(sources[name], settings=settings)
    train = [row for row in run.read_metrics() if "train_lm_loss" in row]
    assert len(train) == 2 and all(0 < row["train_lm_loss"] < 7 and row["train_r_drop"] >= 0 for row in train)
    assert not any("lm_loss" in name for name in run.results()["valid"])
    assert not any(name.startswith("heads.token") for name in run.weights())
    first, last = (run.path / "checkpoints" / f"step-{step}" for step in (4, 8))
    assert len(headstock.load(first).predict(["Anne likes home"])) == 1  # without the language-model head
    whole = shutil.copytree(run.path, tmp_path / "whole")
    for path in (last, run.path / "results.json", run.path / "model.safetensors", run.path / "manifest.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    tune(sources[name], settings=settings, resume=True)
    assert run.weights_file.read_bytes() == (whole / "model.safetensors").read_bytes()


def test_the_language_model_loss_is_that_of_the_source_on_the_training_rows(sources, tune, files):
    run = tune(sources["causal"], settings=UNCHANGED | {"lm_loss": 1.0})
    source = headstock.load(sources["causal"])
    total = count = 0
    for row in read_rows(files["train"]):
        tokens = torch.tensor([[source.tokenizer.bos, *source.tokenizer.encode(row["text"])]])[:, :32]
        with torch.no_grad():
            logits = source.model.heads["token"](source.model(Batch(tokens)).hidden)
        total += float(F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum"))
        count += tokens.size(1) - 1
    (row,) = [row for row in run.read_metrics() if "train_lm_loss" in row]
    assert row["train_lm_loss"] == pytest.approx(total / count, rel=1e-4)


def test_micro_batches_and_processes_learn_the_same(sources, tune, files, tmp_path):
    settings = QUICK | {"dropout": 0.0, "model.dropout": 0.0, "lm_loss": 0.5, "weights": "last"}
    one = tune(sources["masked"], "one", settings)
    small = tune(sources["masked"], "small", settings | {"micro_batch": 5})
    options = ["--train", files["train"], "--valid", files["valid"], "--device", "cpu", *set_options(settings)]
    ranks = start_ranks(tmp_path / "rank", 2, "finetune", sources["masked"], "--out", tmp_path / "two", *options)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    without = tune(sources["masked"], "without", settings | {"lm_loss": 0.0})
    runs = [one, small, RunFolder(tmp_path / "two"), without]
    for name in ("train_loss", "train_lm_loss", "valid_loss"):
        expected, *others, control = (
            [row.get(name) for row in run.read_metrics() if "train_loss" in row] for run in runs
        )
        assert len(expected) == 2 and all(other == pytest.approx(expected, abs=1e-4) for other in others)
        assert control != pytest.approx(expected, abs=1e-4)  # the loss changes what is learnt


def test_gradual_unfreezing_goes_with_the_further_losses(sources, tune):
    run = tune(sources["masked"], settings=QUICK | EVERYTHING | {"unfreeze": 5})  # longer than the run
    before, after = backbone(sources["masked"]), backbone(run.path)
    assert all(
        torch.equal(before[name], after[name]) for name in before if ".blocks.1." not in name and "norm" not in name
    )


def test_new_layers_are_the_top_ones(sources, tune):
    run = tune(sources["causal"], settings=UNCHANGED | {"reinit_layers": 1})
    before, after = backbone(sources["causal"]), backbone(run.path)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed >= {name for name, tensor in before.items() if ".blocks.1." in name and tensor.dim() == 2}
    assert not any(".blocks.0." in name or "tokens" in name for name in changed)


def test_weights_in_half_precision_are_averaged_in_full():
    first, second = torch.tensor([1.0, 2.0], dtype=torch.float16), torch.tensor([3.0, 2.5])
    average = average_weights({"w": first, "n": torch.tensor(1)}, {"w": second, "n": torch.tensor(2)}, 0.25)
    assert average["w"].tolist() == [1.5, 2.125] and average["w"].dtype == torch.float32 and average["n"] == 2


def test_adapted_weights_are_averaged_with_the_sources(sources, tune, tmp_path):
    text = tmp_path / "more.txt"
    text.write_text("\n\n".join(f"Zoë likes the sea\nand finds Paris {number} times." for number in range(30)))
    adapt = {
        "adapt_steps": 3,
        "adapt_lr": 0.01,
        "adapt_average": 0.25,
        "adapt_fraction": 0.3,
        "adapt_text": [str(text)],
    }
    run = tune(sources["masked"], settings=UNCHANGED | adapt)
    source, adapted, average = (backbone(path) for path in (sources["masked"], run.adapted.path, run.path))
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, 0.75 * source[name] + 0.25 * adapted[name], rtol=1e-5, atol=1e-7)
    name = "backbone.tokens.weight"
    assert (adapted[name] - source[name]).abs().max() > 1e-3
    tree = run.adapted.config()
    assert tree["train"]["compile"] == "auto"  # not the source's: a few steps are not worth compiling for
    assert tree["task"]["fraction"] == 0.3 and tree["task"]["fraction_start"] is None
    assert tree["data"]["corpus"] == [str(run.path / "adapt.jsonl"), str(text)]
    assert len((run.path / "adapt.jsonl").read_text().splitlines()) == 60


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lm_loss": 1.0, "init": "scratch"}, r"lm_loss: needs the source's language-model head"),
        ({"lm_loss": 1.0, "freeze": True}, r"lm_loss: trains the backbone"),
        ({"lm_loss": 1.0, "lora": 2}, r"lm_loss: trains the language-model head, so it conflicts with lora"),
        ({"lm_loss": 1.0, "bidirectional": True}, r"lm_loss: needs the attention mask of pretraining"),
        ({"lm_loss": -1.0}, r"lm_loss: must be 0 or above"),
        ({"r_drop": 1.0, "method": "setfit"}, r"r_drop: conflicts with method setfit"),
        ({"r_drop": 1.0, "dropout": 0.0, "model.dropout": 0.0}, r"r_drop: without dropout both readings"),
        ({"token_dropout": 1.0}, r"token_dropout: must be from 0 to below 1"),
        ({"token_dropout": 0.1, "freeze": True}, r"token_dropout: changes what the backbone reads"),
        ({"token_dropout": 0.1, "method": "setfit"}, r"token_dropout: conflicts with method setfit"),
        ({"reinit_layers": 3}, r"reinit_layers: 3 is more than the 2 of the model"),
        ({"reinit_layers": 1, "freeze": True}, r"reinit_layers: needs layers that are trained"),
        ({"adapt_average": 0.5}, r"adapt_average: has no effect without adapt_steps"),
        ({"adapt_average": 0.0, "adapt_steps": 1}, r"adapt_average: must be above 0 and at most 1"),
        ({"adapt_fraction": 0.3, "adapt_steps": 1}, r"adapt_fraction: the objective 'causal' of .* masks no tokens"),
        ({"adapt_text": ["nowhere.txt"], "adapt_steps": 1}, r"nowhere.txt"),
    ],
)
def test_combinations_without_sense_are_refused(settings, message, stock, tune, tmp_path):
    with pytest.raises(HeadstockError, match=message):
        tune(stock, settings=QUICK | settings)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_translator_drops_no_tokens(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("source\ttarget\n" + "a b\tb a\n" * 4)
    with pytest.raises(HeadstockError, match="token_dropout: needs a task with a head of its own, which translate"):
        finetune(
            preset="seq2seq-nano",
            task="translate",
            train=pairs,
            out=tmp_path / "run",
            settings={"token_dropout": 0.1},
        )


def test_sources_without_a_language_model_are_refused(stock, tune, tmp_path):
    run = tune(stock, "first", QUICK | {"epochs": 1})
    with pytest.raises(HeadstockError, match="was trained for 'classify'; expected a run with a language-model head"):
        tune(run.path, "second", QUICK | {"lm_loss": 1.0})
