"""Steps as recordings: batches of one shape are told apart from others, and a recording is given what changes."""

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

import headstock
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, pad, pad_to_multiple
from headstock.model.model import Model
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.train.graphed_step import GraphedStep, Recording, shape_of, tensors_of
from headstock.train.run_folder import RunFolder
from headstock.train.step import LossModule
from tests.kernels.test_ops import gpu
from tests.model.small import small_backbone, small_model, some_tokens


def texts(*lengths, seed=0):
    rows = [some_tokens(length, seed=seed + length).tolist() for length in lengths]
    tokens, padding = pad(rows, 0)
    labels, _ = pad([[*row[1:], 5] for row in rows], IGNORE_INDEX)
    return Batch(tokens, padding, labels={"token": labels}, label_positions={"token": find_label_positions(labels)})


class NextToken:
    """The loss of what follows, as any task has it."""

    def losses(self, model, batch, *, smoothing):
        vectors, labels = batch.at("token", model(batch).hidden)
        scores = model.heads["token"](vectors)
        return {"token": torch.nn.functional.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")}


@pytest.mark.parametrize("causal", [True, False])
def test_wider_rows_lose_the_same(causal):
    model, batch = small_model(causal=causal), texts(5, 9, 7)
    wide = pad_to_multiple(batch, 16)
    assert wide.tokens.shape == (3, 16) and wide.padding.sum() == 48 - 21
    losses = [NextToken().losses(model, one, smoothing=0.0)["token"] for one in (batch, wide)]
    torch.testing.assert_close(*losses)
    assert pad_to_multiple(texts(16, 16), 16).padding is not None  # there whether needed or not: one shape


def test_a_wider_row_of_a_text_has_the_same_class():
    tokenizer = train_tokenizer(["a b c"], TokenizerSettings(vocabulary=300))
    task = Classify(ClassifyConfig(classes=("no", "yes"), pool="concat"), tokenizer)
    backbone = small_backbone(causal=False)
    model = Model(backbone, task.heads(backbone)).eval()
    batch = texts(5, 9, 7)
    batch.labels, batch.label_positions = {"label": torch.tensor([0, 1, IGNORE_INDEX])}, {}
    torch.testing.assert_close(*(task.losses(model, one)["label"] for one in (batch, pad_to_multiple(batch, 16))))


def test_shapes_are_told_apart_and_numbers_are_not():
    one, same, longer = texts(5, 9), texts(9, 3, seed=7), texts(5, 10)
    assert shape_of(one) == shape_of(same) != shape_of(longer)
    assert shape_of(one) != shape_of(Batch(one.tokens, labels=one.labels, label_positions=one.label_positions))
    assert shape_of(Batch(one.tokens, causal=True)) != shape_of(Batch(one.tokens, causal=False))
    assert len(list(tensors_of(Batch(one.tokens, source=one)))) == 1 + 4


class Again:
    """In the place of a CUDA graph where there is no GPU: does the recorded work anew, and writes where it wrote."""

    made: ClassVar[list["Again"]] = []

    def __init__(self):
        self.made.append(self)
        self.work = self.results = None

    def pool(self):
        return "pool"

    def replay(self):
        loss, sums = self.work()
        self.results[0].copy_(loss)
        for name, value in sums.items():
            self.results[1][name].copy_(value)


def test_a_recording_learns_from_the_batch_that_is_given(monkeypatch):
    model = small_model().train()
    objective = LossModule(model, NextToken(), smoothing=0.0)
    recorded = GraphedStep(objective, [], clip=1.0, dtype="float32", device=torch.device("cpu"))
    recorded.possible = True  # there is no GPU to wait for
    learn = recorded.learn

    @contextmanager
    def recording(graph, pool, capture_error_mode):
        def note(batch, scale):
            graph.results = tuple(learn(batch, scale))
            model.zero_grad(set_to_none=False)  # what is recorded is not done yet
            graph.work = lambda: learn(batch, scale)
            return graph.results

        recorded.learn = note
        yield
        recorded.learn = learn

    Again.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Again)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    for number, batch in enumerate([texts(5, 9), texts(9, 4), texts(9, 3), texts(8, 2), texts(6, 9, seed=3)]):
        factor = 1 / (number + 2)
        plain = NextToken().losses(model, batch, smoothing=0.0)["token"]
        wanted = torch.autograd.grad(plain * factor, list(model.parameters()))
        model.zero_grad(set_to_none=False)
        loss, sums = recorded(batch, {"token": factor})
        torch.testing.assert_close((loss, sums["token"]), ((plain * factor).detach(), plain.detach()))
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert len(Again.made) == 1  # the shape that came again


def test_where_memory_is_too_small_for_recordings_steps_are_made_plainly(monkeypatch):
    model, said = small_model().train(), []
    objective = LossModule(model, NextToken(), smoothing=0.0)
    device = torch.device("cpu")
    recorded = GraphedStep(objective, [], clip=1.0, dtype="float32", device=device, say=said.append)
    recorded.possible = True

    @contextmanager
    def recording(graph, pool, capture_error_mode):
        raise torch.OutOfMemoryError("CUDA out of memory.")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Again)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    batch = texts(5, 9)
    wanted = NextToken().losses(model, batch, smoothing=0.0)["token"].detach()
    found = [recorded(batch, {"token": 1.0})[0] for _ in range(3)]
    torch.testing.assert_close(found, [wanted] * 3)
    assert len(said) == 1 and "memory" in said[0] and not recorded.recordings
    gradient = model.backbone.tokens.weight.grad.clone()
    model.zero_grad()
    recorded(batch, {"token": 1.0})
    torch.testing.assert_close(gradient, 3 * model.backbone.tokens.weight.grad)  # each was learned from once


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid"])
def test_a_run_of_recordings_goes_the_same_way(objective, corpus, tmp_path, tiny, monkeypatch):
    settings = tiny | {"task.name": objective, "log_every": 1, "dropout": 0.1, "micro_batch": 4, "ema": 0.9}
    curves, played, play = [], [], Recording.play
    monkeypatch.setattr(Recording, "play", lambda *given: played.append(1) or play(*given))
    for compile in (False, "replay", "both"):
        out, before = tmp_path / str(compile), len(played)
        headstock.pretrain(corpus, out=out, settings=settings | {"compile": compile}, device="cuda")
        curves.append([row["loss"] for row in RunFolder(out).read_metrics() if "loss" in row])
        assert (len(played) > before) == bool(compile)  # it was not given up in silence
    assert len(curves[0]) == 12 and curves[1] == pytest.approx(curves[0], abs=5e-3)
    assert curves[2] == pytest.approx(curves[0], abs=5e-2)  # compiled, dropout draws other numbers


def test_who_cannot_be_recorded_loses_nothing_of_the_step(monkeypatch):
    """Two batches of one step have one shape, so that the second is the one which is tried."""
    model, mode, said = small_model().train(), ["default"], []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda wanted: mode.__setitem__(0, wanted))
    replay = GraphedStep(
        LossModule(model, NextToken(), smoothing=0.0),
        [],
        clip=1.0,
        dtype="float32",
        device=torch.device("cpu"),
        say=said.append,
    )
    learn = replay.learn

    def waits(batch, scale):
        found = learn(batch, scale)
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return found

    monkeypatch.setattr(replay, "learn", waits)
    batches = texts(5, 9), texts(9, 4)
    for batch in batches:
        replay(batch, {"token": 0.5})
    assert len(said) == 1 and mode == ["default"]
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for batch in batches:
        (NextToken().losses(model, batch, smoothing=0.0)["token"] * 0.5).backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
