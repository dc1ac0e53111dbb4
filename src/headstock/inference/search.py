"""Search in the embeddings of a corpus: exact cosine similarity or FAISS, over an index that is built once.

N documents, Q queries, D width, K hits per query.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from headstock.cache_use import mark_used
from headstock.data.corpus import Corpus, read_corpus
from headstock.errors import UserError, WorkError, did_you_mean
from headstock.inference.embed import resolve_pooling
from headstock.inference.inputs import list_texts
from headstock.inference.output_files import NpyWriter
from headstock.io import atomic_file, atomic_folder, cache_folder, fingerprint, sha256, write_json
from headstock.kernels.int8 import Int8Linear
from headstock.results import Result, ResultList
from headstock.rng import generator

if TYPE_CHECKING:
    from headstock.inference.pipeline import Pipeline

logger = logging.getLogger(__name__)

FORMAT = 1  # incremented when the same inputs would give another index
MANIFEST, FAISS_INDEX, FAISS_MANIFEST = "index.json", "faiss.index", "faiss.json"
BLOCK = 1 << 14  # documents scored at once
QUERY_BLOCK = 1 << 10
MIN_EIGENVALUE = 1e-3  # relative to the largest; smaller ones are noise, which whitening would amplify
HNSW_LINKS, HNSW_BUILD, HNSW_SEARCH = 32, 200, 128  # neighbours per node, candidates kept while building, searching
RECALL_QUERIES, RECALL_TOP = 200, 10  # documents whose neighbours are compared with the exact ones

Transform = Literal["none", "center", "whiten"]
IndexKind = Literal["exact", "faiss"]
Dtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class SearchSettings:
    """What determines the vectors of an index, beside run and corpus."""

    layers: str = "last"
    pool: str | None = None  # mean unless given, also for causal models
    transform: Transform = "center"  # of all vectors, estimated on the corpus: none, minus the mean, or whitened
    dtype: Dtype = "float32"  # of the stored vectors

    def __post_init__(self) -> None:
        for name, choices in (("transform", Transform), ("dtype", Dtype)):
            check_choice(name, getattr(self, name), get_args(choices))
        if self.pool == "none":
            raise UserError("pool: search needs one vector per text: mean, cls or last")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name}: must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}")


@dataclass(frozen=True, eq=False)
class Hit(Result):
    """A document of the corpus that is similar to a query."""

    rank: int
    score: float  # cosine similarity
    text: str
    source: str  # the document's file,
    line: int  # and the line where it starts
    document: int  # its number in the corpus, from 0


# Documents


@dataclass(frozen=True)
class Documents:
    """What an index is built from: a corpus, or texts in memory."""

    names: list[str]
    fingerprint: str
    rows: Callable[[], Iterator[tuple[int, int, str]]]  # file, line and text of each


def open_documents(
    corpus: Corpus | str | Path | Iterable[Any], *, documents: str = "auto", column: str = "text"
) -> Documents:
    """The documents of a file, folder or glob (str or Path), of several (Paths), or texts (an iterable of str)."""
    if isinstance(corpus, str | Path):
        corpus = read_corpus(corpus, documents=documents, column=column)  # type: ignore[arg-type]
    if not isinstance(corpus, Corpus):
        items = list(corpus)
        if items and all(isinstance(item, Path) for item in items):
            corpus = read_corpus(items, documents=documents, column=column)  # type: ignore[arg-type]
        else:
            return texts_in_memory(list_texts(items, "corpus"))
    files = corpus

    def rows() -> Iterator[tuple[int, int, str]]:
        for chunk in files.chunks():
            for line, text in zip(chunk.lines, chunk.texts, strict=True):
                yield chunk.file, line, text

    return Documents(files.names(), files.fingerprint(), rows)


def texts_in_memory(texts: list[str]) -> Documents:
    if not texts:
        raise UserError("corpus: no texts in it")
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return Documents(["corpus"], digest.hexdigest(), lambda: ((0, i, text) for i, text in enumerate(texts, 1)))


# The index


class SearchIndex:
    """The unit vectors of a corpus on disk, memory-mapped, with their texts."""

    def __init__(self, pipeline: "Pipeline", settings: SearchSettings, folder: Path, names: list[str], *, reused: bool):
        self.pipeline, self.settings, self.folder, self.names, self.reused = pipeline, settings, folder, names, reused
        self.manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        self.vectors = np.load(folder / "vectors.npy", mmap_mode="r")  # (N, D)
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")  # (N + 1,) of each text in texts.bin
        self.locations = np.load(folder / "locations.npy", mmap_mode="r")  # (N, 2) file and line
        self.mean = np.load(folder / "mean.npy")  # (D,)
        whitening = folder / "whitening.npy"
        self.whitening = np.load(whitening) if whitening.is_file() else None  # (D, D)

    def __len__(self) -> int:
        return len(self.vectors)

    def search(
        self, queries: str | Iterable[str], *, top: int = 5, kind: IndexKind = "exact"
    ) -> ResultList[ResultList[Hit]]:
        """The `top` most similar documents of each query, the best first."""
        texts = list_texts(queries, "queries")
        if blank := next((i for i, text in enumerate(texts, 1) if not text.strip()), None):
            raise UserError(f"query {blank} of {len(texts)} is blank")
        numbers, scores = self.nearest(self.embed(texts), top=top, kind=kind)
        rows = zip(numbers.tolist(), scores.tolist(), strict=True)
        ranked = (enumerate(zip(*row, strict=True), 1) for row in rows)
        hits = (ResultList(self.hit(rank, *pair) for rank, pair in row if pair[0] >= 0) for row in ranked)
        return ResultList(hits, index_name="query")

    def embed(self, texts: list[str]) -> np.ndarray:
        """(Q, D) unit vectors, transformed like those of the documents."""
        vectors = self.pipeline.embed(texts, layers=self.settings.layers, pool=self.settings.pool)
        return unit_vectors(np.asarray(vectors), self.mean, self.whitening)

    def nearest(self, queries: np.ndarray, *, top: int, kind: IndexKind = "exact") -> tuple[np.ndarray, np.ndarray]:
        """(Q, K) document numbers and cosine similarities of the nearest documents to (Q, D) unit vectors.

        Where FAISS reaches fewer than K documents, the row ends with numbers of -1.
        """
        check_choice("index", kind, get_args(IndexKind))
        if top < 1:
            raise UserError(f"top: must be 1 or more, not {top}")
        if kind == "exact":
            return exact_nearest(self.vectors, queries, top, self.pipeline.model.device)
        index = self.faiss_index()
        index.hnsw.efSearch = max(HNSW_SEARCH, 2 * top)
        scores, numbers = index.search(queries, min(top, len(self)))
        return numbers, scores

    def hit(self, rank: int, document: int, score: float) -> Hit:
        file, line = self.locations[document].tolist()
        return Hit(rank, round(score, 6), self.text(document), self.names[file], line, document)

    def text(self, document: int) -> str:
        start, end = self.offsets[document : document + 2].tolist()
        with (self.folder / "texts.bin").open("rb") as file:
            file.seek(start)
            return file.read(end - start).decode()

    def faiss_index(self) -> Any:
        """The FAISS index of these vectors, built at the first use: a graph of neighbours (HNSW)."""
        faiss = import_faiss()
        path = self.folder / FAISS_INDEX
        if not (self.folder / FAISS_MANIFEST).is_file():
            start = time.perf_counter()
            index = faiss.IndexHNSWFlat(self.vectors.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = HNSW_BUILD
            for begin in range(0, len(self), BLOCK):
                index.add(np.asarray(self.vectors[begin : begin + BLOCK], dtype=np.float32))
            with atomic_file(path) as temporary:
                faiss.write_index(index, str(temporary))
            index.hnsw.efSearch = HNSW_SEARCH
            recall, seconds = self.faiss_recall(index), time.perf_counter() - start
            write_json(self.folder / FAISS_MANIFEST, {"recall": round(recall, 4), "seconds": round(seconds, 2)})
            logger.info(f"built a FAISS index in {seconds:.1f} s; recall@{RECALL_TOP} against exact {recall:.1%}")
            return index
        index = faiss.read_index(str(path))
        index.hnsw.efSearch = HNSW_SEARCH
        return index

    def faiss_recall(self, index: Any) -> float:
        """The share of the nearest documents that FAISS finds, for a sample of documents; each also finds itself."""
        sample = generator(0, "recall").permutation(len(self))[:RECALL_QUERIES]
        queries = np.asarray(self.vectors[np.sort(sample)], dtype=np.float32)
        top = min(RECALL_TOP + 1, len(self))
        exact, _ = exact_nearest(self.vectors, queries, top, self.pipeline.model.device)
        _, approximate = index.search(queries, top)
        shared = [len(set(a) & set(b)) - 1 for a, b in zip(exact.tolist(), approximate.tolist(), strict=True)]
        return float(np.mean(shared)) / max(1, top - 1)

    def describe(self, kind: IndexKind) -> dict[str, Any]:
        """The index in words, for --json."""
        facts: dict[str, Any] = {"kind": kind, "documents": len(self), "width": self.vectors.shape[1]}
        facts |= asdict(self.settings) | {"folder": str(self.folder), "reused": self.reused}
        facts["seconds"] = self.manifest["seconds"]
        if kind == "faiss":
            facts["faiss"] = json.loads((self.folder / FAISS_MANIFEST).read_text(encoding="utf-8"))
        return facts


def open_index(
    pipeline: "Pipeline", documents: Documents, settings: SearchSettings, *, cache: Path | None = None
) -> SearchIndex:
    """The index of these documents, run and settings: from the cache, or built and saved there."""
    pool = resolve_pooling(settings.pool or "mean", pipeline.model.backbone)
    settings = SearchSettings(settings.layers, pool, settings.transform, settings.dtype)
    config = pipeline.config.plain()
    key = {
        "format": FORMAT,
        "documents": documents.fingerprint,
        "weights": sha256(pipeline.run.weights_file) if len(pipeline.models) == 1 else None,  # an ensemble is refused
        "tokenizer": pipeline.tokenizer.fingerprint,
        "model": [config["model"], config["task"], pipeline.length],
        "settings": asdict(settings),
        "int8": any(isinstance(module, Int8Linear) for module in pipeline.model.modules()),
    }
    folder = mark_used((cache or cache_folder()) / "search" / fingerprint(key)[:32])
    if reused := is_whole(folder):
        try:
            index = SearchIndex(pipeline, settings, folder, documents.names, reused=True)
            logger.info(f"reusing the index in {folder}")
            return index
        except (ValueError, KeyError, OSError, EOFError) as error:  # arrays with a pickle in them are among these
            logger.warning(f"{folder}: the index is damaged ({error}); building it again")
            reused = False
    if not reused:
        try:
            with atomic_folder(folder) as temporary:
                build_index(pipeline, documents, settings, temporary)
        except OSError as error:
            if not is_whole(folder):  # another process may have finished the same index first
                raise WorkError(f"{folder}: the index could not be written ({error.strerror or error})") from None
    return SearchIndex(pipeline, settings, folder, documents.names, reused=reused)


def is_whole(folder: Path) -> bool:
    """Whether all files of an index exist with the sizes that were recorded."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def build_index(pipeline: "Pipeline", documents: Documents, settings: SearchSettings, folder: Path) -> None:
    """Embed all documents, in constant memory, and write the files of an index."""
    start = time.perf_counter()
    offsets, locations = [0], []

    with (folder / "texts.bin").open("wb") as texts, (folder / "raw.npy").open("wb") as raw:

        def recorded_texts() -> Iterator[str]:
            for file, line, text in documents.rows():
                offsets.append(offsets[-1] + texts.write(text.encode()))
                locations.append((file, line))
                yield text

        writer = NpyWriter(raw)
        for number, vector in enumerate(
            pipeline.iter_embeddings(recorded_texts(), layers=settings.layers, pool=settings.pool), 1
        ):
            writer.write(vector[None])
            if number % (10 * BLOCK) == 0:
                logger.info(f"{number:,} documents embedded")
        writer.finish()
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    np.save(folder / "locations.npy", np.array(locations, dtype=np.int64))
    raw_vectors = np.load(folder / "raw.npy", mmap_mode="r")
    mean, whitening = fit_transform(raw_vectors, settings.transform)
    np.save(folder / "mean.npy", mean)
    if whitening is not None:
        np.save(folder / "whitening.npy", whitening)
    shape, dtype = raw_vectors.shape, np.dtype(settings.dtype)
    vectors = np.lib.format.open_memmap(folder / "vectors.npy", mode="w+", dtype=dtype, shape=shape)
    for begin in range(0, len(raw_vectors), BLOCK):
        vectors[begin : begin + BLOCK] = unit_vectors(raw_vectors[begin : begin + BLOCK], mean, whitening)
    vectors.flush()
    del raw_vectors, vectors
    (folder / "raw.npy").unlink()
    seconds = time.perf_counter() - start
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"format": FORMAT, "shape": shape, "seconds": round(seconds, 2), "bytes": sizes})
    logger.info(f"indexed {shape[0]:,} documents in {seconds:.1f} s ({shape[0] / max(1e-9, seconds):,.0f} per second)")


# Vectors


def fit_transform(vectors: np.ndarray, transform: Transform) -> tuple[np.ndarray, np.ndarray | None]:
    """The mean to subtract, and for whitening the matrix that makes the covariance of the corpus the identity."""
    width = vectors.shape[1]
    if transform == "none":
        return np.zeros(width, np.float32), None
    total, products = np.zeros(width), np.zeros((width, width))
    for begin in range(0, len(vectors), BLOCK):
        block = np.asarray(vectors[begin : begin + BLOCK], dtype=np.float64)
        total += block.sum(0)
        if transform == "whiten":
            products += block.T @ block
    mean = total / len(vectors)
    if transform == "center":
        return mean.astype(np.float32), None
    values, directions = np.linalg.eigh(products / len(vectors) - np.outer(mean, mean))
    scales = np.sqrt(np.maximum(values, MIN_EIGENVALUE * values[-1]))
    # the vectors of a corpus of one document have no variance
    return mean.astype(np.float32), (directions / np.where(scales > 0, scales, 1.0)).astype(np.float32)


def unit_vectors(vectors: np.ndarray, mean: np.ndarray, whitening: np.ndarray | None) -> np.ndarray:
    """(Q, D) transformed and divided by their norms."""
    centered = np.asarray(vectors, dtype=np.float32) - mean
    transformed = centered if whitening is None else centered @ whitening
    norms = np.linalg.norm(transformed, axis=1, keepdims=True)
    return transformed / np.maximum(norms, np.finfo(np.float32).tiny)


def exact_nearest(
    vectors: np.ndarray, queries: np.ndarray, top: int, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """(Q, K) numbers and inner products of the nearest rows of `vectors`, read block by block.

    Rows with equal products are ordered by number.
    """
    numbers = np.zeros((len(queries), min(top, len(vectors))), dtype=np.int64)
    scores = np.zeros(numbers.shape, dtype=np.float32)
    for first in range(0, len(queries), QUERY_BLOCK):
        part = slice(first, first + QUERY_BLOCK)
        block_queries = torch.from_numpy(np.ascontiguousarray(queries[part])).to(device)
        best_scores = torch.empty((len(block_queries), 0), device=device)
        best_numbers = torch.empty((len(block_queries), 0), dtype=torch.long, device=device)
        for begin in range(0, len(vectors), BLOCK):
            block = torch.from_numpy(np.array(vectors[begin : begin + BLOCK], dtype=np.float32)).to(device)
            products = block_queries @ block.T  # (Q, BLOCK)
            block_scores, columns = products.topk(min(top, len(block)), dim=1)
            all_scores = torch.cat([best_scores, block_scores], 1)
            all_numbers = torch.cat([best_numbers, columns + begin], 1)
            best_scores, best = all_scores.topk(min(top, all_scores.size(1)), dim=1)
            best_numbers = all_numbers.gather(1, best)
        row_scores, row_numbers = best_scores.cpu().numpy(), best_numbers.cpu().numpy()
        order = np.lexsort((row_numbers, -row_scores))
        numbers[part] = np.take_along_axis(row_numbers, order, 1)
        scores[part] = np.take_along_axis(row_scores, order, 1)
    return numbers, scores


def import_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise UserError("--index faiss: needs the package faiss-cpu: pip install 'headstock[search]'") from None
    return faiss
