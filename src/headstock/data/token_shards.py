"""One side of a token store on disk: memory-mapped shards of ids, and where each document starts and came from."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from headstock.errors import UserError
from headstock.io import checksum_mismatch

FORMAT = 1  # of the folder; goes up when older ones can no longer be read
INDEX = "index.json"
SHARD_TOKENS = 1 << 26
PLACE = np.dtype([("file", "<i4"), ("line", "<i8"), ("bytes", "<i8")])


@dataclass(frozen=True)
class UnknownTokens:
    """The unknown tokens of a text, and the UTF-8 bytes that they hide."""

    tokens: int = 0
    bytes: int = 0

    @property
    def bits(self) -> int:
        """What it costs to spell them out: 8 bits for each byte, and 8 to say where each unknown token ends.

        This is an upper bound on what a model with a byte fallback would need. Without it a vocabulary that knows
        fewer words would have fewer bits per byte, because it predicts less of the text.
        """
        return 8 * (self.bytes + self.tokens)

    def __add__(self, other: "UnknownTokens") -> "UnknownTokens":
        return UnknownTokens(self.tokens + other.tokens, self.bytes + other.bytes)


def read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a token store (no {INDEX} there)") from None
    except (OSError, ValueError, RecursionError) as wrong:
        raise UserError(f"{folder / INDEX}: cannot be read ({wrong})") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{folder}: a token store of another format; wanted format {FORMAT}: build it again")
    return index


def digest_of(index: dict[str, Any]) -> str:
    """The sha256 of an index, without the entry that holds it."""
    rest = {name: value for name, value in index.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def verify_store(folder: Path) -> None:
    """Refuse a store of which any byte is not as it was written; stores of earlier versions cannot be checked.

    All files are read, each time: whoever wants to reuse a store has just read the text it was made from to compute
    its fingerprint, which is about twice as large. The files are read in parallel, as hashing does not hold the GIL.
    """
    index = read_index(folder)
    if index.get("digest") not in (None, digest_of(index)):
        raise UserError(f"{folder / INDEX}: is not what was written (its digest differs); delete {folder}")
    checksums = index.get("files", {})
    with ThreadPoolExecutor(min(4, max(1, len(checksums)))) as threads:
        for wrong in threads.map(lambda name: checksum_mismatch(folder / name, checksums[name]), checksums):
            if wrong:
                raise UserError(f"{folder}: {wrong}; delete this folder, build it again")


def shard_name(side: str, number: int) -> str:
    return f"{side}-{number:05d}.bin"


class TokenStore:
    """A stream of tokens, `A B C <end> D E <end>`, read from disk as it is needed."""

    tokens: int  # with the end marks
    documents: int
    bytes: int  # of the text, as UTF-8
    sentences: int | None  # where they are marked apart
    unknown: UnknownTokens | None  # counted in held-out text; None where they were not

    def __init__(self, folder: Path, side: str):
        self.folder, self.side = folder, side
        index = read_index(folder)
        self.eos: int = index["end"]
        self.sep: int | None = index.get("separator")  # between the sentences, where they are marked apart
        self.sources: list[str] = index["sources"]
        counts = index[side]
        self.tokens, self.documents, self.bytes = counts["tokens"], counts["documents"], counts["bytes"]
        self.sentences = counts.get("sentences")
        self.unknown = UnknownTokens(**counts["unknown"]) if "unknown" in counts else None
        self.dtype = np.dtype(index["dtype"])
        sizes = counts["shards"]
        self._shards = [self._map(shard_name(side, i), self.dtype, size) for i, size in enumerate(sizes)]
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # where shards start, then the end
        self.offsets = self._map(f"{side}-offsets.bin", np.dtype("<i8"), self.documents + 1)
        self._places = self._map(f"{side}-places.bin", PLACE, self.documents)

    def __reduce__(self) -> Any:  # a worker process opens the files again rather than being sent them
        return TokenStore, (self.folder, self.side)

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}, {self.side!r}: {self.documents:,} documents, {self.tokens:,} tokens)"

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        path = self.folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != count * dtype.itemsize:
            got = "it is missing" if size < 0 else f"got {size}"
            raise UserError(
                f"{path}: wanted {count * dtype.itemsize} bytes, {got}; delete {self.folder}, build it again"
            )
        # as a plain array: every index into a np.memmap makes another np.memmap, which is slow
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per document, with its end mark."""
        return np.diff(self.offsets)

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """Stretches of the stream, (rows, width) of int64; positions before or past the stream hold the end mark."""
        starts = np.asarray(starts, dtype=np.int64)
        rows = np.full((len(starts), width), self.eos, dtype=np.int64)
        shard = np.searchsorted(self._bounds, starts, side="right") - 1
        bound = self._bounds[np.clip(shard + 1, 0, len(self._shards))]
        inside = (starts >= 0) & (starts < self.tokens) & (starts + width <= bound)
        for i in np.unique(shard[inside]):
            mine = np.flatnonzero(inside & (shard == i))
            windows = sliding_window_view(self._shards[i], width)
            rows[mine] = windows[starts[mine] - self._bounds[i]]
        for row in np.flatnonzero(~inside):  # the few that cross a shard's bound or an end of the stream
            first, last = max(0, starts[row]), min(self.tokens, starts[row] + width)
            if first < last:
                rows[row, first - starts[row] : last - starts[row]] = self.slice(first, last)
        return rows

    def document(self, i: int) -> np.ndarray:
        """The ids of one document, without its end mark."""
        if not 0 <= i < self.documents:
            raise IndexError(f"document {i} of {self.documents}")
        return self.slice(int(self.offsets[i]), int(self.offsets[i + 1]) - 1)

    def slice(self, first: int, last: int) -> np.ndarray:
        """The stream from `first` to before `last`, both inside it."""
        shard = int(np.searchsorted(self._bounds, first, side="right")) - 1
        parts = []
        while first < last:
            stop = min(last, int(self._bounds[shard + 1]))
            parts.append(self._shards[shard][first - self._bounds[shard] : stop - self._bounds[shard]])
            first, shard = stop, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def document_at(self, position: int) -> int:
        """The document that holds this position of the stream; its end mark belongs to it."""
        if not 0 <= position < self.tokens:
            raise IndexError(f"position {position} of {self.tokens}")
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def location(self, i: int) -> str:
        """Where a document came from, as `file:line`."""
        return f"{self.sources[self._places['file'][i]]}:{self._places['line'][i]}"

    def document_bytes(self, i: int) -> int:
        """The UTF-8 bytes of one document's text."""
        return int(self._places["bytes"][i])


class SplitWriter:
    """Writes one side by plain buffered writes: a full disk is then an error, where a mapped file would crash."""

    def __init__(self, folder: Path, side: str, dtype: np.dtype, shard_tokens: int, *, separator: int | None = None):
        self.folder, self.side, self.dtype, self.shard_tokens = folder, side, dtype, shard_tokens
        self.separator = separator  # between sentences, where they are marked apart
        self.sizes: list[int] = []
        self.tokens = self.documents = self.bytes = self.sentences = 0
        self.unknown: UnknownTokens | None = None  # until some were counted
        self._files: dict[str, HashedFile] = {}
        self._offsets = self._open(f"{side}-offsets.bin")
        self._places = self._open(f"{side}-places.bin")
        self._offsets.write(np.zeros(1, "<i8").data)
        self._shard = self._next_shard()

    def write(self, tokens: np.ndarray, lengths: np.ndarray, places: np.ndarray) -> None:
        """Add documents: their ids one after the other, the length of each, and where each came from."""
        ends = np.cumsum(lengths, dtype=np.int64)
        done = 0
        while done < len(tokens):
            room = self.shard_tokens - self.sizes[-1]
            fit = int(np.searchsorted(ends, done + room, side="right"))  # documents that end in this shard
            stop = int(ends[fit - 1]) if fit else 0
            if stop <= done and self.sizes[-1]:  # a document stays in one shard
                self._shard = self._next_shard()
                continue
            if stop <= done:  # but for one that no shard can hold, which fills several
                stop = done + room
            self._write_ids(tokens[done:stop])
            done = stop
        self._offsets.write((self.tokens + ends).astype("<i8").data)
        self._places.write(places.tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.bytes += int(places["bytes"].sum())
        if self.separator is not None:
            self.sentences += len(lengths) + int((tokens == self.separator).sum())

    def _write_ids(self, ids: np.ndarray) -> None:
        self._shard.write(np.ascontiguousarray(ids, self.dtype).data)
        self.sizes[-1] += len(ids)

    def _next_shard(self) -> "HashedFile":
        if self.sizes:
            self._shard.close()
        self.sizes.append(0)
        return self._open(shard_name(self.side, len(self.sizes) - 1))

    def _open(self, name: str) -> "HashedFile":
        self._files[name] = HashedFile(self.folder / name)
        return self._files[name]

    def checksums(self) -> dict[str, Any]:
        """Size and sha256 of every file, of the bytes as they were to be written."""
        return {name: {"bytes": file.bytes, "sha256": file.digest.hexdigest()} for name, file in self._files.items()}

    def counts(self) -> dict[str, Any]:
        """What the index says of this side."""
        counts = {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}
        told = {} if self.separator is None else {"sentences": self.sentences}
        unknown = {} if self.unknown is None else {"unknown": asdict(self.unknown)}
        return {**counts, **told, **unknown, "shards": self.sizes}

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class HashedFile:
    """A new file whose size and sha256 are known as soon as it is written, without reading it again."""

    def __init__(self, path: Path):
        self.digest, self.bytes = hashlib.sha256(), 0
        self._file = path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.bytes += len(data) if isinstance(data, bytes) else data.nbytes

    def close(self) -> None:
        self._file.close()
