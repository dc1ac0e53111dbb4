"""What our training loop adds to the bare forward, backward and step that it is made of.

    python benchmarks/loop.py
    python benchmarks/loop.py --preset gpt-mini --batch 16 --steps 20

Both sides run in one process, in turns, on the same model, the same batches, with the same optimizer and threads. The
bare side has its batches ready and does nothing but forward, backward, optimizer step and zero_grad. Ours does all it
does in a real run: it reads from the token store, counts, clips, follows the schedule, checks for numbers that are not
finite and writes metrics. Validation and checkpoints are left out on both sides: how often they happen is a setting.
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


def synthetic(path: Path) -> Path:
    pick = random.Random(0)
    words = ["".join(pick.choices("abcdefghijklmnopqrstuvwxyz", k=pick.randint(2, 9))) for _ in range(3000)]
    path.write_text("\n".join(" ".join(pick.choices(words, k=pick.randint(5, 60))) for _ in range(8000)))
    return path


def bare(model, task, batches, optimizer) -> list[float]:
    """Seconds of each step."""
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


def ours(model, task, stores, settings, run: RunFolder) -> list[float]:
    moments = [time.perf_counter()]

    def hear(event) -> None:
        if event.kind == "step":
            moments.append(time.perf_counter())

    run.path.mkdir()
    distributed = DistributedContext(torch.device("cpu"))
    train(model, task, stores, settings, run=run, distributed=distributed, callbacks=[hear, log_metrics(run)])
    return [after - before for before, after in pairwise(moments)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="gpt-nano")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = read_corpus(synthetic(Path(folder) / "text.txt"))
        tokenizer = train_tokenizer((d.text for d in corpus), TokenizerSettings(vocabulary=4000))
        stores = build_split_stores(corpus, tokenizer, cache=Path(folder) / "cache")
        tree = read_preset(given.preset)
        tree["model"]["vocabulary"] = tokenizer.vocabulary
        chosen = make_config(tree)
        # beyond the end, so that neither a validation nor a checkpoint falls between two steps that are measured
        never = given.steps + 2
        settings = replace(
            chosen.train, batch=given.batch, steps=given.steps + 1, validate_every=never, checkpoint_every=never
        )
        times: dict[str, list[float]] = {"bare": [], "headstock": []}
        for number in range(given.rounds):
            task = build_task(chosen, tokenizer)
            model = build_model(chosen, task)
            order = BatchSampler(task, stores.train, length=chosen.model.context, batch=given.batch, seed=0)
            batches = [order.micro_batches(i, size=None, rank=0, world_size=1)[0] for i in range(given.steps + 1)]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            times["bare"] += bare(model, task, batches, optimizer)[1:]
            task = build_task(chosen, tokenizer)
            model = build_model(chosen, task)
            times["headstock"] += ours(model, task, stores, settings, RunFolder(Path(folder) / f"run-{number}"))
    tokens = given.batch * chosen.model.context
    print(
        f"{given.preset}, batch {given.batch} x {chosen.model.context}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:10s} {middle * 1000:8.1f} ms a step  {tokens / middle:10,.0f} tokens/s")
    print(f"the loop adds {statistics.median(times['headstock']) / statistics.median(times['bare']) - 1:+.1%}")


if __name__ == "__main__":
    main()
