"""Which examples make up which step, where they differ in length."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.model.batch import Batch
from headstock.rng import RandomPermutation, generator
from headstock.train import sampler as order_module
from headstock.train.sampler import POOL, BatchSampler, steps_by_length


class Texts:
    """Examples of given lengths; example i is a row of the number i."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)

    def __len__(self):
        return len(self.lengths)

    def batch(self, indices):
        longest = max(self.lengths[i] for i in indices)
        tokens = torch.stack([torch.full((int(longest),), int(i)) for i in indices])
        return Batch(tokens, labels={"label": torch.zeros(len(indices), dtype=torch.long)})

    def name(self, index):
        return f"text {index}"


class Plain(Texts):
    """The same, but nobody is told the lengths."""

    def __init__(self, lengths):
        self.sizes = np.asarray(lengths)

    def __len__(self):
        return len(self.sizes)


class LengthTask:
    def __init__(self, kind=Texts):
        self.kind = kind

    def examples(self, data, *, length, seed=None, epoch=0):
        return self.kind(data)


def order_of(lengths, batch, *, seed=0, kind=Texts):
    return BatchSampler(LengthTask(kind), lengths, length=512, batch=batch, seed=seed)  # type: ignore[arg-type]


def steps_of(order, epoch=0):
    first = epoch * order.steps_per_epoch
    return [order.indices(step) for step in range(first, first + order.steps_per_epoch)]


def skewed(count):
    """Many short texts and a long tail, as reviews have."""
    return np.minimum(512, 5 + generator(1, "lengths").lognormal(4.0, 0.9, count).astype(int))


def padding_share(lengths, steps):
    read = sum(len(step) * int(lengths[step].max()) for step in steps)
    return 1 - sum(int(lengths[step].sum()) for step in steps) / read


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(1, 9), st.integers(0, 1000))
def test_every_example_comes_once_a_pass_and_the_step_that_is_not_full_is_the_last(count, batch, seed):
    lengths = generator(seed, "lengths").integers(1, 40, count)
    for epoch in (0, 1):
        order = order_of(lengths, batch, seed=seed)
        steps = steps_of(order, epoch)
        assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
        assert all(len(step) == batch for step in steps[:-1])
        assert len(steps[-1]) == (len(lengths) - 1) % batch + 1
        assert steps_of(order_of(lengths, batch, seed=seed), epoch) == steps  # a pure function of seed and epoch


def test_passes_and_seeds_differ_in_steps_and_in_who_meets_whom():
    lengths = skewed(3000)
    order = order_of(lengths, 16)
    passes = [steps_of(order, epoch) for epoch in (0, 1)] + [steps_of(order_of(lengths, 16, seed=1))]
    met = [{(a, b) for step in steps for a in step for b in step if a < b} for steps in passes]
    for one in range(3):
        for other in range(one):
            assert passes[one] != passes[other]
            assert len(met[one] & met[other]) < 0.3 * len(met[one])
    assert steps_of(order, 0) == passes[0]  # also after other passes were asked for


def test_steps_of_like_length_hold_little_padding():
    lengths = skewed(3000)
    sorted_steps, random_steps = steps_of(order_of(lengths, 16)), steps_of(order_of(lengths, 16, kind=Plain))
    assert padding_share(lengths, sorted_steps) < 0.1
    assert padding_share(lengths, random_steps) > 0.3
    longest = np.array([lengths[step].max() for step in sorted_steps[:-1]])
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.3  # yet a step does not foretell the next


def test_only_steps_near_one_another_are_sorted_together():
    count, batch = 3 * POOL * 2, 2
    order = np.arange(count)
    lengths = order[::-1].copy()
    made = steps_by_length(order, lengths, batch, generator(0, "pools"))
    assert sorted(made) == order.tolist()
    pools = {frozenset(step // (POOL * batch)) for step in made.reshape(-1, batch)}
    assert pools == {frozenset([0]), frozenset([1]), frozenset([2])}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("size", [None, 1])
def test_a_step_is_the_same_for_any_number_of_processes(world_size, size):
    lengths = skewed(30)
    alone = order_of(lengths, 8)
    for step in range(8):
        together, parts = [], set()
        for rank in range(world_size):
            batches = order_of(lengths, 8).micro_batches(step, size=size, rank=rank, world_size=world_size)
            parts.add(len(batches))
            for batch in batches:
                counted = batch.labels["label"] != -100
                together += batch.tokens[counted, 0].tolist()
        assert sorted(together) == sorted(alone.indices(step))
        assert len(parts) == 1


# Very many examples


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 9))
def test_a_computed_order_has_every_number_once(count, seed):
    order = RandomPermutation(count, seed, 0, "order")
    whole = order[0:count]
    assert sorted(whole) == list(range(count)) == sorted(order[:])
    assert np.array_equal(np.concatenate([order[:5], order[5:11], order[11:]]), whole)


def test_a_computed_order_is_another_in_every_pass_and_looks_like_chance():
    first, second = (RandomPermutation(100_000, 0, epoch, "order")[:] for epoch in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, RandomPermutation(100_000, 0, 0, "order")[:])
    for one in (first, second):
        assert abs(np.corrcoef(np.arange(100_000), one)[0, 1]) < 0.015  # chance: 0.003
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.015
        assert 0.45 < np.mean(np.diff(one) > 0) < 0.55
        halves = [np.mean(part < 50_000) for part in np.split(one, 100)]
        assert 0.01 < np.std(halves) < 0.024  # a thousand throws of a coin: 0.016


class Countless:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


def test_nothing_grows_with_the_examples(monkeypatch):
    many = 10**12  # an array of them would fill any memory
    order = BatchSampler(LengthTask(Countless), many, length=8, batch=64, seed=0)  # type: ignore[arg-type]
    assert order.steps_per_epoch == -(-many // 64)
    steps = [order.indices(step) for step in (0, 1, order.steps_per_epoch - 1, order.steps_per_epoch)]
    assert len({index for step in steps for index in step}) == 64 * 4
    assert all(0 <= index < many for step in steps for index in step)
    monkeypatch.setattr(order_module, "MAX_IN_MEMORY", 10)
    small = order_of([1] * 25, 4, kind=Plain)
    assert sorted(index for step in steps_of(small) for index in step) == list(range(25))
    assert [len(step) for step in steps_of(small, epoch=1)] == [4] * 6 + [1]
