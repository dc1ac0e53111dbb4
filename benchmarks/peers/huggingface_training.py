"""Hugging Face training for train_speed.py: BERT with masked language modelling, and a classifier with the Trainer."""

import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import chain, islice, repeat
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import logging

from headstock.planner.machine import synchronize

logging.set_verbosity_error()
HAS_TRAINER = importlib.util.find_spec("accelerate") is not None
Measured = tuple[float, float, float]  # tokens per second without padding, milliseconds per step, the last loss


def bert_config(shape: dict[str, Any], **settings: Any) -> BertConfig:
    sizes: dict[str, Any] = {
        "vocab_size": shape["vocabulary"],
        "max_position_embeddings": max(128, shape["context"]),
        "num_hidden_layers": shape["depth"],
        "hidden_size": shape["width"],
        "num_attention_heads": shape["heads"],
        "intermediate_size": shape["hidden"],
        "hidden_dropout_prob": shape["dropout"],
        "attention_probs_dropout_prob": shape["dropout"],
        "attn_implementation": "sdpa",
    }
    return BertConfig(**sizes, **settings)


def masked(
    rows: Sequence[Sequence[int]],
    special_tokens: tuple[int, int],
    shape: dict[str, Any],
    *,
    padded_to: int,
    warmup_steps: int,
    steps: int,
    device: torch.device,
    compiled: bool,
) -> Measured:
    """Masked language modelling with one text per row, truncated or padded to one length, in precomputed batches.

    A step has as many positions as one of ours has tokens, so shorter rows make a larger batch.
    """
    torch.manual_seed(0)
    model: Any = BertForMaskedLM(bert_config(shape))
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if compiled:
        model = torch.compile(model)
    batch = max(1, shape["step_tokens"] // padded_to)
    batches = [
        masked_batch(rows, special_tokens, (batch, padded_to), shape["vocabulary"], seed, device) for seed in range(8)
    ]
    began, tokens, loss = 0.0, 0, torch.zeros(())
    for step in range(warmup_steps + steps):
        if step == warmup_steps:
            synchronize(device)
            began = time.perf_counter()
        inputs, real_tokens = batches[step % len(batches)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += real_tokens if step >= warmup_steps else 0
    synchronize(device)
    seconds = time.perf_counter() - began
    return tokens / seconds, 1000 * seconds / steps, loss.item()


def masked_batch(
    rows: Sequence[Sequence[int]],
    special_tokens: tuple[int, int],
    shape: tuple[int, int],
    vocabulary: int,
    seed: int,
    device: torch.device,
) -> tuple[dict[str, Tensor], int]:
    """Random texts with 15% masked tokens (80/10/10), and the number of real tokens."""
    generator = torch.Generator().manual_seed(seed)
    cls, mask = special_tokens
    tokens = torch.zeros(shape, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for i, row in enumerate(torch.randint(len(rows), (shape[0],), generator=generator).tolist()):
        text = [cls, *rows[row]][: shape[1]]
        tokens[i, : len(text)] = torch.tensor(text)
        attention_mask[i, : len(text)] = 1
    selected = (torch.rand(shape, generator=generator) < 0.15) & (attention_mask == 1)
    labels = torch.where(selected, tokens, -100)
    kind = torch.rand(shape, generator=generator)
    noise = torch.randint(vocabulary, shape, generator=generator)
    inputs = torch.where(selected & (kind < 0.8), mask, torch.where(selected & (kind >= 0.9), noise, tokens))
    batch = {"input_ids": inputs, "attention_mask": attention_mask, "labels": labels}
    return {name: value.to(device) for name, value in batch.items()}, int(attention_mask.sum())


def classifier(
    texts: Sequence[Sequence[int]],
    labels: Any,
    shape: dict[str, Any],
    *,
    warmup_steps: int,
    steps: int,
    device: torch.device,
) -> Measured:
    """The Trainer with default settings, in bfloat16 on a GPU, padding each batch to its longest row.

    It needs the package `accelerate`; without it, a bare training loop is measured instead.
    """
    torch.manual_seed(0)
    rows = [
        {"input_ids": list(text)[: shape["context"]], "label": int(label)}
        for text, label in zip(texts, labels, strict=True)
    ]
    started: list[tuple[float, int]] = []  # seconds, tokens
    tokens = 0

    def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        nonlocal tokens
        longest = max(len(row["input_ids"]) for row in batch)
        tokens += sum(len(row["input_ids"]) for row in batch)
        padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch]
        mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch]
        batch_labels = torch.tensor([row["label"] for row in batch])
        return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask), "labels": batch_labels}

    def start_timer() -> None:
        synchronize(device)
        started.append((time.perf_counter(), tokens))

    model = BertForSequenceClassification(bert_config(shape, num_labels=2))
    run = run_trainer if HAS_TRAINER else run_loop
    loss = run(model, rows, collate, shape["batch"], warmup_steps, steps, device, start_timer)
    synchronize(device)
    seconds = time.perf_counter() - started[0][0]
    return (tokens - started[0][1]) / seconds, 1000 * seconds / steps, loss


def run_trainer(
    model: Any, rows: Any, collate: Any, batch: int, warmup_steps: int, steps: int, device: torch.device, start: Any
) -> float:
    class TimedTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == warmup_steps:
                start()
            return super().training_step(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=warmup_steps + steps,
            per_device_train_batch_size=batch,
            learning_rate=1.5e-4,
            optim="adamw_torch_fused",
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        return TimedTrainer(model, arguments, collate, rows).train().training_loss


def run_loop(
    model: Any, rows: Any, collate: Any, batch: int, warmup_steps: int, steps: int, device: torch.device, start: Any
) -> float:
    model.to(device).train()
    loader: DataLoader[Any] = DataLoader(rows, batch, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, fused=True)
    loss = torch.zeros(())
    for step, inputs in enumerate(islice(chain.from_iterable(repeat(loader)), warmup_steps + steps)):
        if step == warmup_steps:
            start()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**{name: value.to(device) for name, value in inputs.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()
