"""Writes embeddings as .npy or JSON lines, one text at a time."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headstock.io import atomic_file


def write_vectors(out: Path, rows: Iterable[tuple[dict[str, Any], np.ndarray]]) -> dict[str, Any]:
    """Write each text's fields and vectors, and return how many there were.

    A .jsonl file has one line per text. A .npy file has only the vectors; those of tokens or words follow one another,
    and F.tokens.jsonl lists for each text which `rows` of the array are its own.
    """
    with ExitStack() as stack:

        def open_file(path: Path, mode: str) -> Any:
            encoding = None if "b" in mode else "utf-8"
            return stack.enter_context(stack.enter_context(atomic_file(path)).open(mode, encoding=encoding))

        count = 0
        if out.suffix == ".jsonl":
            lines, size, width = open_file(out, "w"), 0, 0
            for fields, vectors in rows:
                name = "vector" if vectors.ndim == 1 else "vectors"
                numbers = np.round(vectors.astype(np.float64), 6).tolist()
                lines.write(json.dumps(fields | {name: numbers}, ensure_ascii=False) + "\n")
                count, size, width = count + 1, size + len(np.atleast_2d(vectors)), vectors.shape[-1]
            return {"texts": count, "shape": [size, width]}
        array, index = NpyWriter(open_file(out, "wb")), None
        for fields, vectors in rows:
            if vectors.ndim == 2:
                index = index or open_file(out.with_suffix(".tokens.jsonl"), "w")
                span = [array.rows, array.rows + len(vectors)]
                index.write(json.dumps(fields | {"rows": span}, ensure_ascii=False) + "\n")
            array.write(np.atleast_2d(vectors))
            count += 1
        return {"texts": count, "shape": array.finish()}


class NpyWriter:
    """A .npy file that is written in parts; the header gets the number of rows at the end."""

    def __init__(self, file: BinaryIO):
        self.file, self.rows, self.width = file, 0, 0

    def write(self, rows: np.ndarray) -> None:
        if not self.width:
            self.width = rows.shape[1]
            self.write_header()
        self.rows += len(rows)
        self.file.write(np.ascontiguousarray(rows, dtype=np.float32).tobytes())

    def write_header(self) -> None:
        """numpy pads the header so that the number of rows can grow in place."""
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.width)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def finish(self) -> list[int]:
        self.file.seek(0)
        self.write_header()
        self.file.seek(0, 2)
        return [self.rows, self.width]
