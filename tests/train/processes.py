"""Starts commands in the background, in processes forked with torch imported: alone, or as ranks of a process group."""

import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.commands import save_time
from tests.forks import start_forked

TIMEOUT = 120.0  # seconds


class BackgroundProcess:
    """A function call in a forked process, whose stdout and stderr are files."""

    def __init__(self, folder: Path, function: Callable[..., None], *arguments: Any, **environment: str):
        folder.mkdir(exist_ok=True)
        self.start({1: folder / "stdout.txt", 2: folder / "stderr.txt"}, function, arguments, environment)

    def start(
        self,
        streams: dict[int, Path],
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        environment: dict[str, str],
    ) -> None:
        self.streams = streams
        self.process = start_forked(_call, function, arguments, self.streams, os.environ | environment, os.getcwd())

    @property
    def stdout(self) -> str:
        return self.streams[1].read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self.streams[2].read_text(encoding="utf-8") if self.streams[2].exists() else ""

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition holds while the process runs."""
        end = time.monotonic() + TIMEOUT
        while not condition():
            assert self.process.is_alive() and time.monotonic() < end, self.stderr
            time.sleep(0.002)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = TIMEOUT) -> int:
        """The exit code, negative after a signal."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, self.stderr
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _call(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    streams: dict[int, Path],
    environment: dict[str, str],
    folder: str,
) -> None:
    for number, path in streams.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)  # may be the same file
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    save_time()
    function(*arguments)


def run_headstock(*arguments: str) -> None:
    sys.argv = ["headstock", *arguments]
    runpy.run_module("headstock", run_name="__main__")


def run_torchrun(options: list[str], command: list[str]) -> None:
    """`torchrun OPTIONS -m headstock COMMAND`, whose workers are forked instead of started."""
    from torch.distributed import run

    config_from_args = run.config_from_args
    run.config_from_args = lambda arguments: (config_from_args(arguments)[0], run_headstock, command)
    run.run(run.parse_args([*options, "--start-method=fork", "-m", "headstock", *command]))


def start_command(folder: Path, *arguments: Any, **environment: str) -> BackgroundProcess:
    """`headstock ARGUMENTS`; stdout and stderr are files in the folder."""
    return BackgroundProcess(folder, run_headstock, *map(str, arguments), **environment)


def start_ranks(folder: Path, count: int, *arguments: Any, **environment: str) -> list[BackgroundProcess]:
    """The same command as each rank of a process group, as torchrun would start it."""
    return start_functions(folder, [(run_headstock, *map(str, arguments))] * count, **environment)


def start_functions(folder: Path, calls: list[tuple[Any, ...]], **environment: str) -> list[BackgroundProcess]:
    """Function calls, each as one rank of a process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(calls)), **environment}
    processes = []
    for rank, call in enumerate(calls):
        streams = folder.with_name(f"{folder.name}-{rank}")
        processes.append(BackgroundProcess(streams, *call, RANK=str(rank), LOCAL_RANK=str(rank), **group))
    return processes
