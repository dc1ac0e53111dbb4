"""Compares the time and memory that a plan predicts with those of the run it planned.

    python benchmarks/plan_check.py                                    synthetic text, one minute
    python benchmarks/plan_check.py --text corpus.txt --minutes 5 --objective masked
    python benchmarks/plan_check.py --device cuda --minutes 3

Plans with a probe, then runs the plan in the same process, whose kernels are loaded; the plan reports the cold start of
a new process separately. Target: time within 10%; memory within 10% on a GPU, 20% on a CPU. On a shared machine, wall
time says little, so the CPU time of a step is compared too.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import headstock
from headstock.experiments.bench.workloads import write_corpus
from headstock.experiments.recipe import to_toml
from headstock.planner.planner import plan
from headstock.planner.summary import plan_notes


class CpuClock:
    """A callback that records the CPU time of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, event: Any) -> None:
        if event.kind == "step":
            self.times.append(time.process_time())

    def step(self) -> float:
        """The median, since validations and checkpoints fall between some steps."""
        return statistics.median(after - before for before, after in pairwise(self.times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", help="default: synthetic text")
    parser.add_argument("--megabytes", type=float, default=5, help="of synthetic text")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--objective")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = arguments.text or [str(write_corpus(folder / "text.txt", arguments.megabytes))]
        options = {"device": arguments.device, "minutes": arguments.minutes, "objective": arguments.objective}
        proposal = plan(text, probe=True, **options)
        for line in plan_notes(proposal):
            print(line, file=sys.stderr)
        (folder / "plan.toml").write_text(to_toml(proposal.config), encoding="utf-8")
        clock = CpuClock()
        results = headstock.pretrain(
            out=folder / "run", config_file=folder / "plan.toml", device=arguments.device, callbacks=[clock]
        )
    unprobed = plan(text, **options) if arguments.text else None
    result = {
        "plan": proposal.candidate.label,
        "compile": proposal.config["train"].get("compile", "auto"),
        "steps": proposal.steps,
        "step_milliseconds": round(1000 * proposal.costs.step_seconds, 3),
        "starting_seconds": round(proposal.costs.startup_seconds, 2),
        "cold_seconds": round(proposal.costs.cold_start_seconds, 2),
        "seconds": [round(proposal.seconds, 1), results["seconds"]],
        "tokens_per_second": [round(proposal.tokens_per_second), results["tokens_per_second"]],
        "peak_megabytes": [round(proposal.costs.peak_bytes / 1e6, 1), round(results["peak_bytes"] / 1e6, 1)],
        "parameters": [proposal.costs.parameters, results["parameters"]["total"]],
        "time_off": round(proposal.seconds / results["seconds"] - 1, 3),
        "memory_off": round(proposal.costs.peak_bytes / results["peak_bytes"] - 1, 3),
    }
    if arguments.device == "cpu":
        result["processor_off"] = round(proposal.costs.cpu_seconds / clock.step() - 1, 3)
    if unprobed is not None:
        result["without_a_probe"] = [unprobed.candidate.label, round(unprobed.tokens_per_second)]
    print(json.dumps(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    memory_limit = 0.1 if arguments.device == "cuda" else 0.2
    return int(abs(result["time_off"]) > 0.1 or abs(result["memory_off"]) > memory_limit)


if __name__ == "__main__":
    sys.exit(main())
