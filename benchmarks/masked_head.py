"""Gain of computing the LM head of a masked language model at masked positions only.

    python benchmarks/masked_head.py
    python benchmarks/masked_head.py --depth 2 --width 64 --fraction 0.3

Both variants run alternately in one process: the same model and batches, forward and backward. One computes logits at
all positions and ignores most of them; the other is the task's own loss.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.tasks.base import cross_entropy
from headstock.tasks.masked import MaskedConfig, MaskedLM


def loss_at_all_positions(model: Model, batch: Batch) -> torch.Tensor:
    return cross_entropy(model.heads["token"](model(batch).hidden), batch.labels["token"])


def random_batch(task: MaskedLM, args: argparse.Namespace, *, row: int) -> Batch:
    shape = (args.batch, args.length)
    unmasked = np.random.default_rng(row).integers(7, args.vocabulary, shape)
    rows = range(row, row + args.batch)
    allowed, documents = np.ones(shape, dtype=bool), np.zeros(shape, dtype=int)
    tokens, labels = task.masker.mask_tokens(unmasked, allowed, documents, key=(0,), rows=rows, fraction=args.fraction)
    return Batch(torch.from_numpy(tokens), labels={"token": torch.from_numpy(labels)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("vocabulary", 16_000), ("depth", 4), ("width", 128), ("length", 128), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fraction", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    tokenizer = train_tokenizer(["some text"] * 2, TokenizerSettings(vocabulary=263))
    task = MaskedLM(MaskedConfig(), tokenizer)
    torch.manual_seed(0)
    sizes = {"depth": args.depth, "width": args.width, "heads": 4, "hidden": 4 * args.width}
    backbone = Transformer(TransformerConfig(vocabulary=args.vocabulary, context=args.length, causal=False, **sizes))
    model = Model(backbone, {"token": LMHead(backbone)})
    variants = {
        "all positions": loss_at_all_positions,
        "masked positions": lambda model, batch: task.losses(model, batch)["token"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, float] = {}
    for number in range(args.rounds + 1):
        batch = random_batch(task, args, row=number * args.batch)
        for name, loss_function in variants.items():
            began = time.perf_counter()
            loss = loss_function(model, batch)
            loss.backward()
            model.zero_grad(set_to_none=True)
            if number:  # the first round is a warm-up
                seconds[name].append(time.perf_counter() - began)
            losses[name] = loss.item()
    masked = int((batch.labels["token"] != IGNORE_INDEX).sum())
    print(
        f"depth {args.depth}, width {args.width}, vocabulary {args.vocabulary:,}, "
        f"{args.batch} x {args.length} tokens, {masked} of them masked, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'head at':16s} {'ms/step':>10s} {'tokens/s':>10s} {'loss':>12s}")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:16s} {median * 1000:10.1f} {args.batch * args.length / median:10,.0f} {losses[name]:12.3f}")
    ratio = statistics.median(seconds["all positions"]) / statistics.median(seconds["masked positions"])
    print(f"a step is {ratio:.2f} times as fast with the head at masked positions only")


if __name__ == "__main__":
    main()
