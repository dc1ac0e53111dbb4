"""Time and memory of a fine-tuning step on the CPU: all weights, LoRA, and LoRA on all linear layers.

    OMP_NUM_THREADS=1 python benchmarks/lora.py --json benchmarks/results/lora.json

Every model classifies random rows of `LENGTH` tokens. The ways take turns, step by step. The time is processor time,
which other programs hardly change; its ratio to full fine-tuning is the median over turns. Memory is counted:
gradients and moments from the tensors that the optimizer holds, activations from those that autograd saves.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.batch import Batch
from headstock.model.heads import ClassificationHead
from headstock.model.lora import LoRAConfig, LoRAModel
from headstock.model.model import Model
from headstock.train.models import blueprint
from headstock.train.optimizers import make_optimizers, update_weights
from headstock.train.resolve import resolve_pretrain_config
from headstock.train.settings import TrainSettings

ROWS, LENGTH, RANK = 16, 32, 8
PRESETS = ("modern-nano", "bert-mini", "gpt-small", "lstm-mini")
WAYS = {
    "all weights": None,
    "LoRA, attention": LoRAConfig(RANK, 16.0, 0.0, "attention"),
    "LoRA, all-linear": LoRAConfig(RANK, 16.0, 0.0, "all-linear"),
}


@dataclass(frozen=True)
class Row:
    model: str
    parameters: int
    way: str
    trained: int
    state_bytes: int  # gradients and moments
    saved_bytes: int  # activations
    step_ms: float
    ratio: float  # of a step's time to that of full fine-tuning


class Step:
    """An optimizer step of one model on one batch."""

    def __init__(self, preset: str, lora: LoRAConfig | None):
        torch.manual_seed(0)
        language_model, _ = blueprint(resolve_pretrain_config(preset, None, {}), weights=True)
        backbone = language_model.backbone
        self.parameters = sum(parameter.numel() for parameter in backbone.parameters())
        model = Model(backbone, {"label": ClassificationHead(backbone.width, 2)})
        self.model = model if lora is None else LoRAModel(model, lora, seed=0)
        self.model.train()
        self.optimizers = make_optimizers(self.model, TrainSettings())
        self.batch = Batch(torch.randint(1000, (ROWS, LENGTH)))
        self.labels = torch.randint(2, (ROWS,))

    def loss(self) -> Tensor:
        last = torch.full((ROWS,), LENGTH - 1)
        hidden = self.model(self.batch, query_positions=last).hidden[:, 0]
        return F.cross_entropy(self.model.heads["label"](hidden), self.labels)

    def __call__(self) -> None:
        self.loss().backward()
        update_weights(self.optimizers, 1.0, to_none=True)

    def state_bytes(self) -> int:
        moments = [v for optimizer in self.optimizers for state in optimizer.state.values() for v in state.values()]
        gradients = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return sum(tensor.numel() * tensor.element_size() for tensor in [*moments, *gradients])

    def saved_bytes(self) -> int:
        """Of the tensors that autograd saves, each storage once, without the parameters."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.loss()
        return sum(sizes.values())


def processor_seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


@fast_cpu_kernels()
def measure(preset: str, turns: int) -> list[Row]:
    steps = {way: Step(preset, lora) for way, lora in WAYS.items()}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(turns):
        for way, step in steps.items():
            times[way].append(processor_seconds(step))
    full = times["all weights"]
    return [
        Row(
            model=preset,
            parameters=step.parameters,
            way=way,
            trained=sum(parameter.numel() for parameter in step.model.parameters() if parameter.requires_grad),
            state_bytes=step.state_bytes(),
            saved_bytes=step.saved_bytes(),
            step_ms=round(1000 * statistics.median(times[way]), 2),
            ratio=round(statistics.median(a / b for a, b in zip(times[way], full, strict=True)), 3),
        )
        for way, step in steps.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for preset in arguments.presets.split(",") for row in measure(preset, arguments.turns)]
    print(
        f"{'model':12s} {'trained':18s} {'parameters':>12s} {'state MB':>9s} {'saved MB':>9s} {'ms':>8s} {'ratio':>6s}"
    )
    for row in rows:
        sizes = f"{row.trained:12,} {row.state_bytes / 1e6:9.2f} {row.saved_bytes / 1e6:9.2f}"
        print(f"{row.model:12s} {row.way:18s} {sizes} {row.step_ms:8.1f} {row.ratio:6.2f}")
    if arguments.json:
        conditions = {"rows": ROWS, "length": LENGTH, "rank": RANK, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps(conditions | {"results": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
