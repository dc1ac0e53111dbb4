"""Public datasets by name: downloaded, verified by sha256, and kept in the cache."""

import json
import logging
import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headstock.cache_use import mark_used
from headstock.data import datasets, remote, urls
from headstock.data.downloads import PyPIArchive, WebFolder
from headstock.errors import UserError, WorkError, did_you_mean
from headstock.io import atomic_folder, cache_folder, sha256, write_json

logger = logging.getLogger(__name__)

RECIPE_VERSION = 1  # incremented whenever a dataset is built differently, so that older copies are rebuilt
CARD = "SOURCE.json"
PREFIX = "catalog:"  # `catalog:imdb` can be used in place of a path


@dataclass(frozen=True)
class CatalogEntry:
    """One dataset: its licence, its origin, and how its files are built."""

    name: str
    summary: str
    licence: str
    size: int  # bytes of the original files
    origin: PyPIArchive | WebFolder
    build: Callable[[datasets.Files, Path], dict[str, Any]]  # writes the files to a folder and returns counts
    notes: Sequence[str] = ()

    def card(self) -> dict[str, Any]:
        """The provenance written to SOURCE.json."""
        return {
            "name": self.name,
            "summary": self.summary,
            "source": str(self.origin),
            "licence": self.licence,
            "bytes": self.size,
            "sha256": {path: digest or None for path, digest in self.origin.expected.items()},
            "notes": list(self.notes),
            "recipe": RECIPE_VERSION,
        }


@cache
def load_catalog() -> dict[str, CatalogEntry]:
    """The entries of catalog.toml, by name."""
    entries = {}
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        archive, web, files = table.pop("archive", None), table.pop("web", None), table.pop("files")
        origin = PyPIArchive(**archive, expected=files) if archive else WebFolder(**web, expected=files)
        build = getattr(datasets, name.replace("-", "_"))
        entries[name] = CatalogEntry(name=name, **table, origin=origin, build=build)
    return entries


def find_entry(name: str) -> CatalogEntry:
    entries = load_catalog()
    if name not in entries:
        raise UserError(f"unknown dataset {name!r}{did_you_mean(name, entries)} (available: {', '.join(entries)})")
    return entries[name]


def is_name(path: str) -> bool:
    """Whether a path is the name of a dataset."""
    return path.startswith(PREFIX)


def resolve(path: str) -> Path | None:
    """The local copy of a catalog name or URL, downloaded if needed; None for other paths.

    `catalog:imdb` is the corpus of a dataset, `catalog:imdb/test.csv` another of its files.
    """
    if urls.is_url(path):
        return remote.cached_copy(path)
    if not path.startswith(PREFIX):
        return None
    name, _, file = path.removeprefix(PREFIX).partition("/")
    folder = fetch(name)
    files = sorted(entry.name for entry in folder.iterdir() if entry.name != CARD)
    file = file or "corpus.txt"
    if file not in files:
        raise UserError(f"{path}: the dataset {name} has no file {file!r} (files: {', '.join(files)})")
    return folder / file


def download_of(path: str) -> CatalogEntry | None:
    """The dataset that reading a path would download: a catalog name that is not in the cache."""
    if not is_name(path):
        return None
    entry = find_entry(path.removeprefix(PREFIX).partition("/")[0])
    return None if is_complete(cache_folder() / "data" / entry.name, entry) else entry


def licence_of(path: str) -> str | None:
    """The licence of a file, if it belongs to a dataset of the catalog or lies beside a SOURCE.json."""
    if path.startswith(PREFIX):
        name = path.removeprefix(PREFIX).partition("/")[0]
        entry = load_catalog().get(name)
        return None if entry is None else entry.licence
    return _read_card(Path(path).parent).get("licence")


def is_corpus(path: Path) -> bool:
    """Whether a file is the corpus of a dataset, in which blank lines separate documents of any length."""
    files = _read_card(path.parent).get("files")
    return path.name == "corpus.txt" and isinstance(files, dict) and path.name in files


def fetch(dataset: str | CatalogEntry, *, to: Path | None = None, source: Path | None = None) -> Path:
    """The folder of a dataset: from the cache, from `source` (an archive or folder), or downloaded; copied to `to`."""
    entry = find_entry(dataset) if isinstance(dataset, str) else dataset
    if source is not None and not source.exists():
        raise UserError(f"{source}: no such file or folder to read {entry.name} from")
    if to is not None and not _is_free(to) and not is_complete(to, entry):
        raise UserError(f"{to}: exists and is not the dataset {entry.name}; give a new or empty folder")
    cached = mark_used(cache_folder() / "data" / entry.name)
    try:
        if source is not None or not is_complete(cached, entry):
            _build(entry, cached, source)
        if to is None:
            return cached
        if _is_free(to) or _read_card(to) != _read_card(cached):
            with atomic_folder(to) as folder:
                for file in cached.iterdir():
                    shutil.copyfile(file, folder / file.name)
        return to
    except OSError as error:
        raise WorkError(f"{entry.name}: could not be saved: {error}") from None


def _build(entry: CatalogEntry, cached: Path, source: Path | None) -> None:
    files = entry.origin.files(source, entry.name)
    with atomic_folder(cached) as folder:
        counts = entry.build(files, folder)
        checksums = {file.name: sha256(file) for file in sorted(folder.iterdir())}
        write_json(folder / CARD, {**entry.card(), "counts": counts, "files": checksums})
    logger.info(f"{entry.name}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


def is_complete(folder: Path, entry: CatalogEntry) -> bool:
    """Whether a folder is an intact copy of the dataset, built by the current recipe."""
    card = _read_card(folder)
    files = card.pop("files", None)
    card.pop("counts", None)
    expected = entry.card()
    for provenance in (card, expected):  # notes may be reworded while the data stays the same
        provenance.pop("notes", None)
    if card != expected or not isinstance(files, dict):
        return False
    if {file.name for file in folder.iterdir()} != {*files, CARD}:
        return False
    return all(sha256(folder / name) == digest for name, digest in files.items())


def _read_card(folder: Path) -> dict[str, Any]:
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return card if isinstance(card, dict) else {}


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
