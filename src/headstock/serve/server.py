"""Starts uvicorn with an application, and stops it once all requests are answered."""

import socket
from collections.abc import Callable

import uvicorn

from headstock.serve.app import create_app
from headstock.serve.models import ServedModels
from headstock.serve.settings import ServeSettings


class Server(uvicorn.Server):
    """A server that tells its URL once it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[str], None]):
        super().__init__(config)
        self.on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def run_server(models: ServedModels, settings: ServeSettings, *, on_ready: Callable[[str], None]) -> None:
    """Serve until the process is told to stop; `on_ready` is called with the URL."""
    config = uvicorn.Config(create_app(models, settings), host=settings.host, port=settings.port, log_level="warning")
    Server(config, on_ready).run()
