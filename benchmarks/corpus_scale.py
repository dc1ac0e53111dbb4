"""Pretraining from a corpus of many gigabytes: time and memory of each stage, disk, and tokens per second.

    python benchmarks/corpus_scale.py --text my/*.txt --gigabytes 10 --out scratch

The corpus is made of real sentences in a random order: every document draws sentences from the given text, so that no
two documents are equal and words have their real frequencies. `headstock pretrain` then runs on all of it and on a
hundredth of it, each in a fresh process with an empty cache, for the same number of minutes. `--reuse` measures the
speed of training again, with the corpus and the stores in --out, and replaces it in the result.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from headstock.data.corpus import read_corpus

SENTENCES = 20  # per document
SPEEDS = ("tokens_per_second", "tokens_per_second_of_halves")
STAGES = {"tokenizer": r"documents are", "hash": r"hashed the documents", "store": r"MB/s\)"}  # the line that ends each


def read_sentences(paths: list[str]) -> list[str]:
    texts = (document.text for document in read_corpus(paths, documents="line"))
    return [sentence for text in texts for sentence in re.split(r"(?<=[.!?]) ", text) if 20 <= len(sentence) <= 400]


def write_file(path: Path, sentences: list[str], size: int) -> None:
    """Documents, one a line, until the file has `size` bytes."""
    draw, written = random.Random(path.name), 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            block = "".join(" ".join(draw.choices(sentences, k=SENTENCES)) + "\n" for _ in range(500))
            file.write(block)
            written += len(block.encode())


def write_corpus(folder: Path, sentences: list[str], size: int, files: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03d}.txt" for number in range(files)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(write_file, sentences=sentences, size=size // files), paths))
    return paths


def watch_memory(process: subprocess.Popen, peak: dict[str, int]) -> None:
    """The largest memory of a process: its own pages, and with those of mapped files."""
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return
        for name in ("RssAnon", "VmRSS"):
            if found := re.search(rf"{name}:\s+(\d+) kB", status):
                peak[name] = max(peak.get(name, 0), int(found[1]) * 1024)
        time.sleep(0.1)


def measure(files: list[Path], folder: Path, minutes: float, options: list[str], *, reuse: bool) -> dict[str, Any]:
    """One pretraining run, with an empty cache unless `reuse`."""
    run, cache = folder / "run", folder / "cache"
    for path in (run,) if reuse else (run, cache):
        shutil.rmtree(path, ignore_errors=True)
    command = [sys.executable, "-m", "headstock", "pretrain", *map(str, files), "--out", str(run)]
    command += ["--minutes", str(minutes), "--set", "documents=line", "--set", "log_every=10", *options]
    start = time.monotonic()
    peak: dict[str, int] = {}
    ends: dict[str, float] = {}
    environment = os.environ | {"HEADSTOCK_CACHE": str(cache)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        watcher = threading.Thread(target=watch_memory, args=(process, peak))
        watcher.start()
        lines = []
        for line in process.stderr or ():
            lines.append(line)
            for stage, pattern in STAGES.items():
                if stage not in ends and re.search(pattern, line):
                    ends[stage] = time.monotonic() - start
        watcher.join()
    seconds = time.monotonic() - start
    if process.returncode:
        raise SystemExit("".join(lines[-20:]))
    speeds = [
        row["tokens_per_second"]
        for row in map(json.loads, (run / "metrics.jsonl").open())
        if "tokens_per_second" in row
    ]
    speeds = speeds[len(speeds) // 10 :]  # without the first, which include compilation
    half = len(speeds) // 2
    size = sum(file.stat().st_size for file in files)
    data = json.loads((run / "data.json").read_text())
    return {
        "bytes": size,
        "tokens": data.get("train_tokens"),
        "seconds": round(seconds, 1),
        "seconds_at_end_of": {stage: round(end, 1) for stage, end in ends.items()},
        "peak_memory_bytes": peak.get("RssAnon"),
        "peak_memory_with_mapped_files_bytes": peak.get("VmRSS"),
        "store_bytes": sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()),
        "tokens_per_second": round(statistics.median(speeds)),
        "tokens_per_second_of_halves": [round(statistics.median(part)) for part in (speeds[:half], speeds[half:])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="pretraining from a corpus of many gigabytes")
    parser.add_argument("--text", nargs="+", required=True, help="files of real text")
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=1, help="training time of each run")
    parser.add_argument("--out", type=Path, required=True, help="a folder for corpus, caches and runs")
    parser.add_argument("--result", type=Path, help="write the result to this JSON file, too")
    parser.add_argument("--reuse", action="store_true", help="train again on the corpus and the stores in --out")
    parser.add_argument("--option", action="append", default=[], help="for headstock pretrain, repeated")
    args = parser.parse_args()
    size = int(args.gigabytes * 1e9)
    sentences = read_sentences(args.text)
    corpora = {"small": (size // 100, 1), "large": (size, args.files)}
    files = {
        name: sorted((args.out / name).glob("*.txt"))
        if args.reuse
        else write_corpus(args.out / name, sentences, *amount)
        for name, amount in corpora.items()
    }
    result: dict[str, Any] = {"cores": os.cpu_count(), "sentences": len(sentences), "options": args.option}
    if args.reuse and args.result and args.result.exists():
        result = json.loads(args.result.read_text())
    for name in corpora:
        row = measure(files[name], args.out / name / "work", args.minutes, args.option, reuse=args.reuse)
        result[name] = result[name] | {key: row[key] for key in SPEEDS} if name in result else row
        print(json.dumps({name: result[name]}), flush=True)
    result["speed_ratio"] = round(result["large"]["tokens_per_second"] / result["small"]["tokens_per_second"], 4)
    if args.result:
        args.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
