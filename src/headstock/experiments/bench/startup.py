"""How long it takes before the work begins: the command line's answer, and the token store."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.experiments.bench.measurement import Measurement
from headstock.experiments.bench.synthetic_data import write_corpus


def bench_startup(device: torch.device, *, quick: bool) -> list[Measurement]:
    """`headstock --help`, in a process of its own."""
    times = []
    for _ in range(2 if quick else 7):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "headstock", "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return [Measurement("headstock --help", statistics.median(times), "s")]


def bench_token_store(device: torch.device, *, quick: bool) -> list[Measurement]:
    """Text read, deduplicated, split, tokenized and written."""
    megabytes = 0.3 if quick else 20
    with tempfile.TemporaryDirectory() as folder:
        corpus = read_corpus(write_corpus(Path(folder) / "text.txt", megabytes), documents="line")
        tokenizer = train_tokenizer(corpus.first_texts(2000 if quick else 30_000), TokenizerSettings(vocabulary=8000))
        began = time.perf_counter()
        build_split_stores(corpus, tokenizer, cache=Path(folder) / "cache")
        taken = time.perf_counter() - began
    return [Measurement("building a token store", megabytes / taken, "MB/s")]
