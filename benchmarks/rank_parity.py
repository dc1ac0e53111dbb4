"""How far the training losses of 1, 2 and 4 processes differ, by DDP and by FSDP, for the same global batch.

    python benchmarks/rank_parity.py                    gpt-nano on the CPU (gloo), 50 steps
    python benchmarks/rank_parity.py --preset bert-nano --steps 20

Dropout is off, since each process draws its own.
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


def losses(folder: Path, args: argparse.Namespace, processes: int, parallel: str) -> list[float]:
    """The loss of every tenth step."""
    out = folder / f"{processes}-{parallel}"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    settings = {"dropout": 0, "steps": args.steps, "batch": 8, "length": 64, "log_every": 10}
    settings |= {"tokenizer.vocabulary": 300, "parallel": parallel, "tensorboard": "false"}
    words = ["pretrain", folder / "text.txt", "--preset", args.preset, "--out", out, "--device", "cpu", "--quiet"]
    words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    subprocess.run([*start, "-m", "headstock", *map(str, words)], env=environment, check=True, capture_output=True)
    rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-nano")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="JSON file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        alone = losses(folder, args, 1, "ddp")
        results = []
        for processes in (2, 4):
            for parallel in ("ddp", "fsdp"):
                curve = losses(folder, args, processes, parallel)
                difference = max(abs(a - b) for a, b in zip(alone, curve, strict=True))
                results.append({"processes": processes, "parallel": parallel, "max_difference": difference})
                print(f"{processes} processes, {parallel}: losses within {difference:.1e} of one process")
    if args.json:
        settings = {"preset": args.preset, "steps": args.steps, "losses": alone}
        args.json.write_text(json.dumps(settings | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
