"""A Ray cluster of several nodes on this machine, each started by `ray start` as its own group of processes."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
START = ["--num-cpus=1", f"--object-store-memory={80 << 20}", "--block", "--log-style=record"]
START.append("--include-log-monitor=false")
TASK = "run_on_worker"  # processes of workers are titled `ray::FUNCTION` while a task runs
# workers keep up with the tests that run beside them (the default is 15), and stay for the next task of their driver
WORKERS = {"worker_niceness": 0, "num_workers_soft_limit": 4, "enable_metrics_collection": 0}
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 5, "health_check_initial_delay_ms": 2000}


class RayNodes:
    """`hidden` is a folder that the second and later nodes do not see, where the system lets us hide one."""

    def __init__(self, hidden: Path):
        self.hidden, self.nodes = hidden, list[subprocess.Popen]()
        self.folder = Path(tempfile.mkdtemp(prefix="hs-"))  # a short name: sockets lie in it
        self.environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **{f"RAY_{name}": str(value) for name, value in (HEALTH | WORKERS).items()},
        }
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        head = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        self.start([*head, "--no-monitor", f"--ray-client-server-port={free_port()}"])  # no autoscaler
        wait_until(lambda: is_open(self.port), "the head node answers")

    def start(self, options: list[str]) -> subprocess.Popen:
        number = len(self.nodes)
        environment = os.environ | self.environment
        environment |= {"PYTHONPATH": str(SOURCE), "HEADSTOCK_CACHE": str(self.folder / f"cache{number}")}
        command = [str(Path(sys.executable).with_name("ray")), "start", *options, *START]
        if number and can_hide():
            command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self.hidden), *command]
        log = (self.folder / f"node{number}.txt").open("wb")
        node = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.nodes.append(node)
        return node

    def add_node(self) -> subprocess.Popen:
        return self.start([f"--address={self.address}"])

    def workers(self, node: subprocess.Popen, task: str = TASK) -> list[int]:
        """The processes of a node that run a task now."""
        raylets = [pid for pid in children(node.pid) if "raylet" in command_line(pid)]
        return [pid for raylet in raylets for pid in children(raylet) if command_line(pid).startswith(f"ray::{task}")]

    def kill(self, node: subprocess.Popen) -> None:
        """Kill all processes of a node without warning."""
        for pid in [node.pid, *descendants(node.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        self.nodes.remove(node)

    def stop(self) -> None:
        for node in self.nodes[::-1]:
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """A free port outside of those that Ray gives to workers."""
    for port in range(21000 + os.getpid() % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in used_ports:
            used_ports.add(port)
            return port
    raise AssertionError("no free port")


used_ports: set[int] = set()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def can_hide() -> bool:
    """Whether a folder can be hidden from a process, which takes a mount namespace."""
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def children(pid: int) -> list[int]:
    found = []
    for other in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # the fields after the command's name: its state, its parent
            status = Path(f"/proc/{other}/stat").read_bytes().rpartition(b")")[2].split()
            found += [int(other)] if int(status[1]) == pid else []
    return found


def descendants(pid: int) -> list[int]:
    return [other for child in children(pid) for other in (child, *descendants(child))]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_until(condition, what: str, seconds: float = 120):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not after {seconds} s: {what}"
        time.sleep(0.05)
    return value
