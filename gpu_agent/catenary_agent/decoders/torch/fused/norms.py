"""A kernel for the RMS norm before a matrix, with the sum before it and the rounding behind it.

In PyTorch this is up to 12 kernels, each of which reads and writes all rows.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from catenary_agent.decoders.torch.torch_wide import LARGEST_IN_ROWS, MatrixOperand, rounded
from catenary_agent.decoders.triton_kernels.launching import KernelLauncher


@triton.jit
def _norm_kernel(
    hidden,
    added,
    weight,
    total,
    rows,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    place = row * SIZE + at
    numbers = tl.load(hidden + place, mask=inside, other=0.0)
    if ADDS:
        numbers += tl.load(added + place, mask=inside, other=0.0)
        tl.store(total + place, numbers, mask=inside)
    mean = tl.sum(numbers * numbers, 0) / SIZE
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    result = factors * (numbers * tl.rsqrt(mean + EPSILON))
    shrink = tl.maximum(tl.max(tl.abs(result), 0) / LARGEST, 1.0)
    tl.store(rows + place, (result / shrink).to(tl.float16), mask=inside)
    tl.store(scale + row, shrink)


@cache
def _launcher(size: int, epsilon: float, adds: bool) -> KernelLauncher:
    block = triton.next_power_of_2(size)
    constants = {
        "SIZE": size,
        "BLOCK": block,
        "EPSILON": epsilon,
        "LARGEST": LARGEST_IN_ROWS,
        "ADDS": adds,
    }
    return KernelLauncher(_norm_kernel, constants, min(16, max(1, block // 512)))


def normed(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> MatrixOperand:
    """Returns the RMS norm of float32 rows [n, size], as an operand of float16 matrices."""
    count, size = hidden.shape
    rows = torch.empty_like(hidden, dtype=torch.float16)
    scale = hidden.new_empty((count, 1))
    launch = _launcher(size, epsilon, False)
    launch((count, 1), (hidden, hidden, weight, hidden, rows, scale))
    return MatrixOperand(rows, scale)


def sum_normed(
    hidden: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, MatrixOperand]:
    """Returns the sum of float32 rows [n, size], and its RMS norm as an operand."""
    total = torch.empty_like(hidden)
    count, size = hidden.shape
    rows = torch.empty_like(hidden, dtype=torch.float16)
    scale = hidden.new_empty((count, 1))
    launch = _launcher(size, epsilon, True)
    launch((count, 1), (hidden, added, weight, total, rows, scale))
    return total, MatrixOperand(rows, scale)


def plainly_normed(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> MatrixOperand:
    """Returns what `normed` does, by PyTorch alone."""
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return rounded(weight * (hidden * torch.rsqrt(variance + epsilon)), torch.float16)
