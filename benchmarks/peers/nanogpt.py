"""nanoGPT's training step, from a local checkout, for train_speed.py."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

from headstock.planner.machine import synchronize


def measure(
    folder: Path, shape: dict[str, Any], *, warmup_steps: int, steps: int, device: torch.device, compiled: bool
) -> tuple[float, float, float]:
    """Tokens per second, milliseconds per step and the last loss, on random tokens in device memory."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    length, batch = shape["context"], shape["batch"]
    vocabulary = -(-shape["vocabulary"] // 64) * 64  # nanoGPT pads to 50,304
    sizes = {"n_layer": shape["depth"], "n_head": shape["heads"], "n_embd": shape["width"], "block_size": length}
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in its train.py
    model = module.GPT(module.GPTConfig(**sizes, vocab_size=vocabulary, dropout=0.0, bias=False)).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    if compiled:
        model = torch.compile(model)
    data = torch.randint(shape["vocabulary"], (8, batch, length + 1), device=device)
    began, loss = 0.0, torch.zeros(())
    for step in range(warmup_steps + steps):
        if step == warmup_steps:
            synchronize(device)
            began = time.perf_counter()
        rows = data[step % len(data)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            _, loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    seconds = time.perf_counter() - began
    return batch * length * steps / seconds, 1000 * seconds / steps, loss.item()
