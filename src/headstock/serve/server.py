"""Runs uvicorn with an application, in this process or in several, until SIGINT or SIGTERM."""

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from headstock.config import from_dict
from headstock.errors import UserError, WorkError
from headstock.serve.app import create_app
from headstock.serve.protocol import TimedProtocol
from headstock.serve.served_models import load_models, model_names
from headstock.serve.settings import ServeSettings

ENVIRONMENT = "HEADSTOCK_SERVE"  # tells worker processes what to serve, as JSON
LOAD_FAILURE = 3  # exit code of a worker process that cannot load its models; the supervisor does not replace it
CACHED_KERNELS = 64  # of oneDNN: batches have ever new shapes, with which its default of 1,024 keeps growing
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses of all interfaces, and where to reach this machine


def run_server(
    runs: list[str], settings: ServeSettings, options: dict[str, Any], ready: Callable[[str, list[str]], None]
) -> None:
    """Serve runs until a signal; requests that are running then have `settings.grace` seconds to finish.

    `options` are those of `headstock.load`. `ready` is called with the URL and the names of the models once the server
    accepts connections.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CACHED_KERNELS))
    names = model_names(runs)  # a wrong name is refused before anything is loaded
    with bind(settings) as listener:
        tell = partial(ready, server_url(settings, listener), names)
        if settings.workers == 1:
            app = create_app(load_models(runs, settings, **options), settings)
            run_single(app, settings, listener, tell)
        else:
            run_workers(runs, settings, options, listener, tell)


def bind(settings: ServeSettings) -> socket.socket:
    """A socket at the server's address, which does not accept connections yet."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # with the protocol named, asyncio sets TCP_NODELAY; without it, answers wait 40 ms for a delayed acknowledgement
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name == "posix":  # a restart may use a port with connections of its predecessor that are not quite closed
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise address_error(error, settings) from None
    listener.set_inheritable(True)
    return listener


def address_error(error: OSError, settings: ServeSettings) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"--port {settings.port}: is in use; choose another one, or --port 0 for any free one")
    if error.errno == errno.EACCES:
        return UserError(f"--port {settings.port}: is not allowed for this user; ports from 1024 are")
    return UserError(f"--host {settings.host}: is not an address of this machine ({error.strerror or error})")


def server_url(settings: ServeSettings, listener: socket.socket) -> str:
    host = WILDCARDS.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def uvicorn_config(app: FastAPI | str, settings: ServeSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        factory=isinstance(app, str),
        workers=settings.workers,
        http=partial(TimedProtocol, settings=settings),  # type: ignore[arg-type]
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # client addresses are not used
        timeout_graceful_shutdown=settings.grace,  # type: ignore[arg-type]  # asyncio takes fractions too
    )


class Server(uvicorn.Server):
    """A uvicorn server that says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]):
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()


def run_single(app: FastAPI, settings: ServeSettings, listener: socket.socket, ready: Callable[[], None]) -> None:
    server = Server(uvicorn_config(app, settings), ready)
    # uvicorn raises a signal that stopped it once more for these handlers, which have nothing left to do then
    previous = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run([listener])
    except OSError as error:  # another program has begun to listen since we bound the port
        raise address_error(error, settings) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Supervisor(Multiprocess):
    """uvicorn's own supervisor of worker processes, which says when they accept connections."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, ready: Callable[[], None]):
        super().__init__(config, sockets=[listener])
        self.ready = ready

    def init_processes(self) -> None:
        super().init_processes()
        address = self.sockets[0].getsockname()[:2]
        host, port = WILDCARDS.get(address[0], address[0]), address[1]
        while not self.signal_queue:
            if any(process.process.exitcode is not None for process in self.processes):
                self.should_exit.set()  # others would fail in the same way
                return
            try:
                socket.create_connection((host, port), timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                self.ready()
                return


def run_workers(
    runs: list[str],
    settings: ServeSettings,
    options: dict[str, Any],
    listener: socket.socket,
    ready: Callable[[], None],
) -> None:
    os.environ[ENVIRONMENT] = json.dumps({"runs": runs, "settings": asdict(settings), "options": options})
    # every worker would otherwise start as many threads as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.workers)))
    supervisor = Supervisor(uvicorn_config(f"{__name__}:create_worker_app", settings), listener, ready)
    supervisor.run()
    if any(process.process.exitcode == LOAD_FAILURE for process in supervisor.processes):
        load_models(runs, settings, **options)  # raises what they raised
        raise WorkError("a worker process failed to start")


def create_worker_app() -> FastAPI:
    """The application of a worker process."""
    configuration = json.loads(os.environ[ENVIRONMENT])
    settings = from_dict(ServeSettings, configuration["settings"])
    try:
        return create_app(load_models(configuration["runs"], settings, **configuration["options"]), settings)
    except Exception:
        sys.exit(LOAD_FAILURE)
