"""Steps of about so many tokens: each example once, as many steps in every pass, the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.train.sampler import BatchSampler
from tests.train.test_sampler import LengthTask, Plain, Texts, steps_of


def order_of(lengths, tokens, *, seed=0, kind=Texts):
    return BatchSampler(LengthTask(kind), lengths, length=512, batch=4, batch_tokens=tokens, seed=seed)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=200), st.integers(1, 300), st.integers(0, 3))
def test_each_example_comes_once_a_pass_and_no_step_is_empty(lengths, tokens, seed):
    order = order_of(lengths, tokens, seed=seed)
    for epoch in range(3):
        steps = steps_of(order, epoch)
        assert sorted(index for step in steps for index in step) == list(range(len(lengths)))
        assert all(steps)


def test_no_step_has_more_tokens_with_its_padding_and_few_have_many_less():
    lengths = np.random.default_rng(0).integers(3, 60, 3000)
    lengths[7] = 400
    order = order_of(lengths, 1000)
    steps = steps_of(order)
    padded = np.array([len(step) * lengths[step].max() for step in steps])
    assert padded.max() <= 1000 and np.median(padded) > 950
    assert padded.sum() < 1.05 * lengths.sum()
    means = [np.mean(lengths[step]) for step in steps][:20]
    assert np.std(means) > 5  # steps do not come sorted
    (alone,) = (step for step in steps_of(order_of(lengths, 300)) if 7 in step)
    assert alone == [7]  # longer than a step may be, it is one by itself


class Changing(Texts):
    """Lengths that are others in every pass, as pieces of documents have."""


class ChangingTask(LengthTask):
    def examples(self, data, *, length, seed=None, epoch=0):
        return Changing(
            np.random.default_rng(epoch).permutation(data) + np.random.default_rng(epoch).integers(0, 9, len(data))
        )


@pytest.mark.parametrize("count", [1, 7, 300])
def test_there_are_as_many_steps_in_every_pass_also_where_lengths_change(count):
    lengths = np.random.default_rng(3).integers(3, 60, count)
    order = BatchSampler(ChangingTask(), lengths, length=512, batch=4, batch_tokens=400, seed=0)  # type: ignore[arg-type]
    for epoch in range(6):
        steps = steps_of(order, epoch)
        assert all(steps) and sorted(index for step in steps for index in step) == list(range(count))


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    lengths = np.random.default_rng(1).integers(3, 60, 400)
    one, other = order_of(lengths, 300), order_of(lengths, 300)
    last = 2 * one.steps_per_epoch + 5
    assert [one.indices(step) for step in range(last + 1)][-1] == other.indices(last)  # also when it is asked first
    assert steps_of(one, 0) != steps_of(one, 1)
    assert steps_of(one) != steps_of(order_of(lengths, 300, seed=1))


def test_processes_share_a_step_without_losing_a_row():
    lengths = np.random.default_rng(2).integers(3, 60, 90)
    order = order_of(lengths, 300)
    for step in range(order.steps_per_epoch):
        rows = [
            int(row)
            for rank in range(2)
            for batch in order.micro_batches(step, size=None, rank=rank, world_size=2, full=True)
            for row, label in zip(batch.tokens[:, 0].tolist(), batch.labels["label"].tolist(), strict=True)
            if label == 0
        ]
        assert sorted(rows) == sorted(order.indices(step))


def test_rows_whose_lengths_nobody_tells_are_full_ones():
    assert order_of([5] * 10, 1024, kind=Plain).steps_per_epoch == pytest.approx(5)
