"""Measures how well `headstock search` finds a text's counterpart, against TF-IDF, and how fast.

    python benchmarks/retrieval.py --run reviews-en --sick sick/train.csv --squad squad/valid.json \
        --json benchmarks/results/retrieval.json

Three kinds of pairs: the two halves of a film review (IMDb test, not among the run's pretraining texts), a sentence and
one that it entails (SICK), a question and the paragraph that answers it (SQuAD). Recall@k is the share of queries whose
counterpart is among the k documents that are ranked first; intervals are 95% bootstrap intervals over queries.
"""

import argparse
import csv
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import headstock
from headstock.data.catalog import fetch
from headstock.inference.search import exact_nearest, fit_transform, unit_vectors
from headstock.intervals import Interval, item_interval

LAYERS = ("1", "last", "mix")
TRANSFORMS = ("none", "center", "whiten")
MIN_WORDS = 60  # of a review that is cut into halves
TOPS = (1, 10)


class Pairs(NamedTuple):
    queries: list[str]
    documents: list[str]
    targets: list[int]  # the document that each query should find


def review_halves(limit: int) -> Pairs:
    csv.field_size_limit(1 << 27)
    with (fetch("imdb") / "test.csv").open(encoding="utf-8") as file:
        reviews = (row["text"].split() for row in csv.DictReader(file))
        chosen = list(islice((words for words in reviews if len(words) >= MIN_WORDS), limit))
    first = [" ".join(words[: len(words) // 2]) for words in chosen]
    second = [" ".join(words[len(words) // 2 :]) for words in chosen]
    return Pairs(first, second, list(range(len(chosen))))


def entailed_sentences(path: Path, limit: int) -> Pairs:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    documents = sorted({row["text_b"] for row in rows})
    numbers = {text: number for number, text in enumerate(documents)}
    entailed = [row for row in rows if row["label"].lower() == "entailment" and row["text"] != row["text_b"]][:limit]
    return Pairs([row["text"] for row in entailed], documents, [numbers[row["text_b"]] for row in entailed])


def answered_questions(path: Path, limit: int) -> Pairs:
    queries, documents, targets = [], [], []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            documents.append(paragraph["context"])
            for question in paragraph["qas"]:
                queries.append(question["question"])
                targets.append(len(documents) - 1)
    return Pairs(queries[:limit], documents, targets[:limit])


def found(ranked: np.ndarray, targets: list[int], top: int) -> np.ndarray:
    """(Q,) 1 where the target is among the first `top`."""
    return (ranked[:, :top] == np.array(targets)[:, None]).any(1).astype(float)


def describe(hits: np.ndarray, baseline: np.ndarray | None = None) -> dict[str, Any]:
    """The recall, and its difference from that of TF-IDF on the same queries."""
    result: dict[str, Any] = rounded(item_interval(hits))
    if baseline is not None:
        halved = item_interval((hits - baseline + 1) / 2)  # differences mapped from -1..1 to 0..1
        result["minus_tfidf"] = rounded(Interval(*(2 * value - 1 for value in halved if value is not None)))
    return result


def rounded(values: Interval) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values._asdict().items()}


def tfidf_ranking(pairs: Pairs) -> np.ndarray:
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    documents = vectorizer.fit_transform(pairs.documents)
    scores = (vectorizer.transform(pairs.queries) @ documents.T).toarray()
    return np.argsort(-scores, axis=1, kind="stable")[:, : max(TOPS)]


def measure(pipeline: headstock.Pipeline, pairs: Pairs) -> dict[str, Any]:
    baseline = tfidf_ranking(pairs)
    arms: dict[str, Any] = {
        "tfidf": {f"recall@{top}": describe(found(baseline, pairs.targets, top)) for top in TOPS},
    }
    for layers in LAYERS:
        documents, queries = (np.asarray(pipeline.embed(texts, layers=layers, pool="mean")) for texts in pairs[1::-1])
        for transform in TRANSFORMS:
            fitted = fit_transform(documents, transform)  # type: ignore[arg-type]
            vectors, asked = unit_vectors(documents, *fitted), unit_vectors(queries, *fitted)
            ranked, _ = exact_nearest(vectors, asked, max(TOPS), pipeline.model.device)
            arms[f"layers {layers}, {transform}"] = {
                f"recall@{top}": describe(found(ranked, pairs.targets, top), found(baseline, pairs.targets, top))
                for top in TOPS
            }
    chance = {f"recall@{top}": round(top / len(pairs.documents), 4) for top in TOPS}
    return {"queries": len(pairs.queries), "documents": len(pairs.documents), "chance": chance, "arms": arms}


def measure_speed(documents: int, width: int, queries: int = 256) -> dict[str, Any]:
    """Queries per second of exact search in random unit vectors, and of FAISS with its recall."""
    import faiss
    import torch

    from headstock.inference.search import HNSW_BUILD, HNSW_LINKS, HNSW_SEARCH

    random = np.random.default_rng(0)
    centers = random.normal(size=(documents // 100, width))  # clusters, as texts have topics
    vectors = centers[random.integers(len(centers), size=documents)] + random.normal(size=(documents, width))
    zero = np.zeros(width, np.float32)
    stored = unit_vectors(vectors, zero, None)
    asked = unit_vectors(vectors[:queries] + 0.5 * random.normal(size=(queries, width)), zero, None)
    result: dict[str, Any] = {"documents": documents, "width": width, "queries": queries}
    start = time.perf_counter()
    exact, _ = exact_nearest(stored, asked, 10, torch.device("cpu"))
    result["exact_queries_per_second"] = round(queries / (time.perf_counter() - start), 1)
    halves = stored.astype(np.float16)
    start = time.perf_counter()
    exact_nearest(halves, asked, 10, torch.device("cpu"))
    result["float16_queries_per_second"] = round(queries / (time.perf_counter() - start), 1)
    index = faiss.IndexHNSWFlat(width, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction, index.hnsw.efSearch = HNSW_BUILD, HNSW_SEARCH
    start = time.perf_counter()
    index.add(stored)
    result["faiss_build_seconds"] = round(time.perf_counter() - start, 1)
    start = time.perf_counter()
    _, approximate = index.search(asked, 10)
    result["faiss_queries_per_second"] = round(queries / (time.perf_counter() - start), 1)
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(exact.tolist(), approximate.tolist(), strict=True)]
    return result | {"faiss_recall@10": round(float(np.mean(shared)), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="reviews-en")
    parser.add_argument("--sick", type=Path, help="SICK as a table text,text_b,label")
    parser.add_argument("--squad", type=Path, help="questions in SQuAD's format")
    parser.add_argument("--limit", type=int, default=1000, help="queries of each kind")
    parser.add_argument("--speed", type=int, default=100_000, help="documents of the speed test; 0 for none")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    pipeline = headstock.load(options.run, device="cpu")
    kinds = {"review halves": review_halves(options.limit)}
    if options.sick:
        kinds["entailed sentences"] = entailed_sentences(options.sick, options.limit)
    if options.squad:
        kinds["questions"] = answered_questions(options.squad, options.limit)
    results: dict[str, Any] = {"run": options.run, "pool": "mean", "pairs": {}}
    for name, pairs in kinds.items():
        results["pairs"][name] = measured = measure(pipeline, pairs)
        print(f"{name}: {measured['queries']} queries, {measured['documents']} documents", flush=True)
        for arm, scores in measured["arms"].items():
            cells = (f"{key} {s['mean']:.3f} ({s['low']:.3f} to {s['high']:.3f})" for key, s in scores.items())
            print(f"  {arm:22s} {'  '.join(cells)}", flush=True)
    if options.speed:
        results["speed"] = measure_speed(options.speed, 160)
        print(results["speed"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
