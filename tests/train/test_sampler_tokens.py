"""Steps of a number of tokens: each example once, equally many steps per epoch, determined by the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.train.sampler import BatchSampler
from tests.train.test_sampler import LengthTask, Plain, Texts, steps_of


def make_sampler(lengths, tokens, *, seed=0, kind=Texts):
    return BatchSampler(LengthTask(kind), lengths, length=512, batch=4, batch_tokens=tokens, seed=seed)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=200), st.integers(1, 300), st.integers(0, 3))
def test_each_example_occurs_once_per_epoch_and_no_step_is_empty(lengths, tokens, seed):
    sampler = make_sampler(lengths, tokens, seed=seed)
    for epoch in range(3):
        steps = steps_of(sampler, epoch)
        assert sorted(index for step in steps for index in step) == list(range(len(lengths)))
        assert all(steps)


def test_steps_are_filled_up_to_the_limit_including_padding():
    lengths = np.random.default_rng(0).integers(3, 60, 3000)
    lengths[7] = 400
    sampler = make_sampler(lengths, 1000)
    steps = steps_of(sampler)
    padded = np.array([len(step) * lengths[step].max() for step in steps])
    assert padded.max() <= 1000 and np.median(padded) > 950
    assert padded.sum() < 1.05 * lengths.sum()
    means = [np.mean(lengths[step]) for step in steps][:20]
    assert np.std(means) > 5  # steps are in random order
    (alone,) = (step for step in steps_of(make_sampler(lengths, 300)) if 7 in step)
    assert alone == [7]  # an example above the limit is a step of its own


class Changing(Texts):
    """Lengths that change between epochs, as those of document windows do."""


class ChangingTask(LengthTask):
    def examples(self, data, *, length, seed=None, epoch=0):
        return Changing(
            np.random.default_rng(epoch).permutation(data) + np.random.default_rng(epoch).integers(0, 9, len(data))
        )


@pytest.mark.parametrize("count", [1, 7, 300])
def test_every_epoch_has_equally_many_steps_where_lengths_change(count):
    lengths = np.random.default_rng(3).integers(3, 60, count)
    sampler = BatchSampler(ChangingTask(), lengths, length=512, batch=4, batch_tokens=400, seed=0)  # type: ignore[arg-type]
    for epoch in range(6):
        steps = steps_of(sampler, epoch)
        assert all(steps) and sorted(index for step in steps for index in step) == list(range(count))


def test_steps_are_a_pure_function_of_seed_and_epoch():
    lengths = np.random.default_rng(1).integers(3, 60, 400)
    first, second = make_sampler(lengths, 300), make_sampler(lengths, 300)
    last = 2 * first.steps_per_epoch + 5
    assert [first.indices(step) for step in range(last + 1)][-1] == second.indices(last)
    assert steps_of(first, 0) != steps_of(first, 1)
    assert steps_of(first) != steps_of(make_sampler(lengths, 300, seed=1))


def test_processes_share_all_rows_of_a_step():
    lengths = np.random.default_rng(2).integers(3, 60, 90)
    sampler = make_sampler(lengths, 300)
    for step in range(sampler.steps_per_epoch):
        rows = [
            int(row)
            for rank in range(2)
            for batch in sampler.micro_batches(step, size=None, rank=rank, world_size=2, full=True)
            for row, label in zip(batch.tokens[:, 0].tolist(), batch.labels["label"].tolist(), strict=True)
            if label == 0
        ]
        assert sorted(rows) == sorted(sampler.indices(step))


def test_rows_without_lengths_count_as_full_rows():
    assert make_sampler([5] * 10, 1024, kind=Plain).steps_per_epoch == pytest.approx(5)
