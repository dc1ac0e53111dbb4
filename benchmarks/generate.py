"""How fast greedy generation with a cache is on the CPU, as a ratio to transformers' `generate` with the same weights.

    python benchmarks/generate.py                    128 new tokens, one row and eight rows
    python benchmarks/generate.py --threads 1

Both sides run in the same process, with the same threads, in turns, after a warm-up; the table shows medians. The
peer is used at its best: evaluation mode, no gradients, its cache on, no padding, and no end token, so that both make
exactly the tokens asked for. The tokens are compared as well: a fast wrong answer would be worth nothing.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.generate import generate
from headstock.model.heads import TokenHead
from headstock.model.model import Model
from headstock.model.sampling import Sampling

# our name -> (theirs, whether theirs is the other way round)
BLOCK = {
    "around_attention.norm": ("ln_1", False),
    "attention.inputs": ("attn.c_attn", True),
    "attention.output": ("attn.c_proj", True),
    "around_feed.norm": ("ln_2", False),
    "feed.up": ("mlp.c_fc", True),
    "feed.down": ("mlp.c_proj", True),
}


def our_model(config: TransformerConfig) -> Model:
    torch.manual_seed(0)
    backbone = Transformer(config)
    for name, parameter in backbone.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.08)  # wide enough that the text does not fall into a loop at once
    return Model(backbone, {"token": TokenHead(backbone)}).eval()


def their_model(ours: Model, config: TransformerConfig) -> GPT2LMHeadModel:
    """A GPT-2 with our weights."""
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocabulary,
            n_positions=config.context,
            n_layer=config.depth,
            n_embd=config.width,
            n_head=config.heads,
            n_inner=config.hidden,
            activation_function="gelu",
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    weights = ours.backbone.state_dict()
    renamed = {
        "wte.weight": weights["tokens.weight"],
        "wpe.weight": weights["positions.weight"],
        "ln_f.weight": weights["final_norm.weight"],
        "ln_f.bias": weights["final_norm.bias"],
    }
    for layer in range(config.depth):
        for our_name, (name, turned) in BLOCK.items():
            weight = weights[f"blocks.{layer}.{our_name}.weight"]
            renamed[f"h.{layer}.{name}.weight"] = weight.T if turned else weight
            renamed[f"h.{layer}.{name}.bias"] = weights[f"blocks.{layer}.{our_name}.bias"]
    theirs.transformer.load_state_dict(renamed)
    return theirs


def our_tokens(model: Model, prompts: Tensor, new: int) -> list[list[int]]:
    made = generate(model, prompts.tolist(), max_tokens=new, sampling=Sampling(temperature=0.0))
    return [continuation.tokens for continuation in made]


def their_tokens(model: Any, prompts: Tensor, new: int) -> list[list[int]]:
    with torch.inference_mode():
        attention = torch.ones_like(prompts)
        made = model.generate(prompts, attention_mask=attention, max_new_tokens=new, do_sample=False, use_cache=True)
    return made[:, prompts.size(1) :].tolist()


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options.add_argument("--tokens", type=int, default=128, help="new tokens a row")
    options.add_argument("--prompt", type=int, default=16, help="tokens in a prompt")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    logging.set_verbosity_error()

    config = TransformerConfig(vocabulary=8000, context=256, depth=6, width=256, heads=4, hidden=1024)
    ours = our_model(config)
    theirs = their_model(ours, config)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"load of the machine before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    print(f"{config.depth} layers x {config.width} wide, vocabulary {config.vocabulary}, {chosen.tokens} new tokens")
    print(f"{'rows':>5} {'ours, tokens/s':>16} {'transformers':>16} {'ratio':>8}")
    for rows in chosen.rows:
        prompts = torch.randint(config.vocabulary, (rows, chosen.prompt), generator=torch.Generator().manual_seed(rows))
        sides: list[Callable[[], list[list[int]]]] = [
            partial(our_tokens, ours, prompts, chosen.tokens),
            partial(their_tokens, theirs, prompts, chosen.tokens),
        ]
        made = [side() for side in sides]  # the warm-up, and the comparison
        assert all(len(row) == chosen.tokens for row in made[0] + made[1])
        if made[0] != made[1]:
            print(f"{rows} rows: the two sides made different tokens", file=sys.stderr)
            return 1
        times: list[list[float]] = [[], []]
        for _ in range(chosen.repeats):
            for side, taken in zip(sides, times, strict=True):
                taken.append(seconds(side))
        our_rate, their_rate = (rows * chosen.tokens / statistics.median(taken) for taken in times)
        print(f"{rows:>5} {our_rate:>16,.0f} {their_rate:>16,.0f} {our_rate / their_rate:>7.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
