"""Records which entries of the cache a process uses, so that `headstock cache clear` does not remove them."""

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headstock.io import ABANDONED_SECONDS, CLOCK_SKEW_SECONDS, HOST, NO_LOCKS, cache_folder, is_alive, start_time

USERS = ".users"  # the folder of the marks: a file HOST-PID per process, one entry of the cache per line

_marked: set[tuple[int, Path]] = set()  # what is marked already, by process: a forked process marks for itself


def mark_used(path: Path) -> Path:
    """Mark an entry of the cache as used until this process ends, and as used now; returns the path.

    Call it before looking whether the entry exists: then it is either missing or stays. Paths outside the cache and
    caches that cannot be written to are ignored.
    """
    root, key = cache_folder(), (os.getpid(), path)
    if key in _marked or not path.is_relative_to(root):
        return path
    with suppress(OSError), cache_lock(root):
        if not any(process == os.getpid() for process, _ in _marked):
            atexit.register(_remove_mark, _mark_file(root), os.getpid())
        _mark_file(root).parent.mkdir(exist_ok=True)
        with _mark_file(root).open("a", encoding="utf-8") as file:
            file.write(f"{path.relative_to(root).as_posix()}\n")
        _marked.add(key)
        with suppress(FileNotFoundError):  # it is about to be written
            os.utime(path)
    return path


def used_entries(root: Path) -> set[Path]:
    """The entries of a cache that running processes use; marks of dead processes are removed."""
    used: set[Path] = set()
    for file in (root / USERS).glob("*-*"):
        with suppress(FileNotFoundError):  # its process has ended meanwhile
            if _is_running(file):
                used |= {root / line for line in file.read_text(encoding="utf-8").splitlines()}
            else:
                file.unlink()
    return used


@contextmanager
def cache_lock(root: Path) -> Iterator[None]:
    """Held while an entry is marked, and while an entry that nobody uses is removed."""
    from filelock import FileLock

    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / f"{USERS}.lock", fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def _mark_file(root: Path) -> Path:
    return root / USERS / f"{HOST}-{os.getpid()}"


def _is_running(file: Path) -> bool:
    """Whether the process of a mark runs. Those of other machines cannot be checked: their marks last for a day."""
    host, _, process = file.name.rpartition("-")
    changed = file.stat().st_mtime
    if host != HOST:
        return time.time() - changed < ABANDONED_SECONDS
    alive = process.isdecimal() and is_alive(int(process))
    return alive and start_time(int(process)) < changed + CLOCK_SKEW_SECONDS


def _remove_mark(file: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process inherits the handler
        with suppress(OSError):
            file.unlink(missing_ok=True)
