"""Kernels of ours on a GPU, beside torch's own: attention in packed short documents, products in 8 bits, gradients.

    python benchmarks/kernels.py                       BERT-base's shape: 64 rows of 512 tokens, 12 heads of 64
    python benchmarks/kernels.py --means 45 --rows 16

Milliseconds that the GPU itself spends on one layer, forward and backward, whatever the CPU needs to start it; products
as many as the layers of GPT-2's smallest shape make of 65,536 tokens. Answers are compared before anything is timed.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from headstock.kernels import fp8 as eight
from headstock.kernels import ops as kernels
from headstock.model.batch import make_cu_seqlens

HEADS, WIDTH = 12, 64
REPEATS = 20
PRODUCTS = {"queries, keys and values": (768, 2304), "output": (768, 768), "up": (768, 3072), "down": (3072, 768)}
TOKENS, SCALE = 65_536, 16.0
VOCABULARY, AT_ONCE = 50_304, 9_472  # scores of a head are held for so many tokens at once
Way = Callable[..., Tensor]


def on_gpu(call: Callable[[], Any]) -> float:
    """Milliseconds of a call's kernels."""
    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    return sum(row.self_device_time_total for row in seen.key_averages()) / REPEATS / 1000


def documents(mean: int, rows: int, length: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values as a layer has them, in documents of geometric lengths; their bounds; a gradient."""
    draw = torch.Generator().manual_seed(0)
    fresh = torch.rand(rows, length, generator=draw) < (0 if mean >= length else 1 / mean)
    packed = torch.randn(rows, length, 3, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    toward = torch.randn(rows, length, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    inputs = [x.detach().requires_grad_() for x in packed.transpose(1, 3).unbind(2)]
    return inputs, make_cu_seqlens(fresh.int().cumsum(1)).cuda(), toward


def there_and_back(way: Way, inputs: list[Tensor], bounds: Tensor, toward: Tensor, causal: bool, drop: float) -> object:
    return torch.autograd.grad(way(*inputs, bounds, causal=causal, dropout=drop), inputs, toward)


def attention(given: argparse.Namespace) -> None:
    from headstock.kernels import attention_triton as fused_attention

    ways: dict[str, Way] = {"ours": fused_attention.attend, "torch's": kernels.attend_by_flash}
    print(f"{'documents of':>12s} {'causal':>6s} {'dropout':>7s} " + " ".join(f"{name:>8s}" for name in ways))
    for mean in given.means:
        inputs, bounds, toward = documents(mean, given.rows, given.length)
        one, other = (way(*inputs, bounds, causal=False) for way in ways.values())
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        for causal, drop in product((False, True), (0.0, 0.1)):
            calls = (partial(there_and_back, way, inputs, bounds, toward, causal, drop) for way in ways.values())
            took = " ".join(f"{on_gpu(call):8.3f}" for call in calls)
            print(f"{mean:12d} {causal!s:>6s} {drop:7.1f} {took}", flush=True)


def products() -> None:
    print(f"{'product':26s} {'16 bits':>8s} {'8 bits':>8s}")
    for name, (features, outputs) in PRODUCTS.items():
        x = torch.randn(TOKENS, features, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, features, device="cuda", dtype=torch.bfloat16) * 0.05
        table, grain = eight.shrunk(weight)
        large = partial(torch.matmul, x, weight.t())
        small = partial(eight.multiply, eight.shrink(x, SCALE), table.t(), 1 / SCALE, grain, fast=True)
        apart = (small() - large()).norm() / large().norm()
        assert apart < 0.05, f"{name}: the two differ by {apart:.3f}"
        print(f"{name:26s} {on_gpu(large):8.3f} {on_gpu(small):8.3f}", flush=True)


def gradients() -> None:
    """What 8 bits save and cost on the way back: of attention's three inputs, and of a head's weights."""
    print(f"{'gradients':26s} {'16 bits':>8s} {'8 bits':>8s} {'of which made ready':>20s}")
    slopes = [torch.randn(TOKENS, 768, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    weight = torch.randn(2304, 768, device="cuda", dtype=torch.bfloat16) * 0.05
    table, grain = eight.shrunk(weight.t())
    ready = partial(eight.gather, slopes, SCALE, False)

    def by_input() -> Tensor:
        return eight.multiply(ready()[1], table.t(), 1 / SCALE, grain)

    compare("queries, keys and values", lambda: torch.cat(slopes, 1) @ weight, by_input, ready)
    wrong = torch.randn(AT_ONCE, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(AT_ONCE, 768, device="cuda", dtype=torch.bfloat16)
    small, few = eight.shrink(wrong, SCALE, eight.BACKWARD), eight.shrink(hidden, SCALE)
    one = grain.new_full((), 1 / SCALE)
    turn = partial(eight.turn, small)

    def by_weight() -> Tensor:
        return eight.multiply(turn(), eight.turn(few).t(), 1 / SCALE, one)

    compare("a head's weights", lambda: wrong.mT @ hidden, by_weight, turn)


def compare(name: str, large: Callable[[], Tensor], small: Callable[[], Tensor], ready: Callable[[], Any]) -> None:
    apart = (small() - large()).norm() / large().norm()
    assert apart < 0.1, f"{name}: the two differ by {apart:.3f}"
    print(f"{name:26s} {on_gpu(large):8.3f} {on_gpu(small):8.3f} {on_gpu(ready):20.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--means", type=int, nargs="+", default=[45, 120, 512], help="tokens in a document")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds")
    attention(given)
    if eight.supports_fp8(torch.device("cuda")):
        products()
        gradients()
    return 0


if __name__ == "__main__":
    sys.exit(main())
