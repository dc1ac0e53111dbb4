"""Whether every fast way of training learns what the plain one learns: loss curves over several seeds, side by side.

    python benchmarks/same_curve.py --device cuda --text corpus.txt
    python benchmarks/same_curve.py --tiny                              a few small steps anywhere, to try it

Plain is single precision, call by call, with masks for packed documents and all scores held at once. The others are
what a run may choose, in the precision of the device. For each: how far its curve is from the plain one of the same
seed, in the mean over the last half of the steps, beside how far two plain seeds are from each other; and the
validation losses.
"""

import argparse
import json
import statistics
import tempfile
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

PLAIN = [(cross_entropy, "MIN_LOGITS", float("inf")), (transformer, "supports_varlen", lambda x, width: False)]


def ways_on(device: str) -> dict[str, dict[str, Any]]:
    """What is compared with the plain way; a CPU has no recordings, and is fastest in single precision."""
    if device != "cuda":
        return {"as it comes": {"compile": False}}
    ways: dict[str, dict[str, Any]] = {"call by call": {"compile": False}, "recorded": {"compile": "replay"}}
    return ways | {"compiled": {"compile": True}, "in 8 bits": {"compile": True, "dtype": "float8"}}


def curve(text: list[str], folder: Path, given: argparse.Namespace, seed: int, plain: bool, how: dict[str, Any]) -> Any:
    """The training losses and the last validation loss of one run."""
    sizes = {"width": 32, "depth": 2, "heads": 2, "hidden": 64, "vocabulary": 300, "batch": 4, "length": 32}
    settings = {"log_every": 1, "validate_every": given.steps, "tensorboard": False, "dropout": 0.0, "seed": seed}
    settings |= {"task.name": given.objective, "steps": given.steps, "optimizer": given.optimizer, "lr": given.lr}
    settings |= (sizes if given.tiny else {}) | how | ({"dtype": "float32"} if plain else {})
    with ExitStack() as stack:
        for patch in PLAIN if plain else []:
            stack.enter_context(mock.patch.object(*patch))
        done = headstock.pretrain(text, out=folder, preset=given.preset, settings=settings, device=given.device)
    return [row["loss"] for row in RunFolder(folder).read_metrics() if "loss" in row], done["valid_loss"]


def apart(one: list[float], other: list[float]) -> float:
    """The mean distance of two curves over their last half."""
    return statistics.mean(abs(a - b) for a, b in zip(one[len(one) // 2 :], other[len(other) // 2 :], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", help="made up when not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="modern-mini")
    parser.add_argument("--objective", default="causal")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a very small model and few steps")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.tiny:
        given.steps, given.seeds = 6, 2
    card = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    facts: dict[str, Any] = {"device": card, "torch": torch.__version__, "rows": []}

    def tell(way: str, gap: float, losses: list[float]) -> None:
        """Told and written at once: whoever is stopped in between has the ways before."""
        facts["rows"].append({"way": way, "apart": gap, "valid_loss": losses})
        print(f"{way:14s} {gap:8.4f}   {', '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
        if given.out:
            given.out.write_text(json.dumps(facts, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = given.text or [str(write_corpus(folder / "text.txt", 0.1 if given.tiny else 10))]
        plain = [curve(text, folder / f"plain-{s}", given, s, True, {"compile": False}) for s in range(given.seeds)]
        print(f"{'way':14s} {'apart':>8s}   validation loss by seed   (plain: apart from other seeds, else from plain)")
        between = statistics.mean(apart(a, b) for (a, _), (b, _) in combinations(plain, 2))
        tell("plain", between, [loss for _, loss in plain])
        for way, how in ways_on(given.device).items():
            made = [curve(text, folder / f"{way}-{s}", given, s, False, how) for s in range(given.seeds)]
            gap = statistics.mean(apart(a, b) for (a, _), (b, _) in zip(plain, made, strict=True))
            tell(way, gap, [loss for _, loss in made])


if __name__ == "__main__":
    main()
