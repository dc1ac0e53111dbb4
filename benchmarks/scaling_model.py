"""The tables of docs/evidence/scaling.md: pretraining by corpus and number of GPUs, from what was measured on one.

    python benchmarks/scaling_model.py

FLOPs, traffic and checkpoint sizes come from closed forms (headstock.cost), throughput and checkpoint speed from
benchmarks/results/fsdp.json. Bandwidths and prices are assumptions.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from fsdp import SIZES as TRAINED

from headstock.cost.data_parallel import Parallel, checkpoint_bytes, step_traffic
from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import flops_per_token, optimizer_state_bytes
from headstock.train.models import blueprint
from headstock.train.settings import make_config

RESULTS = Path(__file__).parent / "results"
LENGTH, STEP_TOKENS = 1024, 1 << 19
MEASURED, LARGE = "GPT-2, 124M", "1.3B"
MODELS = {
    MEASURED: TRAINED["gpt2"][0],
    LARGE: TRAINED["gpt2"][0] | {"depth": 24, "width": 2048, "heads": 16, "hidden": 8192},
}
PARALLEL: dict[str, Parallel] = {MEASURED: "ddp", LARGE: "fsdp"}
CORPORA = {"10 GB": 1e10, "100 GB": 1e11, "1 TB": 1e12}
BYTES_PER_TOKEN = 4.5  # French and English text with 16,000 to 50,000 tokens
GPUS = (1, 8, 64)

# assumptions
NVLINK, NETWORK = 450e9, 50e9  # bytes per second and GPU, within a node of eight and between nodes (400 Gbit/s)
OVERLAP = 2 / 3  # of the compute time, the backward pass, can hide communication
DOLLARS_PER_GPU_HOUR = 3.0


@dataclass(frozen=True)
class ModelSize:
    name: str
    parameters: int
    outside_blocks: int  # embeddings
    flops: float  # per token, forward and backward
    checkpoint: float  # bytes

    @classmethod
    def of(cls, name: str) -> "ModelSize":
        model, task = blueprint(make_config({"model": MODELS[name], "task": {"name": "causal"}}))
        cost = model_cost(model, task, model_dimensions(model, length=LENGTH, source_length=LENGTH))
        weights = list(cost.weights())
        outside = sum(weight.count * weight.times for weight in weights if weight.is_embedding)
        saved = checkpoint_bytes(cost.count, optimizer_state_bytes(weights, "adamw"))
        return cls(name, int(cost.count), int(outside), float(flops_per_token(cost, training=True)), float(saved))


@dataclass(frozen=True)
class Measured:
    """Of one H200."""

    flops_per_second: float
    checkpoint_bytes_per_second: float  # synchronous, with checksums and fsync

    @classmethod
    def read(cls) -> "Measured":
        results = json.loads((RESULTS / "fsdp.json").read_text())
        compiled = next(row for row in results["step"] if row["mode"] == "compiled" and row["variant"] == "plain")
        save = results["save"]["sync"]
        return cls(
            compiled["tokens_per_second"] * ModelSize.of(MEASURED).flops,
            save["checkpoint_mb"] * 1e6 / (save["pause_ms"] / 1000),
        )


@dataclass(frozen=True)
class Step:
    """One optimizer step of STEP_TOKENS tokens on a number of GPUs."""

    sent: float  # bytes per GPU
    communication: float  # seconds
    exposed: float  # seconds of it that computation does not hide
    seconds: float
    save: float  # seconds to write a checkpoint: by rank 0 with DDP, by every process with FSDP

    @classmethod
    def of(cls, size: ModelSize, gpus: int, measured: Measured) -> "Step":
        compute = STEP_TOKENS / gpus * size.flops / measured.flops_per_second
        parallel = PARALLEL[size.name]
        sent = step_traffic(size.parameters, gpus, parallel, outside_blocks=size.outside_blocks, half=True).total
        communication = sent / (NVLINK if gpus <= 8 else NETWORK)
        exposed = max(0.0, communication - OVERLAP * compute)
        writers = gpus if parallel == "fsdp" else 1
        save = size.checkpoint / writers / measured.checkpoint_bytes_per_second
        return cls(float(sent), communication, exposed, compute + exposed, save)


def number(value: float, digits: int = 2) -> str:
    """A number with `digits` significant digits, and thousands separators."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def duration(hours: float) -> str:
    if hours < 1:
        return f"{number(hours * 60)} min"
    return f"{number(hours)} h" if hours < 72 else f"{number(hours / 24)} days"


def step_table(measured: Measured) -> list[str]:
    lines = ["| model | GPUs | step | sent per GPU | sending | not hidden | a save |", "|" + "---|" * 7]
    for size in map(ModelSize.of, MODELS):
        for gpus in GPUS:
            step = Step.of(size, gpus, measured)
            times = [f"{number(1000 * seconds)} ms" for seconds in (step.communication, step.exposed)]
            cells = [size.name, str(gpus), f"{number(1000 * step.seconds)} ms", f"{number(step.sent / 1e9)} GB"]
            lines.append("| " + " | ".join([*cells, *times, f"{number(step.save)} s"]) + " |")
    return lines


def epoch_table(measured: Measured) -> list[str]:
    columns = "".join(f" {gpus} GPU{'s' if gpus > 1 else ''} |" for gpus in GPUS)
    lines = [f"| model | corpus | tokens | FLOPs |{columns}", "|" + "---|" * (4 + len(GPUS))]
    for size in map(ModelSize.of, MODELS):
        for corpus, amount in CORPORA.items():
            tokens = amount / BYTES_PER_TOKEN
            cells = [size.name, corpus, f"{number(tokens / 1e9)} billion", f"{tokens * size.flops:.1e}"]
            for gpus in GPUS:
                hours = tokens / STEP_TOKENS * Step.of(size, gpus, measured).seconds / 3600
                cells.append(f"{duration(hours)}, ${number(hours * gpus * DOLLARS_PER_GPU_HOUR)}")
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    measured = Measured.read()
    print("\n".join([*step_table(measured), "", *epoch_table(measured)]))


if __name__ == "__main__":
    main()
