"""What FSDP, activation checkpointing and saving cost on one GPU: speed, memory, and the pause of a checkpoint.

    python benchmarks/fsdp.py                            GPT-2 124M on a GPU, all sections
    python benchmarks/fsdp.py --size tiny                a few small steps, to try the script
    python benchmarks/fsdp.py --size 50m --only save     the pause of a save of 50M parameters, on a CPU

`step` times one optimizer step, all variants alternating in one process. `plain` is what one process runs, also with
`parallel=fsdp`, because it has nothing to shard; `fsdp` shards all the same, over one process, as each of several would
(`fully_shard`: without traffic, but with every hook, copy and cast). `save` trains with the real loop, one run without
checkpoints, one with synchronous and one with asynchronous saves.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop import write_random_text

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.planner.machine import device_name, synchronize
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import uses_bfloat16
from headstock.train.execution import build_module, build_step
from headstock.train.loop import train
from headstock.train.models import build_model, build_task
from headstock.train.optimizers import make_optimizers
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler
from headstock.train.settings import make_config
from headstock.train.sharding import is_sharded, shard_module

GPT2 = {"context": 1024, "depth": 12, "width": 768, "heads": 12, "hidden": 3072, "activation": "gelu_tanh"}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # model and training settings
    "gpt2": (GPT2 | {"vocabulary": 50_304, "bias": False}, {"batch": 64, "length": 1024}),
    "50m": (
        GPT2 | {"vocabulary": 16_000, "depth": 8, "width": 640, "heads": 10, "hidden": 2560},
        {"batch": 1, "length": 64},
    ),
    "tiny": (GPT2 | {"vocabulary": 600, "depth": 2, "width": 32, "heads": 2, "hidden": 64}, {"batch": 4, "length": 32}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fsdp": {"parallel": "fsdp"},
    "plain, activation checkpointing": {"activation_checkpointing": True},
    "fsdp, activation checkpointing": {"parallel": "fsdp", "activation_checkpointing": True},
}


def timed_steps(
    variants: dict[str, dict[str, Any]], mode: Any, bench: "Bench", rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Tokens per second and peak memory of each variant, by rounds that alternate."""
    running, peaks = {}, dict.fromkeys(variants, 0)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name, options in variants.items():
        settings = replace(bench.config.train, **options)
        model = build_model(bench.config, bench.task)
        module = build_module(model, bench.task, settings, bench.distributed)
        assert not is_sharded(module), "one process has nothing to shard"
        if settings.parallel == "fsdp":
            dtype = torch.bfloat16 if uses_bfloat16(bench.device, settings.dtype) else None
            shard_module(module, bench.device, 1, dtype=dtype, reduce_dtype=torch.float32)
        optimizers = make_optimizers(module.model, settings)
        step = build_step(module, bench.task, optimizers, settings, mode, bench.distributed, bench.no_split)
        for number in range(3):  # compiles
            step(number, bench.batches[number % len(bench.batches)], 1e-4)
        running[name] = step
    batches = cycle(bench.batches)
    for _ in range(rounds):
        for name, step in running.items():
            synchronize(bench.device)
            before = torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0
            if before:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            for number in range(steps):
                step(number, next(batches), 1e-4)
            synchronize(bench.device)
            seconds[name].append((time.perf_counter() - began) / steps)
            if before:
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - before)
    first = statistics.median(seconds[next(iter(variants))])
    rows = []
    for name in variants:
        own = statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds[name], seconds[next(iter(variants))], strict=True)]
        row: dict[str, Any] = {"variant": name, "mode": mode, "ms": round(own * 1000, 2)}
        row |= {"tokens_per_second": round(bench.tokens / own)}
        row |= {"time_over_plain": round(own / first, 4), "by_round": [round(ratio, 4) for ratio in ratios]}
        row |= {"activation_gb": round(peaks[name] / 1e9, 2)} if peaks[name] else {}
        rows.append(row)
        print(f"{mode:9}{name:34}{row['ms']:10.2f} ms {row['tokens_per_second']:12,} tokens/s  "
              f"{own / first - 1:+7.1%}  {row.get('activation_gb', '')}", flush=True)  # fmt: skip
    return rows


def time_saves(bench: "Bench", folder: Path, *, saves: int, every: int) -> dict[str, Any]:
    """How much longer than the others the steps take after which a checkpoint is saved.

    An asynchronous save waits for the one before it, so `every` steps must take longer than writing a checkpoint.
    """
    steps = every * (saves + 1)
    results: dict[str, dict[str, Any]] = {}
    for name in ("none", "sync", "async"):
        settings = replace(
            bench.config.train,
            steps=steps,
            compile=False,
            validate_every=steps + 1,
            checkpoint_every=steps + 1 if name == "none" else every,
            log_every=steps,
            weights="last",
            keep=1,
            async_save=name == "async",
        )
        times = [time.perf_counter()]

        def on_event(event: Event, times: list[float] = times) -> None:
            if event.kind == "step":
                synchronize(bench.device)
                times.append(time.perf_counter())

        run = RunFolder(folder / name)
        run.path.mkdir()
        model = build_model(bench.config, bench.task)
        train(model, bench.task, bench.stores, settings, run=run, distributed=bench.distributed, callbacks=[on_event])
        gaps = [after - before for before, after in pairwise(times)]
        # a checkpoint is saved after the step's event, so that the next gap contains it; not after the last one
        pauses = [gaps[i] for i in range(every, steps - 1, every)] if name != "none" else []
        usual = statistics.median(gaps[1:])
        results[name] = {"step_ms": round(usual * 1000, 1), "total_s": round(times[-1] - times[1], 3)}
        if pauses:
            results[name] |= {"pauses_ms": [round((pause - usual) * 1000, 1) for pause in pauses]}
            results[name]["pause_ms"] = round((statistics.median(pauses[1:] or pauses) - usual) * 1000, 1)
            files = list(run.checkpoints.glob("step-*/*.safetensors"))
            results[name]["checkpoint_mb"] = round(sum(file.stat().st_size for file in files) / 1e6)
        print(f"{name:6} saves: {results[name]}", flush=True)
        del model
        gc.collect()
    return results


class Bench:
    """Model settings, task, data and device that all sections share."""

    def __init__(self, size: str, folder: Path, device: torch.device):
        corpus = read_corpus(write_random_text(folder / "text.txt"), documents="file")
        tokenizer = train_tokenizer((d.text for d in corpus), TokenizerSettings(vocabulary=500))
        model, training = SIZES[size]
        (folder / "valid.txt").write_text((folder / "text.txt").read_text()[:50_000])
        valid = read_corpus(folder / "valid.txt", documents="file")
        self.stores = build_split_stores(corpus, tokenizer, valid=valid, cache=folder / "cache")
        self.config = make_config({"model": model, "task": {"name": "causal"}, "train": training | {"steps": 1}})
        self.task, self.device = build_task(self.config, tokenizer), device
        self.distributed = DistributedContext(device)
        settings = self.config.train
        sampler = BatchSampler(self.task, self.stores.train, length=settings.length or 0, batch=settings.batch, seed=0)
        self.batches = [sampler.micro_batches(step, size=None, rank=0, world_size=1) for step in range(4)]
        self.tokens = settings.batch * (settings.length or 0)
        self.parameters = sum(p.numel() for p in build_model(self.config, self.task).parameters())

    def no_split(self, step: int, size: int) -> list[Any]:
        raise RuntimeError("out of memory: choose a smaller batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--only", choices=("step", "save"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per round")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--every", type=int, default=40, help="steps between two saves")
    parser.add_argument("--no-compile", action="store_true")
    default = Path(os.environ.get("OUT", Path(__file__).parent / "results")) / "fsdp.json"
    parser.add_argument("--json", type=Path, default=default, help="JSON file to write")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(args.size, Path(name), device)
        results: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__, "size": args.size}
        results |= {"parameters": bench.parameters, "tokens_per_step": bench.tokens}
        print(f"{args.size}: {bench.parameters:,} parameters, {bench.tokens:,} tokens per step, {results['device']}")
        if args.only != "save":
            results["step"] = timed_steps(VARIANTS, "eager", bench, args.rounds, args.steps)
            gc.collect()
            if not args.no_compile:
                plain = {name: options for name, options in VARIANTS.items() if "parallel" not in options}
                results["step"] += timed_steps(plain, "compiled", bench, args.rounds, args.steps)
                gc.collect()
        if args.only != "step":
            results["save"] = time_saves(bench, Path(name), saves=args.saves, every=args.every)
    args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
