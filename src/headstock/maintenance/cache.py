"""The entries of the cache by kind: their sizes, whether they are in use, and removing them.

An entry is removed only if its name and its files are those that Headstock writes, and if no running process uses it.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstock.cache_use import cache_lock, used_entries
from headstock.data import remote
from headstock.data.catalog import CARD
from headstock.errors import UserError, did_you_mean
from headstock.io import FolderLayout, cache_folder, remove_folder, remove_stale, unknown_entries

DAY = 24 * 3600
STORE: FolderLayout = dict.fromkeys(("index.json", "*.bin"))
SEARCH_INDEX: FolderLayout = dict.fromkeys(("index.json", "*.npy", "texts.bin", "faiss.index", "faiss.json"))
RUN_ADDRESS = "url.txt"  # of a run at a URL, in the folder of its copy
INDUCTOR = re.compile(r"[a-z0-9]{2}|aotautograd|autotune|fxgraph|locks|pgo|precompiled_headers|triton|tmp\w+")


@dataclass(frozen=True)
class CacheKind:
    """A subfolder of the cache."""

    name: str
    summary: str
    pattern: str  # glob of the entries in the subfolder
    is_ours: Callable[[Path], bool]  # whether name and content of an entry are what Headstock writes


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder of the cache that is kept or removed as a whole."""

    kind: str
    path: Path
    bytes: int
    last_used: float  # seconds since the epoch
    in_use: bool = False  # True if a running process uses it
    is_ours: bool = True  # False if Headstock did not write it, or not all of it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


@dataclass
class ClearedCache:
    """What `clear_cache` removed, or with `dry_run` would remove, and what it kept and why."""

    removed: list[CacheEntry] = field(default_factory=list)
    kept: list[tuple[CacheEntry, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        kept = [entry.to_dict() | {"reason": reason} for entry, reason in self.kept]
        removed = [entry.to_dict() for entry in self.removed]
        return {"removed": removed, "kept": kept, "bytes": sum(entry.bytes for entry in self.removed)}


# What the entries of each kind look like


def is_token_store(path: Path) -> bool:
    return _is_hash(path.name, 64) and not unknown_entries(path, STORE)


def is_search_index(path: Path) -> bool:
    return _is_hash(path.name, 32) and not unknown_entries(path, SEARCH_INDEX)


def is_dataset(path: Path) -> bool:
    """A folder whose SOURCE.json names it and all of its files."""
    card = _read_json(path / CARD)
    files = card.get("files")
    names = [CARD, *files] if isinstance(files, dict) else []
    return card.get("name") == path.name and not unknown_entries(path, dict.fromkeys(names))


def is_url_folder(path: Path) -> bool:
    """The copies of files at URLs: each has a record beside it, which may be that of an unfinished download."""
    if not _is_hash(path.name, 16):
        return False
    names = {entry.name for entry in path.iterdir() if entry.is_file() and not entry.is_symlink()}
    if len(names) < len(list(path.iterdir())):
        return False
    records = {name.removesuffix(".lock") for name in names if name.startswith(".") and name.endswith(".json.lock")}
    parts = {f"{record}{suffix}" for record in records for suffix in ("", ".lock", ".part", ".part.json")}
    return names <= parts | {record.removeprefix(".").removesuffix(".json") for record in records}


def has_run_layout(path: Path) -> bool:
    """Whether a folder holds nothing but the files of a run."""
    from headstock.train.run_folder import LAYOUT  # imports torch, which only the copies of runs need

    return not unknown_entries(path, LAYOUT)


def is_url_run(path: Path) -> bool:
    """The copy of a run at a URL, whose hash names the folder."""
    address = path / RUN_ADDRESS
    if not address.is_file() or remote.cache_name(address.read_text(encoding="utf-8")) != path.name:
        return False
    folders = [entry for entry in path.iterdir() if entry.name not in (RUN_ADDRESS, ".versions")]
    return all(entry.is_dir() and not entry.is_symlink() and has_run_layout(entry) for entry in folders)


def is_hub_run(path: Path) -> bool:
    return _is_hash(path.name.rpartition("@")[2], 40) and has_run_layout(path)


def is_run_copy(path: Path) -> bool:
    return _is_hash(path.name, 32) and has_run_layout(path)


def is_hashed_file(path: Path) -> bool:
    return path.is_file() and _is_hash(path.stem, 64) and path.suffix in (".txt", ".jsonl", ".npy")


def is_inductor_cache(path: Path) -> bool:
    return all(entry.is_dir() and INDUCTOR.fullmatch(entry.name) for entry in path.iterdir())


KINDS = {
    kind.name: kind
    for kind in (
        CacheKind("stores", "tokenized corpora, built again when needed", "*", is_token_store),
        CacheKind("data", "datasets of `headstock data`", "*", is_dataset),
        CacheKind("urls", "files downloaded from URLs", "*", is_url_folder),
        CacheKind("runs", "runs downloaded from URLs", "*", is_url_run),
        CacheKind("hub", "models imported from hf://", "**/*@*", is_hub_run),
        CacheKind("search", "indexes of `headstock search`", "*", is_search_index),
        CacheKind("stdin", "corpora read from standard input: to resume their runs", "*", is_hashed_file),
        CacheKind("memory", "rows given in Python: to resume their runs", "*", is_hashed_file),
        CacheKind(
            "distil",
            "labelled rows of `headstock distil` and the probabilities of its teachers: to resume its runs",
            "*",
            is_hashed_file,
        ),
        CacheKind("ray", "copies of runs for trials on Ray", "*", is_run_copy),
        CacheKind("compiled", "kernels of torch.compile", ".", is_inductor_cache),
    )
}


def _is_hash(name: str, length: int) -> bool:
    return re.fullmatch(f"[0-9a-f]{{{length}}}", name) is not None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# Listing


def cache_entries(kinds: Iterable[str] = KINDS, *, root: Path | None = None) -> list[CacheEntry]:
    """The entries of these kinds, in the order of the kinds, the largest first."""
    root = root or cache_folder()
    used = {path.resolve() for path in used_entries(root)}
    entries: list[CacheEntry] = []
    for name in kinds:
        found = [describe(KINDS[name], path, used) for path in entry_paths(root, KINDS[name])]
        entries += sorted(found, key=lambda entry: (-entry.bytes, entry.path))
    return entries


def entry_paths(root: Path, kind: CacheKind) -> Iterator[Path]:
    """The paths of the entries of a kind; temporary and lock files are none."""
    folder = root / kind.name
    if kind.pattern == ".":
        paths = [folder] if folder.is_dir() and any(folder.iterdir()) else []
    else:
        paths = sorted(folder.glob(kind.pattern))
    return (path for path in paths if not path.name.startswith("."))


def describe(kind: CacheKind, path: Path, used: set[Path]) -> CacheEntry:
    is_ours = False
    if not path.is_symlink() and not os.path.ismount(path):
        with suppress(OSError, UnicodeDecodeError):
            is_ours = kind.is_ours(path)
    size, last_used = measure(path)
    return CacheEntry(kind.name, path, size, last_used, path.resolve() in used, is_ours)


def measure(path: Path) -> tuple[int, float]:
    """Bytes and time of the last change of a file or folder; links are not followed."""
    size, changed = 0, 0.0
    for file in [path, *(Path(folder) / name for folder, _, names in os.walk(path) for name in names)]:
        with suppress(OSError):  # removed meanwhile
            status = file.lstat()
            size += 0 if file.is_dir() else status.st_size
            changed = max(changed, status.st_mtime)
    return size, changed


def cache_sizes(root: Path) -> dict[str, int]:
    """Bytes of each kind of which there is any."""
    sizes = {name: sum(measure(path)[0] for path in entry_paths(root, kind)) for name, kind in KINDS.items()}
    return {name: size for name, size in sizes.items() if size}


# Removing


def clear_cache(
    kind: str | None = None, *, older_than: float | None = None, dry_run: bool = False, root: Path | None = None
) -> ClearedCache:
    """Remove entries of one kind, or all, that were not used in the last `older_than` days.

    Kept are entries that a running process uses and those that Headstock did not write. With `dry_run`, nothing is
    removed.
    """
    if kind is not None and kind not in KINDS:
        raise UserError(f"{kind}: no such kind of cache{did_you_mean(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    if older_than is not None and not older_than >= 0:
        raise UserError(f"--older-than {older_than:g}: must be a number of days")
    root, result = root or cache_folder(), ClearedCache()
    for entry in cache_entries([kind] if kind else KINDS, root=root):
        if not entry.is_ours:
            result.kept.append((entry, "not written by Headstock"))
        elif older_than is not None and time.time() - entry.last_used < older_than * DAY:
            result.kept.append((entry, f"used in the last {older_than:g} days"))
        elif problem := ("in use" if entry.in_use else None) if dry_run else _remove(entry, root):
            result.kept.append((entry, problem))
        else:
            result.removed.append(entry)
    for entry in [] if dry_run else result.removed:
        _remove_empty_parents(entry.path, root)
    return result


def _remove(entry: CacheEntry, root: Path) -> str | None:
    """Remove an entry unless a process uses it; returns why it was kept."""
    try:
        with cache_lock(root):  # no process can start to use it between the check and the removal
            if entry.path.resolve() in {path.resolve() for path in used_entries(root)}:
                return "in use"
            remove_folder(entry.path)
    except FileNotFoundError:  # another process was faster
        return None
    except OSError as error:
        return f"cannot be removed ({error.strerror or error})"
    return None


def _remove_empty_parents(path: Path, root: Path) -> None:
    """Remove the folders of a removed entry, and what dead processes left in them, unless they hold something else."""
    for folder in path.parents:
        if folder == root or folder.is_symlink() or not folder.is_dir():
            return
        remove_stale(folder)
        with suppress(OSError):  # not empty
            folder.rmdir()
