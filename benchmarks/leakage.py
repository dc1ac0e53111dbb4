"""Speed and memory of the leakage search.

    python benchmarks/leakage.py [--texts 2500] [--megabytes 20 100 | --corpus FILE]

The corpus consists of random words, or is a real one, from which the test texts are then taken. Each size runs in its
own process, so that its peak memory can be measured.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headstock.data.corpus import Corpus, read_corpus
from headstock.experiments.leakage_search import find_leaked_texts


def random_words(generator: random.Random, count: int) -> str:
    """Words from a vocabulary of 50,000 with Zipf's distribution."""
    return " ".join(f"word{int(50_000 ** generator.random())}" for _ in range(count))


def measure_random(megabytes: int, count: int) -> None:
    generator = random.Random(0)
    texts = [random_words(generator, generator.randint(10, 60)) for _ in range(count)]
    leaked = set(range(0, count, 100))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        with path.open("w", encoding="utf-8") as file:
            for row in leaked:
                file.write(f"{random_words(generator, 30)} {texts[row]} {random_words(generator, 30)}\n\n")
            while file.tell() < megabytes * 1_000_000:
                file.write(random_words(generator, 200) + "\n\n")
        measure(read_corpus(path, documents="block"), texts, leaked, path.stat().st_size / 1e6)


def measure_corpus(path: str, count: int) -> None:
    """Every hundredth text is an excerpt of the corpus; the others are excerpts with shuffled words."""
    corpus, generator = read_corpus(path), random.Random(0)
    size, texts = 0.0, list[str]()
    for document in corpus:
        size += len(document.text.encode()) / 1e6
        if len(texts) < count and len(excerpt := document.text.split()[:40]) == 40:
            if len(texts) % 100:
                generator.shuffle(excerpt)
            texts.append(" ".join(excerpt))
    measure(corpus, texts, set(range(0, len(texts), 100)), size)


def measure(corpus: Corpus, texts: list[str], leaked: set[int], size: float) -> None:
    """`leaked` are the rows of the texts that are in the corpus and must be found."""
    began, cpu = time.perf_counter(), time.process_time()
    result = find_leaked_texts(texts, corpus)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    exact = {match.row for match in result.found if match.kind == "exact"}
    assert leaked <= exact, f"{len(leaked - exact)} leaked texts were not found"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    speed = f"{size / wall:6.1f} MB/s (wall clock), {size / cpu:6.1f} (CPU time)"
    print(f"{size:8.0f} MB, {len(texts):,} texts: {speed}, peak memory {peak:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--texts", type=int, default=2500)
    parser.add_argument("--corpus")
    args = parser.parse_args()
    if args.corpus:
        measure_corpus(args.corpus, args.texts)
    elif len(args.megabytes) == 1:
        measure_random(args.megabytes[0], args.texts)
    else:
        for size in args.megabytes:
            command = [sys.executable, __file__, "--megabytes", str(size), "--texts", str(args.texts)]
            subprocess.run(command, check=True)
