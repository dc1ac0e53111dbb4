"""The kernels of headstock/kernels on a GPU beside plain PyTorch and the libraries that do the same.

    python benchmarks/kernels.py                            all kernels
    python benchmarks/kernels.py --only attention --mean 45

Prints milliseconds of GPU time per call, forward and backward, whatever the CPU needs to launch it. Results are
compared before anything is timed. Libraries that are not installed (liger-kernel, torchao) are skipped.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from headstock.kernels import attention, fp8, pointwise
from headstock.kernels.cross_entropy import linear_cross_entropy
from headstock.model.batch import make_cu_seqlens

HEADS, WIDTH = 12, 64
PREDICTIONS, MODEL_WIDTH, VOCABULARY = 16_384, 768, 50_304
TOKENS = 65_536
LAYERS = {"qkv projection": (768, 2304), "output": (768, 768), "up": (768, 3072), "down": (3072, 768)}
REPEATS = 20

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    kernel: str
    ours: float
    plain: float | None
    libraries: dict[str, float]


def gpu_milliseconds(call: Call) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in events.key_averages()) / REPEATS / 1000


def measure(kernel: str, ours: Call, plain: Call, libraries: dict[str, Call], *, tolerance: float) -> Row:
    """Compare the first results of all implementations, then time them; a library that fails is left out."""
    expected = [x.float() for x in ours()]
    times = {}
    for name, call in ({"plain": plain} | libraries).items():
        try:
            for reference, actual in zip(expected, call(), strict=True):
                error = (reference - actual.float()).norm() / actual.float().norm()
                assert error < tolerance, f"{kernel}: {name} differs by {error:.3f}"
            times[name] = gpu_milliseconds(call)
        except (RuntimeError, ImportError, NotImplementedError, TypeError) as error:
            print(f"{kernel}: {name} skipped: {str(error).splitlines()[0]}", file=sys.stderr)
    return Row(kernel, gpu_milliseconds(ours), times.pop("plain", None), times)


def with_gradients(function: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    output = function()
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


# Attention inside packed documents


def packed_attention(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of documents with geometric lengths, in the layout of one projection."""
    from headstock.kernels import attention_triton

    rows, length = arguments.rows, arguments.length
    generator = torch.Generator().manual_seed(0)
    documents = (torch.rand(rows, length, generator=generator) < 1 / arguments.mean).int().cumsum(1)
    cu_seqlens, ids = make_cu_seqlens(documents).cuda(), documents.cuda()
    packed = torch.randn(rows, length, 3, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16)
    allowed = ids[:, None, :, None] == ids[:, None, None, :]

    def views() -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = packed.transpose(1, 3).unbind(2)
        return query, key, value

    for causal, dropout in ((False, 0.0), (True, 0.0), (False, 0.1)):

        def ours(causal: bool = causal, dropout: float = dropout) -> Tensor:
            output = attention_triton.packed_attention(packed, cu_seqlens, causal=causal, dropout=dropout)
            return output.transpose(1, 2)

        def plain(causal: bool = causal, dropout: float = dropout) -> Tensor:
            mask = allowed.tril() if causal else allowed
            return F.scaled_dot_product_attention(*views(), mask, dropout)

        def varlen(causal: bool = causal, dropout: float = dropout) -> Tensor:
            return attention.flash_varlen_attention(*views(), cu_seqlens, causal=causal, dropout=dropout)

        calls: dict[str, Call] = {"varlen": partial(with_gradients, varlen, [packed], grad)}
        if not dropout:

            def flex(function: Callable[..., Tensor] = compiled_flex(ids, causal)) -> Tensor:  # noqa: B008
                return function(*views())

            calls["FlexAttention"] = partial(with_gradients, flex, [packed], grad)
        name = f"packed attention, documents of {arguments.mean}{', causal' if causal else ''}"
        yield measure(
            f"{name}{f', dropout {dropout}' if dropout else ''}",
            partial(with_gradients, ours, [packed], grad),
            partial(with_gradients, plain, [packed], grad),
            calls,
            tolerance=1.5 if dropout else 0.02,  # dropout draws other pairs
        )


def compiled_flex(ids: Tensor, causal: bool) -> Callable[..., Tensor]:
    """FlexAttention with a block mask that is created once, as a training step would for all its layers."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = ids[row, query] == ids[row, key]
        return same & (query >= key) if causal else same

    rows, length = ids.shape
    mask = create_block_mask(allowed, rows, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask)


# Cross entropy of a linear layer


def cross_entropy(_: argparse.Namespace) -> Iterator[Row]:
    torch.manual_seed(0)
    hidden = torch.randn(PREDICTIONS, MODEL_WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(VOCABULARY, MODEL_WIDTH, device="cuda") * 0.02).bfloat16().requires_grad_()
    labels = torch.randint(VOCABULARY, (PREDICTIONS,), device="cuda")
    inputs, unit_grad = [hidden, weight], torch.ones((), device="cuda")

    def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    def ours() -> Tensor:
        return linear_cross_entropy(hidden, weight, None, labels)[0]

    compiled = torch.compile(plain)
    libraries: dict[str, Call] = {
        "torch.compile": partial(with_gradients, lambda: compiled(hidden, weight, labels), inputs, unit_grad)
    }
    if find_spec("liger_kernel") is not None:
        liger = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
        libraries["Liger"] = partial(with_gradients, lambda: liger(weight, hidden, labels), inputs, unit_grad)
    yield measure(
        f"linear cross entropy, {PREDICTIONS:,} x {MODEL_WIDTH} x {VOCABULARY:,}",
        partial(with_gradients, ours, inputs, unit_grad),
        partial(with_gradients, lambda: plain(hidden, weight, labels), inputs, unit_grad),
        libraries,
        tolerance=0.02,
    )


# Linear layers in fp8


def fp8_linear(_: argparse.Namespace) -> Iterator[Row]:
    """Forward and backward of the layers of GPT-2, compiled as in training."""
    compiled_fp8, compiled_linear = torch.compile(fp8.linear), torch.compile(F.linear)
    for name, (features, outputs) in LAYERS.items():
        torch.manual_seed(0)
        x = F.layer_norm(torch.randn(TOKENS, features, device="cuda"), (features,)).bfloat16().requires_grad_()
        weight = (torch.randn(outputs, features, device="cuda") * 0.05).requires_grad_()
        bias = torch.zeros(outputs, device="cuda", requires_grad=True)
        inputs = [x, weight, bias]
        grad = (torch.randn(TOKENS, outputs, device="cuda") / TOKENS).bfloat16()

        def ours(inputs: list[Tensor] = inputs, linear: Any = compiled_fp8) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16), fp8.fp8_matmuls():
                return linear(*inputs)

        def plain(inputs: list[Tensor] = inputs, linear: Any = compiled_linear) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return linear(*inputs)

        libraries: dict[str, Call] = {}
        if find_spec("torchao") is not None:
            layer = torch.nn.Linear(features, outputs, device="cuda")
            layer.weight.data.copy_(weight.data)
            layer.bias.data.zero_()
            converted = torch.compile(
                import_module("torchao.float8").convert_to_float8_training(torch.nn.Sequential(layer))
            )
            parameters = [x, layer.weight, layer.bias]

            def torchao(converted: Any = converted, x: Tensor = x) -> Tensor:
                with torch.autocast("cuda", torch.bfloat16):
                    return converted(x)

            libraries["torchao"] = partial(with_gradients, torchao, parameters, grad)
        yield measure(
            f"fp8 linear, {name} {features} -> {outputs}",
            partial(with_gradients, ours, inputs, grad),
            partial(with_gradients, plain, inputs, grad),
            libraries,
            tolerance=0.1,
        )


def fp8_gradients(_: argparse.Namespace) -> Iterator[Row]:
    """Three gradients side by side, quantized and summed, as the qkv projection needs them."""
    torch.manual_seed(0)
    parts = [torch.randn(TOKENS, 768, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def plain(parts: list[Tensor]) -> tuple[Tensor, ...]:
        grad = torch.cat(parts, 1)
        return grad, fp8.quantize(grad, 16.0, fp8.GRADIENT), grad.sum(0, dtype=torch.float32)

    compiled = torch.compile(plain)
    yield measure(
        "fp8 concatenation of q, k, v gradients",
        lambda: fp8.concat_and_quantize(parts, 16.0, True),
        lambda: plain(parts),
        {"torch.compile": lambda: compiled(parts)},
        tolerance=0.02,
    )


# Pointwise functions under torch.compile


def pointwise_functions(_: argparse.Namespace) -> Iterator[Row]:
    x = torch.randn(TOKENS, 3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    dropouts = partial(pointwise.dropout, p=0.1), partial(F.dropout, p=0.1)
    pairs: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "GELU (exact)": (pointwise.gelu, F.gelu),
        "GELU (tanh)": (pointwise.gelu_tanh, partial(F.gelu, approximate="tanh")),
        "dropout": dropouts,
        "GELU (exact) and dropout": (
            lambda x: pointwise.dropout(pointwise.gelu(x), 0.1),
            lambda x: F.dropout(F.gelu(x), 0.1),
        ),
    }
    for name, (ours, plain) in pairs.items():
        calls = [
            partial(with_gradients, partial(torch.compile(function, dynamic=False), x), [x], grad)
            for function in (ours, plain)
        ]
        tolerance = 1.5 if "dropout" in name else 0.02
        yield measure(f"{name}, compiled", calls[0], calls[1], {}, tolerance=tolerance)


KERNELS = {
    "attention": packed_attention,
    "cross-entropy": cross_entropy,
    "fp8": fp8_linear,
    "fp8-gradients": fp8_gradients,
    "pointwise": pointwise_functions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--mean", type=int, default=60, help="tokens per document")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", help="write the table to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| kernel | ours ms | plain torch ms | library ms |\n|---|---|---|---|")
    rows = []
    for name in arguments.only:
        for row in KERNELS[name](arguments):
            libraries = ", ".join(f"{library} {time:.3f}" for library, time in row.libraries.items())
            plain = "" if row.plain is None else f"{row.plain:.3f}"
            print(f"| {row.kernel} | {row.ours:.3f} | {plain} | {libraries} |", flush=True)
            rows.append(asdict(row))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
