"""Recurrent models and ELMo through the same pretraining, fine-tuning and use as every other family."""

import json

import numpy as np
import pytest
import torch

import headstock
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_store
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import UserError
from headstock.inference.pipeline import load
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.model import Model
from headstock.tasks.causal import CausalConfig, CausalLM
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import evaluate
from headstock.train.finetune import finetune
from headstock.train.optimizers import make_optimizers
from headstock.train.pretrain import pretrain
from headstock.train.settings import TrainSettings
from tests.model.small import stir

ALONE = DistributedContext(torch.device("cpu"))
TINY = {
    "width": 16,
    "hidden": 24,
    "vocabulary": 300,
    "batch": 8,
    "steps": 24,
    "length": 32,
    "lr": 1e-2,
    "validate_every": 12,
    "tensorboard": False,
}
PRESETS = ["lstm-nano", "gru-nano", "elmo-nano"]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A run of each family, all of one tokenizer."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for preset in PRESETS:
        results = pretrain(corpus, out=folder / preset, preset=preset, settings=dict(TINY))
        made[preset] = (folder / preset, results)
    return made


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "rows.jsonl"
    who = [("Anne", "person"), ("Paris", "place"), ("Ben", "person"), ("the sea", "place")]
    rows = [{"text": f"{name} {number}", "label": label} for number in range(10) for name, label in who]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("preset", PRESETS)
def test_pretraining_learns(runs, preset):
    run, results = runs[preset]
    assert results["steps"] == 24
    assert results["perplexity"] < 60
    assert headstock.load(run).evaluate()["loss"] == pytest.approx(results["valid_loss"], rel=1e-5)
    if preset == "elmo-nano":
        both = [results["forward_perplexity"], results["backward_perplexity"]]
        assert results["valid_loss"] == pytest.approx(np.log(both).sum())


@pytest.mark.parametrize("preset", ["lstm-nano", "gru-nano"])
def test_a_run_generates_and_scores(runs, preset):
    run = load(runs[preset][0])
    [made] = run.generate("Anne", max_tokens=60, temperature=0.0)
    [again] = run.generate("Anne", max_tokens=60, temperature=0.0, cache=False)
    assert made == again
    assert not made.slid
    [score] = run.score("Anne sees Paris.")
    ids = run.tokenizer.encode_batch(["Anne sees Paris."])[0]
    with torch.inference_mode():
        tokens = torch.tensor([[run.tokenizer.bos, *ids]])
        scores = run.model.heads["token"](run.model(headstock.model.batch.Batch(tokens)).hidden[0]).log_softmax(-1)
    wanted = [scores[place, token].item() for place, token in enumerate(ids)]
    assert [value for _, value in score.tokens] == pytest.approx(wanted, abs=1e-5)


def test_elmo_refuses_what_it_cannot_and_says_who_can(runs):
    run = load(runs["elmo-nano"][0])
    for ask in (lambda: run.generate("Anne"), lambda: run.score("Anne")):
        with pytest.raises(UserError, match=r"objectives that can: causal, hybrid"):
            ask()
    with pytest.raises(UserError, match=r"objectives that can: hybrid, masked"):
        run.fill("Anne [MASK]")


def test_families_and_objectives_that_do_not_go_together(corpus, tmp_path):
    for preset, objective, able in (
        ("lstm-nano", "masked", "transformer"),
        ("elmo-nano", "causal", "recurrent, transformer"),
        ("gpt-nano", "both-ways", "elmo"),
    ):
        with pytest.raises(UserError, match=rf"families that can: {able}"):
            pretrain(corpus, out=tmp_path / "run", preset=preset, objective=objective)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("preset", "width", "pool"), [("lstm-nano", 16, "last"), ("elmo-nano", 32, "mean")])
def test_texts_become_vectors(runs, preset, width, pool):
    run = load(runs[preset][0])
    texts = ["Anne sees Paris.", "Ben", "Zoë likes the sea. Zoë likes the sea."]
    for layers in ("last", "0", "1", "mix"):
        found = run.embed(texts, layers=layers)
        assert found.shape == (3, width)
        np.testing.assert_allclose(found, run.embed(texts, layers=layers, pool=pool))
        np.testing.assert_allclose(found[1], run.embed(texts[1], layers=layers)[0], atol=1e-5)
    with pytest.raises(UserError, match="sum4 needs 4 layers, this model has 2"):
        run.embed(texts, layers="sum4")


@pytest.mark.parametrize(
    ("preset", "given", "freeze"),
    [
        ("lstm-nano", {}, False),
        ("lstm-nano", {"pool": "concat", "layers": "1", "lr": 0.3}, True),  # small numbers, after so few steps
        ("gru-nano", {"layer_decay": 0.8, "pool": "mean"}, False),
        ("elmo-nano", {"layers": "mix"}, True),
        ("elmo-nano", {"layers": "mix", "unfreeze": 1.0}, False),
    ],
)
def test_a_classifier_of_them_learns(runs, labelled, tmp_path, preset, given, freeze):
    settings = {"epochs": 25, "lr": 1e-2, "batch": 8, **given}
    results = finetune(runs[preset][0], train=labelled, out=tmp_path / "run", freeze=freeze, settings=settings)
    assert results["valid"]["accuracy"] == 1.0
    model = load(tmp_path / "run")
    assert model.predict("Anne 99")[0]["label"] == "person"
    assert model.config.train.length == 32  # as long as the rows it was pretrained on
    before = load(runs[preset][0]).model.tensors()
    still = {name: torch.equal(tensor, model.model.tensors()[name]) for name, tensor in before.items()}
    assert all(still.values()) is freeze


def test_a_direction_that_a_family_does_not_have_is_refused(runs, labelled, tmp_path):
    for preset, asked, reads in (("lstm-nano", True, "causal"), ("elmo-nano", False, "bidirectional")):
        with pytest.raises(UserError, match=rf"transfer.bidirectional: .* always {reads}"):
            finetune(runs[preset][0], train=labelled, out=tmp_path / "run", settings={"bidirectional": asked})
    with pytest.raises(UserError, match="pool"):
        finetune(runs["lstm-nano"][0], train=labelled, out=tmp_path / "run", settings={"pool": "cls"})


# A document's state goes on in its next window


@pytest.fixture(scope="module")
def long_document(tmp_path_factory):
    """One long document among short ones, and a model to read them with."""
    path = tmp_path_factory.mktemp("long") / "text.txt"
    long = " ".join(f"word{number % 7} and {number}" for number in range(40))
    path.write_text("\n\n".join(["A short one.", long, "Another.", "And a last short one."]))
    text = read_corpus(path, documents="block")
    settings = TokenizerSettings(kind="char", vocabulary=60, min_frequency=1)
    tokenizer = train_tokenizer((document.text for document in text), settings)
    torch.manual_seed(0)
    backbone = Recurrent(RecurrentConfig(vocabulary=tokenizer.vocabulary, depth=2, width=8, hidden=12))
    stir(backbone, spread=0.5)  # so that what is remembered weighs something
    return tokenizer, build_store(text, tokenizer), backbone


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_windows_with_the_carried_state_are_the_document_read_whole(long_document, rows):
    tokenizer, store, backbone = long_document
    task = CausalLM(CausalConfig(rows=rows), tokenizer)
    model = Model(backbone, task.heads(backbone))
    half = int(store.lengths.max()) // 2 + 30
    assert store.lengths.max() > half  # so that it lies in two windows

    def loss(length, carries):
        task.needs_prefix = carries
        examples = task.examples(store, length=length)
        return evaluate(model, task, examples, distributed=ALONE, batch_size=4, size=0)["loss"]

    whole = loss(store.tokens, False)
    assert loss(half, True) == pytest.approx(whole, rel=1e-6)
    assert abs(loss(half, False) - whole) > 1e-4  # a control: begun anew in the middle of the document


def test_what_stands_before_a_window_is_of_the_same_document(long_document):
    tokenizer, store, _ = long_document
    task = CausalLM(CausalConfig(), tokenizer)
    shown = np.concatenate([[tokenizer.bos, *store.document(i)] for i in range(store.documents)])
    for length in (7, 50, 64):
        for seed in (None, 0, 1):
            windows = task.examples(store, length=length, seed=seed).windows
            for index, found in enumerate(windows.prefixes(range(len(windows)))):
                begin = int(windows.starts([index])[0])
                first = store.offsets[store.document_at(begin)]
                assert found == shown[max(first, begin - length) : begin].tolist()
                assert windows.prefixes([index]) == [found]  # whoever else is asked for


def test_only_models_that_carry_are_brought_what_stands_before(runs, corpus, tiny, tmp_path):
    store = load(runs["lstm-nano"][0])
    assert store.task.needs_prefix
    assert not load(runs["elmo-nano"][0]).task.needs_prefix
    pretrain(corpus, out=tmp_path / "gpt", settings=tiny | {"steps": 1})
    assert not load(tmp_path / "gpt").task.needs_prefix


# Training


def test_muon_moves_each_gate_by_itself():
    for cell, gates in (("lstm", 4), ("gru", 3)):
        backbone = Recurrent(RecurrentConfig(vocabulary=9, cell=cell, width=6, hidden=8))
        model = Model(backbone, {})
        muon, adam = make_optimizers(model, TrainSettings(optimizer="muon"))
        parts = {id(p): group["parts"] for group in muon.param_groups for p in group["params"]}
        for layer in backbone.stack.layers:
            assert {parts[id(layer.cells.weight_ih_l0)], parts[id(layer.cells.weight_hh_l0)]} == {gates}
            assert parts[id(layer.project.weight)] == 1
        everything = [p for one in (muon, adam) for group in one.param_groups for p in group["params"]]
        assert sorted(map(id, everything)) == sorted(map(id, model.parameters()))


def test_a_stopped_run_goes_on_as_if_it_had_not_been(corpus, tmp_path):
    """Locked dropout, windows cut inside documents, and the averaged weights among what must be the same."""
    settings = TINY | {"dropout": 0.2, "ema": 0.9, "checkpoint_every": 6, "length": 16, "steps": 12}

    class Stop(Exception):
        pass

    def stop(event):
        if event.state.step == 8:
            raise Stop

    pretrain(corpus, out=tmp_path / "one", preset="lstm-nano", settings=dict(settings))
    with pytest.raises(Stop):
        pretrain(corpus, out=tmp_path / "two", preset="lstm-nano", settings=dict(settings), callbacks=[stop])
    pretrain(corpus, out=tmp_path / "two", preset="lstm-nano", settings=dict(settings), resume=True)
    one, two = (load(tmp_path / name).model.tensors() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
