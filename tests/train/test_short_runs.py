"""Short runs on labels: layers that thaw, patience, and the best weights kept in memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, nn

from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.tasks.labelled import EncodedRows
from headstock.train import loop
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import evaluate
from headstock.train.fit import LabelledData
from headstock.train.optimizers import make_optimizers
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler
from headstock.train.settings import TrainSettings
from headstock.train.step import LossModule, TrainingStep

ALONE = DistributedContext(torch.device("cpu"))


def labels_to_learn(count, *, flipped=False):
    """Texts of letters whose class is their first letter's, or the other one."""
    draw = np.random.default_rng(count)
    tokens = [draw.integers(7, 17, draw.integers(2, 12)).tolist() for _ in range(count)]
    labels = np.array([int((row[0] < 12) != flipped) for row in tokens])
    return EncodedRows(tokens, labels, [f"text {i}" for i in range(count)])


def classifier(seed=0, **config):
    letters = TokenizerSettings(kind="char", vocabulary=20, min_frequency=1)
    tokenizer = train_tokenizer(["abcdefghij"] * 3, letters)
    assert tokenizer.vocabulary >= 17
    task = Classify(ClassifyConfig(classes=("a", "b"), dropout=0.0, **config), tokenizer)
    torch.manual_seed(seed)
    sizes = {"vocabulary": tokenizer.vocabulary, "context": 16, "depth": 2, "width": 8, "heads": 2, "hidden": 16}
    backbone = Transformer(TransformerConfig(**sizes))
    return Model(backbone, task.heads(backbone)), task


def kept(model):
    return {name: tensor.clone() for name, tensor in model.tensors().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("unfreeze", "moving"), [(None, [0, 0, 0]), (1.0, [3, 6, 9]), (0.5, [2, 3, 5])])
def test_layers_thaw_from_the_top(unfreeze, moving):
    model, task = classifier()
    stages = {"top": "backbone.blocks.1", "bottom": "backbone.blocks.0", "words": "backbone.tokens"}
    before, moved = kept(model), []

    def hear(event):
        if event.kind == "step":
            now = kept(model)
            moved.append({name for name in now if not torch.equal(now[name], before[name])})

    data = LabelledData(labels_to_learn(24), labels_to_learn(8))  # three steps of eight in an epoch
    settings = TrainSettings(batch=8, epochs=4, lr=1e-2, warmup=0.0, schedule="constant", unfreeze=unfreeze)
    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[hear])
    assert len(moved) == 12
    for stage, first in zip(stages.values(), moving, strict=True):
        inside = {name for name in before if name.startswith(stage)}
        for step, names in enumerate(moved):
            assert names & inside == (inside if step >= first else set()), (step, stage)
    assert all({name for name in before if name.startswith("heads.")} <= names for names in moved)
    norm = [step for step, names in enumerate(moved) if "backbone.final_norm.weight" in names]
    assert norm[0] == moving[0]  # the last norm belongs to the top layer
    assert moved[-1] == set(before)


def test_a_head_that_shares_the_embedding_moves_from_the_start():
    backbone = classifier()[0].backbone
    model = Model(backbone, {"token": LMHead(backbone)})
    loop.unfreeze_layers(model, 0.0)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["backbone.tokens.weight"]


def test_layers_thaw_where_processes_share_the_gradients(tmp_path):
    model, task = classifier()
    before = kept(model)
    settings = TrainSettings(batch=8, epochs=4, lr=1e-2, warmup=0.0, unfreeze=1.0, weights="last")
    # one process that believes to be the first of two: torch is as strict about gradients that do not come
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        data = LabelledData(labels_to_learn(24), labels_to_learn(8))
        loop.train(model, task, data, settings, run=None, distributed=DistributedContext(torch.device("cpu"), 0, 2))
    finally:
        distributed.destroy_process_group()
    after = kept(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_a_step_moves_each_layer_at_its_own_rate():
    model, task = classifier()
    data, settings = labels_to_learn(16), TrainSettings(lr=1e-3, layer_decay=0.5, weight_decay=0.0, clip=0.0)
    before = kept(model)
    batch = task.examples(data, length=16).batch(range(16))
    module = LossModule(model, task, smoothing=0.0)
    TrainingStep(module, task, make_optimizers(model, settings), settings, ALONE)(0, [batch], 1e-3)
    # AdamW's first step moves every weight that has a gradient by the learning rate
    moved = {name: float((tensor - before[name]).abs().max()) for name, tensor in kept(model).items()}
    for name, share in (
        ("heads.label.linear.weight", 1.0),
        ("backbone.final_norm.weight", 0.5),
        ("backbone.blocks.1.feed.up.weight", 0.5),
        ("backbone.blocks.0.feed.up.weight", 0.25),
        ("backbone.tokens.weight", 0.125),
    ):
        assert moved[name] == pytest.approx(share * 1e-3, rel=1e-2), name


@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_patience_ends_a_run_that_gets_worse_with_its_best_weights(tmp_path, place, ema):
    model, task = classifier()
    data = LabelledData(labels_to_learn(40), labels_to_learn(40, flipped=True))  # whatever is learned is wrong there
    settings = TrainSettings(
        batch=8, epochs=30, validate_every=5, lr=1e-2, schedule="constant", warmup=0.0, patience=3, ema=ema
    )
    merits, best, last, scores = [], {}, {}, {}

    def hear(event):
        if event.kind == "valid":
            merits.append(task.selection_score(event.state.valid))
            if event.state.best_step == event.state.step:
                best.update(kept(model))
                scores.update(event.state.valid)
            last.update(kept(model))

    run = None
    if place == "disk":
        run = RunFolder(tmp_path / "run")
        run.path.mkdir()
    progress = loop.train(model, task, data, settings, run=run, distributed=ALONE, callbacks=[hear])
    at = int(np.argmin(merits))
    assert progress.best_step == 5 * (at + 1)
    assert progress.step == progress.best_step + 3 * 5 < 150  # three validations in vain
    assert merits[at] < merits[-1]
    assert not same(best, last)
    found = evaluate(model, task, task.examples(data.valid, length=16), distributed=ALONE, batch_size=8, size=0)
    assert found == pytest.approx(scores, rel=1e-5)
    if not ema:  # with it, the averaged weights of that moment are kept instead
        assert same(kept(model), best)
    if run is not None:
        assert same(run.weights(), kept(model))


def test_without_patience_the_run_is_as_long_as_asked():
    model, task = classifier()
    data = LabelledData(labels_to_learn(40), labels_to_learn(40, flipped=True))
    settings = TrainSettings(batch=8, epochs=8, validate_every=5, lr=1e-2, weights="last")
    last = {}
    progress = loop.train(
        model, task, data, settings, run=None, distributed=ALONE, callbacks=[lambda event: last.update(kept(model))]
    )
    assert progress.step == 40
    assert progress.validations_since_best > 3
    assert same(kept(model), last)  # the last weights were asked for


def test_without_a_run_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Path(os.environ["HEADSTOCK_CACHE"])
    before = sorted(cache.rglob("*"))
    model, task = classifier()
    best = {}

    def hear(event):
        if event.kind == "valid" and event.state.best_step == event.state.step:
            best.update(kept(model))

    data = LabelledData(labels_to_learn(40), labels_to_learn(30))
    settings = TrainSettings(batch=8, epochs=6, validate_every=5, checkpoint_every=1, lr=1e-2)
    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[hear])
    assert list(tmp_path.iterdir()) == []
    assert sorted(cache.rglob("*")) == before
    assert same(kept(model), best)


@pytest.mark.parametrize("separator", [None, ","])
@pytest.mark.parametrize("micro", [None, 2])
def test_what_training_batches_score_is_what_the_rows_score(separator, micro):
    model, task = classifier(separator=separator)
    data = LabelledData(labels_to_learn(27), labels_to_learn(10))
    if separator:
        for part in (data.train, data.valid):
            part.labels = np.stack([part.labels, part.labels[::-1]], 1)
    for parameter in model.heads.parameters():  # so that its answers differ
        nn.init.normal_(parameter, std=2.0)
    heard = []
    settings = TrainSettings(batch=4, micro_batch=micro, epochs=2, validate_every=5, lr=1e-12, weight_decay=0.0)

    def hear(event):
        if event.kind == "valid":
            heard.append(event.state.train)

    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[hear])
    order = BatchSampler(task, data.train, length=16, batch=4, seed=0)
    assert order.steps_per_epoch == 7
    for found, steps in zip(heard, [range(5), range(5, 10), range(10, 14)], strict=True):  # each since the one before
        rows = [row for step in steps for row in order.indices(step)]
        examples = task.examples(data.train.select(rows), length=16)
        again = evaluate(model, task, examples, distributed=ALONE, batch_size=len(rows), size=0)
        assert 0 < again["accuracy"] < 1
        assert found == pytest.approx(again, rel=1e-5)
    assert heard[0]["loss"] != pytest.approx(heard[1]["loss"], rel=1e-3)


def test_who_uses_the_model_meanwhile_does_not_turn_dropout_off():
    model, task = classifier()
    modes = []
    model.register_forward_pre_hook(lambda module, given: modes.append(module.training))
    data, settings = LabelledData(labels_to_learn(16), labels_to_learn(8)), TrainSettings(steps=3, batch=16)
    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[lambda event: model.eval()])
    assert modes.count(True) == 3
