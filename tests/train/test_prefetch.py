"""Batches that are made ahead: in order, no more than asked for, and whatever goes wrong is heard of in its step."""

import threading

import pytest
import torch

from headstock.model.batch import Batch
from headstock.train.prefetch import STEPS, Prefetcher
from headstock.train.run_folder import RunFolder


def batch(number):
    return [Batch(torch.tensor([[number]]))]


def told(batches):
    return int(batches[0].tokens)


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_steps_come_in_order_from_where_a_run_goes_on():
    with Prefetcher(batch, 5, 30) as ahead:
        assert [told(ahead.take(step)) for step in range(5, 30)] == list(range(5, 30))
    assert not alive()


def test_it_waits_when_enough_is_ready():
    made, full = [], threading.Event()

    def make(step):
        made.append(step)
        if len(made) == STEPS + 1:
            full.set()
        return batch(step)

    with Prefetcher(make, 0) as ahead:
        assert full.wait(60)  # so many are made without anyone asking,
        assert told(ahead.take(0)) == 0
    assert not alive()
    assert made == list(range(len(made))) and len(made) <= STEPS + 3  # and then it waited


def test_an_error_is_heard_in_its_own_step():
    def make(step):
        if step == 2:
            raise ValueError("bad row")
        return batch(step)

    with Prefetcher(make, 0) as ahead:
        assert [told(ahead.take(step)) for step in (0, 1)] == [0, 1]
        with pytest.raises(ValueError, match="bad row"):
            ahead.take(2)
    assert not alive()


def test_an_error_past_the_end_is_nobodys():
    with Prefetcher(lambda step: batch(step) if step < 2 else 1 / 0, 0) as ahead:
        assert told(ahead.take(0)) == 0
    assert not alive()


def test_whoever_leaves_early_leaves_no_thread_behind():
    def leave():
        with Prefetcher(batch, 0) as ahead:
            ahead.take(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert not alive()


def test_a_changing_share_of_hidden_tokens_does_not_depend_on_how_far_ahead_they_are_hidden(
    corpus, tmp_path, tiny, monkeypatch
):
    import headstock
    from headstock.train import loop

    class InTurn(Prefetcher):
        """Makes a step's batches when they are asked for."""

        def __enter__(self):
            return self

        def take(self, step):
            return self.make(step)

        def __exit__(self, *_):
            pass

    settings = tiny | {"task.fraction_start": 0.5, "log_every": 1}
    curves = []
    for kind in (Prefetcher, InTurn):
        monkeypatch.setattr(loop, "Prefetcher", kind)
        headstock.pretrain(corpus, out=tmp_path / kind.__name__, objective="masked", settings=settings)
        curves.append([row["loss"] for row in RunFolder(tmp_path / kind.__name__).read_metrics() if "loss" in row])
    assert len(curves[0]) == 12 and curves[0] == curves[1]
