"""Hugging Face's side of benchmarks/train_speed.py: its BERT with a head for hidden tokens, and its Trainer."""

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

logging.set_verbosity_error()
HAS_TRAINER = importlib.util.find_spec("accelerate") is not None
Found = tuple[float, float, float]  # tokens a second without padding, milliseconds a step, the last loss


def config_of(shape: dict[str, Any], **more: Any) -> BertConfig:
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
    return BertConfig(**sizes, **more)


def masked(
    rows: Sequence[Sequence[int]],
    marks: tuple[int, int],
    shape: dict[str, Any],
    *,
    padded_to: int,
    warm: int,
    steps: int,
    device: torch.device,
    compiled: bool,
) -> Found:
    """Masked language modelling, one text a row, cut or padded to one length, in batches made beforehand.

    As many places a step as ours has tokens: the batch grows as the rows are shorter.
    """
    torch.manual_seed(0)
    model: Any = BertForMaskedLM(config_of(shape))
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if compiled:
        model = torch.compile(model)
    batch = max(1, shape["places"] // padded_to)
    made = [_hidden(rows, marks, batch, padded_to, shape["vocabulary"], number, device) for number in range(8)]
    began, tokens, loss = 0.0, 0, torch.zeros(())
    for step in range(warm + steps):
        if step == warm:
            _wait(device)
            began = time.perf_counter()
        given, real = made[step % len(made)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += real if step >= warm else 0
    _wait(device)
    seconds = time.perf_counter() - began
    return tokens / seconds, 1000 * seconds / steps, loss.item()


def _hidden(
    rows: Sequence[Sequence[int]],
    marks: tuple[int, int],
    batch: int,
    length: int,
    vocabulary: int,
    number: int,
    device: torch.device,
) -> tuple[dict[str, Tensor], int]:
    draw = torch.Generator().manual_seed(number)
    opening, mask = marks
    tokens = torch.zeros(batch, length, dtype=torch.long)
    seen = torch.zeros(batch, length, dtype=torch.long)
    for place, row in enumerate(torch.randint(len(rows), (batch,), generator=draw).tolist()):
        text = [opening, *rows[row]][:length]
        tokens[place, : len(text)] = torch.tensor(text)
        seen[place, : len(text)] = 1
    asked = (torch.rand(batch, length, generator=draw) < 0.15) & (seen == 1)
    labels = torch.where(asked, tokens, -100)
    kind = torch.rand(batch, length, generator=draw)
    noise = torch.randint(vocabulary, tokens.shape, generator=draw)
    shown = torch.where(asked & (kind < 0.8), mask, torch.where(asked & (kind >= 0.9), noise, tokens))
    given = {"input_ids": shown, "attention_mask": seen, "labels": labels}
    return {name: value.to(device) for name, value in given.items()}, int(seen.sum())


def classifier(
    texts: Sequence[Sequence[int]], labels: Any, shape: dict[str, Any], *, warm: int, steps: int, device: torch.device
) -> Found:
    """The Trainer as it comes, in bfloat16 on a GPU, padding each batch to its longest row.

    It needs the package `accelerate`. Without it, a bare loop does the Trainer's work without its bookkeeping.
    """
    torch.manual_seed(0)
    rows = [
        {"input_ids": list(text)[: shape["context"]], "label": int(label)}
        for text, label in zip(texts, labels, strict=True)
    ]
    moments: list[tuple[float, int]] = []
    read = 0

    def collate(chosen: list[dict[str, Any]]) -> dict[str, Tensor]:
        nonlocal read
        longest = max(len(row["input_ids"]) for row in chosen)
        read += sum(len(row["input_ids"]) for row in chosen)
        padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in chosen]
        seen = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in chosen]
        answers = torch.tensor([row["label"] for row in chosen])
        return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(seen), "labels": answers}

    def begin() -> None:
        _wait(device)
        moments.append((time.perf_counter(), read))

    model = BertForSequenceClassification(config_of(shape, num_labels=2))
    loss = (_by_trainer if HAS_TRAINER else _by_loop)(model, rows, collate, shape, warm, steps, device, begin)
    _wait(device)
    seconds = time.perf_counter() - moments[0][0]
    return (read - moments[0][1]) / seconds, 1000 * seconds / steps, loss


def _by_trainer(
    model: Any, rows: Any, collate: Any, shape: Any, warm: int, steps: int, device: torch.device, begin: Any
) -> float:
    class Clocked(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Tensor:
            if self.state.global_step == warm:
                begin()
            return super().training_step(*given, **named)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=warm + steps,
            per_device_train_batch_size=shape["batch"],
            learning_rate=1.5e-4,
            optim="adamw_torch_fused",
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        return Clocked(model, arguments, collate, rows).train().training_loss


def _by_loop(
    model: Any, rows: Any, collate: Any, shape: Any, warm: int, steps: int, device: torch.device, begin: Any
) -> float:
    model.to(device).train()
    loader: DataLoader[Any] = DataLoader(rows, shape["batch"], shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, fused=True)
    loss = torch.zeros(())
    for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), warm + steps)):
        if step == warm:
            begin()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
