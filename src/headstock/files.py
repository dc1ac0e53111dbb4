"""Files that are either whole or not there: written beside, flushed to disk, then renamed."""

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


def cache_folder() -> Path:
    """Where data, token stores and other things that can be made again are kept."""
    if chosen := os.environ.get("HEADSTOCK_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headstock"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "headstock" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstock"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes its name only when it is all on disk; on any failure it vanishes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        _sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    with whole_file(path) as beside:
        beside.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name only when everything in it is on disk; on any failure it vanishes.

    >>> with whole_folder(Path("checkpoints/step-100")) as folder:
    ...     (folder / "a.txt").write_text("all of it")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    beside = _beside(path)
    beside.mkdir()
    try:
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        for folder in [beside, *(f for f in beside.rglob("*") if f.is_dir())]:
            _sync_folder(folder)
        if path.exists():
            shutil.rmtree(path)
        os.replace(beside, path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process alone holds the claim to what `path` names, while this lasts; one that dies gives it up.

    >>> with claimed(Path("claims/cell-1")) as mine:
    ...     print("ours" if mine else "another process is at work on it")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        mine = _lock(file.fileno()) and _names(path, file.fileno())
        try:
            yield mine
        finally:
            if mine:
                _unlock(file.fileno())


@contextmanager
def at_work(folder: Path) -> Iterator[bool]:
    """Whether this process alone is at work in a folder, which need not be there yet, while this lasts.

    The claim lies beside the folder, which may be replaced meanwhile, and goes with whatever was made for it.
    """
    folder = folder.resolve()  # one folder may have several names
    missing = [parent for parent in folder.parents if not parent.exists()]
    claim = folder.parent / f".{folder.name}.claim"
    try:
        with claimed(claim) as mine:
            try:
                yield mine
            finally:
                if mine:
                    with suppress(PermissionError):  # Windows keeps a file that is open
                        claim.unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # something else is in it by now
            for parent in missing:
                parent.rmdir()


def _names(path: Path, handle: int) -> bool:
    """Whether `path` still is the open file: a claim to one that was removed would be no claim to the next."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as wrong:
            if wrong.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return True  # a file system without locks, where nobody can be asked
        return True

    def _unlock(handle: int) -> None:
        with suppress(OSError):  # there was no lock, or it goes with the file that is closed next
            fcntl.flock(handle, fcntl.LOCK_UN)


def sweep(folder: Path) -> None:
    """Remove what processes that no longer live left half-made in `folder`."""
    for left in folder.glob(f".*{PARTIAL}"):
        maker = left.name.removesuffix(PARTIAL).rpartition(".")[2]
        if maker.isdigit() and not _alive(int(maker)):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut (not possible, and not needed, on Windows)."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
