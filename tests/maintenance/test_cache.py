"""The cache: every kind that the package writes is listed, and only unused entries of our own are removed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import headstock
from headstock.cache_use import USERS, cache_lock, mark_used, used_entries
from headstock.data.corpus import read_corpus
from headstock.data.saved_inputs import MEMORY, STDIN
from headstock.data.token_store import build_store
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import UserError
from headstock.io import HOST
from headstock.maintenance.cache import DAY, KINDS, cache_entries, cache_sizes, clear_cache

ROOT = Path(headstock.__file__).parent
HEX = "0123456789abcdef" * 4


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def store(cache: Path, name: str = HEX) -> Path:
    """A folder with the files of a token store."""
    write(cache / "stores" / name / "train-00000.bin", "tokens")
    return write(cache / "stores" / name / "index.json", "{}").parent


@pytest.fixture
def entries_of_each_kind(cache) -> dict[str, Path]:
    url = "https://example.org/runs/bard"
    run = cache / "runs" / headstock.data.remote.cache_name(url)
    write(run / "url.txt", url)
    write(run / ".versions" / "config.json.json")
    write(run / "bard" / "config.json")
    folder = cache / "urls" / HEX[:16]
    for name in ("a.txt", ".a.txt.json", ".a.txt.json.lock", ".b.txt.json.lock", ".b.txt.json.part"):
        write(folder / name)
    write(cache / "data" / "imdb" / "SOURCE.json", json.dumps({"name": "imdb", "files": {"train.csv": "0"}}))
    return {
        "stores": store(cache),
        "data": write(cache / "data" / "imdb" / "train.csv").parent,
        "urls": folder,
        "runs": run,
        "hub": write(cache / "hub" / "org" / f"name@{HEX[:40]}" / "config.json").parent,
        "search": write(cache / "search" / HEX[:32] / "vectors.npy").parent,
        "stdin": write(cache / "stdin" / f"{HEX}.txt"),
        "memory": write(cache / "memory" / f"{HEX}.jsonl"),
        "distil": write(cache / "distil" / f"{HEX}.jsonl"),
        "ray": write(cache / "ray" / HEX[:32] / "checkpoints" / "step-3" / "model.safetensors").parents[2],
        "compiled": write(cache / "compiled" / "fxgraph" / "ab" / "entry").parents[2],
    }


def test_every_folder_that_the_package_writes_in_the_cache_is_a_kind():
    source = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py"))
    written = set(re.findall(r'cache_folder\(\)\)? / "(\w+)"', source)) | {STDIN, MEMORY}
    assert len(written) == 11 and written == set(KINDS)


def test_entries_of_each_kind_are_listed_and_removed(cache, entries_of_each_kind):
    entries = cache_entries()
    assert {entry.kind: entry.path for entry in entries} == entries_of_each_kind
    assert all(entry.is_ours and not entry.in_use and entry.bytes > 0 for entry in entries)
    assert cache_sizes(cache) == {entry.kind: entry.bytes for entry in entries}
    would = clear_cache(dry_run=True)
    assert len(would.removed) == 11 and not would.kept
    assert all(path.exists() for path in entries_of_each_kind.values())
    assert {entry.path for entry in clear_cache().removed} == set(entries_of_each_kind.values())
    assert not [path for path in cache.iterdir() if not path.name.startswith(USERS)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_files_that_headstock_did_not_write_are_kept(kind, cache, entries_of_each_kind):
    path = entries_of_each_kind[kind]
    foreign = write(path.with_name("thesis.docx") if path.is_file() else path / "thesis.docx")
    expected = foreign if path.is_file() else path
    kept = {entry.path: reason for entry, reason in clear_cache(kind).kept}
    assert foreign.read_text() == "x"
    assert kept == {expected: "not written by Headstock"}
    assert all(other.exists() for other in entries_of_each_kind.values() if other != path)


def test_a_folder_of_the_user_with_the_name_of_a_kind_is_kept(cache):
    own = [write(cache / "runs" / "mine" / "config.json"), write(cache / "data" / "train.csv"), store(cache, "mine")]
    link = cache / "stores" / HEX
    link.symlink_to(own[2])
    assert not clear_cache().removed
    assert all(path.exists() for path in [*own, link])


def test_only_old_entries_of_one_kind(cache):
    old, new, other = store(cache), store(cache, HEX[::-1]), write(cache / "stdin" / f"{HEX}.txt")
    for path in (*old.iterdir(), old, other):
        os.utime(path, (time.time() - 3 * DAY,) * 2)
    result = clear_cache("stores", older_than=2)
    assert [entry.path for entry in result.removed] == [old] and [entry.path for entry, _ in result.kept] == [new]
    assert other.exists()
    for wrong, days in (("store", None), ("stores", -1.0), ("stores", float("nan"))):
        with pytest.raises(UserError, match="did you mean 'stores'" if days is None else "--older-than"):
            clear_cache(wrong, older_than=days)


def test_a_store_that_a_running_process_uses_is_kept(cache, corpus):
    """The process maps a real store, and after the attempt to clear it reads it again by name."""
    code = (
        "import sys; from headstock.data.token_store import *; from headstock.data.corpus import read_corpus\n"
        "from headstock.data.tokenizer import open_tokenizer\n"
        "store = build_store(read_corpus(sys.argv[1]), open_tokenizer(sys.argv[2]))\n"
        "print(store.folder, flush=True); input(); print(TokenStore(store.folder, 'valid').tokens, flush=True); input()"
    )
    tokenizer = cache.with_name("tokenizer.json")
    train_tokenizer(read_corpus(corpus).sample_texts(), TokenizerSettings(vocabulary=300)).save(tokenizer)
    words = [sys.executable, "-c", code, str(corpus), str(tokenizer)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        assert [(entry.path, reason) for entry, reason in clear_cache().kept] == [(folder, "in use")]
        process.stdin.write("\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) > 1000
        process.send_signal(signal.SIGKILL)  # it cannot remove its mark
    assert [entry.path for entry in clear_cache().removed] == [folder]
    assert not list((cache / USERS).iterdir())


def test_a_mark_waits_for_a_removal(cache):
    """Otherwise an entry could vanish between the mark and its use."""
    folder = store(cache)
    done = threading.Event()
    with cache_lock(cache):
        thread = threading.Thread(target=lambda: (mark_used(folder), done.set()))
        thread.start()
        assert not done.wait(0.3)
    thread.join(10)
    assert folder in used_entries(cache)


def test_marks_of_other_machines_last_for_a_day(cache):
    folder = store(cache)
    mark = write(cache / USERS / f"{'0' * len(HOST)}-1", f"stores/{HEX}\n")
    assert clear_cache().kept[0][1] == "in use"
    os.utime(mark, (time.time() - 2 * DAY,) * 2)
    assert [entry.path for entry in clear_cache().removed] == [folder] and not mark.exists()


def test_a_cache_that_cannot_be_written_is_used_without_marks(monkeypatch):
    monkeypatch.setenv("HEADSTOCK_CACHE", "/proc/headstock")
    assert mark_used(Path("/proc/headstock/stores/x")) == Path("/proc/headstock/stores/x")


def test_a_use_counts_as_a_use(cache, corpus):
    tokenizer = train_tokenizer(read_corpus(corpus).sample_texts(), TokenizerSettings(vocabulary=300))
    folder = build_store(read_corpus(corpus), tokenizer).folder
    assert folder in used_entries(cache)
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - 3 * DAY,) * 2)
    code = "import sys; from pathlib import Path; from headstock.cache_use import *; mark_used(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    (entry,) = cache_entries(["stores"])
    assert time.time() - entry.last_used < DAY
