"""The training loop: exact gradients, reproducible data order, budgets, logs, divergence and spikes."""

import json
import math
import re
from functools import partial

import pytest
import torch
from torch import nn

import headstock
from headstock.errors import UserError, WorkError
from headstock.model.batch import Batch
from headstock.train.budget import Budget, Milestones
from headstock.train.callbacks import log_lines
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.execution import check_settings
from headstock.train.meters import SpikeDetector
from headstock.train.optimizers import update_weights
from headstock.train.sampler import BatchSampler
from headstock.train.settings import TrainSettings
from headstock.train.step import LossModule, TrainingStep


class Uneven:
    """Examples whose rows have very different numbers of labels."""

    def __len__(self):
        return 20

    def batch(self, indices):
        tokens = torch.stack([torch.full((6,), int(i) + 1) for i in indices])
        labels = tokens.clone()
        for row, index in enumerate(indices):
            labels[row, index % 6 + 1 :] = -100
        return Batch(tokens, labels={"token": labels})

    def name(self, index):
        return f"row {index}"


class UnevenTask:
    is_language_model = True

    def __init__(self, weight=1.0):
        self.weight = lambda head: weight

    def examples(self, data, *, length, seed=None, epoch=0):
        return Uneven()

    def counts(self, batch):
        return {"token": int((batch.labels["token"] != -100).sum())}

    def tokens(self, batch):
        return batch.tokens.numel()

    def losses(self, model, batch, *, smoothing=0.0):
        scores = model(batch.tokens)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch.labels["token"].flatten(), reduction="sum")
        return {"token": loss}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(21, 8)
        self.out = nn.Linear(8, 21)

    def forward(self, tokens):
        return self.out(self.table(tokens))


def gradients(micro: int | None, *, weight: float = 1.0) -> torch.Tensor:
    settings, task = TrainSettings(batch=12, micro_batch=micro, clip=0.0), UnevenTask(weight)
    model = Net()
    sampler = BatchSampler(task, None, length=6, batch=12, seed=1)  # type: ignore[arg-type]
    distributed = DistributedContext(torch.device("cpu"))
    recorded = []

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            recorded.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    module = LossModule(model, task, smoothing=0.0)  # type: ignore[arg-type]
    batches = sampler.micro_batches(0, size=micro, rank=0, world_size=1)
    TrainingStep(module, task, [Recorder(model.parameters(), lr=1.0)], settings, distributed)(0, batches, 1.0)  # type: ignore[arg-type]
    return recorded[0]


def test_micro_batches_give_the_gradient_of_the_full_batch():
    full = gradients(None)
    for micro in (1, 3, 6):
        assert torch.allclose(gradients(micro), full, atol=1e-7)
    assert torch.allclose(gradients(3, weight=0.25), full / 4, atol=1e-7)  # the task's weight of the head
    task, model = UnevenTask(), Net()  # a control: the mean of means differs
    sampler = BatchSampler(task, None, length=6, batch=12, seed=1)  # type: ignore[arg-type]
    parts = sampler.micro_batches(0, size=3, rank=0, world_size=1)
    for part in parts:
        (task.losses(model, part)["token"] / task.counts(part)["token"] / len(parts)).backward()
    naive = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (naive - full).norm() / full.norm() > 0.05


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_order_is_the_same_for_any_number_of_processes(world_size):
    alone = BatchSampler(UnevenTask(), None, length=6, batch=8, seed=5)  # type: ignore[arg-type]
    assert alone.steps_per_epoch == 3
    for step in range(6):
        together = []
        for rank in range(world_size):
            shared = BatchSampler(UnevenTask(), None, length=6, batch=8, seed=5)  # type: ignore[arg-type]
            for batch in shared.micro_batches(step, size=2, rank=rank, world_size=world_size):
                has_labels = batch.labels["token"].ne(-100).any(1)
                together += (batch.tokens[has_labels, 0] - 1).tolist()
        assert sorted(together) == sorted(alone.indices(step))
    indices = [i for step in range(3) for i in alone.indices(step)]
    assert sorted(indices) == list(range(20))  # each example once per epoch
    assert indices != [i for step in range(3, 6) for i in alone.indices(step)]  # every epoch in another order


def test_every_process_gets_equally_many_micro_batches():
    parts = {
        len(BatchSampler(UnevenTask(), None, length=6, batch=8, seed=0).micro_batches(2, size=1, rank=r, world_size=3))  # type: ignore[arg-type]
        for r in range(3)
    }
    assert parts == {2}  # four rows for three processes


def test_budgets():
    assert Budget.of(TrainSettings(steps=7), 3).steps == 7
    assert Budget.of(TrainSettings(epochs=2.5), 3).steps == 8
    assert Budget.of(TrainSettings(), 3).steps == 3
    minutes = Budget.of(TrainSettings(minutes=2.0), 3)
    assert minutes.fraction(5, 60.0) == 0.5
    assert minutes.expected_steps(5, 60.0) == 10
    assert minutes.fraction(1, 121.0) == 1.0
    assert due_steps(None, 5) == [2, 4, 6, 8, 10]
    assert due_steps(4, 5) == [4, 8, 10]


def due_steps(every, times):
    milestones, steps = Milestones(Budget(10, None), TrainState()), []
    for step in range(1, 11):
        milestones.advance(TrainState(step=step))
        if milestones.due(every, times):
            steps.append(step)
    return steps


def test_a_run_learns_and_logs(corpus, tmp_path, tiny):
    lines = []
    results = headstock.pretrain(
        corpus,
        out=tmp_path / "run",
        settings=tiny | {"steps": 60, "lr": 1e-2, "tensorboard": True},
        callbacks=[log_lines(lines.append)],
    )
    assert results["valid_loss"] < 3.6 < math.log(300)
    assert results["perplexity"] == pytest.approx(math.exp(results["valid_loss"]))
    assert results["tokens"] > 0
    assert results["tokens_per_second"] > 0
    assert any(
        re.match(r"\| epoch   \d \|    30/   60 steps \| loss \d\.\d{5} \| ppl +\d+\.\d{3} \|", line) for line in lines
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "valid_loss" in row] == list(range(6, 61, 6))
    assert sum("loss" in row for row in rows) >= 50
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_tensorboard_reads_the_events(corpus, tmp_path, tiny):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"tensorboard": True})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    assert events.Scalars("valid/bits_per_byte")


def test_minutes_end_the_run_and_its_schedule(corpus, tmp_path, tiny):
    del tiny["steps"]
    results = headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"minutes": 0.02, "log_every": 1})
    assert results["steps"] > 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates[-1] < 0.5 * max(rates)


def test_runs_are_determined_by_their_seed(corpus, tmp_path, tiny):
    weights = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        headstock.pretrain(corpus, out=tmp_path / name, settings=tiny | {"seed": seed})
        weights[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert weights["a"] == weights["b"] != weights["c"]


def test_a_config_repeats_its_run(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "a", settings=tiny)
    headstock.pretrain(out=tmp_path / "b", config_file=tmp_path / "a" / "config.json")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_batch(corpus, tmp_path, tiny, monkeypatch):
    losses = LossModule.forward
    calls = []

    def with_nan(self, batch):
        calls.append(0)
        return {head: loss * (math.nan if len(calls) == 8 else 1) for head, loss in losses(self, batch).items()}

    monkeypatch.setattr(LossModule, "forward", with_nan)
    with pytest.raises(WorkError) as caught:
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"checkpoint_every": 3, "validate_every": 3})
    message = str(caught.value)
    assert message.startswith("step 8: the loss or its gradient is not a finite number")
    assert f"{corpus}:" in message
    assert "step-6" in message
    assert not (tmp_path / "run" / "checkpoints" / "step-8").exists()


def test_a_batch_not_divisible_by_the_processes_is_rejected():
    with pytest.raises(UserError, match=r"8 .* 3 processes"):
        check_settings(TrainSettings(batch=8), DistributedContext(torch.device("cpu"), 0, 3))


def test_padded_rows(corpus, tmp_path, tiny):
    results = headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"rows": "padded"})
    assert math.isfinite(results["valid_loss"])


def test_label_smoothing_applies_to_training_only(corpus, tmp_path, tiny):
    plain = headstock.pretrain(corpus, out=tmp_path / "a", settings=tiny | {"lr": 1e-12})
    smooth = headstock.pretrain(corpus, out=tmp_path / "b", settings=tiny | {"lr": 1e-12, "label_smoothing": 0.3})
    assert smooth["valid_loss"] == pytest.approx(plain["valid_loss"], abs=1e-4)
    assert smooth["train_loss"] != plain["train_loss"]


def test_compiled_gives_the_same_losses(corpus, tmp_path, tiny, monkeypatch):
    # captures and differentiates the graph; generating C++ would take a minute
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tiny |= {"steps": 3, "depth": 1, "log_every": 1}
    losses = {}
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        headstock.pretrain(corpus, out=out, settings=tiny | {"compile": compiled})
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[compiled] = [row["loss"] for row in rows if "loss" in row]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_a_gradient_that_is_not_finite_stops_the_run_before_its_weights_are_saved(corpus, tmp_path, tiny, monkeypatch):
    losses = LossModule.forward
    calls = []

    def with_nan(self, batch):
        calls.append(0)
        sums = losses(self, batch)
        if len(calls) == 6:
            for loss in sums.values():
                loss.register_hook(lambda gradient: gradient * math.nan)
        return sums

    monkeypatch.setattr(LossModule, "forward", with_nan)
    with pytest.raises(WorkError, match=r"step 6: the loss or its gradient is not a finite number.*step-3"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"checkpoint_every": 3, "validate_every": 3})
    assert not (tmp_path / "run" / "checkpoints" / "step-6").exists()


def test_a_validation_loss_that_is_not_finite_stops_the_run(corpus, tmp_path, tiny):
    """The update itself makes the weights infinite, so that the step's loss and gradient are finite."""
    with pytest.raises(WorkError, match=r"step 1: the validation loss is not a finite number.*no checkpoint yet"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1, "lr": 1e38, "clip": 0.0})
    assert not (tmp_path / "run" / "results.json").exists()


def test_gradients_that_are_not_finite_change_neither_weights_nor_optimizer_states():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(3)
    update_weights([optimizer], 1.0, to_none=True)
    before, moment = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    weight.grad = torch.tensor([1.0, math.nan, 1.0])
    assert not update_weights([optimizer], 1.0, to_none=True).isfinite()
    assert torch.equal(weight, before) and torch.equal(optimizer.state[weight]["exp_avg"], moment)
    weight.grad = torch.ones(3)  # a control: finite gradients change them
    update_weights([optimizer], 1.0, to_none=True)
    assert not torch.equal(weight, before)


def test_spikes_are_detected_the_same_after_a_resume(messages):
    healthy = [(3.0 - step / 100 + 0.02 * (step % 3), 1.0 + 0.1 * (step % 5)) for step in range(60)]
    uninterrupted, first = SpikeDetector(), SpikeDetector()
    for step, values in enumerate(healthy):
        uninterrupted.add(step, *values)
        first.add(step, *values)
    second = SpikeDetector(first.count)
    second.restore(json.loads(json.dumps(first.state())))
    for detector in (uninterrupted, second):
        detector.add(60, 2.4, 9.0)
        detector.add(61, 6.5, 1.0)
    assert messages[:2] == messages[2:]
    assert uninterrupted.count == second.count == 2
    assert "gradient norm 9" in messages[0] and "loss 6.5" in messages[1]
