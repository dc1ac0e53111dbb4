"""Running out of memory: smaller micro-batches with the same gradients, or an error with a hint."""

import json
from dataclasses import replace

import pytest
import torch

import headstock
from headstock.errors import WorkError
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch
from headstock.train import pretrain
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.run_folder import RunFolder
from headstock.train.session import Session
from headstock.train.settings import make_config
from headstock.train.step import MicroBatching, is_out_of_memory

ALONE = DistributedContext(torch.device("cpu"))


@pytest.fixture
def limit_memory(monkeypatch):
    """Limits the rows per forward pass as a full GPU would; returns the list of rows of each call."""
    calls: list[int] = []

    def limit(rows: int, error: BaseException | None = None) -> list[int]:
        forward = Transformer.forward

        def limited(self, batch: Batch, *args, **kwargs):
            if self.training:
                calls.append(len(batch.tokens))
                if len(batch.tokens) > rows:
                    raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore.")
            return forward(self, batch, *args, **kwargs)

        monkeypatch.setattr(Transformer, "forward", limited)
        return calls

    return limit


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_smaller_micro_batches_give_the_same_losses(corpus, tiny, tmp_path, limit_memory, objective, messages):
    settings = tiny | {"steps": 6, "log_every": 1, "validate_every": 6}
    plain = headstock.pretrain(corpus, out=tmp_path / "plain", objective=objective, settings=settings)
    calls = limit_memory(3)
    small = headstock.pretrain(corpus, out=tmp_path / "small", objective=objective, settings=settings)
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert small["valid_loss"] == pytest.approx(plain["valid_loss"], rel=1e-4)
    (message,) = [line for line in messages if "memory" in line]
    assert "2 rows" in message and "4 micro-batches" in message and "micro_batch=2" in message
    assert calls[:6] == [8, 4, 2, 2, 2, 2]
    assert sum(rows for rows in calls if rows == 2) == 8 * 6  # prefetched steps are split again


def test_a_micro_batch_that_is_set_is_halved_too(corpus, tiny, tmp_path, limit_memory):
    calls = limit_memory(2)
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1, "micro_batch": 4})
    assert calls == [4, 2, 2, 2, 2]


def test_the_final_evaluation_uses_the_micro_batch_of_training(corpus, tiny, tmp_path, limit_memory, monkeypatch):
    limit_memory(3)
    batch_sizes, evaluate = [], pretrain.evaluate

    def recorded(*args, batch_size, distributed, **kwargs):
        batch_sizes.append(batch_size)
        return evaluate(*args, batch_size=batch_size, distributed=ALONE, **kwargs)

    monkeypatch.setattr(pretrain, "evaluate", recorded)
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1})
    assert batch_sizes == [2]
    monkeypatch.setattr(pretrain, "train", lambda *args, **kwargs: TrainState(step=1))
    run = RunFolder(tmp_path / "run")
    for distributed in (ALONE, replace(ALONE, size=2)):  # where a batch of 8 fits
        setup = pretrain.open_setup(run, make_config(run.config()))
        pretrain.train_and_evaluate(Session(run, distributed, resuming=True), setup, ())
    assert batch_sizes == [2, 8, 4]


def test_a_single_row_that_does_not_fit_is_an_error(corpus, tiny, tmp_path, limit_memory):
    limit_memory(0)
    with pytest.raises(WorkError, match=r"single row of 32 tokens.*CUDA out of memory"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny)


def test_other_errors_are_raised_unchanged(corpus, tiny, tmp_path, limit_memory):
    limit_memory(0, RuntimeError("a matrix of another shape"))
    with pytest.raises(RuntimeError, match="another shape"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny)


def rows(count):
    return Batch(torch.zeros(count, 4, dtype=torch.long))


class LimitedStep:
    """Stands in for a TrainingStep whose memory holds `limit` rows per micro-batch."""

    def __init__(self, limit, distributed=ALONE):
        self.limit, self.distributed = limit, distributed

    def accumulate(self, step, batches):
        if max(len(batch.tokens) for batch in batches) > self.limit:
            raise torch.OutOfMemoryError("full")
        return sum(len(batch.tokens) for batch in batches)

    def zero_grad(self):
        pass

    def finish(self, gradients, lr):
        return gradients


def test_prefetched_batches_are_split_to_the_size_that_fits(messages):
    step = MicroBatching(LimitedStep(4), lambda step, size: [rows(size)] * (16 // size), None)
    assert step(0, [rows(16)], 0.1) == 16 and step.size == 4
    assert step(1, [rows(16)], 0.1) == 16 and step.size == 4  # not halved again
    assert len(messages) == 1


def test_with_several_processes_running_out_of_memory_is_an_error():
    limited = LimitedStep(0, DistributedContext(torch.device("cpu"), rank=1, size=2))
    with pytest.raises(WorkError, match="micro_batch"):
        MicroBatching(limited, lambda step, size: [], None)(0, [rows(16)], 0.1)


def test_out_of_memory_errors_of_the_cpu_are_recognized():
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 56)  # more than any machine has
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("shapes do not agree"))


@pytest.mark.parametrize(
    "message",
    ["CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"],
)
def test_out_of_memory_messages_of_libraries_are_recognized(message):
    assert is_out_of_memory(RuntimeError(message))


def fail_to_capture():
    try:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_memory_that_runs_out_in_a_capture_is_recognized_behind_the_error_of_its_end():
    with pytest.raises(RuntimeError) as error:
        fail_to_capture()
    assert is_out_of_memory(error.value)
