"""What it saves that the head of a masked language model reads only the hidden places.

    python benchmarks/masked_head.py
    python benchmarks/masked_head.py --depth 2 --width 64 --fraction 0.3

Both sides run in one process, in turns: the same model, the same batches, forward and backward. One gives every place
its scores and ignores most of them, the other is the task's own loss.
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


def everywhere(model: Model, batch: Batch) -> torch.Tensor:
    return cross_entropy(model.heads["token"](model(batch).hidden), batch.labels["token"])


def some_batch(task: MaskedLM, given: argparse.Namespace, *, row: int) -> Batch:
    """Random text: what the tokens are does not change how long they take."""
    shape = (given.batch, given.length)
    shown = np.random.default_rng(row).integers(7, given.vocabulary, shape)
    rows = range(row, row + given.batch)
    allowed, documents = np.ones(shape, dtype=bool), np.zeros(shape, dtype=int)
    tokens, labels = task.masker.mask_tokens(shown, allowed, documents, key=(0,), rows=rows, fraction=given.fraction)
    return Batch(torch.from_numpy(tokens), labels={"token": torch.from_numpy(labels)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("vocabulary", 16_000), ("depth", 4), ("width", 128), ("length", 128), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fraction", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    tokenizer = train_tokenizer(["some text"] * 2, TokenizerSettings(vocabulary=263))
    task = MaskedLM(MaskedConfig(), tokenizer)
    torch.manual_seed(0)
    sizes = {"depth": given.depth, "width": given.width, "heads": 4, "hidden": 4 * given.width}
    backbone = Transformer(TransformerConfig(vocabulary=given.vocabulary, context=given.length, causal=False, **sizes))
    model = Model(backbone, {"token": LMHead(backbone)})
    ways = {"all places": everywhere, "hidden places": lambda model, batch: task.losses(model, batch)["token"]}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for number in range(given.rounds + 1):
        batch = some_batch(task, given, row=number * given.batch)
        for name, way in ways.items():
            began = time.perf_counter()
            loss = way(model, batch)
            loss.backward()
            model.zero_grad(set_to_none=True)
            if number:  # the first is only to warm up
                seconds[name].append(time.perf_counter() - began)
            losses[name] = loss.item()
    hidden = int((batch.labels["token"] != IGNORE_INDEX).sum())
    print(
        f"depth {given.depth}, width {given.width}, vocabulary {given.vocabulary:,}, "
        f"{given.batch} x {given.length} tokens, {hidden} of them hidden, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'head at':14s} {'ms a step':>10s} {'tokens/s':>10s} {'loss':>12s}")
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"{name:14s} {middle * 1000:10.1f} {given.batch * given.length / middle:10,.0f} {losses[name]:12.3f}")
    ratio = statistics.median(seconds["all places"]) / statistics.median(seconds["hidden places"])
    print(f"a step is {ratio:.2f} times as fast with the head at the hidden places only")


if __name__ == "__main__":
    main()
