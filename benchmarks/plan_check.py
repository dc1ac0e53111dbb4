"""How far a plan's time and memory are from the run that it planned.

    python benchmarks/plan_check.py                                    on made-up text, a minute each
    python benchmarks/plan_check.py --text corpus.txt --minutes 5 --objective masked
    python benchmarks/plan_check.py --device cuda --minutes 3

A plan is made with its probe, the run is made with exactly its settings, and both are set side by side. The run is
made in the same process, which has its kernels by then; what a new one may take to load them, the plan tells apart.
Wanted after a probe: time within 10%; memory within 10% on a GPU, 20% on a CPU. On a machine that others use too, time
by the clock says little; the processor's time of a step, in the probe and in the run, is set beside it.
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
from headstock.experiments.bench.synthetic_data import write_corpus
from headstock.experiments.recipe import to_toml
from headstock.planner.planner import plan
from headstock.planner.summary import plan_notes


class Processor:
    """The processor's time of each step of a run."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, event: Any) -> None:
        if event.kind == "step":
            self.moments.append(time.process_time())

    def step(self) -> float:
        """The middle one, as validations and checkpoints fall between some."""
        return statistics.median(after - before for before, after in pairwise(self.moments))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", help="made up when not given")
    parser.add_argument("--megabytes", type=float, default=5, help="of made-up text")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--objective")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = given.text or [str(write_corpus(folder / "text.txt", given.megabytes))]
        wish = {"device": given.device, "minutes": given.minutes, "objective": given.objective}
        made = plan(text, probe=True, **wish)
        for line in plan_notes(made):
            say(line)
        (folder / "plan.toml").write_text(to_toml(made.config), encoding="utf-8")
        clock = Processor()
        done = headstock.pretrain(
            out=folder / "run", config_file=folder / "plan.toml", device=given.device, callbacks=[clock]
        )
    rough = plan(text, **wish) if given.text else None
    result = {
        "plan": made.candidate.label,
        "compile": made.config["train"].get("compile", "auto"),
        "steps": made.steps,
        "step_milliseconds": round(1000 * made.costs.step_seconds, 3),
        "starting_seconds": round(made.costs.startup_seconds, 2),
        "cold_seconds": round(made.costs.cold_start_seconds, 2),
        "seconds": [round(made.seconds, 1), done["seconds"]],
        "tokens_per_second": [round(made.tokens_per_second), done["tokens_per_second"]],
        "peak_megabytes": [round(made.costs.peak_bytes / 1e6, 1), round(done["peak_bytes"] / 1e6, 1)],
        "parameters": [made.costs.parameters, done["parameters"]["total"]],
        "time_off": round(made.seconds / done["seconds"] - 1, 3),
        "memory_off": round(made.costs.peak_bytes / done["peak_bytes"] - 1, 3),
    }
    if given.device == "cpu":
        result["processor_off"] = round(made.costs.cpu_seconds / clock.step() - 1, 3)
    if rough is not None:
        result["without_a_probe"] = [rough.candidate.label, round(rough.tokens_per_second)]
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    most = 0.1 if given.device == "cuda" else 0.2
    return int(abs(result["time_off"]) > 0.1 or abs(result["memory_off"]) > most)


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
