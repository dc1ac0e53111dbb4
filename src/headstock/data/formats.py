"""Turns one file of any readable format into text with line numbers, streamed, and says exactly where it is wrong."""

import bz2
import csv
import gzip
import json
import lzma
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from headstock.errors import UserError, did_you_mean

PLAIN = ".txt"
TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
FORMATS = (PLAIN, *TABLES)
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
LANGUAGE = re.compile(r"\.[a-z]{2}([-_][a-z]{2})?")  # how a file of plain text in one language often ends
READ_BYTES = 1 << 20
PACKED_BYTES = 1 << 10  # of .zst taken at a time: four of its bytes can stand for 128 KB, which come all at once
WINDOW_BYTES = 1 << 27  # the memory that any .zst may ask for, as with the zstd program; large files may ask for more
SAMPLE_LINES = 1000
LONGEST_LINE = 1 << 27  # bytes; enough for corpora that are one line, such as text8


@dataclass(frozen=True)
class DataFile:
    """One file: where it is, what errors call it, and how it is read."""

    path: Path
    name: str
    format: str  # one of FORMATS
    compression: str  # one of PACKINGS, or "" for none


def detect_format(path: Path, name: str | None = None) -> DataFile | None:
    """How `path` would be read, by its name alone; None when the name says nothing we know."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    if not suffixes or suffixes[-1] not in FORMATS:
        return None
    return DataFile(path, name or str(path), suffixes[-1], packing)


def detect_language_file(path: Path, name: str) -> DataFile | None:
    """How a file is read that is named for its language, such as corpus.fr or corpus.pt-br.gz; None for others."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    if not suffixes or not LANGUAGE.fullmatch(suffixes[-1]):
        return None
    return DataFile(path, name, PLAIN, packing)


# Bytes


def read_chunks(source: DataFile) -> Iterator[bytes]:
    """The bytes of a file, decompressed, a stretch at a time."""
    try:
        with source.path.open("rb") as file:
            if source.compression == ".zst":
                yield from _unpacked_zst(file, source)
            else:
                stream = _stream(file, source.compression)
                while data := stream.read(READ_BYTES):
                    yield data
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as wrong:
        raise _damaged(source, wrong) from None
    except OSError as wrong:
        if source.compression and wrong.errno is None:  # bz2 reports damage as an OSError that no system call made
            raise _damaged(source, wrong) from None
        raise UserError(f"{source.name}: cannot be read ({wrong.strerror or wrong})") from None


def _stream(file: IO[bytes], packing: str) -> IO[bytes]:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if packing == ".bz2":
        return bz2.BZ2File(file)
    if packing == ".xz":
        return lzma.LZMAFile(file)
    return file


def _unpacked_zst(file: IO[bytes], source: DataFile) -> Iterator[bytes]:
    import zstandard

    # a file that was packed with a very long window is itself large, unless it was made to exhaust memory
    window = min(1 << 31, max(WINDOW_BYTES, 16 * source.path.stat().st_size))
    # the library's own stream reader ends quietly where a file is cut short, so the frames are followed here
    machine = zstandard.ZstdDecompressor(max_window_size=window)
    frame, ready, size = None, [], 0
    while packed := file.read(PACKED_BYTES):
        while packed:
            frame = frame or machine.decompressobj()
            try:
                data = frame.decompress(packed)
            except zstandard.ZstdError as wrong:
                if "too much memory" in str(wrong):
                    raise UserError(
                        f"{source.name}: takes more than {window >> 20} MiB of memory to decompress; "
                        "decompress it first (such as: zstd -d --long=31)"
                    ) from None
                raise EOFError(str(wrong)) from None
            ready.append(data)
            size += len(data)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        if size >= READ_BYTES:
            whole = b"".join(ready)
            ready, size = [], 0
            yield from (whole[at : at + READ_BYTES] for at in range(0, len(whole), READ_BYTES))
    if size:
        yield b"".join(ready)
    if frame:
        raise EOFError("the last frame has no end")


def _damaged(source: DataFile, wrong: Exception) -> UserError:
    return UserError(f"{source.name}: the {source.compression} data is cut short or damaged ({wrong}); fetch it again")


# Text


def text_chunks(
    source: DataFile, stretches: Iterator[bytes] | None = None, *, cut_long: bool = False
) -> Iterator[tuple[int, str]]:
    """Stretches of whole lines, each with the number of its first line; line ends are made plain newlines.

    `stretches` are the bytes where they do not come from a file, such as those of standard input. A line above
    LONGEST_LINE is an error; with `cut_long` it comes in stretches of about READ_BYTES, cut after spaces.
    """
    line, offset = 1, 0
    for raw in _whole_lines(read_chunks(source) if stretches is None else stretches, cut_long=cut_long):
        if len(raw) > LONGEST_LINE and not raw.endswith(b"\n"):
            raise UserError(f"{source.name}:{line}: a line of more than {LONGEST_LINE:,} bytes")
        text = _decoded(source, raw, line, offset)
        if offset == 0:
            text = text.removeprefix("\ufeff")
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        yield line, text
        line += text.count("\n")
        offset += len(raw)


def _whole_lines(stretches: Iterator[bytes], *, cut_long: bool) -> Iterator[bytes]:
    """The same bytes, cut after line ends, so that no line and no character is in two pieces, but for long lines."""
    pending: list[bytes] = []
    size, most = 0, LONGEST_LINE
    for data in stretches:
        cut = data.rfind(b"\n") + 1
        if cut:
            yield b"".join([*pending, data[:cut]])
            pending, size, most = [data[cut:]] if cut < len(data) else [], len(data) - cut, LONGEST_LINE
            continue
        pending.append(data)
        size += len(data)
        if size > most and cut_long:
            rest = b""
            for part in pending:
                rest += part
                if len(rest) >= READ_BYTES:
                    cut = rest.rfind(b" ") + 1 or _last_character(rest)
                    yield rest[:cut]
                    rest = rest[cut:]
            pending, size, most = [rest], len(rest), READ_BYTES  # the rest of the line follows in short pieces too
        elif size > most:
            break  # which whoever reads these takes for an error
    if size:
        yield b"".join(pending)


def _last_character(data: bytes) -> int:
    """Where the last character of UTF-8 begins, whole or not."""
    return next((at for at in range(len(data) - 1, 0, -1) if data[at] & 0xC0 != 0x80), len(data))


def _decoded(source: DataFile, raw: bytes, line: int, offset: int) -> str:
    within = " of the decompressed file" if source.compression else ""
    if b"\0" in raw:
        utf16 = offset == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "it looks like UTF-16: convert it to UTF-8" if utf16 else "it is not text"
        raise UserError(f"{source.name}: binary: NUL byte at offset {offset + raw.index(0)}{within}; {hint}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as wrong:
        at_line = line + raw.count(b"\n", 0, wrong.start)
        raise UserError(
            f"{source.name}:{at_line}: not UTF-8: byte 0x{raw[wrong.start]:02x} at offset {offset + wrong.start}"
            f"{within}; convert it first (such as: iconv -f latin1 -t utf-8)"
        ) from None


def text_lines(
    source: DataFile, stretches: Iterator[bytes] | None = None, *, cut_long: bool = False
) -> Iterator[tuple[int, str]]:
    """Each line with its number, without its end."""
    for first, text in text_chunks(source, stretches, cut_long=cut_long):
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        yield from enumerate(lines, first)


# Tables


def column_names(source: DataFile) -> list[str] | None:
    """The columns of a table, from its header or first row; None when its rows are bare strings or it has none."""
    if source.format == ".parquet":
        with _parquet(source) as table:
            return list(table.schema_arrow.names)
    if source.format == ".jsonl":
        first = next(json_rows(source), None)
        return list(first[1]) if first and isinstance(first[1], dict) else None
    header = next(csv_rows(source), None)
    return header[1] if header else None


def column_values(source: DataFile, column: str) -> Iterator[tuple[int, str]]:
    """The text in one column, row by row, each with the line (or, in parquet, the row) where it starts."""
    if source.format == ".parquet":
        yield from _parquet_cells(source, column)
    elif source.format == ".jsonl":
        yield from _json_cells(source, column)
    else:
        rows = csv_rows(source)
        _, header = next(rows, (1, []))
        if column not in header:
            raise no_column(source.name, column, header)
        at = header.index(column)
        for line, row in rows:
            yield line, row[at]


def table_rows(source: DataFile, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The values of several columns, row by row, as the file holds them; columns that are not there are left out.

    In .jsonl a row that is a bare string stands for an object that has the first of the columns only.
    """
    if source.format == ".parquet":
        yield from _parquet_rows(source, names)
    elif source.format == ".jsonl":
        for line, row in json_rows(source):
            if isinstance(row, dict):
                yield line, {name: row[name] for name in names if name in row}
            elif isinstance(row, str):
                yield line, {names[0]: row}
            else:
                raise _no_row(source, line, row)
    else:
        rows = csv_rows(source)
        _, header = next(rows, (1, []))
        places = [(name, header.index(name)) for name in names if name in header]
        for line, cells in rows:
            yield line, {name: cells[at] for name, at in places}


def no_column(where: str, column: str, there: list[str]) -> UserError:
    have = ", ".join(map(repr, there)) or "none"
    return UserError(f"{where}: no column {column!r}{did_you_mean(column, there)} (columns: {have})")


def csv_rows(source: DataFile) -> Iterator[tuple[int, list[str]]]:
    """The rows of a .csv or .tsv, header first, each with the line where it starts; all are as wide as the header."""
    csv.field_size_limit(LONGEST_LINE)  # the default refuses texts longer than 131,072 characters
    delimiter, quoting = _dialect(source)
    lines = (line + "\n" for _, line in text_lines(source))
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for row in reader:
            if header is None and row:
                header = [name.strip() for name in row]
                yield start, header
            elif row and header is not None:
                if len(row) != len(header):
                    raise UserError(
                        f"{source.name}:{start}: {len(row)} fields where the header has {len(header)} "
                        f"(a text that holds {delimiter!r} or a line end must be quoted)"
                    )
                yield start, row
            start = reader.line_num + 1
    except csv.Error as wrong:
        raise UserError(f"{source.name}:{start}: not a {source.format[1:]} row ({wrong})") from None


def _dialect(source: DataFile) -> tuple[str, Any]:
    """The delimiter, by the header, and whether quotes mean anything: in many .tsv files they are plain characters."""
    sample = [line + "\n" for _, line in islice(text_lines(source), SAMPLE_LINES)]
    if source.format == ".csv":
        header = next((line for line in sample if line.strip()), "")
        return max(",;\t", key=header.count), csv.QUOTE_MINIMAL
    if any(_speaks(line) for _, line in text_lines(source)):
        return "\t", csv.QUOTE_NONE
    try:
        rows = list(csv.reader(sample, delimiter="\t", strict=True))
    except csv.Error as wrong:
        # a row may be cut by the end of the sample; every other complaint means that quotes are not quotes
        cut = len(sample) == SAMPLE_LINES and "unexpected end" in str(wrong)
        return "\t", csv.QUOTE_MINIMAL if cut else csv.QUOTE_NONE
    widths = {len(row) for row in rows if row}
    return "\t", csv.QUOTE_MINIMAL if len(widths) <= 1 else csv.QUOTE_NONE


def _speaks(line: str) -> bool:
    """Whether a row of a .tsv has a quote that quotes nothing: something follows it before the field ends."""
    if not line.startswith('"') and '\t"' not in line:
        return False
    try:
        list(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error as wrong:
        return "unexpected end" not in str(wrong)  # which may be a text with a line end in it
    return False


def json_rows(source: DataFile, stretches: Iterator[bytes] | None = None) -> Iterator[tuple[int, Any]]:
    """The value on each line that is not blank."""
    for line, text in text_lines(source, stretches):
        if not text or text.isspace():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as wrong:
            raise UserError(f"{source.name}:{line}: not JSON: {wrong.msg} at column {wrong.colno}") from None
        except (ValueError, RecursionError) as wrong:
            raise UserError(f"{source.name}:{line}: not JSON that can be read ({wrong})") from None
        yield line, value


def _json_cells(source: DataFile, column: str) -> Iterator[tuple[int, str]]:
    for line, row in json_rows(source):
        value = row
        if isinstance(row, dict):
            if column not in row:
                raise no_column(f"{source.name}:{line}", column, list(row))
            value = row[column]
        elif not isinstance(row, str):
            raise _no_row(source, line, row)
        text = _text(source, line, column, value)
        if not is_valid_unicode(text):
            raise UserError(f"{source.name}:{line}: half of a surrogate pair, which is no character")
        yield line, text


def _no_row(source: DataFile, line: int, row: Any) -> UserError:
    return UserError(f"{source.name}:{line}: wanted an object or a string, got {type(row).__name__}")


def is_valid_unicode(text: str) -> bool:
    """Whether no character is half of a surrogate pair, which only an escape in JSON can make."""
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False


def _text(source: DataFile, line: int, column: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{source.name}:{line}: column {column!r} holds {type(value).__name__}, wanted text")
    return value


@contextmanager
def _parquet(source: DataFile) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{source.name}: reading .parquet needs: pip install 'headstock[tables]'") from None
    with tempfile.TemporaryFile() if source.compression else nullcontext(source.path) as file:
        if not isinstance(file, Path):  # a parquet file is read from its end, which a packed stream cannot do
            for data in read_chunks(source):
                file.write(data)
            file.seek(0)
        try:
            # without these two, a whole row group (often the whole file) is held in memory
            table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
        except (pyarrow.ArrowException, OSError) as wrong:
            raise UserError(f"{source.name}: not a parquet file ({_first_line(wrong)})") from None
        with table:
            yield table


def _parquet_cells(source: DataFile, column: str) -> Iterator[tuple[int, str]]:
    for row, values in _parquet_rows(source, [column]):
        yield row, _text(source, row, column, values[column])


def _parquet_rows(source: DataFile, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _parquet(source) as table:
        import pyarrow

        there = list(table.schema_arrow.names)
        chosen = [name for name in names if name in there]
        if not chosen:
            raise no_column(source.name, names[0], there)
        row = 1
        try:
            for batch in table.iter_batches(batch_size=1000, columns=chosen):
                for values in batch.to_pylist():
                    yield row, values
                    row += 1
        except (pyarrow.ArrowException, OSError) as wrong:
            raise UserError(f"{source.name}: damaged near row {row} ({_first_line(wrong)})") from None


def _first_line(wrong: Exception) -> str:
    return str(wrong).partition("\n")[0]
