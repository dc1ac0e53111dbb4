"""Small files that would expand to fill memory or disk are refused soon, in little memory, and with one line."""

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import time
import zipfile
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
import zstandard

from headstock.config import DEEP_KEY, read_settings
from headstock.data import formats
from headstock.data.corpus import read_corpus
from headstock.data.downloads import read_archive
from headstock.data.labelled_texts import read_records
from headstock.data.minimal_pairs import read_minimal_pairs
from headstock.data.tokenizer import open_tokenizer
from headstock.data.winograd import read_schemas
from headstock.errors import HeadstockError
from headstock.interop.huggingface.importer import read_pickled
from headstock.interop.imported_run import load_checkpoint
from headstock.train.tensors import read_tensors
from tests.faults.fuzzing import _address_space, _peak, _reset_peak
from tests.faults.harness import amount

SECONDS, MEGABYTES = 10.0, 1000  # for one file, of CPU time and of memory
COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_content_size=False).compress,
}
UNIT = 2 << 20  # bytes of text in one compressed frame


def refusal(read, path: Path) -> tuple[str, float, float]:
    """The message, CPU seconds and megabytes of a refused file."""
    memory, start = _reset_peak(), time.process_time()
    with _address_space(4 * MEGABYTES), pytest.raises(HeadstockError) as error:
        read(path)
    seconds, megabytes = time.process_time() - start, (_peak() - memory) / 2**20
    assert seconds < SECONDS and megabytes < MEGABYTES, (path.name, seconds, megabytes)
    assert "\n" not in str(error.value)
    return str(error.value), seconds, megabytes


def write_bomb(path: Path, compress, line: bytes, size: int) -> Path:
    """A file that expands to `size` bytes."""
    frame = compress(line * (UNIT // len(line)))
    with path.open("wb") as file:
        for _ in range(size // UNIT):
            file.write(frame)
    return path


def read_all(path: Path) -> None:
    for _ in read_corpus([str(path)]).chunks():
        pass


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_fault_23_compressed_corpora(tmp_path, record, suffix):
    size = amount(1 << 30, 100 << 30)
    corpus = write_bomb(tmp_path / f"corpus.txt{suffix}", COMPRESSORS[suffix], b"a few words\n", size)
    message, seconds, megabytes = refusal(read_all, corpus)
    assert "decompression bomb" in message and corpus.name in message and formats.EXPANSION_VARIABLE in message
    what = f"{corpus.stat().st_size / 1e6:.2f} MB in {suffix} that expand to {size >> 30} GB"
    record(23, what, refused_after=f"{seconds:.2f} s", memory=f"{megabytes:.0f} MB")


def test_fault_23_the_limit_does_not_hold_where_it_is_raised(tmp_path, monkeypatch):
    corpus = write_bomb(tmp_path / "corpus.txt.zst", COMPRESSORS[".zst"], b"a few words\n", 24 << 20)
    assert "bomb" in refusal(read_all, corpus)[0]
    monkeypatch.setenv(formats.EXPANSION_VARIABLE, "1000000")
    read_all(corpus)  # the control: all of it
    monkeypatch.setenv(formats.EXPANSION_VARIABLE, "many")
    assert formats.EXPANSION_VARIABLE in refusal(read_all, corpus)[0]


def test_fault_23_real_text_is_no_bomb(tmp_path):
    """Text that compresses a hundred times is read, and so is a small file that compresses far better."""
    words = [f"{number} {'the same words in each line ' * 20}\n".encode() for number in range(40_000)]
    for name, text in {"large.txt.gz": b"".join(words), "small.txt.gz": b"words\n" * 2_000_000}.items():
        (tmp_path / name).write_bytes(gzip.compress(text))
        assert len(text) > 50 * (tmp_path / name).stat().st_size
        read_all(tmp_path / name)


# Tables, archives and settings


def parquet_bomb(path: Path) -> None:
    """One long text in a dictionary stands for a million rows."""
    import pyarrow
    import pyarrow.parquet

    indices, values = pyarrow.array([0] * 1_000_000, pyarrow.int32()), pyarrow.array(["x" * 1_000_000])
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(indices, values)})
    pyarrow.parquet.write_table(table, path, compression="zstd")


def parquet_page(path: Path) -> None:
    """One long text in a page of some kilobytes."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["x" * (amount(80, 512) << 20)]})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)


def tar_bomb(path: Path, name: str = "pairs.jsonl") -> None:
    """A tar whose header announces 100 GB."""
    member = tarfile.TarInfo(name)
    member.size = 100 << 30
    path.write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))


@cache
def zip_bytes() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("package/input.txt", bytes(260 << 20))
    return stream.getvalue()


def zip_bomb(path: Path) -> None:
    path.write_bytes(zip_bytes())


def lying_zip(path: Path) -> None:
    """The directory says 10 bytes, the member has 260 MiB."""
    data = bytearray(zip_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 10)
    path.write_bytes(bytes(data))


def torch_bomb(path: Path) -> None:
    """A tensor of zeros, deflated."""
    stream = io.BytesIO()
    torch.save({"weight": torch.zeros(1 << 20)}, stream)
    with zipfile.ZipFile(stream) as stored, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in stored.infolist():
            archive.writestr(member.filename, stored.read(member))


def expanded_tensor(path: Path) -> None:
    torch.save({"weight": torch.zeros(1, dtype=torch.half).expand(1 << 40)}, path)


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
LAUGHS = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY l0 "ha">{LAUGHS}]><x>&l9;</x>'


def headers(length: int) -> bytes:
    return struct.pack("<Q", length) + b"{}"


BOMBS = {  # name of the file: its content or what writes it, and the reader
    "rows.parquet": (parquet_bomb, read_all),
    "page.parquet": (parquet_page, read_all),
    "rows.csv.gz": (lambda path: write_bomb(path, gzip.compress, b"a,b\n", 1 << 30), read_records),
    "line.jsonl.gz": (lambda path: write_bomb(path, gzip.compress, b"[", 1 << 30), read_all),
    "lists.jsonl": (lambda path: path.write_bytes(b"[" + b"[]," * (amount(6, 30) * 10**6) + b"[]]"), read_all),
    "number.jsonl": (lambda path: path.write_bytes(b"9" * amount(10**7, 10**8)), read_all),
    "pairs.tar.gz": (tar_bomb, lambda path: read_minimal_pairs([path])),
    "other.tar.gz": (lambda path: tar_bomb(path, "x.bin"), lambda path: read_minimal_pairs([path])),
    "package.tar.gz": (tar_bomb, lambda path: read_archive(path, {"package/*.txt": "0" * 64})),
    "package.whl": (zip_bomb, lambda path: read_archive(path, {"package/*.txt": "0" * 64})),
    "lying.whl": (lying_zip, lambda path: read_archive(path, {"package/*.txt": "0" * 64})),
    "deep.json": (lambda path: path.write_bytes(b"[" * (20 << 20)), read_settings),
    "number.json": (lambda path: path.write_bytes(b"9" * (40 << 20)), read_settings),
    "digits.json": (lambda path: path.write_bytes(b'{"a": ' + b"9" * (20 << 20) + b"}"), read_settings),
    "huge.json": (sparse_file, read_settings),
    "deep.toml": (lambda path: path.write_bytes(b"a = " + b"[" * 1_000_000), read_settings),
    "keys.toml": (lambda path: path.write_text(".".join(["a"] * 100_000) + " = 1"), read_settings),
    "header.toml": (lambda path: path.write_text(f"[{'.'.join(['a'] * 100_000)}]"), read_settings),
    "number.toml": (lambda path: path.write_bytes(b"a = " + b"9" * 1_000_000), read_settings),
    "huge.toml": (sparse_file, read_settings),
    "tokenizer.json": (sparse_file, open_tokenizer),
    "laughs.xml": (lambda path: path.write_text(LAUGHS), read_schemas),
    "deep.xml": (lambda path: path.write_text("<a>" * 500_000), read_schemas),
    "header.safetensors": (lambda path: path.write_bytes(headers(2**63)), read_tensors),
    "long.safetensors": (lambda path: path.write_bytes(headers(10**11)), read_tensors),
    "deflated.pt": (torch_bomb, load_checkpoint),
    "expanded.bin": (expanded_tensor, read_pickled),
}


def test_fault_23_tables_archives_and_settings(tmp_path, record):
    slowest, most = 0.0, 0.0
    for name, (write, read) in BOMBS.items():
        path = tmp_path / name
        write(path)
        message, seconds, megabytes = refusal(read, path)
        assert name in message, message
        slowest, most = max(slowest, seconds), max(most, megabytes)
        path.unlink()
    what = "JSON, TOML, XML, parquet, tar, zip, safetensors and torch bombs"
    figures = {"slowest": f"{slowest:.2f} s", "most_memory": f"{most:.0f} MB"}
    record(23, what, files=len(BOMBS), refused=len(BOMBS), **figures)


def test_fault_23_the_checks_are_needed(tmp_path, monkeypatch):
    """The control: without them, a file of some kilobytes yields text without end."""
    parquet_bomb(tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").stat().st_size < 10_000
    monkeypatch.setattr("headstock.data.tables.check_expansion", lambda *_: None)
    documents = islice(read_corpus([str(tmp_path / "rows.parquet")]), 300)
    assert sum(len(document.text) for document in documents) == 300_000_000
    for depth, is_deep in ((60, False), (70, True)):
        key = ".".join(["a"] * depth)
        assert bool(DEEP_KEY.search(f"{key} = 1")) == is_deep
