"""How far the training losses of 1, 2 and 4 processes differ, by DDP and by FSDP, for the same global batch.

    python benchmarks/rank_parity.py                    gpt-nano on the CPU (gloo), 50 steps
    python benchmarks/rank_parity.py --preset bert-nano --steps 20

In float32 they differ by rounding, since processes sum gradients in another order, and training amplifies it. In
float64 nothing else is left. Dropout is off, since each process draws its own.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "a",
    "mat",
    "big",
    "small",
    "red",
    "blue",
    "house",
    "tree",
    "and",
    "then",
]


def write_text(path: Path) -> None:
    generator = random.Random(0)
    sentences = (". ".join(" ".join(generator.choices(WORDS, k=8)) for _ in range(6)) for _ in range(200))
    path.write_text("\n\n".join(sentences), encoding="utf-8")


def losses(folder: Path, args: argparse.Namespace, dtype: str, processes: int, parallel: str) -> list[float]:
    """The mean losses of ten steps each."""
    out = folder / f"{dtype}-{processes}-{parallel}"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    settings = {"dropout": 0, "steps": args.steps, "batch": 8, "length": 64, "log_every": 10, "weights": "last"}
    settings |= {"tokenizer.vocabulary": 300, "parallel": parallel, "tensorboard": False}
    job = {"corpus": str(folder / "text.txt"), "preset": args.preset, "out": str(out), "settings": settings}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*start, __file__, "--process", dtype, json.dumps(job)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def train_process(dtype: str, job: str) -> None:
    """One of the processes that torchrun starts."""
    import torch

    import headstock

    torch.set_default_dtype(getattr(torch, dtype))
    headstock.pretrain(**json.loads(job), device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-nano")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--process", nargs=2, metavar=("DTYPE", "JOB"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        train_process(*args.process)
        return
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        for dtype in ("float32", "float64"):
            alone = losses(folder, args, dtype, 1, "ddp")
            for processes, parallel in ((2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")):
                curve = losses(folder, args, dtype, processes, parallel)
                difference = max(abs(a - b) for a, b in zip(alone, curve, strict=True))
                row = {"dtype": dtype, "processes": processes, "parallel": parallel, "max_difference": difference}
                results.append(row | {"last_difference": abs(alone[-1] - curve[-1])})
                print(f"{dtype}, {processes} processes, {parallel}: losses within {difference:.1e} of one process")
    if args.json:
        settings = {"preset": args.preset, "steps": args.steps, "losses": alone}
        args.json.write_text(json.dumps(settings | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
