"""The server of forks: one process that has torch and the package imported, from which others start by forking.

Workers of pytest-xdist are such forks too: execnet starts `python tests/forks.py -u -c PROGRAM`, and this program lets
the server fork a process that runs PROGRAM with its stdin, stdout and stderr.
"""

import ast
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VARIABLE = "TEST_FORK_SERVER"  # tells other processes where the server is
CONTEXT = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the server, unless this process uses one, and tell it to all processes that this one starts."""
    server = multiprocessing.forkserver._forkserver
    with contextlib.chdir(ROOT):  # where it finds our modules
        server.ensure_running()
    state = vars(server)
    names = [name for name in ("_forkserver_address", "_forkserver_authkey") if name in state]
    os.environ[VARIABLE] = repr({name: state[name] for name in names})


def stop_server(seconds: float = 10) -> None:
    """Stop the server that this process has started, and wait for it, so that its CPU time is counted as ours."""
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is None:
        return
    os.close(server._forkserver_alive_fd)
    end = time.monotonic() + seconds
    while not os.waitpid(server._forkserver_pid, os.WNOHANG)[0] and time.monotonic() < end:
        time.sleep(0.01)
    server._forkserver_pid = None


def use_server() -> None:
    """Fork from the server that another process has started."""
    server = multiprocessing.forkserver._forkserver
    state = ast.literal_eval(os.environ[VARIABLE])
    vars(server).update(state, _forkserver_alive_fd=os.open(os.devnull, os.O_RDONLY))
    server.ensure_running = multiprocessing.resource_tracker.ensure_running


def start_forked(function: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Call a function in a forked process."""
    start_server()
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def run_program(program: str, streams: list[Connection], environment: dict[str, str]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = ["-c"]
    use_server()
    exec(program, {"__name__": "__main__"})


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.forks import run_program, start_forked, use_server

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker receives it, too
    use_server()
    streams = [Connection(os.dup(0), writable=False), *(Connection(os.dup(n), readable=False) for n in (1, 2))]
    process = start_forked(run_program, sys.argv[-1], streams, dict(os.environ))
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
