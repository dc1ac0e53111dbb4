"""Recurrent models and ELMo: pretraining, fine-tuning, inference and carried states."""

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
    """The folder and results of a run of each preset."""
    folder, runs = tmp_path_factory.mktemp("runs"), {}
    for preset in PRESETS:
        results = pretrain(corpus, out=folder / preset, preset=preset, settings=dict(TINY))
        runs[preset] = (folder / preset, results)
    return runs


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "rows.jsonl"
    names = [("Anne", "person"), ("Paris", "place"), ("Ben", "person"), ("the sea", "place")]
    rows = [{"text": f"{name} {number}", "label": label} for number in range(10) for name, label in names]
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
    [cached] = run.generate("Anne", max_tokens=60, temperature=0.0)
    [uncached] = run.generate("Anne", max_tokens=60, temperature=0.0, cache=False)
    assert cached == uncached
    assert not cached.slid
    [score] = run.score("Anne sees Paris.")
    ids = run.tokenizer.encode_batch(["Anne sees Paris."])[0]
    with torch.inference_mode():
        tokens = torch.tensor([[run.tokenizer.bos, *ids]])
        scores = run.model.heads["token"](run.model(headstock.model.batch.Batch(tokens)).hidden[0]).log_softmax(-1)
    expected = [scores[position, token].item() for position, token in enumerate(ids)]
    assert [value for _, value in score.tokens] == pytest.approx(expected, abs=1e-5)


def test_unsupported_methods_of_elmo_name_the_objectives_that_can(runs):
    run = load(runs["elmo-nano"][0])
    for method in (lambda: run.generate("Anne"), lambda: run.score("Anne")):
        with pytest.raises(UserError, match=r"objectives that can: causal, hybrid"):
            method()
    with pytest.raises(UserError, match=r"objectives that can: hybrid, masked"):
        run.fill("Anne [MASK]")


def test_incompatible_families_and_objectives_are_rejected(corpus, tmp_path):
    for preset, objective, families in (
        ("lstm-nano", "masked", "transformer"),
        ("elmo-nano", "causal", "ngram, recurrent, transformer"),
        ("gpt-nano", "both-ways", "bitransformer, elmo"),
    ):
        with pytest.raises(UserError, match=rf"families that can: {families}"):
            pretrain(corpus, out=tmp_path / "run", preset=preset, objective=objective)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("preset", "width", "pool"), [("lstm-nano", 16, "last"), ("elmo-nano", 32, "mean")])
def test_embeddings_of_every_layer(runs, preset, width, pool):
    run = load(runs[preset][0])
    texts = ["Anne sees Paris.", "Ben", "Zoë likes the sea. Zoë likes the sea."]
    for layers in ("last", "0", "1", "mix"):
        vectors = run.embed(texts, layers=layers)
        assert vectors.shape == (3, width)
        np.testing.assert_allclose(vectors, run.embed(texts, layers=layers, pool=pool))
        np.testing.assert_allclose(vectors[1], run.embed(texts[1], layers=layers)[0], atol=1e-5)
    with pytest.raises(UserError, match="sum4 needs 4 layers, this model has 2"):
        run.embed(texts, layers="sum4")


@pytest.mark.parametrize(
    ("preset", "options", "freeze"),
    [
        ("lstm-nano", {}, False),
        ("lstm-nano", {"pool": "concat", "layers": "1", "lr": 0.3}, True),  # features are small after few steps
        ("gru-nano", {"layer_decay": 0.8, "pool": "mean"}, False),
        ("elmo-nano", {"layers": "mix"}, True),
        ("elmo-nano", {"layers": "mix", "unfreeze": 1.0}, False),
    ],
)
def test_classifiers_learn(runs, labelled, tmp_path, preset, options, freeze):
    settings = {"epochs": 25, "lr": 1e-2, "batch": 8, **options}
    results = finetune(runs[preset][0], train=labelled, out=tmp_path / "run", freeze=freeze, settings=settings)
    assert results["valid"]["accuracy"] == 1.0
    model = load(tmp_path / "run")
    assert model.predict("Anne 99")[0]["label"] == "person"
    assert model.config.train.length == 32  # the length of the pretraining rows
    before = load(runs[preset][0]).model.tensors()
    unchanged = {name: torch.equal(tensor, model.model.tensors()[name]) for name, tensor in before.items()}
    assert all(unchanged.values()) is freeze


def test_directions_that_a_family_does_not_have_are_rejected(runs, labelled, tmp_path):
    for preset, bidirectional, direction in (("lstm-nano", True, "causal"), ("elmo-nano", False, "bidirectional")):
        with pytest.raises(UserError, match=rf"transfer.bidirectional: .* always {direction}"):
            finetune(runs[preset][0], train=labelled, out=tmp_path / "run", settings={"bidirectional": bidirectional})
    with pytest.raises(UserError, match="pool"):
        finetune(runs["lstm-nano"][0], train=labelled, out=tmp_path / "run", settings={"pool": "cls"})


# Carried states


@pytest.fixture(scope="module")
def long_document(tmp_path_factory):
    """A tokenizer, the store of one long document among short ones, and a backbone."""
    path = tmp_path_factory.mktemp("long") / "text.txt"
    long = " ".join(f"word{number % 7} and {number}" for number in range(40))
    path.write_text("\n\n".join(["A short one.", long, "Another.", "And a last short one."]))
    text = read_corpus(path, documents="block")
    settings = TokenizerSettings(kind="char", vocabulary=60, min_frequency=1)
    tokenizer = train_tokenizer((document.text for document in text), settings)
    torch.manual_seed(0)
    backbone = Recurrent(RecurrentConfig(vocabulary=tokenizer.vocabulary, depth=2, width=8, hidden=12))
    stir(backbone, spread=0.5)  # so that the carried state has an effect
    return tokenizer, build_store(text, tokenizer), backbone


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_windows_with_carried_state_equal_one_long_window(long_document, rows):
    tokenizer, store, backbone = long_document
    task = CausalLM(CausalConfig(rows=rows), tokenizer)
    model = Model(backbone, task.heads(backbone))
    half = int(store.lengths.max()) // 2 + 30
    assert store.lengths.max() > half  # two windows

    def loss(length, carries):
        task.needs_prefix = carries
        examples = task.examples(store, length=length)
        return evaluate(model, task, examples, distributed=ALONE, batch_size=4, size=0)["loss"]

    expected = loss(store.tokens, False)
    assert loss(half, True) == pytest.approx(expected, rel=1e-6)
    assert abs(loss(half, False) - expected) > 1e-4  # a control without the carried state


def test_the_prefix_of_a_window_is_from_the_same_document(long_document):
    tokenizer, store, _ = long_document
    task = CausalLM(CausalConfig(), tokenizer)
    tokens = np.concatenate([[tokenizer.bos, *store.document(i)] for i in range(store.documents)])
    for length in (7, 50, 64):
        for seed in (None, 0, 1):
            windows = task.examples(store, length=length, seed=seed).windows
            for index, prefix in enumerate(windows.prefixes(range(len(windows)))):
                begin = int(windows.starts([index])[0])
                first = store.offsets[store.document_at(begin)]
                assert prefix == tokens[max(first, begin - length) : begin].tolist()
                assert windows.prefixes([index]) == [prefix]  # independent of the batch


def test_only_recurrent_language_models_need_a_prefix(runs, corpus, tiny, tmp_path):
    assert load(runs["lstm-nano"][0]).task.needs_prefix
    assert not load(runs["elmo-nano"][0]).task.needs_prefix
    pretrain(corpus, out=tmp_path / "gpt", settings=tiny | {"steps": 1})
    assert not load(tmp_path / "gpt").task.needs_prefix


# Training


def test_muon_orthogonalizes_each_gate_separately():
    for cell, gates in (("lstm", 4), ("gru", 3)):
        backbone = Recurrent(RecurrentConfig(vocabulary=9, cell=cell, width=6, hidden=8))
        model = Model(backbone, {})
        muon, adam = make_optimizers(model, TrainSettings(optimizer="muon"))
        parts = {id(p): group["parts"] for group in muon.param_groups for p in group["params"]}
        for layer in backbone.stack.layers:
            assert {parts[id(layer.cells.weight_ih_l0)], parts[id(layer.cells.weight_hh_l0)]} == {gates}
            assert parts[id(layer.project.weight)] == 1
        parameters = [p for optimizer in (muon, adam) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))


def test_a_resumed_run_has_the_same_weights(corpus, tmp_path):
    """Including locked dropout, windows within documents, and averaged weights."""
    settings = TINY | {"dropout": 0.2, "ema": 0.9, "checkpoint_every": 6, "length": 16, "steps": 12}

    class Stopped(Exception):
        pass

    def stop(event):
        if event.state.step == 8:
            raise Stopped

    pretrain(corpus, out=tmp_path / "one", preset="lstm-nano", settings=dict(settings))
    with pytest.raises(Stopped):
        pretrain(corpus, out=tmp_path / "two", preset="lstm-nano", settings=dict(settings), callbacks=[stop])
    pretrain(corpus, out=tmp_path / "two", preset="lstm-nano", settings=dict(settings), resume=True)
    one, two = (load(tmp_path / name).model.tensors() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
