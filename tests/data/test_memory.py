"""Memory stays bounded for highly compressed corpora and for corpora on a single line."""

import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from headstock.data import formats
from headstock.data.corpus import read_corpus
from headstock.errors import UserError

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
SCRIPT = """
import sys
from pathlib import Path
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
train_tokenizer(["to be or not"], TokenizerSettings())  # loads the libraries
def peak():  # getrusage includes the memory of the parent before exec
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024
before = peak()
corpus = read_corpus(sys.argv[1], documents="line")
{work}
print(peak() - before)
"""
READ = "print(sum(len(chunk.texts) for chunk in corpus.chunks()))"
STORE = """
tokenizer = train_tokenizer((document.text for document in corpus), TokenizerSettings())
print(build_split_stores(corpus, tokenizer, cache=Path(sys.argv[1]).parent / "cache").summary["documents"])
"""


def measure(work: str, path: Path) -> tuple[int, int]:
    """The number of documents, and the peak memory of reading them in MiB, in a separate process."""
    command = [sys.executable, "-c", SCRIPT.format(work=work), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    documents, memory = done.stdout.split()
    return int(documents), int(memory)


def write_compressed(path: Path, block: bytes, times: int) -> Path:
    compressor = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as file:
        for _ in range(times):
            file.write(compressor.compress(block))
        file.write(compressor.flush())
    return path


@linux
def test_decompression_uses_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTOCK_MAX_EXPANSION", "100000")
    path = write_compressed(tmp_path / "bomb.txt.zst", (b"a" * 1023 + b"\n") * 1024, 128)
    assert path.stat().st_size < 50_000
    documents, memory = measure(READ, path)
    assert documents == 128 * 1024
    assert memory < 100, "MiB, of 128 MiB of text"


@linux
def test_a_corpus_on_one_line_takes_little_memory(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text(" ".join(f"word{i * i % 4099}" for i in range(400_000)))
    documents, memory = measure(STORE, path)
    assert documents == 1
    assert memory < 320, "MiB; tokenized in one piece, the text takes more than 500"


def test_a_compressed_file_cannot_exhaust_memory(tmp_path):
    settings = zstandard.ZstdCompressionParameters(window_log=30)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    path = tmp_path / "window.txt.zst"
    path.write_bytes(compressor.compress(b"a\n" * 1000) + compressor.flush())
    with pytest.raises(UserError, match=r"window\.txt\.zst: needs more than 128 MiB"):
        read_corpus(path)


@pytest.fixture
def short_lines(monkeypatch):
    """Lower the limits, so that small files have lines that are too long."""
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(formats, "READ_BYTES", 100)


@pytest.mark.parametrize("word", ["été ", "é"])
def test_a_line_that_is_too_long_becomes_several_documents(tmp_path, short_lines, word):
    (tmp_path / "c.txt").write_text("before\n" + word * 2000 + "\nafter\n", encoding="utf-8")
    documents = list(read_corpus(tmp_path / "c.txt", documents="line"))
    assert [documents[0].text, documents[-1].text, documents[-1].line] == ["before", "after", 3]
    assert {document.line for document in documents[1:-1]} == {2}
    assert max(len(document.text) for document in documents) <= 200
    joined = (" " if " " in word else "").join(document.text for document in documents[1:-1])
    assert joined == (word * 2000).strip(), "and none of it is lost"


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv"])
def test_a_row_that_is_too_long_is_an_error_with_its_line(tmp_path, short_lines, name):
    short, long = "a" * 10, "a" * 5000
    rows = [f'{{"text": "{text}"}}' if name == "c.jsonl" else text for text in (short, long)]
    (tmp_path / name).write_text("\n".join(["text", *rows] if name == "c.csv" else ['{"text": "a"}', *rows]))
    with pytest.raises(UserError, match=rf"{name}:3: .*1,000 bytes"):
        list(read_corpus(tmp_path / name))
