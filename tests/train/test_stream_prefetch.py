"""A stream made ahead: the same items, in their order, and never many of them at once."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.train.stream_prefetch import WAITING, growing, made_ahead, worked_ahead


@given(st.integers(0, 3000), st.integers(1, 900))
def test_parts_grow_and_hold_every_item_once(count, most):
    parts = list(growing(range(count), most=most))
    assert [item for part in parts for item in part] == list(range(count))
    assert all(len(part) <= most for part in parts)
    assert all(len(after) >= min(most, 2 * len(before)) for before, after in itertools.pairwise(parts[:-1]))


def test_the_first_part_does_not_wait_for_the_last_item():
    assert len(next(growing(itertools.count()))) < 1000


@given(st.lists(st.one_of(st.none(), st.integers())))
def test_items_come_in_order_whatever_they_are(items):
    assert list(made_ahead(iter(items))) == items


def test_what_goes_wrong_is_heard_in_its_turn():
    def broken():
        yield from (1, 2, 3)
        raise KeyError("fourth")

    stream = made_ahead(broken())
    assert list(itertools.islice(stream, 3)) == [1, 2, 3]
    with pytest.raises(KeyError, match="fourth"):
        next(stream)


def test_few_items_wait_however_many_are_to_come():
    used, lead = 0, []

    def counted():
        for made in range(300):
            lead.append(made - used)
            yield made

    for _ in made_ahead(counted()):
        used += 1
    assert used == 300
    assert max(lead) <= WAITING + 2  # those that wait, the one being made, and the one in use


def test_nobody_goes_on_making_when_nobody_asks():
    before = set(threading.enumerate())
    stream = made_ahead(itertools.count())
    assert list(itertools.islice(stream, 5)) == [0, 1, 2, 3, 4]
    (thread,) = set(threading.enumerate()) - before
    stream.close()
    thread.join(60)  # an end to a test that would otherwise never fail
    assert not thread.is_alive()


@pytest.mark.parametrize("threads", [1, 3])
def test_work_is_told_in_order_however_many_do_it(threads):
    first = threading.Event()

    def work(item):
        if item == 0 and threads > 1:
            assert first.wait(60)  # the first is done after the second, which others do meanwhile
        first.set()
        if item == 7:
            raise KeyError("eighth")
        return item * item

    assert list(worked_ahead(work, iter(range(7)), threads=threads)) == [item * item for item in range(7)]
    first.clear()
    stream = worked_ahead(work, itertools.count(), threads=threads)
    assert list(itertools.islice(stream, 7)) == [item * item for item in range(7)]
    with pytest.raises(KeyError, match="eighth"):
        next(stream)


def test_few_parts_are_worked_on_however_many_are_to_come():
    used, lead = 0, []

    def counted():
        for made in range(300):
            lead.append(made - used)
            yield made

    for _ in worked_ahead(str, counted(), threads=3):
        used += 1
    assert used == 300
    assert max(lead) <= WAITING + 2


def test_workers_leave_when_nobody_asks():
    before = set(threading.enumerate())
    stream = worked_ahead(str, itertools.count(), threads=3)
    assert next(stream) == "0"
    more = set(threading.enumerate()) - before
    stream.close()
    for thread in more:
        thread.join(60)
    assert not any(thread.is_alive() for thread in more)
