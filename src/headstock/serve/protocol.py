"""HTTP over a socket with time limits, which uvicorn lacks: slow requests and slow readers lose their connection."""

import asyncio
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from headstock.serve.responses import busy_response, error_response
from headstock.serve.settings import ServeSettings

LATE = bytes(error_response(408, "the request arrived too slowly", "timeout").body)
LATE_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(LATE), LATE)
)


async def too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    response = busy_response("too many open connections; try again later")
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


class TimedProtocol(H11Protocol):
    """A connection whose client has a limited time to send a request and to take the answer.

    The time runs while a request is incomplete, from its first byte (of the first request: from the connection) to the
    end of its body, and while the answer waits for the client to read. Large uploads are given the same time again for
    every `max_body` bytes that arrive in it. An idle connection is closed by uvicorn's keep-alive limit.
    """

    def __init__(self, *arguments: Any, settings: ServeSettings, **options: Any):
        super().__init__(*arguments, **options)
        self.settings = settings
        self.request_timer: asyncio.TimerHandle | None = None
        self.answer_timer: asyncio.TimerHandle | None = None
        self.received = 0  # bytes since the request's time started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 2 * self.settings.max_connections:
            transport.abort()
        elif len(self.connections) > self.settings.max_connections:
            self.app = too_many_connections
        self.start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_request_timer()
        self.stop_answer_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        state = self.conn.their_state
        incomplete = state is h11.SEND_BODY or (state is h11.IDLE and self.timeout_keep_alive_task is None)
        if not incomplete:
            self.stop_request_timer()
        elif self.request_timer is None:
            self.start_request_timer()

    def start_request_timer(self) -> None:
        self.received = 0
        self.request_timer = self.loop.call_later(self.settings.socket_timeout, self.request_is_late)

    def stop_request_timer(self) -> None:
        if self.request_timer is not None:
            self.request_timer.cancel()
            self.request_timer = None

    def request_is_late(self) -> None:
        if self.received >= self.settings.max_body:
            self.start_request_timer()
            return
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(LATE_RESPONSE)
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.answer_timer = self.loop.call_later(self.settings.socket_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self.stop_answer_timer()
        super().resume_writing()

    def stop_answer_timer(self) -> None:
        if self.answer_timer is not None:
            self.answer_timer.cancel()
            self.answer_timer = None
