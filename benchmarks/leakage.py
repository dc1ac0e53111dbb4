"""How fast the search for leaks reads a corpus, and whether its memory grows with it.

    python benchmarks/leakage.py [--texts 2500] [--megabytes 20 100 | --corpus FILE]

Made-up words, or a real corpus, from which the texts are then taken too. Each size is a process of its own, since
memory that was once taken is not given back.
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


def words(pick: random.Random, count: int) -> str:
    """Words as often as in a language: the n-th most frequent about 1/n of the time, among 50,000."""
    return " ".join(f"word{int(50_000 ** pick.random())}" for _ in range(count))


def made_up(megabytes: int, texts: int) -> None:
    pick = random.Random(0)
    tested = [words(pick, pick.randint(10, 60)) for _ in range(texts)]
    hidden = set(range(0, texts, 100))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        with path.open("w", encoding="utf-8") as file:
            for row in hidden:
                file.write(f"{words(pick, 30)} {tested[row]} {words(pick, 30)}\n\n")
            while file.tell() < megabytes * 1_000_000:
                file.write(words(pick, 200) + "\n\n")
        measure(read_corpus(path, documents="block"), tested, hidden, path.stat().st_size / 1e6)


def real(path: str, texts: int) -> None:
    """Every hundredth text is a stretch of the corpus; the others are the same stretches in another order of words."""
    corpus, pick = read_corpus(path), random.Random(0)
    size, tested = 0.0, list[str]()
    for document in corpus:
        size += len(document.text.encode()) / 1e6
        if len(tested) < texts and len(stretch := document.text.split()[:40]) == 40:
            if len(tested) % 100:
                pick.shuffle(stretch)
            tested.append(" ".join(stretch))
    measure(corpus, tested, set(range(0, len(tested), 100)), size)


def measure(corpus: Corpus, tested: list[str], hidden: set[int], size: float) -> None:
    """`hidden` are the texts that are in the corpus, and must be found."""
    began, busy = time.perf_counter(), time.process_time()
    found = find_leaked_texts(tested, corpus)
    clock, busy = time.perf_counter() - began, time.process_time() - busy
    exact = {hit.row for hit in found.found if hit.kind == "exact"}
    assert hidden <= exact, f"{len(hidden - exact)} texts that are there were not found"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    speed = f"{size / clock:6.1f} MB/s by the clock, {size / busy:6.1f} by processor time"
    print(f"{size:8.0f} MB, {len(tested):,} texts: {speed}, peak memory {peak:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--texts", type=int, default=2500)
    parser.add_argument("--corpus")
    asked = parser.parse_args()
    if asked.corpus:
        real(asked.corpus, asked.texts)
    elif len(asked.megabytes) == 1:
        made_up(asked.megabytes[0], asked.texts)
    else:
        for size in asked.megabytes:
            command = [sys.executable, __file__, "--megabytes", str(size), "--texts", str(asked.texts)]
            subprocess.run(command, check=True)
