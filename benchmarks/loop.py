"""Overhead of the training loop over bare forward, backward and optimizer step.

    python benchmarks/loop.py
    python benchmarks/loop.py --preset gpt-mini --batch 16 --steps 20

Both sides run alternately in one process with the same model, batches, optimizer and threads. The bare side has its
batches in memory and only runs forward, backward, optimizer step and zero_grad. Headstock's loop does everything it
does in a real run except validation and checkpoints: it reads the token store, counts, clips, follows the schedule,
checks for non-finite values and writes metrics.
"""

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.train.callbacks import log_metrics
from headstock.train.distributed import DistributedContext
from headstock.train.loop import train
from headstock.train.models import build_model, build_task
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler
from headstock.train.settings import make_config, read_preset


def write_random_text(path: Path) -> Path:
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(3000)]
    path.write_text("\n".join(" ".join(generator.choices(words, k=generator.randint(5, 60))) for _ in range(8000)))
    return path


def time_bare_loop(model, task, batches, optimizer) -> list[float]:
    model.train()
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        loss = task.losses(model, batch)["token"] / batch.labels["token"].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    return seconds


def time_headstock(model, task, stores, settings, run: RunFolder) -> list[float]:
    timestamps = [time.perf_counter()]

    def on_event(event) -> None:
        if event.kind == "step":
            timestamps.append(time.perf_counter())

    run.path.mkdir()
    distributed = DistributedContext(torch.device("cpu"))
    train(model, task, stores, settings, run=run, distributed=distributed, callbacks=[on_event, log_metrics(run)])
    return [after - before for before, after in pairwise(timestamps)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="gpt-nano")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = read_corpus(write_random_text(Path(folder) / "text.txt"))
        tokenizer = train_tokenizer((d.text for d in corpus), TokenizerSettings(vocabulary=4000))
        stores = build_split_stores(corpus, tokenizer, cache=Path(folder) / "cache")
        tree = read_preset(args.preset)
        tree["model"]["vocabulary"] = tokenizer.vocabulary
        config = make_config(tree)
        never = args.steps + 2  # no validation or checkpoint between timed steps
        settings = replace(
            config.train, batch=args.batch, steps=args.steps + 1, validate_every=never, checkpoint_every=never
        )
        times: dict[str, list[float]] = {"bare": [], "headstock": []}
        for number in range(args.rounds):
            task = build_task(config, tokenizer)
            model = build_model(config, task)
            sampler = BatchSampler(task, stores.train, length=config.model.context, batch=args.batch, seed=0)
            batches = [sampler.micro_batches(i, size=None, rank=0, world_size=1)[0] for i in range(args.steps + 1)]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            times["bare"] += time_bare_loop(model, task, batches, optimizer)[1:]
            task = build_task(config, tokenizer)
            model = build_model(config, task)
            run = RunFolder(Path(folder) / f"run-{number}")
            times["headstock"] += time_headstock(model, task, stores, settings, run)
    tokens = args.batch * config.model.context
    print(
        f"{args.preset}, batch {args.batch} x {config.model.context}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:10s} {median * 1000:8.1f} ms/step  {tokens / median:10,.0f} tokens/s")
    print(f"the loop adds {statistics.median(times['headstock']) / statistics.median(times['bare']) - 1:+.1%}")


if __name__ == "__main__":
    main()
