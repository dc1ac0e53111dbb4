"""Hugging Face's side of benchmarks/inference.py: `generate` and two pipelines, over folders that we exported.

Each is given what its documentation asks for: evaluation mode, no gradients, a cache, the fast tokenizer, and the batch
size that was fastest on a sample. What it does not do by itself, such as sorting texts by length, is not done for it.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, pipeline
from transformers.utils import logging

logging.set_verbosity_error()
version = transformers.__version__


def generator(folder: Path, *, device: str, dtype: torch.dtype) -> Callable[[list[list[int]], int], list[list[int]]]:
    """From prompts of tokens to exactly so many new tokens each, chosen greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    # its own settings forbid marks; without those, and with no end, both sides make what is asked and compute the same
    model.generation_config.eos_token_id = model.generation_config.suppress_tokens = None

    def make(prompts: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]  # it wants padding on the left
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            given = {"attention_mask": torch.tensor(seen, device=device), "max_new_tokens": new, "do_sample": False}
            made = model.generate(torch.tensor(rows, device=device), use_cache=True, **given)
        return made[:, longest:].tolist()

    return make


def classifier(folder: Path, *, device: str, dtype: torch.dtype) -> Callable[[Sequence[str], int], list[Any]]:
    """From texts and a batch size to the probability of every class, by its name."""
    pipe: Any = pipeline("text-classification", str(folder), device=torch.device(device), dtype=dtype)

    def predict(texts: Sequence[str], batch_size: int) -> list[dict[str, float]]:
        told = pipe(list(texts), batch_size=batch_size, top_k=None, truncation=True)
        return [{one["label"]: one["score"] for one in row} for row in told]

    return predict


def embedder(folder: Path, *, device: str, dtype: torch.dtype) -> Callable[[Sequence[str], int], np.ndarray]:
    """From texts and a batch size to (N, D), the vector of each text's first mark."""
    pipe = pipeline("feature-extraction", str(folder), device=torch.device(device), dtype=dtype)

    def embed(texts: Sequence[str], batch_size: int) -> np.ndarray:
        options = {"batch_size": batch_size, "return_tensors": True, "truncation": True}
        return torch.stack([row[0, 0] for row in pipe(list(texts), **options)]).float().cpu().numpy()

    return embed


def best_batch(work: Callable[[Sequence[str], int], Any], texts: Sequence[str], sizes: Sequence[int]) -> int:
    """The batch size that reads a sample of the texts fastest."""
    work(texts[: sizes[0]], sizes[0])
    seconds = {}
    for size in sizes:
        began = time.perf_counter()
        work(texts, size)
        seconds[size] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)
