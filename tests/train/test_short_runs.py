"""Short runs on labelled rows: gradual unfreezing, patience, and the best weights in memory."""

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
from headstock.train.fit import EncodedSplits
from headstock.train.optimizers import make_optimizers
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler
from headstock.train.settings import TrainSettings
from headstock.train.step import LossModule, TrainingStep

ALONE = DistributedContext(torch.device("cpu"))


def labelled_rows(count, *, flipped=False):
    """Texts of letters whose class is that of their first letter, or with `flipped` the other one."""
    random = np.random.default_rng(count)
    tokens = [random.integers(7, 17, random.integers(2, 12)).tolist() for _ in range(count)]
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


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.tensors().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("unfreeze", "first_steps"), [(None, [0, 0, 0]), (1.0, [3, 6, 9]), (0.5, [2, 3, 5])])
def test_layers_are_unfrozen_from_the_top(unfreeze, first_steps):
    model, task = classifier()
    stages = {"top": "backbone.blocks.1", "bottom": "backbone.blocks.0", "embedding": "backbone.tokens"}
    before, changed = snapshot(model), []

    def on_event(event):
        if event.kind == "step":
            now = snapshot(model)
            changed.append({name for name in now if not torch.equal(now[name], before[name])})

    data = EncodedSplits(labelled_rows(24), labelled_rows(8))  # three steps of eight in an epoch
    settings = TrainSettings(batch=8, epochs=4, lr=1e-2, warmup=0.0, schedule="constant", unfreeze=unfreeze)
    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[on_event])
    assert len(changed) == 12
    for stage, first in zip(stages.values(), first_steps, strict=True):
        inside = {name for name in before if name.startswith(stage)}
        for step, names in enumerate(changed):
            assert names & inside == (inside if step >= first else set()), (step, stage)
    assert all({name for name in before if name.startswith("heads.")} <= names for names in changed)
    norm = [step for step, names in enumerate(changed) if "backbone.final_norm.weight" in names]
    assert norm[0] == first_steps[0]  # the final norm belongs to the top layer
    assert changed[-1] == set(before)


def test_an_embedding_tied_to_the_head_is_trained_from_the_start():
    backbone = classifier()[0].backbone
    model = Model(backbone, {"token": LMHead(backbone)})
    loop.unfreeze_layers(model, 0.0)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["backbone.tokens.weight"]


def test_layers_are_unfrozen_under_distributed_data_parallel(tmp_path):
    model, task = classifier()
    before = snapshot(model)
    settings = TrainSettings(batch=8, epochs=4, lr=1e-2, warmup=0.0, unfreeze=1.0, weights="last")
    # one process that acts as the first of two: DDP is as strict about missing gradients
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        data = EncodedSplits(labelled_rows(24), labelled_rows(8))
        loop.train(model, task, data, settings, run=None, distributed=DistributedContext(torch.device("cpu"), 0, 2))
    finally:
        distributed.destroy_process_group()
    after = snapshot(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_layer_decay_scales_the_update_of_each_layer():
    model, task = classifier()
    data, settings = labelled_rows(16), TrainSettings(lr=1e-3, layer_decay=0.5, weight_decay=0.0, clip=0.0)
    before = snapshot(model)
    batch = task.examples(data, length=16).batch(range(16))
    module = LossModule(model, task, smoothing=0.0)
    TrainingStep(module, task, make_optimizers(model, settings), settings, ALONE)(0, [batch], 1e-3)
    # AdamW's first step changes every weight that has a gradient by the learning rate
    changed = {name: float((tensor - before[name]).abs().max()) for name, tensor in snapshot(model).items()}
    for name, share in (
        ("heads.label.linear.weight", 1.0),
        ("backbone.final_norm.weight", 0.5),
        ("backbone.blocks.1.feed.up.weight", 0.5),
        ("backbone.blocks.0.feed.up.weight", 0.25),
        ("backbone.tokens.weight", 0.125),
    ):
        assert changed[name] == pytest.approx(share * 1e-3, rel=1e-2), name


@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_patience_stops_a_run_with_its_best_weights(tmp_path, storage, ema):
    model, task = classifier()
    data = EncodedSplits(labelled_rows(40), labelled_rows(40, flipped=True))  # training makes validation worse
    settings = TrainSettings(
        batch=8, epochs=30, validate_every=5, lr=1e-2, schedule="constant", warmup=0.0, patience=3, ema=ema
    )
    selection_scores, best, last, metrics = [], {}, {}, {}

    def on_event(event):
        if event.kind == "valid":
            selection_scores.append(task.selection_score(event.state.valid))
            if event.state.best_step == event.state.step:
                best.update(snapshot(model))
                metrics.update(event.state.valid)
            last.update(snapshot(model))

    run = None
    if storage == "disk":
        run = RunFolder(tmp_path / "run")
        run.path.mkdir()
    state = loop.train(model, task, data, settings, run=run, distributed=ALONE, callbacks=[on_event])
    best_index = int(np.argmin(selection_scores))
    assert state.best_step == 5 * (best_index + 1)
    assert state.step == state.best_step + 3 * 5 < 150  # three validations without improvement
    assert selection_scores[best_index] < selection_scores[-1]
    assert not same(best, last)
    evaluated = evaluate(model, task, task.examples(data.valid, length=16), distributed=ALONE, batch_size=8, size=0)
    assert evaluated == pytest.approx(metrics, rel=1e-5)
    if not ema:  # with it, the averaged weights are kept instead
        assert same(snapshot(model), best)
    if run is not None:
        assert same(run.weights(), snapshot(model))


def test_without_patience_a_run_has_its_full_length():
    model, task = classifier()
    data = EncodedSplits(labelled_rows(40), labelled_rows(40, flipped=True))
    settings = TrainSettings(batch=8, epochs=8, validate_every=5, lr=1e-2, weights="last")
    last = {}
    state = loop.train(
        model, task, data, settings, run=None, distributed=ALONE, callbacks=[lambda event: last.update(snapshot(model))]
    )
    assert state.step == 40
    assert state.validations_since_best > 3
    assert same(snapshot(model), last)  # as the setting `weights` says


def test_without_a_run_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Path(os.environ["HEADSTOCK_CACHE"])
    before = sorted(cache.rglob("*"))
    model, task = classifier()
    best = {}

    def on_event(event):
        if event.kind == "valid" and event.state.best_step == event.state.step:
            best.update(snapshot(model))

    data = EncodedSplits(labelled_rows(40), labelled_rows(30))
    settings = TrainSettings(batch=8, epochs=6, validate_every=5, checkpoint_every=1, lr=1e-2)
    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[on_event])
    assert list(tmp_path.iterdir()) == []
    assert sorted(cache.rglob("*")) == before
    assert same(snapshot(model), best)


@pytest.mark.parametrize("separator", [None, ","])
@pytest.mark.parametrize("micro", [None, 2])
def test_training_metrics_are_those_of_the_rows_since_the_last_validation(separator, micro):
    model, task = classifier(separator=separator)
    data = EncodedSplits(labelled_rows(27), labelled_rows(10))
    if separator:
        for part in (data.train, data.valid):
            part.labels = np.stack([part.labels, part.labels[::-1]], 1)
    for parameter in model.heads.parameters():  # so that its predictions differ
        nn.init.normal_(parameter, std=2.0)
    reported = []
    settings = TrainSettings(batch=4, micro_batch=micro, epochs=2, validate_every=5, lr=1e-12, weight_decay=0.0)

    def on_event(event):
        if event.kind == "valid":
            reported.append(event.state.train)

    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[on_event])
    sampler = BatchSampler(task, data.train, length=16, batch=4, seed=0)
    assert sampler.steps_per_epoch == 7
    for metrics, steps in zip(
        reported, [range(5), range(5, 10), range(10, 14)], strict=True
    ):  # each since the previous one
        rows = [row for step in steps for row in sampler.indices(step)]
        examples = task.examples(data.train.select(rows), length=16)
        expected = evaluate(model, task, examples, distributed=ALONE, batch_size=len(rows), size=0)
        assert 0 < expected["accuracy"] < 1
        assert metrics == pytest.approx(expected, rel=1e-5)
    assert reported[0]["loss"] != pytest.approx(reported[1]["loss"], rel=1e-3)


def test_a_callback_that_sets_eval_mode_does_not_disable_dropout():
    model, task = classifier()
    modes = []
    model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    data, settings = EncodedSplits(labelled_rows(16), labelled_rows(8)), TrainSettings(steps=3, batch=16)
    loop.train(model, task, data, settings, run=None, distributed=ALONE, callbacks=[lambda event: model.eval()])
    assert modes.count(True) == 3
