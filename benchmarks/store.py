"""Speed of building a token store, relative to `tokenizers.Tokenizer.encode_batch` on the same text.

    python benchmarks/store.py                       on 10 MB of random text
    python benchmarks/store.py --text my.txt         on your own text, with one document per line
    python benchmarks/store.py --megabytes 1000 --rounds 1 --no-bare     for the memory of a large corpus

Both sides tokenize alternately in one process with the same threads. A store also reads, hashes, deduplicates, splits
and writes; the bare side has its lines in memory and uses the fastest of several batch sizes.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import tokenizers

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import train_tokenizer
from headstock.data.tokenizer_training import TokenizerSettings
from headstock.experiments.bench.workloads import write_corpus

T = TypeVar("T")
BARE_BATCHES = (1000, 2000, 4000)


def encode_all(library: tokenizers.Tokenizer, lines: list[str], batch: int) -> None:
    for i in range(0, len(lines), batch):
        library.encode_batch(lines[i : i + batch])


def time_call(function: Callable[[], T], times: list[tuple[float, float]]) -> T:
    """Call the function and record its wall-clock and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return result


def median(times: list[tuple[float, float]], which: int) -> float:
    return statistics.median(pair[which] for pair in times)


def main() -> None:
    parser = argparse.ArgumentParser(description="the speed of building a token store")
    parser.add_argument("--text", type=Path, help="a .txt file (default: random text)")
    parser.add_argument("--megabytes", type=float, default=10, help="size of the random text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True, help="compare with encode_batch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.text or Path(folder, "random.txt")
        if not args.text:
            write_corpus(path, args.megabytes)
        size = path.stat().st_size
        with path.open(encoding="utf-8") as file:
            sample = [line for line, _ in zip(file, range(30_000), strict=False)]
        tokenizer = train_tokenizer(sample, TokenizerSettings(kind="bpe", vocabulary=8000))
        tokenizer.save(Path(folder, "tokenizer.json"))
        library = tokenizers.Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        lines = path.read_text(encoding="utf-8").split("\n") if args.bare else []
        corpus = read_corpus(path, documents="line")
        stores: list[tuple[float, float]] = []
        bare: dict[int, list[tuple[float, float]]] = {batch: [] for batch in BARE_BATCHES}
        for number in range(args.rounds):
            build = partial(build_split_stores, corpus, tokenizer, cache=Path(folder, f"round-{number}"))
            store = time_call(build, stores)
            for batch, times in bare.items() if args.bare else ():
                time_call(partial(encode_all, library, lines, batch), times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result = {"megabytes": size / 1e6, "store_mb_per_second": size / 1e6 / median(stores, 0)}
    if args.bare:
        best = min(bare.values(), key=lambda times: median(times, 0))
        result["bare_mb_per_second"] = size / 1e6 / median(best, 0)
        result["ratio"] = median(best, 0) / median(stores, 0)
        result["cpu_ratio"] = median(best, 1) / median(stores, 1)  # varies less on a shared machine
    result["peak_rss_megabytes"] = peak / 1e6
    print(json.dumps({**{key: round(value, 3) for key, value in result.items()}, **store.summary}))


if __name__ == "__main__":
    main()
