"""The application in process; tests of the real server process are in test_server.py."""

import json
import threading
import urllib.request

import pytest

pytest.importorskip("fastapi", reason="needs headstock[serve]")

from headstock.serve.worker import QueueFullError, Worker


def test_jobs_that_wait_are_computed_together_and_answered_apart():
    worker, started, release, batches = Worker("w", max_queue=8), threading.Event(), threading.Event(), []

    def compute(rows):
        batches.append(list(rows))
        started.set()
        release.wait(10)
        return [row * 2 for row in rows]

    first = worker.submit("double", compute, [1], timeout=60)
    assert started.wait(10)
    others = [worker.submit("double", compute, [n, n], timeout=60) for n in (2, 3)]
    other_key = worker.submit("other", compute, [9], timeout=60)
    release.set()
    assert first.result(10) == [2]
    assert [future.result(10) for future in others] == [[4, 4], [6, 6]]
    assert other_key.result(10) == [18]
    assert batches == [[1], [2, 2, 3, 3], [9]]
    worker.close()
    with pytest.raises(QueueFullError):
        worker.submit("double", compute, [1], timeout=60)


def test_the_server_process_answers(served):
    url, names = served
    with urllib.request.urlopen(f"{url}/health") as response:
        assert json.load(response) == {"status": "ok"}
    assert names["classify"] == "classify"
