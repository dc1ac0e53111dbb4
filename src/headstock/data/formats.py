"""Finds data files, detects their format, and streams their text with line numbers, compressed or not."""

import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headstock.data import catalog, remote, urls
from headstock.errors import UserError, suggest_path

PLAIN = ".txt"
TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
FORMATS = (PLAIN, *TABLES)
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}  # suffix -> fsspec's name
READ_BYTES = 1 << 20
ZSTD_READ_BYTES = 1 << 10  # compressed bytes per step: 4 bytes can expand to 128 KB, all of it returned at once
ZSTD_WINDOW_BYTES = 1 << 27  # window memory any .zst may use, as in the zstd program; large files may use more
SAMPLE_LINES = 1000
MAX_LINE_BYTES = 1 << 27  # enough for corpora that are a single line, such as text8
# A decompression bomb: text of more than FREE_BYTES that is more than MAX_EXPANSION times as large as its file.
FREE_BYTES = 1 << 24
MAX_EXPANSION = 200  # text compresses 3 to 10 times, logs up to 50 times
EXPANSION_VARIABLE = "HEADSTOCK_MAX_EXPANSION"


@dataclass(frozen=True)
class DataFile:
    """One file and how to read it."""

    path: Path
    name: str  # as the user wrote it, for error messages
    format: str  # the suffix in lower case, without that of the compression; "" if there is none
    compression: str  # one of COMPRESSIONS, or "" for none

    @property
    def is_table(self) -> bool:
        return self.format in TABLES


def split_compression(name: str) -> tuple[str, str]:
    """A file name without its compression suffix, and that suffix in lower case."""
    suffix = next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)], suffix


def detect_format(path: str | Path, name: str | None = None) -> DataFile:
    """How to read a file, by its name alone; its format may be an unknown one."""
    bare, compression = split_compression(urls.file_name(path))
    return DataFile(Path(path), name or str(path), Path(bare).suffix.lower(), compression)


def unknown_format(file: DataFile, expected: str) -> UserError:
    problem = f"the suffix {file.format} is not known" if file.format else "the name has no suffix"
    return UserError(f"{file.name}: cannot tell the format: {problem} (expected {expected})")


def find_beside(path: str | Path, name: str, shown: str | None = None) -> DataFile | None:
    """The file `name`, or the same with a compression suffix, beside a path or URL; None if there is none.

    `shown` is the path as the user wrote it.
    """
    names, shown = [name + suffix for suffix in ("", *COMPRESSIONS)], shown or str(path)
    if urls.is_url(shown):
        file = remote.find_sibling(shown, names)
        return None if file is None else detect_format(remote.cached_copies([file])[0], file.url)
    files = (Path(path).with_name(each) for each in names)
    match = next((file for file in files if file.is_file()), None)
    return None if match is None else detect_format(match, str(Path(shown).with_name(match.name)))


def expand_path(name: str, formats: Sequence[str], expected: str) -> list[DataFile]:
    """The files that a path, folder, glob, URL or catalog name stands for, sorted.

    Of folders and globs only visible, non-empty files in one of the formats count; a single file may have any format.
    """
    if urls.is_url(name):
        return _expand_url(urls.redact(name), formats, expected)
    path = catalog.resolve(name) or Path(name).expanduser()
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # such as a text instead of a file name, which is too long for one
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    if exists and not is_folder:
        return [detect_format(path, name)]
    if is_folder:
        matches, problem = [path], "no readable files in this folder"
    elif glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        problem = f"the pattern matches {'no readable files' if matches else 'nothing'}"
    else:
        raise UserError(f"{name}: no such file or folder{_suggest(path)}")
    paths = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
    files = [detect_format(file) for file in paths if file.is_file() and file.stat().st_size]
    files = [file for file in files if file.format in formats]
    if not files:
        raise UserError(f"{name}: {problem} (expected {expected})")
    return files


def _expand_url(url: str, formats: Sequence[str], expected: str) -> list[DataFile]:
    if remote.has_magic(url):
        files, problem = remote.list_glob(url), "the pattern matches"
    elif remote.is_folder(remote.open_url(url)):
        files, problem = remote.list_folder(url), "in this folder there are"
    else:
        return [detect_format(remote.cached_copy(url), url)]
    readable = [f for f in files if detect_format(f.url).format in formats and (f.listed or {}).get("size") != 0]
    if not readable:
        raise UserError(f"{url}: {problem} {'no readable files' if files else 'nothing'} (expected {expected})")
    copies = zip(readable, remote.cached_copies(readable), strict=True)
    return [detect_format(copy, file.url) for file, copy in copies if copy.stat().st_size]


def _files_below(folder: Path) -> list[Path]:
    """All files below a folder, sorted, without hidden ones."""
    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _suggest(path: Path) -> str:
    """A suggestion for the first component of the path that does not exist."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    siblings = [entry.name for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    return suggest_path(missing.name, siblings)


# Bytes


def read_chunks(file: DataFile) -> Iterator[bytes]:
    """The decompressed bytes of a file, in chunks."""
    try:
        with file.path.open("rb") as raw:
            if file.compression == ".zst":
                yield from _decompress_zstd(raw, file)
                return
            stream: IO[bytes] = raw
            if file.compression:
                from fsspec.compression import compr

                stream = compr[COMPRESSIONS[file.compression]](raw, mode="r")
            produced = 0
            while data := stream.read(READ_BYTES):
                if file.compression:
                    produced += len(data)
                    check_expansion(file.name, raw.tell(), produced)
                yield data
    except MemoryError:
        raise UserError(f"{file.name}: needs more memory to decompress than there is; decompress it first") from None
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(file, error) from None
    except OSError as error:
        if file.compression and error.errno is None:  # bz2 reports damaged data as an OSError without errno
            raise _damaged(file, error) from None
        raise UserError(f"{file.name}: cannot be read ({error.strerror or error})") from None


def _decompress_zstd(raw: IO[bytes], file: DataFile) -> Iterator[bytes]:
    """Decompress frame by frame: the stream reader of `zstandard`, which fsspec uses, accepts truncated files."""
    import zstandard

    # A file that needs a large window is itself large, unless it was crafted to exhaust memory.
    window = min(1 << 31, max(ZSTD_WINDOW_BYTES, 16 * file.path.stat().st_size))
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    frame, pending, produced = None, bytearray(), 0
    while packed := raw.read(ZSTD_READ_BYTES):
        while packed:
            frame = frame or decompressor.decompressobj()
            try:
                pending += frame.decompress(packed)
            except zstandard.ZstdError as error:
                if "too much memory" in str(error):
                    raise UserError(
                        f"{file.name}: needs more than {window >> 20} MiB of memory to decompress; "
                        "decompress it first (for example: zstd -d --long=31)"
                    ) from None
                raise EOFError(str(error)) from None
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        while len(pending) >= READ_BYTES:
            produced += READ_BYTES
            check_expansion(file.name, raw.tell(), produced)
            yield bytes(pending[:READ_BYTES])
            del pending[:READ_BYTES]
    if pending:
        yield bytes(pending)
    if frame:
        raise EOFError("the last frame has no end")


def check_expansion(name: str, read: int, produced: int) -> None:
    """Refuse a file that has expanded like a decompression bomb after `read` bytes of it."""
    if produced <= FREE_BYTES:
        return
    setting = os.environ.get(EXPANSION_VARIABLE, str(MAX_EXPANSION))
    if not setting.isdecimal() or not int(setting):
        raise UserError(f"{EXPANSION_VARIABLE}={setting}: expected a number above 0, such as {MAX_EXPANSION}")
    if produced > int(setting) * max(1, read):
        raise UserError(
            f"{name}: expands to more than {setting} times its size, like a decompression bomb; "
            f"if you trust it, set {EXPANSION_VARIABLE} to a higher number"
        )


def _damaged(file: DataFile, error: Exception) -> UserError:
    return UserError(f"{file.name}: the {file.compression} data is truncated or damaged ({error}); download it again")


# Text


def text_chunks(
    file: DataFile, chunks: Iterator[bytes] | None = None, *, split_long: bool = False
) -> Iterator[tuple[int, str]]:
    """Chunks of complete lines, each with the number of its first line; all line ends become `\\n`.

    `chunks` are the bytes where they do not come from the file itself, such as those of standard input. A line above
    MAX_LINE_BYTES is an error; with `split_long` it is split after spaces into chunks of about READ_BYTES.
    """
    line, offset = 1, 0
    for raw in _complete_lines(read_chunks(file) if chunks is None else chunks, split_long=split_long):
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raise UserError(f"{file.name}:{line}: line longer than {MAX_LINE_BYTES:,} bytes")
        text = _decode(file, raw, line, offset)
        if offset == 0:
            text = text.removeprefix("\ufeff")
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        yield line, text
        line += text.count("\n")
        offset += len(raw)


def _complete_lines(chunks: Iterator[bytes], *, split_long: bool) -> Iterator[bytes]:
    """Re-chunk bytes at line ends, so that no line (unless it is too long) and no character is split."""
    pending: list[bytes] = []
    size, limit = 0, MAX_LINE_BYTES
    for data in chunks:
        cut = data.rfind(b"\n") + 1
        if cut:
            yield b"".join([*pending, data[:cut]])
            pending, size, limit = [data[cut:]] if cut < len(data) else [], len(data) - cut, MAX_LINE_BYTES
            continue
        pending.append(data)
        size += len(data)
        if size > limit and split_long:
            tail = b""
            for part in pending:
                tail += part
                if len(tail) >= READ_BYTES:
                    cut = tail.rfind(b" ") + 1 or _last_character(tail)
                    yield tail[:cut]
                    tail = tail[cut:]
            pending, size, limit = [tail], len(tail), READ_BYTES  # the remainder of this line is split as it arrives
        elif size > limit:
            break  # the caller reports the overlong line
    if size:
        yield b"".join(pending)


def _last_character(data: bytes) -> int:
    """Where the last UTF-8 character begins, complete or not."""
    return next((i for i in range(len(data) - 1, 0, -1) if data[i] & 0xC0 != 0x80), len(data))


def _decode(file: DataFile, raw: bytes, line: int, offset: int) -> str:
    within = " of the decompressed file" if file.compression else ""
    if b"\0" in raw:
        utf16 = offset == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "it looks like UTF-16: convert it to UTF-8" if utf16 else "it is not text"
        raise UserError(f"{file.name}: binary: NUL byte at offset {offset + raw.index(0)}{within}; {hint}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        error_line = line + raw.count(b"\n", 0, error.start)
        raise UserError(
            f"{file.name}:{error_line}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start}"
            f"{within}; convert it first (for example: iconv -f latin1 -t utf-8)"
        ) from None


def text_lines(
    file: DataFile, chunks: Iterator[bytes] | None = None, *, split_long: bool = False
) -> Iterator[tuple[int, str]]:
    """Each line with its number, without its line end."""
    for first, text in text_chunks(file, chunks, split_long=split_long):
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        yield from enumerate(lines, first)


def is_valid_unicode(text: str) -> bool:
    """False if a text contains half of a surrogate pair, which only a JSON escape can produce."""
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False
