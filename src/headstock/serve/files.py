"""Predictions for the rows of an uploaded table, streamed back as CSV while they are computed.

A file is answered in one request: to cancel is to close the connection, and nothing is left behind. Its rows go through
the worker in small chunks, so that other requests are answered in between.
"""

import asyncio
import csv
import io
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from headstock.data import tables
from headstock.data.labelled_texts import is_table
from headstock.data.records import Records, find_file, parse_columns
from headstock.errors import HeadstockError, UserError
from headstock.inference.output_files import flatten
from headstock.inference.pipeline import Pipeline
from headstock.serve.responses import SERVER, error_body, event
from headstock.serve.routes import RESPONSES
from headstock.serve.served_models import ServedModel, ServedModels
from headstock.serve.settings import ServeSettings

CHUNK_ROWS = 64  # computed together; smaller ones would waste time, larger ones delay other requests
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")

Row = dict[str, Any]
Parts = AsyncGenerator[tuple[int, str], None]  # the number of rows that are done, and the new lines of CSV


def files_router(models: ServedModels, settings: ServeSettings) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["tasks"])
    locks = {model.name: asyncio.Lock() for model in models}  # one table at a time for each run

    async def predict_file(
        request: Request,
        model: Annotated[str | None, Query(description="The name of a run; by default the first one.")] = None,
        name: Annotated[str, Query(description="The name of the file; its suffix is its format.")] = "rows.csv",
        keep: Annotated[bool, Query(description="Write the columns of the file beside the predictions.")] = False,
        columns: Annotated[str | None, Query(description="Column names, such as text=review.", max_length=1000)] = None,
    ) -> StreamingResponse:
        """The same columns as `headstock predict --file rows.csv --out predictions.csv`; blank rows are skipped.

        With `Accept: text/event-stream` the answer is a stream of events with the progress and the lines of the file.
        """
        served = models.find_for("predict", model)  # refuses other runs before the upload is read
        names = parse_columns(columns) if columns else None
        rows = await read_upload(request, served.pipeline, name, keep=keep, columns=names, limit=settings.max_file)
        lock = locks[served.name]
        parts = prediction_lines(served, rows, lock, timeout=settings.timeout)
        if "text/event-stream" in request.headers.get("accept", ""):
            start = {"rows": len(rows), "skipped": rows.skipped, "waiting": lock.locked()}
            return StreamingResponse(events(models, start, parts), media_type="text/event-stream")
        headers = {"Content-Disposition": 'attachment; filename="predictions.csv"'}
        return StreamingResponse(csv_text(parts), media_type="text/csv; charset=utf-8", headers=headers)

    router.add_api_route(
        "/files",
        predict_file,
        methods=["POST"],
        summary="Predictions for the rows of a table, as CSV",
        response_class=StreamingResponse,
        responses=RESPONSES,
        openapi_extra={"requestBody": {"content": {"text/csv": {"schema": {"type": "string"}}}, "required": True}},
    )
    return router


# Reading


@dataclass
class UploadedRows:
    """The rows of a table, and beside each the columns to keep."""

    rows: list[str] | Records
    kept: list[Row]
    skipped: int  # blank rows

    def __len__(self) -> int:
        return len(self.rows)


async def read_upload(
    request: Request, pipeline: Pipeline, name: str, *, keep: bool, columns: dict[str, str] | None, limit: int
) -> UploadedRows:
    """The rows of the request's body, which is a file in a private folder only while it is read."""
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"name: {name!r} must end in {', '.join(SUFFIXES)}")
    with tempfile.TemporaryDirectory(prefix="headstock-") as folder:  # only its owner can read it
        path, size = Path(folder) / f"rows{suffix}", 0
        with path.open("wb") as file:
            async for chunk in request.stream():
                if (size := size + len(chunk)) > limit:
                    raise UserError(f"the file is larger than {limit:,} bytes, which is the limit of this server")
                file.write(chunk)
        try:
            return await asyncio.to_thread(read_rows, pipeline, path, keep=keep, columns=columns)
        except UserError as error:  # the client does not know the folder
            raise UserError(str(error).replace(f"{folder}/", "").replace("--columns", "columns")) from None


def read_rows(pipeline: Pipeline, path: Path, *, keep: bool, columns: dict[str, str] | None = None) -> UploadedRows:
    skipped: list[int] = []
    numbered = pipeline.read_numbered_rows(path, columns=columns, skipped=skipped)
    if isinstance(numbered, Records):
        rows: list[str] | Records = numbered
        lines: Sequence[int] = numbered.lines
        skipped_count = numbered.skipped
    else:
        pairs = list(numbered)
        rows, lines = [text for _, text in pairs], [line for line, _ in pairs]
        skipped_count = len(skipped)
    if not len(rows):
        raise UserError(f"{path.name}: no rows")
    by_line: dict[int, Row] = {}
    if keep and is_table(path):
        source = find_file(path)
        by_line = dict(tables.table_rows(source, tables.column_names(source) or []))
    return UploadedRows(rows, [by_line.get(line, {}) for line in lines], skipped_count)


# Writing


async def prediction_lines(served: ServedModel, rows: UploadedRows, lock: asyncio.Lock, *, timeout: float) -> Parts:
    """The lines chunk by chunk; the header comes first."""
    pipeline = served.pipeline
    records = rows.rows
    writer: csv.DictWriter | None = None
    async with lock:
        for start in range(0, len(rows), CHUNK_ROWS):
            indices = range(start, min(start + CHUNK_ROWS, len(rows)))
            if isinstance(records, Records):
                selected = records.select(list(indices))
                compute = lambda chunk, selected=selected: list(pipeline.iter_predictions(selected))  # noqa: E731
                key = f"file {id(selected)}"  # rows of a file of their own, which no other request can join
                predictions = await served.compute(key, compute, list(indices), timeout=timeout)
            else:
                texts = [records[index] for index in indices]
                predictions = await served.compute("predict", pipeline.predict_values, texts, timeout=timeout)
            text = io.StringIO(newline="")
            for index, prediction in zip(indices, predictions, strict=True):
                row = safe_row(merge_columns(rows.kept[index], prediction))
                if writer is None:
                    writer = csv.DictWriter(text, list(row), lineterminator="\n")
                    writer.writeheader()
                else:
                    writer.writer = csv.writer(text, lineterminator="\n")
                writer.writerow(row)
            yield indices.stop, text.getvalue()


def merge_columns(kept: Row, prediction: Row) -> Row:
    """The file's columns before those of the prediction, as `input.NAME` where both have a name."""
    flat = flatten(prediction)
    return {f"input.{name}" if name in flat else name: value for name, value in kept.items()} | flat


def safe_row(row: Row) -> Row:
    return {safe_cell(name): safe_cell(value) for name, value in row.items()}


def safe_cell(value: Any) -> Any:
    """A cell that a spreadsheet does not run as a formula: a quote comes before its first character."""
    if isinstance(value, str) and value.startswith(FORMULA_STARTS) and not NUMBER.fullmatch(value):
        return f"'{value}"
    return value


async def csv_text(parts: Parts) -> AsyncIterator[str]:
    async with aclosing(parts):
        async for _, text in parts:
            yield text


async def events(models: ServedModels, start: Row, parts: Parts) -> AsyncIterator[str]:
    """Server-sent events: first the number of rows, then for each chunk how many are done and its lines."""
    yield event(start)
    try:
        async with aclosing(parts):
            async for done, text in parts:
                yield event({"done": done, "csv": text})
    except HeadstockError as error:
        yield event(error_body(models.public_message(error), SERVER))
