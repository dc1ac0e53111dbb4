"""Data at URLs gives the same as on disk, is downloaded once, and a lost connection never shortens it."""

import bz2
import gzip
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headstock.data import remote, urls
from headstock.data.corpus import read_corpus
from headstock.data.labelled_texts import read_records
from headstock.data.parallel import read_parallel
from headstock.data.qa import read_questions
from headstock.data.tagged import read_tagged
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import HeadstockError, UserError, WorkError
from headstock.io import cache_folder, sha256
from headstock.logs import messages_to
from tests.servers import PASSWORD, USER


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0.01, 0.01, 0.01))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A corpus of several formats, in several folders."""
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("un\ndeux\n")
    (folder / "b" / "c d.txt.gz").write_bytes(gzip.compress(b"trois\n"))
    (folder / "b" / "e.jsonl").write_text('{"text": "quatre"}\n')
    (folder / "b2.txt").write_text("cinq\n")
    (folder / "notes.xyz").write_text("no corpus\n")
    (folder / "empty.txt").write_text("")
    (folder / ".hidden.txt").write_text("hidden\n")
    return folder


def texts(corpus) -> list[str]:
    return [document.text for document in corpus]


def refusal(path, read=read_corpus) -> str:
    with pytest.raises(HeadstockError) as error:
        read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def copies() -> list[Path]:
    return sorted(p for p in (cache_folder() / "urls").rglob("*") if p.is_file() and not p.name.startswith("."))


# The same as on disk


def test_folders_and_globs_at_any_url_are_read_like_local_ones(folder, bucket, web, sftp):
    shutil.copytree(folder, web.folder / "corpus", dirs_exist_ok=True)
    shutil.copytree(folder, sftp.folder / "corpus", dirs_exist_ok=True)
    roots = [bucket.put_folder("corpus", folder), web.url("corpus"), sftp.url("corpus")]
    for pattern in ("/", "/*.txt", "/**/*.txt.gz", "/b/[ce]*"):
        expected = read_corpus(f"{folder}{pattern}", documents="line")
        for root in roots:
            corpus = read_corpus(root + pattern, documents="line")
            assert texts(corpus) == texts(expected), root + pattern
            assert corpus.fingerprint() == expected.fingerprint()
            assert corpus.describe() == expected.describe()
    assert "nothing" in refusal(f"{roots[0]}/*.bz2")
    assert "no readable files" in refusal(f"{roots[0]}/*.xyz")
    assert texts(read_corpus([f"{roots[0]}/a.txt", f"{roots[2]}/b2.txt"], documents="line")) == ["un", "deux", "cinq"]


def test_labelled_files_of_every_format_are_read_from_urls(tmp_path, bucket, web):
    files = {
        "train.csv": b"text,label\ngood,1\n",
        "train.jsonl": b'{"text": "good", "label": 1}\n',
        "train.tsv.bz2": bz2.compress(b"text\tlabel\ngood\t1\n"),
        "lab.review.spm": "▁good\n".encode(),
        "lab.label.gz": gzip.compress(b"1\n"),
        "words.conll": b"Anne B-PER\nsees O\n\n",
        "squad.jsonl": b'{"context": "Anne sees", "question": "who?", "answers": ["Anne"]}\n',
        "pair.en": b"home\n",
        "pair.fr.gz": gzip.compress(b"maison\n"),
    }
    for name, data in files.items():
        bucket.put(f"rows/{name}", data)
        (web.folder / name).write_bytes(data)
    bases = (f"{bucket.url}/rows/", web.url(""))
    for base in bases:
        for name in ("train.csv", "train.jsonl", "train.tsv.bz2", "lab.review.spm"):
            rows = read_records(base + name)
            assert (rows.labels, len(rows), rows.source) == (["1"], 1, base + name)
        assert read_tagged(base + "words.conll").columns["tags"] == [["B-PER", "O"]]
        assert read_questions(base + "squad.jsonl").columns["answers"][0][0]["text"] == "Anne"
        for name in ("pair", "pair.en"):
            rows = read_parallel(base + name, columns={"source": "en", "target": "fr"})
            assert rows.columns == {"source": ["home"], "target": ["maison"]}
    assert read_records(Path(f"{bases[0]}train.csv")).labels == ["1"], "pathlib drops one of the slashes"


# The cache


def test_a_file_is_downloaded_once_and_again_when_it_changes(bucket, web, sftp):
    def download() -> tuple[str, str, str]:
        return tuple(remote.cached_copy(url).read_text() for url in places)

    places = [bucket.put("a.txt", b"old"), web.url("once.txt"), sftp.url("a.txt")]
    (web.folder / "once.txt").write_text("old")
    (sftp.folder / "a.txt").write_text("old")
    lines: list[str] = []
    with messages_to(lines.append):
        assert download() == ("old",) * 3
        first = len(lines)
        assert download() == ("old",) * 3
        assert len(lines) == first == 3, "the second time nothing is downloaded"
        bucket.put("a.txt", b"other")
        (web.folder / "once.txt").write_text("other")
        (sftp.folder / "a.txt").write_text("other")
        assert download() == ("other",) * 3


def test_blocks_arrive_in_parallel_and_in_order(bucket, web, sftp, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 10_000)
    data = random.Random(0).randbytes(123_456)
    (web.folder / "large.bin").write_bytes(data)
    (sftp.folder / "large.bin").write_bytes(data)
    for url in (bucket.put("large.bin", data), web.url("large.bin"), sftp.url("large.bin")):
        assert remote.cached_copy(url).read_bytes() == data
    ranges = [line for line in web.requests() if line.startswith("GET /ranges/large.bin bytes=")]
    assert len(ranges) == 13 + 1, "one request for each block, and one to learn that ranges are answered"
    for how in ("plain", "chunked"):
        assert remote.cached_copy(web.url("large.bin", how)).read_bytes() == data


def test_a_lost_connection_never_shortens_a_file(web, sftp, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 10_000)
    data = random.Random(1).randbytes(50_000)
    for name in ("lost.bin", "small.bin"):
        (web.folder / name).write_bytes(data[:5_000] if name == "small.bin" else data)
    assert remote.cached_copy(web.url("lost.bin", "dropped")).read_bytes() == data
    assert remote.cached_copy(web.url("small.bin", "dropped")).read_bytes() == data[:5_000]
    (sftp.folder / "lost.bin").write_bytes(data)
    remote.open_url(sftp.url("lost.bin"))
    (sftp.folder / ".drop").touch()
    while (sftp.folder / ".drop").exists():
        pass
    assert remote.cached_copy(sftp.url("lost.bin")).read_bytes() == data
    before = copies()
    for name in ("lost.bin", "small.bin"):
        url = web.url(name, "short")
        assert refusal(url, remote.cached_copy).startswith(f"{url}: cannot be reached")
    assert copies() == before, "no file has its name before all its bytes are there"


def test_without_the_check_of_sizes_a_short_file_would_pass(web, monkeypatch):
    """The control of the test above: a block that is cut off gives a shorter file if nobody counts its bytes."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1_000)
    (web.folder / "cut.bin").write_bytes(bytes(2_500))
    file = remote.open_url(web.url("cut.bin"))
    real = file.fs.cat_file
    monkeypatch.setattr(file.fs, "cat_file", lambda *args, **options: real(*args, **options)[:-1])
    assert "999 of 1,000 bytes" in refusal(web.url("cut.bin"), remote.cached_copy)
    monkeypatch.setattr(remote, "_fetch_block", lambda f, start, end, size: f.fs.cat_file(f.path, start=start, end=end))
    with pytest.raises(WorkError, match="2,497 bytes arrived, expected 2,500"):
        remote.cached_copy(web.url("cut.bin"))


def test_an_interrupted_download_continues_where_it_stopped(web, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 10_000)
    data = random.Random(2).randbytes(95_000)
    (web.folder / "resumed.bin").write_bytes(data)
    url, real, fetched = web.url("resumed.bin"), remote._fetch_block, []

    def interrupted(file, start, end, size):
        fetched.append(start)
        if start == 50_000:
            raise KeyboardInterrupt
        return real(file, start, end, size)

    monkeypatch.setattr(remote, "_fetch_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remote.cached_copy(url)
    assert copies() == []
    fetched.clear()
    monkeypatch.setattr(remote, "_fetch_block", lambda *a: fetched.append(a[1]) or real(*a))
    assert remote.cached_copy(url).read_bytes() == data
    assert min(fetched) == 50_000
    # a file that changed meanwhile is not continued
    monkeypatch.setattr(remote, "_fetch_block", interrupted)
    (web.folder / "resumed.bin").write_bytes(data[::-1])
    with pytest.raises(KeyboardInterrupt):
        remote.cached_copy(url)
    (web.folder / "resumed.bin").write_bytes(data[::-1][:-1])
    monkeypatch.setattr(remote, "_fetch_block", real)
    assert remote.cached_copy(url).read_bytes() == data[::-1][:-1]


def test_several_processes_download_a_file_once(web):
    (web.folder / "shared.txt").write_text("text\n" * 1000)
    code = f"from headstock.data import remote; print(remote.cached_copy({web.url('shared.txt')!r}))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    paths = {process.communicate()[0].decode().strip() for process in processes}
    assert len(paths) == 1 and sha256(Path(paths.pop())) == sha256(web.folder / "shared.txt")
    assert len([line for line in web.requests() if line.startswith("GET /ranges/shared.txt")]) == 1


def test_a_cached_copy_is_used_while_the_server_cannot_be_reached(web, monkeypatch):
    url = web.url("offline.txt")
    (web.folder / "offline.txt").write_text("text")
    copy = remote.cached_copy(url)
    monkeypatch.setattr(remote.RemoteFile, "info", lambda file: (_ for _ in ()).throw(WorkError("cannot be reached")))
    lines: list[str] = []
    with messages_to(lines.append):
        assert remote.cached_copy(url) == copy
    assert "using the copy of" in lines[0]


# Token stores


def test_a_token_store_is_built_by_one_machine_and_downloaded_by_others(bucket, corpus, tmp_path):
    tokenizer = train_tokenizer(read_corpus(corpus).sample_texts(), TokenizerSettings(vocabulary=300))
    url, machines = f"{bucket.url}/stores", iter("abcdef")

    def build() -> tuple[Path, str]:
        lines: list[str] = []
        with messages_to(lines.append):
            cache = tmp_path / next(machines)
            folder = build_split_stores(read_corpus(corpus), tokenizer, cache=cache, shared=url).folder
        return folder, "\n".join(lines)

    first, log = build()
    assert "shared the token store" in log
    second, log = build()
    assert "using the token store" in log and "hashed" not in log
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    index = f"stores/{first.name}/index.json"
    shard = f"stores/{first.name}/train-00000.bin"
    data = bucket.get(shard)
    bucket.put(shard, data[:-1] + bytes([data[-1] ^ 1]))  # damaged there: built here, and replaced there
    _, log = build()
    assert "train-00000.bin has changed" in log and "building" in log and bucket.get(shard) == data
    evil = json.loads(bucket.get(index))
    evil["files"]["../../../evil.bin"] = evil["files"]["train-00000.bin"]
    bucket.put(index, json.dumps(evil).encode())
    bucket.put("evil.bin", data)
    _, log = build()
    assert "building the token store here" in log and not list(tmp_path.rglob("evil.bin"))


# Errors


def test_errors_are_one_line_that_says_what_to_do(bucket, web, sftp, monkeypatch):
    url = f"{bucket.url}/none.txt"
    assert refusal(url) == f"{url}: no such file"
    assert "no such bucket" in refusal("s3://no-such-bucket-here/a.txt")
    assert refusal(web.url("none.txt")) == f"{web.url('none.txt')}: no such file"
    assert "access denied (403)" in refusal(web.url("403", "error"))
    assert "access denied (401); put user and password" in refusal(web.url("x.txt", "private"))
    assert "503" in refusal(web.url("503", "error"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert "cannot be reached" in refusal(f"http://127.0.0.1:{port}/a.txt")
    assert "name of the host is not known" in refusal("http://no-such-host.invalid/a.txt")
    assert refusal(sftp.url("none.txt")).endswith("none.txt: no such file")
    assert "access denied" in refusal(sftp.url("a.txt", user=f"{USER}:wrong"))
    assert "did you mean" in refusal("nosuch://a.txt") or "protocol nosuch is not known" in refusal("nosuch://a.txt")
    (Path.home() / ".ssh" / "known_hosts").write_text("")
    remote._sftp_class().clear_instance_cache()
    assert "host key is not in ~/.ssh/known_hosts" in refusal(sftp.url("none.txt"))


PACKAGES = {
    "s3://b/a.txt": "'headstock[remote]'",
    "sftp://h/a.txt": "'headstock[remote]'",
    "https://h/a.txt": "'headstock[remote]'",
    "gs://b/a.txt": "gcsfs",
    "hf://datasets/a/b/c.txt": "huggingface_hub",
}
WITHOUT_PACKAGES = """
import sys
for name in ("s3fs", "aiohttp", "paramiko", "gcsfs", "huggingface_hub"):
    sys.modules[name] = None
from headstock.data import remote
from headstock.errors import UserError
for url in sys.argv[1:]:
    try:
        remote.cached_copy(url)
    except UserError as error:
        print(error)
"""


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    command = [sys.executable, "-c", WITHOUT_PACKAGES, *PACKAGES]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(PACKAGES)
    for line, (url, package) in zip(lines, PACKAGES.items(), strict=True):
        assert line.startswith(f"{url}: this needs") and line.endswith(f"pip install {package}")


# Credentials


SECRETS = [
    ("https://anne:hunter2@host/a.txt", "https://***@host/a.txt"),
    ("https://hunter2@host/a.txt", "https://***@host/a.txt"),
    ("https://anne:hun@ter2@host:8080/a.txt", "https://***@host:8080/a.txt"),
    ("sftp://anne:hunter2@host/a.txt", "sftp://anne:***@host/a.txt"),
    ("sftp://anne@host/a.txt", "sftp://anne@host/a.txt"),
    (
        "https://b.s3.amazonaws.com/a.txt?X-Amz-Expires=60&X-Amz-Signature=hunter2&X-Amz-Security-Token=hunter2",
        "https://b.s3.amazonaws.com/a.txt?X-Amz-Expires=60&X-Amz-Signature=***&X-Amz-Security-Token=***",
    ),
    ("https://host/a.txt?api_key=hunter2#x", "https://host/a.txt?api_key=***#x"),
    ("https://host/get?file=a.txt&monkey=1", "https://host/get?file=a.txt&monkey=1"),
    ("hf://datasets/org/name@main/a.txt", "hf://datasets/org/name@main/a.txt"),
    ("s3://bucket/a@b.txt", "s3://bucket/a@b.txt"),
    ("abfs://container@account.dfs.core.windows.net/a", "abfs://container@account.dfs.core.windows.net/a"),
    ("data/a@b.txt", "data/a@b.txt"),
]


@pytest.mark.parametrize(("url", "shown"), SECRETS)
def test_urls_are_shown_without_credentials_and_opened_with_them(url, shown):
    assert urls.redact(url) == shown
    assert urls.redact(shown) == shown
    assert urls.with_credentials(shown) == url
    assert "hunter2" not in urls.hide_credentials(f"could not open {url!r} (401)")


def test_a_masked_url_of_another_process_is_opened_without_the_mask():
    assert urls.with_credentials("https://***@unknown/a.txt") == "https://unknown/a.txt"
    assert urls.with_credentials("sftp://anne:***@unknown/a.txt") == "sftp://anne@unknown/a.txt"


def test_no_credential_is_written_or_shown(web, call, tmp_path, corpus, tiny):
    (web.folder / "books").mkdir(exist_ok=True)
    shutil.copy(corpus, web.folder / "books" / "stories.txt")
    url = web.url("books/", "private", user=f"{USER}:{PASSWORD}")
    out = tmp_path / "run"
    settings = [f"--set={key}={json.dumps(value)}" for key, value in tiny.items()]
    shown = call("pretrain", url, "--out", out, *settings)
    none = url.replace("books/", "none.csv")
    shown += call("finetune", "--train", none, "--out", tmp_path / "b", "--preset", "gpt-nano", code=2)
    written = b"".join(p.read_bytes() for folder in (out, cache_folder()) for p in folder.rglob("*") if p.is_file())
    names = "".join(str(p) for p in cache_folder().rglob("*"))
    everything = written.decode(errors="replace") + names + "".join(shown)
    assert PASSWORD not in everything and "***" in everything
    assert json.loads((out / "config.json").read_text())["data"]["corpus"] == [urls.redact(url)]
    call("pretrain", url, "--out", out, "--resume", *settings)  # the same URL, which is stored without its password


# Security


def test_names_never_lead_out_of_the_cache(web, tmp_path):
    evil = web.folder / "evil"
    evil.mkdir(exist_ok=True)
    (web.folder / "secret.txt").write_text("outside\n")
    (evil / "good.txt").write_text("good\n")
    links = "../secret.txt /ranges/secret.txt ..%2fsecret.txt %2e%2e/secret.txt ../../x/ ./a.txt ?C=N http://localhost/b.txt"
    (evil / ".links").write_text(links.replace(" ", "\n"))
    assert texts(read_corpus(web.url("evil/"), documents="line")) == ["good"]
    for name in ("..", ".", "", "a/../b", "..\\x.txt", "a\0b.txt", ".hidden", "x" * 300 + ".txt.gz", "con:aux.txt"):
        safe = remote.safe_name(name)
        assert re.fullmatch(r"[\w-][\w.-]*", safe) and len(safe) < 200 and ".." not in safe
    assert remote.safe_name("x" * 300 + ".txt.gz").endswith(".txt.gz")
    root = (tmp_path / "cache").resolve()
    for path in cache_folder().rglob("*"):
        assert path.resolve().is_relative_to(root)


def test_results_are_not_written_to_urls(call, tmp_path):
    assert "local folders" in call("pretrain", "x.txt", "--out", "s3://bucket/run", code=2)[1]


def test_names_of_urls():
    assert urls.file_name("https://host/a/b%20c.txt.gz?x=1.csv") == "b c.txt.gz"
    assert urls.sibling("https://host/a/b.en?x=1", "b.fr") == "https://host/a/b.fr?x=1"
    assert urls.normalize(Path("s3://bucket/a.txt")) == "s3://bucket/a.txt"
    assert not urls.is_url("C:/data.txt") and not urls.is_url("catalog:imdb") and urls.is_url("sftp:/host/x")
    assert (
        remote.has_magic("s3://b/?.txt") and not remote.has_magic("https://h/a?b=1") and remote.has_magic("http://h/*")
    )


def test_a_request_in_flight_ends_with_the_server(monkeypatch):
    """A server that accepts and says nothing is given up after the timeout."""
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held: list[socket.socket] = []
        threading.Thread(target=lambda: held.extend(silent.accept()[0] for _ in range(9)), daemon=True).start()
        assert "no response" in refusal(f"http://127.0.0.1:{silent.getsockname()[1]}/a.txt")


def test_urls_that_differ_only_in_a_token_are_refused_rather_than_confused():
    remote._cache_paths(remote.open_url("https://host/a.txt?token=a"))
    other = remote.open_url("https://host/a.txt?token=b")
    with pytest.raises(UserError, match="differ only in a token"):
        remote._cache_paths(other)
