"""What `/metrics` shows to Prometheus. Each server process counts for itself."""

import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from headstock.serve.worker import Worker

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters of one server process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = to = CollectorRegistry()
        self.requests = Counter("headstock_requests", "Requests", ["route", "method", "status"], registry=to)
        self.seconds = Histogram(
            "headstock_request_seconds", "Time until the response was sent", ["route"], registry=to, buckets=SECONDS
        )
        self.queue = Gauge("headstock_queue_length", "Requests and rows that wait", ["model"], registry=to)
        self.rows = Gauge("headstock_decoding_rows", "Rows that are being decoded", ["model"], registry=to)
        self.batch_rows = Histogram(
            "headstock_batch_rows", "Rows of a batch or a decoding step", ["model"], registry=to, buckets=ROWS
        )
        self.prompt_tokens = Counter("headstock_prompt_tokens", "Tokens of prompts", ["model"], registry=to)
        self.generated_tokens = Counter("headstock_generated_tokens", "Tokens of completions", ["model"], registry=to)

    def watch(self, name: str, worker: "Worker") -> None:
        """Show the queue of a model."""
        self.queue.labels(name).set_function(lambda: worker.queued)
        self.rows.labels(name).set_function(lambda: worker.decoding)

    def batch_observer(self, name: str) -> Callable[[int], None]:
        return self.batch_rows.labels(name).observe

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """Counts requests by route and status, and measures their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics
        self.counters = cache(lambda *labels: (metrics.requests.labels(*labels), metrics.seconds.labels(labels[0])))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            # the template of the route, so that what clients invent makes no new series
            route = getattr(scope.get("route"), "path", "other")
            counter, histogram = self.counters(route, scope["method"], str(status))
            counter.inc()
            histogram.observe(time.perf_counter() - start)
