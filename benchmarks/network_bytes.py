"""Bytes that data-parallel training sends per step, measured against the formulas of headstock.cost.data_parallel.

    sudo python benchmarks/network_bytes.py            # root, for a network namespace of its own

Each run has the loopback interface of a new namespace to itself, so that its counter holds the traffic of that run
only. The difference between a long and a short run leaves out the start, the end and the rendezvous. The processes
communicate by gloo, which reduces and scatters gradients by an all-reduce; NCCL sends half as much for that.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from headstock.cost.data_parallel import Parallel, step_traffic
from headstock.experiments.bench.workloads import write_corpus

NAMESPACE = "headstock-network-bytes"
SIZES = {"depth": 4, "width": 256, "heads": 4, "context": 32, "vocabulary": 2000, "batch": 8}
STEPS = (4, 24)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])}: {done.stderr[-2000:]}")
    return done.stdout


def train(corpus: Path, folder: Path, processes: int, parallel: str, steps: int) -> tuple[int, int]:
    """Bytes sent by a whole run, and its number of parameters."""
    settings = SIZES | {"parallel": parallel, "steps": steps, "validate_every": 1000, "log_every": 1000}
    settings |= {"tensorboard": "false"}
    out = folder / f"{parallel}-{processes}-{steps}"
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*torchrun, "-m", "headstock", "pretrain", str(corpus), "--out", str(out), "--device", "cpu", *options]
    run("ip", "netns", "add", NAMESPACE)
    try:
        run("ip", "-n", NAMESPACE, "link", "set", "lo", "up")
        run("ip", "netns", "exec", NAMESPACE, "env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", *command)
        (link,) = json.loads(run("ip", "-n", NAMESPACE, "-s", "-j", "link", "show", "lo"))
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=False)
    results = json.loads((out / "results.json").read_text())
    return link["stats64"]["tx"]["bytes"], results["parameters"]["total"]


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes per step of data-parallel training")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--result", type=Path, help="write the rows to this JSON file, too")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name, "corpus.txt")
        write_corpus(corpus, 0.3)
        for parallel in get_args(Parallel):
            for processes in args.processes:
                short, long = (train(corpus, Path(name), processes, parallel, steps) for steps in STEPS)
                measured = (long[0] - short[0]) / (STEPS[1] - STEPS[0]) / processes
                embeddings = SIZES["vocabulary"] * SIZES["width"]
                formula = step_traffic(long[1], processes, parallel, outside_blocks=embeddings, scatters=False).total
                row = {"parallel": parallel, "processes": processes, "parameters": long[1]}
                row |= {"measured_bytes": round(measured), "formula_bytes": round(formula)}
                rows.append(row | {"ratio": round(measured / formula, 3)})
                print(json.dumps(rows[-1]), flush=True)
    if args.result:
        args.result.write_text(json.dumps({"settings": SIZES, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
