"""Hugging Face inference for inference.py: `generate` and two pipelines, on folders that Headstock exported.

Each is used as its documentation recommends: evaluation mode, inference mode, KV cache, fast tokenizer, and the batch
size that is fastest on a sample. Texts are not sorted by length, which the pipelines do not do.
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
    """A function from prompts and a number of tokens to exactly so many greedily generated tokens per prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    # without suppressed tokens and end of text, both sides generate the same number of tokens by the same rule
    model.generation_config.eos_token_id = model.generation_config.suppress_tokens = None

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]  # left padding
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            tokens = model.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=max_tokens,
                do_sample=False,
                use_cache=True,
            )
        return tokens[:, longest:].tolist()

    return generate


def classifier(folder: Path, *, device: str, dtype: torch.dtype) -> Callable[[Sequence[str], int], list[Any]]:
    """A function from texts and a batch size to the probabilities of the classes by name."""
    pipe: Any = pipeline("text-classification", str(folder), device=torch.device(device), dtype=dtype)

    def predict(texts: Sequence[str], batch_size: int) -> list[dict[str, float]]:
        rows = pipe(list(texts), batch_size=batch_size, top_k=None, truncation=True)
        return [{score["label"]: score["score"] for score in row} for row in rows]

    return predict


def embedder(folder: Path, *, device: str, dtype: torch.dtype) -> Callable[[Sequence[str], int], np.ndarray]:
    """A function from texts and a batch size to (N, D), the hidden state of each text's first token."""
    pipe = pipeline("feature-extraction", str(folder), device=torch.device(device), dtype=dtype)

    def embed(texts: Sequence[str], batch_size: int) -> np.ndarray:
        options = {"batch_size": batch_size, "return_tensors": True, "truncation": True}
        return torch.stack([row[0, 0] for row in pipe(list(texts), **options)]).float().cpu().numpy()

    return embed


def fastest_batch_size(
    function: Callable[[Sequence[str], int], Any], texts: Sequence[str], sizes: Sequence[int]
) -> int:
    """The batch size that processes a sample of the texts fastest."""
    function(texts[: sizes[0]], sizes[0])
    seconds = {}
    for size in sizes:
        began = time.perf_counter()
        function(texts, size)
        seconds[size] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)
