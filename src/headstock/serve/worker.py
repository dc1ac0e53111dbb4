"""One thread per run that answers its requests, batched by what they ask for.

Requests never wait for more to come: what has arrived while the model was busy is answered together, so that the batch
grows with the load. The model has one owner, the thread, and therefore no lock.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from headstock.errors import HeadstockError

MAX_BATCH_ROWS = 1024  # rows that are computed together, so that a large request does not delay others for long

Compute = Callable[[list[Any]], Sequence[Any]]  # one result per row


class QueueFullError(HeadstockError):
    """More requests wait than the server allows."""


class TimeLimitError(HeadstockError):
    """A request took longer than the server allows."""


@dataclass
class Job:
    """Rows to compute for one request. Jobs with the same key are computed together."""

    key: Hashable  # the operation and its options
    compute: Compute
    rows: list[Any]
    deadline: float  # of time.monotonic()
    future: "Future[list[Any]]" = field(default_factory=Future)


class Worker:
    """Runs the jobs of one model, in batches of equal keys."""

    def __init__(self, name: str, *, max_queue: int):
        self.max_queue = max_queue
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closing = False
        self.thread = threading.Thread(target=self._run, name=f"worker {name}", daemon=True)
        self.thread.start()

    @property
    def queued(self) -> int:
        return len(self.jobs)

    def submit(self, key: Hashable, compute: Compute, rows: Sequence[Any], *, timeout: float) -> "Future[list[Any]]":
        """One result per row, when they are computed. A cancelled future is skipped."""
        job = Job(key, compute, list(rows), time.monotonic() + timeout)
        with self.changed:
            if self.closing or len(self.jobs) >= self.max_queue:
                raise QueueFullError(f"{self.max_queue} requests are waiting; try again later")
            self.jobs.append(job)
            self.changed.notify()
        return job.future

    def close(self) -> None:
        """Finish the jobs that wait, then stop."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            rows = [row for job in batch for row in job.rows]
            try:
                results = list(batch[0].compute(rows))
                assert len(results) == len(rows), "one result per row"
            except BaseException as error:
                self._fail(batch, error)
                continue
            start = 0
            for job in batch:
                job.future.set_result(results[start : start + len(job.rows)])
                start += len(job.rows)

    def _fail(self, batch: list[Job], error: BaseException) -> None:
        """Answer a failed batch job by job, so that one request's error does not reach the others."""
        if len(batch) == 1:
            batch[0].future.set_exception(error)
            return
        for job in batch:
            try:
                job.future.set_result(list(job.compute(job.rows)))
            except BaseException as own_error:
                job.future.set_exception(own_error)

    def _next_batch(self) -> list[Job]:
        """The oldest job and all others with its key, up to a number of rows; empty when the worker closes."""
        with self.changed:
            while True:
                self.changed.wait_for(lambda: self.jobs or self.closing)
                if not self.jobs:
                    return []
                key, count, batch, others = self.jobs[0].key, 0, list[Job](), deque[Job]()
                for job in self.jobs:
                    if job.key == key and (not batch or count + len(job.rows) <= MAX_BATCH_ROWS):
                        batch.append(job)
                        count += len(job.rows)
                    else:
                        others.append(job)
                self.jobs = others
                if ready := [job for job in batch if self._start(job)]:
                    return ready

    def _start(self, job: Job) -> bool:
        """Whether a job is still wanted and in time."""
        if not job.future.set_running_or_notify_cancel():
            return False
        if time.monotonic() > job.deadline:
            job.future.set_exception(TimeLimitError("the request waited longer than the server's time limit"))
            return False
        return True
