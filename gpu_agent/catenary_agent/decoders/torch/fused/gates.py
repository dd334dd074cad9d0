"""A kernel for the gate of a feed-forward part, with the scale before it and the rounding behind.

In PyTorch this is nine kernels, each of which reads and writes all rows.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch.nn import functional

from catenary_agent.decoders.torch.torch_wide import LARGEST_IN_ROWS, MatrixOperand, rounded
from catenary_agent.decoders.triton_kernels.launching import KernelLauncher

_BLOCK = 8192
"""The most numbers that a program computes at a time."""


@triton.jit
def _gated_part(product, factor, at, SIZE: tl.constexpr):
    inside = at < SIZE
    gate = tl.load(product + at, mask=inside, other=0.0) * factor
    other = tl.load(product + SIZE + at, mask=inside, other=0.0) * factor
    return gate / (1.0 + tl.exp(-gate)) * other


@triton.jit
def _gate_kernel(
    product,
    entered,
    rows,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    product += row * (2 * SIZE)
    rows += row * SIZE
    factor = tl.load(entered + row)
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        result = _gated_part(product, factor, at, SIZE)
        most = tl.maximum(most, tl.abs(result))
        tl.store(rows + at, result.to(tl.float16), mask=at < SIZE)
    shrink = tl.maximum(tl.max(most, 0) / LARGEST, 1.0)
    if shrink > 1.0:
        # What is stored may be infinite. It is rare, and cheaper than reading all rows twice.
        tl.debug_barrier()
        for first in range(0, SIZE, BLOCK):
            at = first + tl.arange(0, BLOCK)
            result = _gated_part(product, factor, at, SIZE) / shrink
            tl.store(rows + at, result.to(tl.float16), mask=at < SIZE)
    tl.store(scale + row, shrink)


@cache
def _launcher(size: int) -> KernelLauncher:
    block = min(_BLOCK, triton.next_power_of_2(size))
    constants = {"SIZE": size, "BLOCK": block, "LARGEST": LARGEST_IN_ROWS}
    return KernelLauncher(_gate_kernel, constants, min(16, max(1, block // 512)))


def gated(product: torch.Tensor, entered: torch.Tensor) -> MatrixOperand:
    """Returns SiLU of the first half of each row times the second, as an operand.

    Args:
        product: float32 [n, 2 * size]: what the matrices of both halves make, one beside the other.
        entered: The scale of the rows that entered these, float32 [n, 1].
    """
    count, both = product.shape
    size = both // 2
    rows = product.new_empty((count, size), dtype=torch.float16)
    scale = product.new_empty((count, 1))
    _launcher(size)((count, 1), (product, entered, rows, scale))
    return MatrixOperand(rows, scale)


def plainly_gated(product: torch.Tensor, entered: torch.Tensor) -> MatrixOperand:
    """Returns what `gated` does, by PyTorch alone."""
    gate, other = (product * entered).chunk(2, -1)
    return rounded(functional.silu(gate) * other, torch.float16)
