"""The on-disk format of a token store: memory-mapped shards of ids, document offsets and document locations."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from headstock.config import malformed_as_user_error
from headstock.errors import UserError
from headstock.io import checksum, fingerprint, folder_mismatches

FORMAT = 1  # incremented when older stores can no longer be read
INDEX = "index.json"
SHARD_TOKENS = 1 << 26
LOCATION = np.dtype([("file", "<i4"), ("line", "<i8"), ("bytes", "<i8")])


@dataclass(frozen=True)
class UnknownTokens:
    """The unknown tokens of a text, and the UTF-8 bytes they stand for."""

    tokens: int = 0
    bytes: int = 0

    @property
    def bits(self) -> int:
        """The cost of spelling them out: 8 bits per byte, and 8 to mark the end of each unknown token.

        This is an upper bound on what a model with byte fallback would need. Without it, a vocabulary with more
        unknown words would have fewer bits per byte, because it predicts less of the text.
        """
        return 8 * (self.bytes + self.tokens)

    def __add__(self, other: "UnknownTokens") -> "UnknownTokens":
        return UnknownTokens(self.tokens + other.tokens, self.bytes + other.bytes)


def read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a token store (it has no {INDEX})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / INDEX}: cannot be read ({error})") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{folder}: a token store of another format, expected format {FORMAT}; build it again")
    return index


def index_digest(index: dict[str, Any]) -> str:
    """The fingerprint of an index without its own "digest" entry."""
    return fingerprint({name: value for name, value in index.items() if name != "digest"})


def verify_store(folder: Path) -> None:
    """Refuse a store in which any byte has changed; stores of the first version have no checksums.

    All files are read each time. This is cheap for the caller, who has just hashed the corpus, which is about twice as
    large. The files are hashed in parallel, as hashing releases the GIL.
    """
    index = read_index(folder)
    if index.get("digest") not in (None, index_digest(index)):
        raise UserError(f"{folder / INDEX}: has changed since it was written (its digest differs); delete {folder}")
    checksums = index.get("files", {})
    with ThreadPoolExecutor(min(4, max(1, len(checksums)))) as threads:
        mismatches = threads.map(lambda name: next(folder_mismatches(folder, {name: checksums[name]}), None), checksums)
        for mismatch in filter(None, mismatches):
            raise UserError(f"{folder}: {mismatch}; delete this folder and build it again")


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


class TokenStore:
    """A memory-mapped stream of token ids, `A B C <eos> D E <eos>`."""

    tokens: int  # including eos
    documents: int
    bytes: int  # of the text, as UTF-8
    sentences: int | None  # None if they are not separated by sep
    unknown: UnknownTokens | None  # counted in validation text only

    def __init__(self, folder: Path, split: str):
        self.folder, self.split = folder, split
        with malformed_as_user_error(folder / INDEX, "a token store"):
            self._open(read_index(folder))

    def _open(self, index: dict[str, Any]) -> None:
        split = self.split
        self.eos: int = index["end"]
        self.sep: int | None = index.get("separator")  # between sentences, if they are separated
        self.sources: list[str] = [str(name) for name in list(index["sources"])]
        counts = index[split]
        self.tokens, self.documents, self.bytes = counts["tokens"], counts["documents"], counts["bytes"]
        self.sentences = counts.get("sentences")
        self.unknown = UnknownTokens(**counts["unknown"]) if "unknown" in counts else None
        self.dtype = np.dtype(index["dtype"])
        sizes = counts["shards"]
        self._shards = [self._map(shard_name(split, i), self.dtype, size) for i, size in enumerate(sizes)]
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # where shards start, and the end
        self.offsets = self._map(f"{split}-offsets.bin", np.dtype("<i8"), self.documents + 1)
        self._locations = self._map(f"{split}-places.bin", LOCATION, self.documents)
        if self._bounds[-1] != self.tokens or self.offsets[0] != 0 or self.offsets[-1] != self.tokens:
            raise ValueError(f"its shards and documents do not have {self.tokens} tokens")

    def __reduce__(self) -> Any:  # a worker process maps the files itself
        return TokenStore, (self.folder, self.split)

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}, {self.split!r}: {self.documents:,} documents, {self.tokens:,} tokens)"

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        path = self.folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != count * dtype.itemsize:
            actual = "it is missing" if size < 0 else f"found {size}"
            raise UserError(
                f"{path}: expected {count * dtype.itemsize} bytes, {actual}; delete {self.folder} and build it again"
            )
        # a plain array, because every index into a np.memmap creates another np.memmap, which is slow
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per document, including eos."""
        return np.diff(self.offsets)

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """Windows of the stream, (rows, width) int64; positions outside the stream are eos."""
        starts = np.asarray(starts, dtype=np.int64)
        rows = np.full((len(starts), width), self.eos, dtype=np.int64)
        shard = np.searchsorted(self._bounds, starts, side="right") - 1
        bound = self._bounds[np.clip(shard + 1, 0, len(self._shards))]
        inside = (starts >= 0) & (starts < self.tokens) & (starts + width <= bound)
        for i in np.unique(shard[inside]):
            in_shard = np.flatnonzero(inside & (shard == i))
            windows = sliding_window_view(self._shards[i], width)
            rows[in_shard] = windows[starts[in_shard] - self._bounds[i]]
        for row in np.flatnonzero(~inside):  # the few that cross the end of a shard or of the stream
            first, last = max(0, starts[row]), min(self.tokens, starts[row] + width)
            if first < last:
                rows[row, first - starts[row] : last - starts[row]] = self.slice(first, last)
        return rows

    def document(self, i: int) -> np.ndarray:
        """The ids of one document, without eos."""
        if not 0 <= i < self.documents:
            raise IndexError(f"document {i} of {self.documents}")
        return self.slice(int(self.offsets[i]), int(self.offsets[i + 1]) - 1)

    def slice(self, first: int, last: int) -> np.ndarray:
        """The stream in the range [first, last)."""
        shard = int(np.searchsorted(self._bounds, first, side="right")) - 1
        parts = []
        while first < last:
            stop = min(last, int(self._bounds[shard + 1]))
            parts.append(self._shards[shard][first - self._bounds[shard] : stop - self._bounds[shard]])
            first, shard = stop, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def document_at(self, position: int) -> int:
        """The document at a position of the stream; its eos belongs to it."""
        if not 0 <= position < self.tokens:
            raise IndexError(f"position {position} of {self.tokens}")
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def location(self, i: int) -> str:
        """The source of a document, as `file:line`."""
        number = int(self._locations["file"][i])
        if not 0 <= number < len(self.sources):
            raise UserError(f"{self.folder / INDEX}: names {len(self.sources)} sources, but not number {number}")
        return f"{self.sources[number]}:{self._locations['line'][i]}"


class SplitWriter:
    """Writes one split with buffered writes: a full disk is then an error, whereas a memory-mapped file would crash."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, *, sep: int | None = None):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.sep = sep  # between sentences, if they are separated
        self.sizes: list[int] = []
        self.tokens = self.documents = self.bytes = self.sentences = 0
        self.unknown: UnknownTokens | None = None  # None until counted
        self._files: dict[str, BinaryIO] = {}
        self._offsets = self._open(f"{split}-offsets.bin")
        self._locations = self._open(f"{split}-places.bin")
        self._offsets.write(np.zeros(1, "<i8").data)
        self._shard = self._next_shard()

    def write(self, tokens: np.ndarray, lengths: np.ndarray, locations: np.ndarray) -> None:
        """Append documents: their concatenated ids, their lengths and their locations."""
        ends = np.cumsum(lengths, dtype=np.int64)
        done = 0
        while done < len(tokens):
            room = self.shard_tokens - self.sizes[-1]
            fit = int(np.searchsorted(ends, done + room, side="right"))  # documents that end in this shard
            stop = int(ends[fit - 1]) if fit else 0
            if stop <= done and self.sizes[-1]:  # a document is not split across shards
                self._shard = self._next_shard()
                continue
            if stop <= done:  # unless it is longer than a shard
                stop = done + room
            self._shard.write(np.ascontiguousarray(tokens[done:stop], self.dtype).data)
            self.sizes[-1] += stop - done
            done = stop
        self._offsets.write((self.tokens + ends).astype("<i8").data)
        self._locations.write(locations.tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.bytes += int(locations["bytes"].sum())
        if self.sep is not None:
            self.sentences += len(lengths) + int((tokens == self.sep).sum())

    def _next_shard(self) -> BinaryIO:
        if self.sizes:
            self._shard.close()
        self.sizes.append(0)
        return self._open(shard_name(self.split, len(self.sizes) - 1))

    def _open(self, name: str) -> BinaryIO:
        self._files[name] = (self.folder / name).open("wb")
        return self._files[name]

    def checksums(self) -> dict[str, Any]:
        """Size and sha256 of every file, after they are closed."""
        return {name: checksum(self.folder / name) for name in self._files}

    def counts(self) -> dict[str, Any]:
        """The entry of this split in the index."""
        counts = {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}
        sentences = {} if self.sep is None else {"sentences": self.sentences}
        unknown = {} if self.unknown is None else {"unknown": asdict(self.unknown)}
        return {**counts, **sentences, **unknown, "shards": self.sizes}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
