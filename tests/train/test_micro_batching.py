"""Memory that runs out: the step is the same, cut smaller; and where it cannot be, the user is told."""

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
def little_memory(monkeypatch):
    """A machine whose memory holds so many rows: reading more raises what torch raises; calls are noted."""
    read: list[int] = []

    def most(rows: int, error: BaseException | None = None) -> list[int]:
        forward = Transformer.forward

        def limited(self, batch: Batch, *given, **more):
            if self.training:
                read.append(len(batch.tokens))
                if len(batch.tokens) > rows:
                    raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore.")
            return forward(self, batch, *given, **more)

        monkeypatch.setattr(Transformer, "forward", limited)
        return read

    return most


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_the_same_losses_with_fewer_rows_at_once(corpus, tiny, tmp_path, little_memory, objective, messages):
    settings = tiny | {"steps": 6, "log_every": 1, "validate_every": 6}
    plain = headstock.pretrain(corpus, out=tmp_path / "plain", objective=objective, settings=settings)
    read = little_memory(3)
    small = headstock.pretrain(corpus, out=tmp_path / "small", objective=objective, settings=settings)
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert small["valid_loss"] == pytest.approx(plain["valid_loss"], rel=1e-4)
    (message,) = [line for line in messages if "memory" in line]
    assert "2 rows" in message and "4 micro-batches" in message and "micro_batch=2" in message
    assert read[:6] == [8, 4, 2, 2, 2, 2]
    assert sum(rows for rows in read if rows == 2) == 8 * 6  # kept, though steps that were made ahead are cut again


def test_a_micro_batch_that_is_set_is_halved_too(corpus, tiny, tmp_path, little_memory):
    read = little_memory(2)
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1, "micro_batch": 4})
    assert read == [4, 2, 2, 2, 2]


def test_the_last_measurement_reads_as_many_rows_at_once_as_training(
    corpus, tiny, tmp_path, little_memory, monkeypatch
):
    little_memory(3)
    seen, measure = [], pretrain.evaluate

    def noted(*given, batch_size, distributed, **more):
        seen.append(batch_size)
        return measure(*given, batch_size=batch_size, distributed=ALONE, **more)

    monkeypatch.setattr(pretrain, "evaluate", noted)
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 1})
    assert seen == [2]
    monkeypatch.setattr(pretrain, "train", lambda *given, **more: TrainState(step=1))
    run = RunFolder(tmp_path / "run")
    for distributed in (ALONE, replace(ALONE, size=2)):  # whose batch of 8 fitted
        setup = pretrain.open_setup(run, make_config(run.config()))
        pretrain.train_and_evaluate(Session(run, distributed, resuming=True), setup, ())
    assert seen == [2, 8, 4]


def test_a_single_row_that_does_not_fit_is_said(corpus, tiny, tmp_path, little_memory):
    little_memory(0)
    with pytest.raises(WorkError, match=r"single row of 32 tokens.*CUDA out of memory"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny)


def test_other_errors_pass_untouched(corpus, tiny, tmp_path, little_memory):
    little_memory(0, RuntimeError("a matrix of another shape"))
    with pytest.raises(RuntimeError, match="another shape"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny)


def rows(count):
    return Batch(torch.zeros(count, 4, dtype=torch.long))


class LimitedStep:
    """Stands in for a TrainingStep whose memory holds `most` rows per micro-batch."""

    def __init__(self, most, distributed=ALONE):
        self.most, self.distributed = most, distributed

    def accumulate(self, step, batches):
        if max(len(batch.tokens) for batch in batches) > self.most:
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


def test_the_cpu_has_its_own_words_for_it():
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 56)  # more than any machine has
    assert is_out_of_memory(found.value)
    assert not is_out_of_memory(RuntimeError("shapes do not agree"))


@pytest.mark.parametrize(
    "said",
    ["CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"],
)
def test_what_lies_under_torch_has_other_words_for_it(said):
    assert is_out_of_memory(RuntimeError(said))
