"""Files that are either whole or not there: written beside, flushed to disk, then renamed."""

import errno
import hashlib
import itertools
import json
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
# `.name.HOST-PROCESS-COUNT.partial`; earlier versions wrote `.name.PROCESS.partial`
MAKER = re.compile(r"(?:([0-9a-f]{8})-)?(\d+)(?:-\d+)?")
ABANDONED = 24 * 3600  # seconds without a change after which another machine's partial file or folder is removed
SKEW = 60  # seconds that a clock may be off between the start of a process and the time stamp of a file
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # for these the system names no file

# What a folder of ours may hold: patterns of names, each with None for a file or the layout of a subfolder
Layout = Mapping[str, "Layout | None"]
SYSTEM_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")  # file managers leave these anywhere


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


def checksum(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as manifests record them."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def checksum_mismatch(path: Path, recorded: Any) -> str | None:
    """How a file differs from its recorded checksum; None if it does not."""
    if not path.is_file():
        return f"{path.name} is missing"
    if not isinstance(recorded, Mapping) or not {"bytes", "sha256"} <= recorded.keys():
        return f"no size and sha256 of {path.name} are recorded"
    if (size := path.stat().st_size) != recorded["bytes"]:
        return f"{path.name} has {size} bytes, wanted {recorded['bytes']}"
    if sha256(path) != recorded["sha256"]:
        return f"{path.name} is not what was written (its sha256 differs)"
    return None


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes its name only when it is all on disk; on any failure it vanishes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _partial(path) as beside, errors_name_path(path, beside):
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        _sync_folder(path.parent)


@contextmanager
def errors_name_path(path: Path, beside: Path | None = None) -> Iterator[None]:
    """Errors while writing name `path`: those without a file name, and those that name the partial file or folder."""
    try:
        yield
    except OSError as wrong:
        if wrong.filename is None and wrong.errno in WRITE_ERRORS:
            raise OSError(wrong.errno, wrong.strerror, str(path)) from wrong
        if beside is not None and isinstance(wrong.filename, str | os.PathLike):
            place = Path(wrong.filename)
            if wrong.errno is not None and place.is_relative_to(beside):
                raise OSError(wrong.errno, wrong.strerror, str(path / place.relative_to(beside))) from wrong
        raise


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path) as beside:
        beside.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(path: Path, *, layout: Layout | None = None) -> Iterator[Path]:
    """A folder to fill, which takes its name only when everything in it is on disk; on any failure it vanishes.

    A folder of that name is replaced; one with a `layout` only if it holds nothing else. A link is followed.

    >>> with whole_folder(Path("checkpoints/step-100")) as folder:
    ...     (folder / "a.txt").write_text("all of it")
    """
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent)
    with _partial(path) as beside, errors_name_path(path, beside):
        beside.mkdir()
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        for folder in [beside, *(f for f in beside.rglob("*") if f.is_dir())]:
            _sync_folder(folder)
        if path.exists():
            if layout is not None:
                check_replaceable(path, layout)
            with _partial(path) as before:  # the old one goes in one step, and comes back if the new one cannot come
                os.replace(path, before)
                try:
                    os.replace(beside, path)
                except OSError:
                    os.replace(before, path)
                    raise
        else:
            os.replace(beside, path)
        _sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder; it is renamed first, so that what is left of it after a crash is swept, never read."""
    with _partial(path) as leaving:
        os.replace(path, leaving)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` that no other maker uses; whatever still has it in the end is removed."""
    beside = path.with_name(f".{path.name}.{HOST}-{os.getpid()}-{next(_count)}{PARTIAL}")
    _making.add(beside.name)
    try:
        yield beside
    finally:
        _remove(beside)
        _making.discard(beside.name)


_count, _making = itertools.count(), set[str]()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# Folders that may be replaced: those that hold nothing but what we write


def unknown_entries(folder: Path, layout: Layout) -> list[str]:
    """What a folder holds beside its layout, as relative paths. Links to folders and mount points are foreign too."""
    found: list[str] = []
    for entry in sorted(folder.iterdir()):
        known, inner = _known(entry, layout)
        if not known:
            found.append(entry.name + ("/" if entry.is_dir() else ""))
        elif inner is not None:
            found += [f"{entry.name}/{name}" for name in unknown_entries(entry, inner)]
    return found


def remove_layout(folder: Path, layout: Layout) -> None:
    """Remove what a folder's layout names, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        known, inner = _known(entry, layout)
        if known and inner is not None:
            remove_layout(entry, inner)
        elif known:
            _remove(entry)
    with suppress(OSError):  # something of the user's is in it
        folder.rmdir()


def check_replaceable(folder: Path, layout: Layout) -> None:
    """Refuse to replace a folder in which anything would be lost that we did not write."""
    if os.path.ismount(folder):
        raise UserError(f"{folder}: is a mount point, which cannot be replaced; name a folder in it")
    if others := unknown_entries(folder, layout):
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise UserError(
            f"{folder}: holds what Headstock did not write and --overwrite would delete ({shown}); "
            "move that elsewhere, or name another folder"
        )


def check_inputs(folder: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse to replace a folder in which an input lies, by whatever name."""
    homes = {folder.absolute(), folder.resolve()}
    for given in inputs:
        path = Path(given).expanduser()
        if any(place.is_relative_to(home) for place in (path.absolute(), path.resolve()) for home in homes):
            raise UserError(f"{given}: is an input in {folder}, which --overwrite would replace; name another folder")


def _known(entry: Path, layout: Layout) -> tuple[bool, Layout | None]:
    """Whether a layout names an entry, and the layout of the subfolder if it is one."""
    if entry.name in SYSTEM_FILES or (entry.name.startswith(".") and entry.name.endswith(PARTIAL)):
        return True, None
    for pattern, inner in layout.items():
        if fnmatchcase(entry.name, pattern):
            if inner is None:
                return not entry.is_dir(), None
            return entry.is_dir() and not entry.is_symlink() and not os.path.ismount(entry), inner
    return False, None


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
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
def lock_folder(folder: Path) -> Iterator[bool]:
    """Whether this process alone is at work in a folder, which need not be there yet, while this lasts.

    The claim lies beside the folder, which may be replaced meanwhile, and goes with whatever was made for it.
    """
    folder = folder.resolve()  # one folder may have several names
    missing = [parent for parent in folder.parents if not parent.exists()]
    claim = folder.parent / f".{folder.name}.claim"
    try:
        with try_lock(claim) as mine:
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


def remove_stale(folder: Path) -> None:
    """Remove what processes that no longer live left half-made in `folder`."""
    for left in folder.glob(f".*{PARTIAL}"):
        with suppress(FileNotFoundError):  # its maker has just finished it
            if not _being_made(left):
                _remove(left)


def _being_made(left: Path) -> bool:
    """Whether the process that a partial file or folder is named after still works on it.

    A process that began after the last change has merely been given the same number. Processes of another machine
    cannot be asked: what has not changed for a day counts as abandoned.
    """
    maker = MAKER.fullmatch(left.name.removesuffix(PARTIAL).rpartition(".")[2])
    if maker is None:
        return True  # not named by us
    host, process = maker[1], int(maker[2])
    if left.name in _making:
        return True
    changed = max(path.lstat().st_mtime for path in (left, *left.rglob("*")))
    if host not in (None, HOST):
        return time.time() - changed < ABANDONED
    if process == os.getpid():
        return host is None and _started(process) < changed  # other code of ours may have named it so
    return _alive(process) and _started(process) < changed + SKEW


def _alive(process: int) -> bool:
    if process <= 0:  # not a process: the system would take it for a group of them
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _started(process: int) -> float:
    """When a process began, in seconds of the clock; long ago where the system does not say."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return time.time() - age


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut (not possible, and not needed, on Windows)."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
