"""The prefetcher: the same items in order, a bounded buffer, errors at their item, and no thread left behind."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headstock
from headstock.train import loop
from headstock.train.prefetch import BUFFER, Prefetcher, growing_chunks, prefetch_map
from headstock.train.run_folder import RunFolder


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@given(st.lists(st.one_of(st.none(), st.integers())))
def test_items_keep_their_order(items):
    assert list(Prefetcher(items)) == items


def test_the_buffer_is_bounded():
    computed, full = [], threading.Event()

    def items():
        for item in itertools.count():
            computed.append(item)
            if len(computed) == 4:
                full.set()
            yield item

    with Prefetcher(items(), size=3) as stream:
        assert full.wait(60)  # the buffer and one more are computed without a consumer
        assert next(stream) == 0
    assert not prefetch_threads()
    assert computed == list(range(len(computed))) and len(computed) <= 6


@pytest.mark.parametrize("stream", [Prefetcher, lambda items: prefetch_map(int, items, threads=3)])
def test_the_producer_stays_close_to_the_consumer(stream):
    used, lead = 0, []

    def items():
        for item in range(300):
            lead.append(item - used)
            yield item

    for _ in stream(items()):
        used += 1
    assert used == 300
    assert max(lead) <= BUFFER + 2  # the buffer, the item being computed, and the one in use


def test_an_error_is_raised_at_its_item():
    def items():
        yield from (1, 2, 3)
        raise KeyError("fourth")

    with Prefetcher(items()) as stream:
        assert list(itertools.islice(stream, 3)) == [1, 2, 3]
        with pytest.raises(KeyError, match="fourth"):
            next(stream)
        assert list(stream) == []
    assert not prefetch_threads()


def test_an_error_beyond_the_last_used_item_is_ignored():
    with Prefetcher(1 // (2 - item) for item in range(4)) as stream:
        assert next(stream) == 0
    assert not prefetch_threads()


def test_leaving_early_ends_the_thread():
    def leave():
        with Prefetcher(itertools.count()) as stream:
            next(stream)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert not prefetch_threads()


@pytest.mark.parametrize("end", ["close", "delete"])
def test_closing_or_abandoning_ends_the_thread(end):
    stream = Prefetcher(itertools.count())
    assert list(itertools.islice(stream, 5)) == [0, 1, 2, 3, 4]
    thread = stream.thread
    if end == "close":
        stream.close()
    del stream
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_mapped_stream_keeps_its_order_and_errors(threads):
    first = threading.Event()

    def work(item):
        if item == 0 and threads > 1:
            assert first.wait(60)  # the first item finishes after the second
        first.set()
        if item == 7:
            raise KeyError("eighth")
        return item * item

    assert list(prefetch_map(work, range(7), threads=threads)) == [item * item for item in range(7)]
    first.clear()
    stream = prefetch_map(work, itertools.count(), threads=threads)
    assert list(itertools.islice(stream, 7)) == [item * item for item in range(7)]
    with pytest.raises(KeyError, match="eighth"):
        next(stream)


def test_workers_end_when_a_mapped_stream_is_closed():
    before = set(threading.enumerate())
    stream = prefetch_map(str, itertools.count(), threads=3)
    assert next(stream) == "0"
    started = set(threading.enumerate()) - before
    stream.close()
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)


@given(st.integers(0, 3000), st.integers(1, 900))
def test_chunks_grow_and_hold_every_item_once(count, max_size):
    chunks = list(growing_chunks(range(count), max_size=max_size))
    assert [item for chunk in chunks for item in chunk] == list(range(count))
    assert all(len(chunk) <= max_size for chunk in chunks)
    assert all(len(after) >= min(max_size, 2 * len(before)) for before, after in itertools.pairwise(chunks[:-1]))


def test_the_first_chunk_is_small():
    assert len(next(growing_chunks(itertools.count()))) < 1000


def test_a_masking_schedule_does_not_depend_on_prefetching(corpus, tmp_path, tiny, monkeypatch):
    class Immediate(Prefetcher):
        """Computes each item when it is requested."""

        def __init__(self, items, *, size):
            self.items = iter(items)

        def __next__(self):
            return next(self.items)

        def close(self):
            pass

        def __exit__(self, *_):
            pass

    settings = tiny | {"task.fraction_start": 0.5, "log_every": 1}
    curves = []
    for kind in (Prefetcher, Immediate):
        monkeypatch.setattr(loop, "Prefetcher", kind)
        headstock.pretrain(corpus, out=tmp_path / kind.__name__, objective="masked", settings=settings)
        curves.append([row["loss"] for row in RunFolder(tmp_path / kind.__name__).read_metrics() if "loss" in row])
    assert len(curves[0]) == 12 and curves[0] == curves[1]
