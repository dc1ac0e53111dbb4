"""Connects to a Ray cluster (`--on ray`) and runs independent tasks on it, again if a worker or a node is lost."""

import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstock.errors import UserError, WorkError

logger = logging.getLogger(__name__)

ATTEMPTS = 4  # of a task whose worker or node is lost
POLL_SECONDS = 0.5
CONNECT_SECONDS = 10
PROBE_SECONDS = 120  # a new worker imports packages, perhaps from a network disk
CONNECT_ERRORS = (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError)
ADDRESSES = "ray, ray:auto, ray:HOST:6379 or ray://HOST:10001"


def import_ray() -> Any:
    # Ray checks the token of a cluster that was started where one exists, but sends it only if told to
    if os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of tasks that are cancelled after the first error
    try:
        import ray
    except ImportError:
        raise UserError("--on ray needs the package ray: pip install 'headstock[ray]'") from None
    return ray


def parse_address(on: str) -> str | None:
    """The address that `--on` names; None joins the cluster of this machine or starts one."""
    if on.startswith("ray://"):
        return on
    kind, separator, address = on.partition(":")
    if kind != "ray" or (separator and not address):
        raise UserError(f"--on {on}: must be {ADDRESSES}")
    return address or None


def check_on(on: str, *, as_client: bool = True) -> None:
    """Refuse an invalid address, or a client where it cannot be one, before any work begins."""
    address = parse_address(on) or ""
    if address.startswith("ray://") and not as_client:
        raise UserError(f"--on {on}: works on a node of the cluster only; run the command there with ray:HOST:6379")
    import_ray()


@contextmanager
def connect(on: str) -> Iterator[None]:
    """Join or start a cluster for a block. A connection that the caller has made already is used, and stays."""
    address, ray = parse_address(on), import_ray()
    if ray.is_initialized():
        yield
        return
    check_reachable(on, address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet = {} if address and address.startswith("ray://") else {"include_dashboard": False}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **quiet)
    except CONNECT_ERRORS as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "InvalidAuthToken" in f"{error} {error.__cause__}":
            reason = "it checks a token: copy ~/.ray/auth_token of its head node, or set RAY_AUTH_TOKEN"
        raise WorkError(f"--on {on}: no Ray cluster answers there ({reason})") from None
    try:
        if threading.current_thread() is threading.main_thread():  # Ray has set a handler of its own
            signal.signal(signal.SIGTERM, on_sigterm)
        yield
    finally:
        ray.shutdown()


def check_reachable(on: str, address: str | None) -> None:
    """Refuse an address where nothing listens: Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # none, auto or local
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise WorkError(f"--on {on}: no Ray cluster answers there ({error})") from None


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in import_ray().nodes() if node["Alive"]]


def largest(resource: str, nodes: Sequence[dict[str, Any]] | None = None) -> float:
    """The most of a resource, such as CPU or GPU, that one node has."""
    nodes = alive_nodes() if nodes is None else nodes
    return max((node["Resources"].get(resource, 0.0) for node in nodes), default=0.0)


def check_nodes(files: Sequence[Path] = (), *, why: str = "") -> None:
    """Check that every node has our version and sees `files`; `why` says what the files are needed for."""
    for where, unseen in probe_nodes(files):
        if unseen:
            raise UserError(f"{where} does not see {unseen[0]}{why}")


def probe_nodes(files: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """Each node, as messages name it, and those of `files` that it does not see at the same path and of the same size.

    A node with another version of headstock or torch is refused.
    """
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray, expected = import_ray(), own_versions()
    sizes = [(str(path.absolute()), path.stat().st_size) for path in files]
    # nested, so that it is pickled by value: on a node without headstock it still runs
    probe = ray.remote(make_probe())
    nodes, results = alive_nodes(), []
    strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    refs = [probe.options(num_cpus=0, scheduling_strategy=strategy).remote(sizes) for strategy in strategies]
    for node, ref in zip(nodes, refs, strict=True):
        where = f"--on ray: node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        try:
            found, unseen = ray.get(ref, timeout=PROBE_SECONDS)
        except GetTimeoutError:
            raise WorkError(f"{where} does not answer within {PROBE_SECONDS} s") from None
        except RayError as error:
            raise WorkError(f"{where} cannot run a task ({str(error).strip().splitlines()[-1]})") from None
        if found != expected:
            raise UserError(f"{where} has {versions_text(found)}; expected {versions_text(expected)}, as here")
        results.append((where, unseen))
    return results


def own_versions() -> dict[str, str | None]:
    return make_probe()([])[0]


def versions_text(versions: dict[str, str | None]) -> str:
    return " and ".join(f"{name} {version}" if version else f"no {name}" for name, version in versions.items())


def make_probe() -> Callable[[list[tuple[str, int]]], tuple[dict[str, str | None], list[str]]]:
    """A function that returns the versions of a node and those of the given files that it does not see."""

    def probe(sizes: list[tuple[str, int]]) -> tuple[dict[str, str | None], list[str]]:
        import importlib.metadata
        import os

        versions: dict[str, str | None] = {"headstock": None, "torch": None}
        try:
            import headstock

            versions["headstock"] = headstock.__version__
            # nodes with and without a GPU have different builds of one version, such as 2.13.0+cpu
            versions["torch"] = importlib.metadata.version("torch").partition("+")[0]
        except ImportError:
            pass
        unseen = [path for path, size in sizes if not os.path.isfile(path) or os.path.getsize(path) != size]
        return versions, unseen

    return probe


def run_tasks(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    names: Sequence[str],
    cpus: float = 1,
    gpus: float = 0,
) -> Iterator[tuple[int, Any]]:
    """Yield the index and the value of each call `function(*arguments[index])` as it becomes available.

    A task whose worker or node is lost is run again. An exception of the function itself is raised here. It cancels
    all other tasks, as an interruption does.
    """
    from ray.exceptions import RayTaskError

    ray = import_ray()
    if cpus > largest("CPU") or gpus > largest("GPU"):
        logger.info("no node has %g CPUs and %g GPUs; waiting for one to join the cluster", cpus, gpus)
    task = ray.remote(function).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
    running = {task.remote(*values): index for index, values in enumerate(arguments)}
    losses = Counter[int]()
    try:
        while running:
            for done in ray.wait(list(running), timeout=POLL_SECONDS)[0]:
                index = running.pop(done)
                try:
                    value = ray.get(done)
                except RayTaskError as error:
                    if not is_loss(error.cause):
                        raise error.cause from error
                    reason = loss_reason(error.cause)
                except Exception as error:
                    if not is_loss(error):
                        raise
                    reason = loss_reason(error)
                else:
                    yield index, value
                    continue
                losses[index] += 1
                if losses[index] == ATTEMPTS:
                    raise WorkError(f"{names[index].strip()}: was lost {ATTEMPTS} times ({reason})")
                logger.info("%s  lost (%s); running it again", names[index], reason)
                running[task.remote(*arguments[index])] = index
    finally:
        for ref in running:
            ray.cancel(ref, force=True)


def is_loss(error: BaseException) -> bool:
    """Whether a task failed because its worker, its node or an object in their memory was lost."""
    from ray import exceptions

    lost = (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError)
    return isinstance(error, (*lost, exceptions.ObjectLostError, exceptions.LocalRayletDiedError))


def loss_reason(error: BaseException) -> str:
    from ray import exceptions

    if isinstance(error, exceptions.OutOfMemoryError):
        return "out of memory"
    return "its node died" if isinstance(error, exceptions.NodeDiedError) else "its worker died"
