"""The batch sampler: steps of similar length, the same for any number of processes and examples."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.model.batch import Batch
from headstock.rng import RandomPermutation, generator
from headstock.train import sampler as sampler_module
from headstock.train.sampler import POOL, BatchSampler, steps_by_length


class Texts:
    """Examples with the lengths `lengths`; example i is a row of the number i."""

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
    """The same without `lengths`."""

    def __init__(self, lengths):
        self.sizes = np.asarray(lengths)

    def __len__(self):
        return len(self.sizes)


class LengthTask:
    def __init__(self, kind=Texts):
        self.kind = kind

    def examples(self, data, *, length, seed=None, epoch=0):
        return self.kind(data)


def make_sampler(lengths, batch, *, seed=0, kind=Texts):
    return BatchSampler(LengthTask(kind), lengths, length=512, batch=batch, seed=seed)  # type: ignore[arg-type]


def steps_of(sampler, epoch=0):
    first = epoch * sampler.steps_per_epoch
    return [sampler.indices(step) for step in range(first, first + sampler.steps_per_epoch)]


def skewed(count):
    """Lengths with many short texts and a long tail, as of reviews."""
    return np.minimum(512, 5 + generator(1, "lengths").lognormal(4.0, 0.9, count).astype(int))


def padding_share(lengths, steps):
    padded = sum(len(step) * int(lengths[step].max()) for step in steps)
    return 1 - sum(int(lengths[step].sum()) for step in steps) / padded


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(1, 9), st.integers(0, 1000))
def test_every_example_occurs_once_per_epoch_and_the_last_step_may_be_smaller(count, batch, seed):
    lengths = generator(seed, "lengths").integers(1, 40, count)
    for epoch in (0, 1):
        steps = steps_of(make_sampler(lengths, batch, seed=seed), epoch)
        assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
        assert all(len(step) == batch for step in steps[:-1])
        assert len(steps[-1]) == (len(lengths) - 1) % batch + 1
        assert steps_of(make_sampler(lengths, batch, seed=seed), epoch) == steps  # a pure function of seed and epoch


def test_epochs_and_seeds_combine_different_examples():
    lengths = skewed(3000)
    sampler = make_sampler(lengths, 16)
    epochs = [steps_of(sampler, epoch) for epoch in (0, 1)] + [steps_of(make_sampler(lengths, 16, seed=1))]
    pairs = [{(a, b) for step in steps for a in step for b in step if a < b} for steps in epochs]
    for first, second in itertools.combinations(range(3), 2):
        assert epochs[first] != epochs[second]
        assert len(pairs[first] & pairs[second]) < 0.3 * len(pairs[first])
    assert steps_of(sampler, 0) == epochs[0]  # also after other epochs


def test_steps_of_similar_length_have_little_padding():
    lengths = skewed(3000)
    sorted_steps, random_steps = steps_of(make_sampler(lengths, 16)), steps_of(make_sampler(lengths, 16, kind=Plain))
    assert padding_share(lengths, sorted_steps) < 0.1
    assert padding_share(lengths, random_steps) > 0.3
    longest = np.array([lengths[step].max() for step in sorted_steps[:-1]])
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.3  # the steps are in random order


def test_examples_are_sorted_within_pools():
    count, batch = 3 * POOL * 2, 2
    order = np.arange(count)
    lengths = order[::-1].copy()
    sorted_order = steps_by_length(order, lengths, batch, generator(0, "pools"))
    assert sorted(sorted_order) == order.tolist()
    pools = {frozenset(step // (POOL * batch)) for step in sorted_order.reshape(-1, batch)}
    assert pools == {frozenset([0]), frozenset([1]), frozenset([2])}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("size", [None, 1])
def test_a_step_is_the_same_for_any_number_of_processes(world_size, size):
    lengths = skewed(30)
    alone = make_sampler(lengths, 8)
    for step in range(8):
        together, parts = [], set()
        for rank in range(world_size):
            batches = make_sampler(lengths, 8).micro_batches(step, size=size, rank=rank, world_size=world_size)
            parts.add(len(batches))
            for batch in batches:
                has_label = batch.labels["label"] != -100
                together += batch.tokens[has_label, 0].tolist()
        assert sorted(together) == sorted(alone.indices(step))
        assert len(parts) == 1


# More examples than fit into memory


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 9))
def test_a_random_permutation_has_every_number_once(count, seed):
    order = RandomPermutation(count, seed, 0, "order")
    numbers = order[0:count]
    assert sorted(numbers) == list(range(count)) == sorted(order[:])
    assert np.array_equal(np.concatenate([order[:5], order[5:11], order[11:]]), numbers)


def test_random_permutations_differ_between_epochs_and_look_random():
    first, second = (RandomPermutation(100_000, 0, epoch, "order")[:] for epoch in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, RandomPermutation(100_000, 0, 0, "order")[:])
    for order in (first, second):
        assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.015  # expected: 0.003
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.015
        assert 0.45 < np.mean(np.diff(order) > 0) < 0.55
        halves = [np.mean(part < 50_000) for part in np.split(order, 100)]
        assert 0.01 < np.std(halves) < 0.024  # expected of a thousand coin flips: 0.016


class ManyExamples:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


def test_memory_does_not_grow_with_the_examples(monkeypatch):
    many = 10**12  # too many for an array
    sampler = BatchSampler(LengthTask(ManyExamples), many, length=8, batch=64, seed=0)  # type: ignore[arg-type]
    assert sampler.steps_per_epoch == -(-many // 64)
    steps = [sampler.indices(step) for step in (0, 1, sampler.steps_per_epoch - 1, sampler.steps_per_epoch)]
    assert len({index for step in steps for index in step}) == 64 * 4
    assert all(0 <= index < many for step in steps for index in step)
    monkeypatch.setattr(sampler_module, "MAX_IN_MEMORY", 10)
    small = make_sampler([1] * 25, 4, kind=Plain)
    assert sorted(index for step in steps_of(small) for index in step) == list(range(25))
    assert [len(step) for step in steps_of(small, epoch=1)] == [4] * 6 + [1]
