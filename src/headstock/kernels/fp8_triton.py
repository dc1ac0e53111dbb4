"""Gradients made ready for products in 8 bits, by Triton kernels: imported only where there is Triton.

M rows, D features of a part, N features of all parts side by side.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from headstock.kernels.fp8 import BACKWARD

ROWS, COLUMNS = 64, 128  # of a tile


def gather(parts: Sequence[Tensor], whole: Tensor, small: Tensor, scale: float, summed: bool) -> Tensor:
    """Put parts (M, D) side by side into `whole` (M, N) and, scaled, into `small`; (N,) their sums where asked for."""
    rows, features = whole.shape
    blocks = triton.cdiv(rows, ROWS)
    sums = torch.empty(blocks if summed else 0, features, dtype=torch.float32, device=whole.device)
    before = 0
    with torch.cuda.device_of(whole):  # Triton starts kernels on the current device
        for part in parts:
            part = part if part.stride(1) == 1 else part.contiguous()
            width = part.size(1)
            _gather[(triton.cdiv(width, COLUMNS), blocks)](
                part,
                whole,
                small,
                sums,
                rows,
                width,
                features,
                before,
                part.stride(0),
                float(scale),
                torch.finfo(BACKWARD).max,
                SUMMED=summed,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                num_warps=4,
            )
            before += width
    return sums.sum(0)


@triton.jit
def _gather(
    part, whole, small, sums, rows, width, features, before, stride, scale, most,
    SUMMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < width)[None, :]
    row = row.to(tl.int64)  # there may be more numbers than 32 bits can count
    made = tl.load(part + row[:, None] * stride + column[None, :], mask=there, other=0.0)
    at = row[:, None] * features + before + column[None, :]
    tl.store(whole + at, made.to(whole.dtype.element_ty), mask=there)
    made = made.to(tl.float32)
    less = tl.minimum(tl.maximum(made * scale, -most), most)
    tl.store(small + at, less.to(small.dtype.element_ty), mask=there)
    if SUMMED:
        tl.store(sums + block * features + before + column, tl.sum(made, 0), mask=column < width)


def turn(x: Tensor, turned: Tensor) -> None:
    """Bytes (M, N) into the columns of (N, M or more), with zeros in the columns that are more."""
    rows, columns = x.shape
    room = turned.size(1)
    with torch.cuda.device_of(x):
        _turn[(triton.cdiv(columns, COLUMNS), triton.cdiv(room, COLUMNS))](
            x, turned, rows, columns, room, x.stride(0), TILE=COLUMNS, num_warps=8
        )


@triton.jit
def _turn(x, turned, rows, columns, room, stride, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    far_row, far_column = row.to(tl.int64), column.to(tl.int64)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + far_row[:, None] * stride + column[None, :], mask=there, other=0)
    there = (column < columns)[:, None] & (row < room)[None, :]
    tl.store(turned + far_column[:, None] * room + row[None, :], tl.trans(tile), mask=there)
