"""Layers whose matrices have 16 bits, and whose numbers between the matrices are float32.

A token that is read again is computed among other rows, so that sums differ in their last bit.
Every rounding to few bits turns such a difference e into one of about sqrt(e * step), so that a few
of them in a row turn it into a whole step ("ADR 0025"). Here nothing is rounded but what enters a
matrix, and what attention takes and gives, which is float16 in both:

* float16 rounds what enters to 11 bits. Rows beyond its range are scaled, that nothing overflows.
* bfloat16, which has 8 bits, multiplies with what enters and with what rounding it left over: 16
  bits, for twice the multiplications. A step of few rows waits for weights and takes no longer.

Products are summed up, and come, in float32. On CUDA that is a kernel's doing; on a CPU weights are
widened a piece at a time, which gives the same numbers slowly.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from catenary_agent.decoders.model_files.sizes import TILE_BYTES

_LARGEST = 32768.0
"""Rows with larger numbers are scaled down to it before they become float16."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Rows as a matrix is multiplied with them."""

    rows: torch.Tensor
    """[n, inputs], or [2 n, inputs] if `halves`; on a CPU float32, else of the matrix' datatype."""
    scale: torch.Tensor | None = None
    """float32 [n, 1]: of each row; None: 1."""
    halves: bool = False
    """The upper parts of all rows, then the lower ones."""


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> Operand:
    """Returns rows [n, inputs] for matrices of a datatype."""
    on_cpu = rows.device.type == "cpu"
    if dtype is torch.float32 or rows.dtype is dtype:
        return Operand(rows.float() if on_cpu or dtype is torch.float32 else rows)
    if dtype is torch.float16:
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True)
        scale = (largest / _LARGEST).clamp_(min=1.0)
        narrow = (rows / scale).to(dtype)
        return Operand(narrow.float() if on_cpu else narrow, scale)
    rows = rows.float()
    if on_cpu:
        upper = rows.to(dtype).float()
        return Operand(upper.add_((rows - upper).to(dtype)))
    count = len(rows)
    both = torch.empty((2 * count, rows.shape[1]), dtype=dtype, device=rows.device)
    both[:count].copy_(rows)
    both[count:].copy_(rows - both[:count])
    return Operand(both, halves=True)


def product(entering: Operand, weight: torch.Tensor) -> torch.Tensor:
    """Returns float32 [n, outputs]: rows times a matrix [outputs, inputs]."""
    if weight.dtype is torch.float32:
        return functional.linear(entering.rows, weight)
    if weight.device.type == "cpu":
        result = _in_tiles(entering.rows, weight)
    else:
        result = torch.mm(entering.rows, weight.t(), out_dtype=torch.float32)
    return joined(entering, result)


def joined(entering: Operand, result: torch.Tensor) -> torch.Tensor:
    """Returns float32 [n, outputs] of what a kernel made of the rows of an operand."""
    result = result.float()
    if entering.halves:
        count = len(result) // 2
        result = result[:count] + result[count:]
    return result if entering.scale is None else result.mul_(entering.scale)


def _in_tiles(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    result = torch.empty((len(rows), outputs))
    step = max(1, TILE_BYTES // (4 * inputs))
    tile = torch.empty((min(step, outputs), inputs))
    for first in range(0, outputs, step):
        part = weight[first : first + step]
        wide = tile[: len(part)].copy_(part)
        torch.mm(rows, wide.t(), out=result[:, first : first + step])
    return result


class Entering:
    """What entered the last matrix, as it was rounded: several matrices read the same rows."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self._source: weakref.ref[torch.Tensor] | None = None
        self._made: Operand | None = None

    def of(self, rows: torch.Tensor, dtype: torch.dtype) -> Operand:
        """Returns rows [.., inputs] for matrices of a datatype, all of which have the same one."""
        if self._made is None or self._source is None or self._source() is not rows:
            self.forget()
            self._made = rounded(rows.reshape(-1, rows.shape[-1]), dtype)
            self._source = weakref.ref(rows)
        return self._made

    def forget(self) -> None:
        """Frees its memory."""
        self._source = self._made = None


class Matrix(torch.nn.Module):
    """What `torch.nn.Linear` is, with weights of 16 bits and results in float32."""

    def __init__(self, linear: Any, entering: Entering) -> None:
        """Takes over the parameters of a linear layer."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._entering = entering

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 [.., outputs] of [.., inputs]."""
        result = product(self._entering.of(rows, self.weight.dtype), self.weight)
        if self.bias is not None:
            result += self.bias
        return result.view(*rows.shape[:-1], -1)


class Widened(torch.nn.Module):
    """A module whose results are made float32: an embedding."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        """Returns what the module makes."""
        result: torch.Tensor = self.inner(entering)
        return result.float()


class WideNorm(torch.nn.Module):
    """`torch.nn.LayerNorm` of float32 with weights of 16 bits, which PyTorch's does not take."""

    def __init__(self, norm: Any) -> None:
        """Takes over the parameters of a norm."""
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._shape, self._epsilon = norm.normalized_shape, norm.eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32, of the same shape."""
        weight, bias = (None if x is None else x.float() for x in (self.weight, self.bias))
        return functional.layer_norm(rows, self._shape, weight, bias, self._epsilon)


def widened(module: torch.nn.Module, entering: Entering) -> torch.nn.Module:
    """Returns a module whose matrices and norms take and give float32, itself if it can be kept."""
    if isinstance(module, torch.nn.Linear):
        return Matrix(module, entering)
    if isinstance(module, torch.nn.LayerNorm):
        return WideNorm(module)
    if isinstance(module, torch.nn.Embedding):
        return Widened(module)
    for name, child in module.named_children():
        setattr(module, name, widened(child, entering))
    return module


def narrowed(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns queries, keys or values as attention takes them, none beyond the largest number."""
    if numbers.dtype is dtype:
        return numbers
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)
