"""Atomic files and folders, locks, checksums, and the cache folder.

A file or folder is written under a temporary name beside its destination, flushed to disk, then renamed.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headstock.errors import UserError

PARTIAL = ".partial"
HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
# `.NAME.HOST-PID-COUNT.partial`; earlier versions wrote `.NAME.PID.partial`
OWNER = re.compile(r"(?:([0-9a-f]{8})-)?(\d+)(?:-\d+)?")
ABANDONED_SECONDS = 24 * 3600  # an unchanged temporary file of another machine is removed after this time
CLOCK_SKEW_SECONDS = 60  # tolerated between a process's start time and file time stamps
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # the system reports these without a file name
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system does not support locks

# The files a folder of ours may hold: name patterns, each with None for a file or the layout of a subfolder.
FolderLayout = Mapping[str, "FolderLayout | None"]
SYSTEM_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")  # left by file managers


def cache_folder() -> Path:
    """The folder for downloads, token stores and everything else that can be rebuilt."""
    if folder := os.environ.get("HEADSTOCK_CACHE"):
        return Path(folder).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("headstock", appauthor=False)


# Hashes


def fingerprint(value: Any) -> str:
    """sha256 of a JSON-serializable value; the order of dictionary keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as stored in manifests."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def checksum_mismatch(path: Path, recorded: Any) -> str | None:
    """Describes how a file differs from its recorded checksum; None if it matches."""
    if not path.is_file():
        return f"{path.name} is missing"
    if not isinstance(recorded, Mapping) or not {"bytes", "sha256"} <= recorded.keys():
        return f"no size and sha256 of {path.name} are recorded"
    if (size := path.stat().st_size) != recorded["bytes"]:
        return f"{path.name} has {size} bytes, expected {recorded['bytes']}"
    if sha256(path) != recorded["sha256"]:
        return f"{path.name} has changed since it was written (its sha256 differs)"
    return None


def folder_mismatches(folder: Path, checksums: Mapping[str, Any]) -> Iterator[str]:
    """How the files of a folder differ from their recorded checksums; files in other folders are not read."""
    for name, recorded in checksums.items():
        if Path(name).name != name:
            yield f"{name} is not a file name"
        elif mismatch := checksum_mismatch(folder / name, recorded):
            yield mismatch


# Atomic writes


@contextmanager
def atomic_file(path: Path, *, in_folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write; it replaces `path` on success and is deleted on failure.

    With `in_folder` it lies in a temporary folder of its own, for libraries that create temporary files beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_name(path) as temporary:
        file = temporary / path.name if in_folder else temporary
        with errors_name_path(path, file):
            file.parent.mkdir(exist_ok=True)
            yield file
            _sync(file)
            os.replace(file, path)
            _sync(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(path: Path, *, layout: FolderLayout | None = None) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces `path` on success and is deleted on failure.

    With a `layout`, an existing folder is replaced only if it holds nothing outside the layout. Symbolic links are
    followed.

    >>> with atomic_folder(Path("checkpoints/step-100")) as folder:
    ...     (folder / "model.txt").write_text("complete")
    """
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent)
    with _temporary_name(path) as temporary, errors_name_path(path, temporary):
        temporary.mkdir()
        yield temporary
        for entry in [*temporary.rglob("*"), temporary]:
            _sync(entry)
        if path.exists():
            if layout is not None:
                check_replaceable(path, layout)
            with _temporary_name(path) as previous:
                os.replace(path, previous)
                try:
                    os.replace(temporary, path)
                except OSError:
                    os.replace(previous, path)
                    raise
        else:
            os.replace(temporary, path)
        _sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder atomically: it is renamed first, so a crash never leaves a partial folder under its name."""
    with _temporary_name(path) as removed:
        os.replace(path, removed)


@contextmanager
def errors_name_path(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Make OSErrors raised while writing name `path`, not the temporary file or no file at all."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in WRITE_ERRORS:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if temporary is not None and isinstance(error.filename, str | os.PathLike):
            failed = Path(error.filename)
            if error.errno is not None and failed.is_relative_to(temporary):
                raise OSError(error.errno, error.strerror, str(path / failed.relative_to(temporary))) from error
        raise


_counter, _in_progress = itertools.count(), set[str]()


@contextmanager
def _temporary_name(path: Path) -> Iterator[Path]:
    """A unique hidden name beside `path`; whatever has that name at the end is deleted."""
    temporary = path.with_name(f".{path.name}.{HOST}-{os.getpid()}-{next(_counter)}{PARTIAL}")
    _in_progress.add(temporary.name)
    try:
        yield temporary
    finally:
        _remove(temporary)
        _in_progress.discard(temporary.name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, so that it survives a power failure (Windows cannot flush folders)."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Temporary files of dead processes


def remove_stale(folder: Path) -> None:
    """Delete temporary files and folders in `folder` whose process is gone."""
    for path in folder.glob(f".*{PARTIAL}"):
        with suppress(FileNotFoundError):  # its owner finished it meanwhile
            if not _is_in_use(path):
                _remove(path)


def _is_in_use(path: Path) -> bool:
    """Whether the process that created a temporary file or folder may still be writing it.

    A process that started after the last change merely reuses the process id. Processes of other machines cannot be
    checked, so their files count as abandoned after a day without a change.
    """
    owner = OWNER.fullmatch(path.name.removesuffix(PARTIAL).rpartition(".")[2])
    if owner is None or path.name in _in_progress:  # None: not one of our names
        return True
    host, process = owner[1], int(owner[2])
    changed = max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
    if host not in (None, HOST):
        return time.time() - changed < ABANDONED_SECONDS
    if process == os.getpid():
        return host is None and start_time(process) < changed  # an earlier version's name says no more
    return is_alive(process) and start_time(process) < changed + CLOCK_SKEW_SECONDS


def is_alive(process: int) -> bool:
    if process <= 0:  # os.kill would address a process group
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True


def start_time(process: int) -> float:
    """When a process started, in seconds since the epoch; 0 where the system does not tell."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return time.time() - age


# Folders that may be replaced: those that hold only files we wrote


def unknown_entries(folder: Path, layout: FolderLayout) -> list[str]:
    """Relative paths in a folder that its layout does not name; links to folders and mount points are among them."""
    unknown: list[str] = []
    for entry in sorted(folder.iterdir()):
        is_known, inner = _match_layout(entry, layout)
        if not is_known:
            unknown.append(entry.name + ("/" if entry.is_dir() else ""))
        elif inner is not None:
            unknown += [f"{entry.name}/{name}" for name in unknown_entries(entry, inner)]
    return unknown


def remove_layout(folder: Path, layout: FolderLayout) -> None:
    """Delete what a folder's layout names, and the folder itself if nothing else is left in it."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        is_known, inner = _match_layout(entry, layout)
        if is_known and inner is not None:
            remove_layout(entry, inner)
        elif is_known:
            _remove(entry)
    with suppress(OSError):  # it still holds files of the user
        folder.rmdir()


def layout_files(folder: Path, layout: FolderLayout) -> Iterator[Path]:
    """The files in a folder that its layout names, without temporary ones."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        is_known, inner = _match_layout(entry, layout)
        if is_known and inner is not None:
            yield from layout_files(entry, inner)
        elif is_known and not entry.name.startswith(".") and entry.name not in SYSTEM_FILES:
            yield entry


def check_replaceable(folder: Path, layout: FolderLayout) -> None:
    """Refuse to replace a folder that holds anything Headstock did not write."""
    if os.path.ismount(folder):
        raise UserError(f"{folder}: is a mount point and cannot be replaced; use a folder inside it")
    if unknown := unknown_entries(folder, layout):
        names = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise UserError(
            f"{folder}: contains files that Headstock did not write and --overwrite would delete ({names}); "
            "move them or use another folder"
        )


def check_inputs(folder: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse to replace a folder that contains an input, also through symbolic links."""
    folders = {folder.absolute(), folder.resolve()}
    for name in inputs:
        path = Path(name).expanduser()
        if any(p.is_relative_to(f) for p in (path.absolute(), path.resolve()) for f in folders):
            raise UserError(f"{name}: is an input inside {folder}, which --overwrite would replace; use another folder")


def _match_layout(entry: Path, layout: FolderLayout) -> tuple[bool, FolderLayout | None]:
    """Whether a layout names an entry, and the inner layout if it is a subfolder."""
    if entry.name in SYSTEM_FILES or (entry.name.startswith(".") and entry.name.endswith(PARTIAL)):
        return True, None
    for pattern, inner in layout.items():
        if fnmatchcase(entry.name, pattern):
            if inner is None:
                return not entry.is_dir(), None
            return entry.is_dir() and not entry.is_symlink() and not os.path.ismount(entry), inner
    return False, None


# Locks


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file without waiting; yields whether this process holds the lock. A dead process loses its lock.

    On a file system without locks every process is told that it holds the lock.

    >>> with try_lock(Path("claims/trial-1")) as acquired:
    ...     print("ours" if acquired else "another process holds it")
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
        acquired = True
    except Timeout:
        acquired = False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        acquired = True
    try:
        yield acquired
    finally:
        lock.release()


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Like `try_lock` for a folder, which need not exist.

    The lock file lies beside the folder, because the folder may be replaced meanwhile. It is deleted at the end, as are
    parent folders that were created for it and are still empty.
    """
    folder = folder.resolve()  # one folder may have several names
    missing = [parent for parent in folder.parents if not parent.exists()]
    lock_file = folder.parent / f".{folder.name}.claim"
    try:
        with try_lock(lock_file) as acquired:
            try:
                yield acquired
            finally:
                if acquired:
                    with suppress(PermissionError):  # Windows does not delete an open file
                        lock_file.unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # no longer empty
            for parent in missing:
                parent.rmdir()


# Processes started by torchrun

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) unless all of torchrun's variables are set."""
    rank, size, *_ = (os.environ.get(name, "") for name in TORCHRUN)
    if not all(os.environ.get(name) for name in TORCHRUN) or not (rank.isdecimal() and size.isdecimal()):
        return 0, 1
    return int(rank), max(1, int(size))


def finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON does not have and strict parsers refuse."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
