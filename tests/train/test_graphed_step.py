"""CUDA-graph training steps: one graph per batch shape, the same gradients, and a fallback where capture fails."""

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

import headstock
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.kernels.cuda_graphs import CapturedGraph, signature, tensors_in
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, pad, pad_to_multiple
from headstock.model.model import Model
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.train.distributed import DistributedContext
from headstock.train.execution import GraphedStep
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from headstock.train.step import LossModule
from tests.kernels.test_varlen import gpu
from tests.model.small import small_backbone, small_model, some_tokens


def texts(*lengths, seed=0):
    rows = [some_tokens(length, seed=seed + length).tolist() for length in lengths]
    tokens, padding = pad(rows, 0)
    labels, _ = pad([[*row[1:], 5] for row in rows], IGNORE_INDEX)
    return Batch(tokens, padding, labels={"token": labels}, label_positions={"token": find_label_positions(labels)})


class NextToken:
    """A next-token loss."""

    def weight(self, head):
        return 1.0

    def losses(self, model, batch, *, smoothing):
        vectors, labels = batch.gather_labelled("token", model(batch).hidden)
        scores = model.heads["token"](vectors)
        return {"token": torch.nn.functional.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")}


@pytest.mark.parametrize("causal", [True, False])
def test_padding_to_a_multiple_does_not_change_the_loss(causal):
    model, batch = small_model(causal=causal), texts(5, 9, 7)
    wide = pad_to_multiple(batch, 16)
    assert wide.tokens.shape == (3, 16) and wide.padding.sum() == 48 - 21
    losses = [NextToken().losses(model, one, smoothing=0.0)["token"] for one in (batch, wide)]
    torch.testing.assert_close(*losses)
    assert pad_to_multiple(texts(16, 16), 16).padding is not None  # always present, so that there is one shape


def test_padding_to_a_multiple_does_not_change_the_class():
    tokenizer = train_tokenizer(["a b c"], TokenizerSettings(vocabulary=300))
    task = Classify(ClassifyConfig(classes=("no", "yes"), pool="concat"), tokenizer)
    backbone = small_backbone(causal=False)
    model = Model(backbone, task.heads(backbone)).eval()
    batch = texts(5, 9, 7)
    batch.labels, batch.label_positions = {"label": torch.tensor([0, 1, IGNORE_INDEX])}, {}
    torch.testing.assert_close(*(task.losses(model, one)["label"] for one in (batch, pad_to_multiple(batch, 16))))


def test_the_signature_depends_on_shapes_and_flags_only():
    one, same, longer = texts(5, 9), texts(9, 3, seed=7), texts(5, 10)
    assert signature(one) == signature(same) != signature(longer)
    assert signature(one) != signature(Batch(one.tokens, labels=one.labels, label_positions=one.label_positions))
    assert signature(Batch(one.tokens, causal=True)) != signature(Batch(one.tokens, causal=False))
    assert len(list(tensors_in(Batch(one.tokens, source=one)))) == 1 + 4


def graphed(model) -> GraphedStep:
    settings = TrainSettings(clip=1.0, dtype="float32")
    module = LossModule(model, NextToken(), smoothing=0.0)
    return GraphedStep(module, NextToken(), [], settings, DistributedContext(torch.device("cpu")))


class FakeGraph:
    """Stands in for a CUDA graph on a CPU: recomputes the captured function into the captured outputs."""

    instances: ClassVar[list["FakeGraph"]] = []

    def __init__(self):
        self.instances.append(self)
        self.work = self.results = None

    def pool(self):
        return "pool"

    def replay(self):
        loss, sums = self.work()
        self.results[0].copy_(loss)
        for name, value in sums.items():
            self.results[1][name].copy_(value)


def test_a_captured_step_trains_on_the_new_batch(monkeypatch):
    model = small_model().train()
    step = graphed(model)
    step.capturable = True  # there is no GPU to synchronize with
    eager = step.eager

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        def record(batch, heads):
            graph.results = tuple(eager(batch, heads))
            model.zero_grad(set_to_none=False)  # capturing does not execute
            graph.work = lambda: eager(batch, heads)
            return graph.results

        step.eager = record
        yield
        step.eager = eager

    FakeGraph.instances = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for number, batch in enumerate([texts(5, 9), texts(9, 4), texts(9, 3), texts(8, 2), texts(6, 9, seed=3)]):
        count = number + 2
        plain = NextToken().losses(model, batch, smoothing=0.0)["token"]
        expected = torch.autograd.grad(plain / count, list(model.parameters()))
        model.zero_grad(set_to_none=False)
        loss, sums = step.forward_backward(batch, {"token": count})
        torch.testing.assert_close((loss, sums["token"]), ((plain / count).detach(), plain.detach()))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert len(FakeGraph.instances) == 1  # for the shape that recurred


def test_without_memory_for_graphs_steps_run_eagerly(monkeypatch, messages):
    model = small_model().train()
    step = graphed(model)
    step.capturable = True

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        raise torch.OutOfMemoryError("CUDA out of memory.")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    batch = texts(5, 9)
    expected = NextToken().losses(model, batch, smoothing=0.0)["token"].detach()
    losses = [step.forward_backward(batch, {"token": 1})[0] for _ in range(3)]
    torch.testing.assert_close(losses, [expected] * 3)
    assert len(messages) == 1 and "memory" in messages[0] and not step.graphs
    gradient = model.backbone.tokens.weight.grad.clone()
    model.zero_grad()
    step.forward_backward(batch, {"token": 1})
    torch.testing.assert_close(gradient, 3 * model.backbone.tokens.weight.grad)  # each call counted once


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid"])
def test_graphed_runs_follow_the_plain_loss_curve(objective, corpus, tmp_path, tiny, monkeypatch):
    settings = tiny | {"task.name": objective, "log_every": 1, "dropout": 0.1, "micro_batch": 4, "ema": 0.9}
    curves, replays, replay = [], [], CapturedGraph.__call__
    monkeypatch.setattr(CapturedGraph, "__call__", lambda *args: replays.append(1) or replay(*args))
    for compile in (False, "replay", "both"):
        out, before = tmp_path / str(compile), len(replays)
        headstock.pretrain(corpus, out=out, settings=settings | {"compile": compile}, device="cuda")
        curves.append([row["loss"] for row in RunFolder(out).read_metrics() if "loss" in row])
        assert (len(replays) > before) == bool(compile)  # no silent fallback
    assert len(curves[0]) == 12 and curves[1] == pytest.approx(curves[0], abs=5e-3)
    assert curves[2] == pytest.approx(curves[0], abs=5e-2)  # compiled dropout draws other masks


def test_a_model_that_synchronizes_loses_no_gradients(monkeypatch, messages):
    """Two micro-batches of one step have the same shape, so the second one is the trial."""
    model, mode = small_model().train(), ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda value: mode.__setitem__(0, value))
    step = graphed(model)
    eager = step.eager

    def synchronizing(batch, heads):
        result = eager(batch, heads)
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return result

    monkeypatch.setattr(step, "eager", synchronizing)
    batches = texts(5, 9), texts(9, 4)
    for batch in batches:
        step.forward_backward(batch, {"token": 2})
    assert len(messages) == 1 and mode == ["default"]
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for batch in batches:
        (NextToken().losses(model, batch, smoothing=0.0)["token"] / 2).backward()
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])
