"""Whether optimized training gives the loss curves of plain training, over several seeds.

    python benchmarks/same_curve.py --device cuda --text corpus.txt
    python benchmarks/same_curve.py --tiny                              a few small steps, to try the script

The reference is float32 in eager mode, with attention masks for packed documents and without the fused loss. The
variants are the execution modes that a run may choose, in the precision of the device. For each variant: the mean
absolute difference to the reference curve of the same seed over the last half of the steps, which should be below the
difference between two reference seeds; and the validation losses.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import headstock
from headstock.experiments.bench.workloads import write_corpus
from headstock.kernels import cross_entropy
from headstock.model.backbones import transformer
from headstock.train.run_folder import RunFolder

REFERENCE_PATCHES = [
    (cross_entropy, "MIN_LOGITS", float("inf")),
    (transformer, "supports_varlen", lambda x, width: False),
]
LossCurve = tuple[list[float], float]  # training losses, the last validation loss


def variants_for(device: str) -> dict[str, dict[str, Any]]:
    """Training settings to compare with the reference; a CPU has neither CUDA graphs nor faster precisions."""
    if device != "cuda":
        return {"default": {"compile": False}}
    variants: dict[str, dict[str, Any]] = {"eager": {"compile": False}, "CUDA graphs": {"compile": "replay"}}
    return variants | {"compiled": {"compile": True}, "fp8": {"compile": True, "dtype": "float8"}}


def train_once(text: list[str], folder: Path, args: argparse.Namespace, variant: dict[str, Any] | None) -> LossCurve:
    """Train with the settings of a variant; None is the reference. The seed is the number in the folder's name."""
    seed = int(folder.name.rpartition("-")[2])
    settings = {"log_every": 1, "validate_every": args.steps, "tensorboard": False, "dropout": 0.0, "seed": seed}
    settings |= {"task.name": args.objective, "steps": args.steps, "optimizer": args.optimizer, "lr": args.lr}
    if args.tiny:
        settings |= {"width": 32, "depth": 2, "heads": 2, "hidden": 64, "vocabulary": 300, "batch": 4, "length": 32}
    settings |= {"compile": False, "dtype": "float32"} if variant is None else variant
    with ExitStack() as stack:
        for patch in REFERENCE_PATCHES if variant is None else []:
            stack.enter_context(mock.patch.object(*patch))
        results = headstock.pretrain(text, out=folder, preset=args.preset, settings=settings, device=args.device)
    return [row["loss"] for row in RunFolder(folder).read_metrics() if "loss" in row], results["valid_loss"]


def mean_difference(pairs: Iterable[tuple[LossCurve, LossCurve]]) -> float:
    """The mean absolute difference of pairs of curves over their last half."""
    differences = []
    for (first, _), (second, _) in pairs:
        half = len(first) // 2
        differences += [abs(a - b) for a, b in zip(first[half:], second[half:], strict=True)]
    return statistics.mean(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", help="text files (default: random text)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="modern-mini")
    parser.add_argument("--objective", default="causal")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a very small model and few steps")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.seeds = 6, 2
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    facts: dict[str, Any] = {"device": device_name, "torch": torch.__version__, "rows": []}

    def add_row(variant: str, difference: float, curves: list[LossCurve]) -> None:
        losses = [loss for _, loss in curves]
        facts["rows"].append({"variant": variant, "difference": difference, "valid_loss": losses})
        print(f"{variant:14s} {difference:10.4f}   {', '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(facts, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = args.text or [str(write_corpus(folder / "text.txt", 0.1 if args.tiny else 10))]

        def train_all(label: str, variant: dict[str, Any] | None) -> list[LossCurve]:
            return [train_once(text, folder / f"{label}-{seed}", args, variant) for seed in range(args.seeds)]

        print(f"{'variant':14s} {'difference':>10s}   validation loss by seed")
        reference = train_all("reference", None)
        add_row("reference", mean_difference(combinations(reference, 2)), reference)  # between seeds
        for label, variant in variants_for(args.device).items():
            curves = train_all(label, variant)
            add_row(label, mean_difference(zip(reference, curves, strict=True)), curves)


if __name__ == "__main__":
    main()
