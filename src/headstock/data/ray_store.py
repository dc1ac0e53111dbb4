"""Builds token stores with Ray Data: nodes read, hash and encode documents; this process writes them in order.

The bytes are those of a local build: documents are split by the hashes of all of them, and blocks of documents return
in the order of the files.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headstock.data.corpus import Corpus, resolve_paths
from headstock.data.document_split import VALID, SplitPlan, document_batches, hash_texts
from headstock.data.formats import DataFile
from headstock.data.token_shards import LOCATION, UnknownTokens
from headstock.data.token_store import EncodedBatch, count_unknown, encode_documents
from headstock.data.tokenizer import Tokenizer
from headstock.data.urls import is_url
from headstock.errors import HeadstockError
from headstock.ray_cluster import connect, import_ray, probe_nodes

BLOCK_BYTES = 1 << 22  # of documents that one task encodes: small, so that one large file occupies many CPUs
READER_CPUS = 0.5  # readers mostly wait for disks; different from encoders, or Ray Data would fuse the two


@contextmanager
def ray_builder(on: str) -> Iterator["RayBuilder"]:
    """Join the cluster `on` to build a store there."""
    with connect(on):
        yield RayBuilder()


@dataclass
class RayBuilder:
    """The two passes over a corpus (see `token_store.LocalBuilder`)."""

    counts: dict[Corpus, list[int]] = field(default_factory=dict)  # documents per file, found by the first pass

    def hash_documents(self, corpus: Corpus) -> tuple[np.ndarray, int]:
        files, counts = corpus.data_files, [0] * len(corpus.data_files)

        def read(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
            for chunk in read_file(corpus, files, unit, row["file"]):
                hashes = hash_texts(chunk.texts)
                yield {"file": chunk.file, "hashes": hashes, "longest": max(map(len, chunk.texts))}

        unit, parts, longest = corpus.unit, [], 0
        for row in self.rows(corpus, read):
            hashes = np.frombuffer(row["hashes"], np.uint64)
            parts.append(hashes)
            counts[row["file"]] += len(hashes)
            longest = max(longest, row["longest"])
        if not parts:
            raise corpus.is_empty()
        self.counts[corpus] = counts
        return np.concatenate(parts), longest

    def encode(
        self, plan: SplitPlan, fraction: float, first_file: int, tokenizer: Tokenizer, dtype: np.dtype, sep: int | None
    ) -> Iterator[EncodedBatch]:
        corpus, files, unit = plan.corpus, plan.corpus.data_files, plan.corpus.unit
        ends = np.cumsum(self.counts[corpus])
        ray, starts = import_ray(), [0, *ends[:-1]]
        slices = [ray.put(plan.assignment[start:end]) for start, end in zip(starts, ends, strict=True)]

        def read(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
            part = SplitPlan(corpus, ray.get(slices[row["file"]]))
            if len(part.assignment):
                chunks = read_file(corpus, files, unit, row["file"])
                for batch in document_batches(part, fraction, first_file, chunks=chunks):
                    yield {"batch": pickle.dumps(batch)}

        def encode(row: dict[str, Any]) -> dict[str, Any]:
            os.environ.setdefault("RAYON_NUM_THREADS", "1")  # one task per CPU encodes already
            batch = pickle.loads(row["batch"])
            tokens, lengths, locations, empty = encode_documents(tokenizer, batch, dtype, sep)
            unknown = count_unknown(tokenizer, batch) if batch.split == VALID else UnknownTokens()
            arrays = {"tokens": tokens.tobytes(), "lengths": lengths.tobytes(), "locations": locations.tobytes()}
            return {"split": batch.split, **arrays, "empty": empty, "unknown": [unknown.tokens, unknown.bytes]}

        for row in self.rows(corpus, read, encode):
            yield EncodedBatch(
                row["split"],
                np.frombuffer(row["tokens"], dtype),
                np.frombuffer(row["lengths"], np.int64),
                np.frombuffer(row["locations"], LOCATION),
                row["empty"],
                UnknownTokens(*map(int, row["unknown"])) if row["split"] == VALID else None,
            )

    def rows(
        self,
        corpus: Corpus,
        read: Callable[[dict[str, Any]], Iterator[dict[str, Any]]],
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """What `read` yields for each file, transformed, in the order of the files."""
        import ray.data
        from ray.exceptions import RayError

        numbers = [{"file": number} for number in range(len(corpus.data_files))]
        with quiet_dataset_context() as context:
            context.execution_options.preserve_order = True
            context.target_max_block_size = BLOCK_BYTES
            dataset: Any = ray.data.from_items(numbers, override_num_blocks=len(numbers))
            dataset = dataset.flat_map(read, num_cpus=READER_CPUS, **reader_placement(corpus))
            dataset = dataset.map(transform) if transform else dataset
            try:
                yield from dataset.iter_rows()
            except RayError as error:
                raise headstock_error(error) from error


def read_file(corpus: Corpus, files: list[DataFile], unit: str, number: int) -> Iterator[Any]:
    """The chunks of one file; a URL is downloaded to the cache of the node that reads it."""
    file = files[number]
    if is_url(file.name):
        file = replace(resolve_paths([file.name])[0], format=file.format)
    return corpus.file_chunks(file, number, unit)


def reader_placement(corpus: Corpus) -> dict[str, Any]:
    """Read on every node, or on this one alone if another does not see all files."""
    files = [file.path for file in corpus.data_files if not is_url(file.name)]
    if not any(unseen for _, unseen in probe_nodes(files)):
        return {}
    return {"label_selector": {"ray.io/node-id": import_ray().get_runtime_context().get_node_id()}}


@contextmanager
def quiet_dataset_context() -> Iterator[Any]:
    """A context of Ray Data for a block, without its progress bars and messages."""
    import logging

    from ray.data import DataContext

    previous, logger = DataContext.get_current(), logging.getLogger("ray.data")
    context, level = previous.copy(), logger.level
    context.enable_progress_bars = context.print_on_execution_start = False
    logger.setLevel(logging.ERROR)
    DataContext._set_current(context)
    try:
        yield context
    finally:
        DataContext._set_current(previous)
        logger.setLevel(level)


def headstock_error(error: BaseException) -> BaseException:
    """The error of ours that a chain of Ray's errors began with, or else the last one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HeadstockError) and type(cause).__module__.startswith("headstock."):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return error
