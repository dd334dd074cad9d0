"""Layers with 16-bit matrices that compute in float32 between these.

When a token is read again it is computed among other rows, so its sums differ in the last bit. Each
rounding to few bits turns such a difference e into one of about sqrt(e * step), so a few of them in
a row turn it into a whole step ("ADR 0025"). Therefore only the inputs of matrices are rounded
here, and the inputs and outputs of attention, which are float16 for both datatypes:

* float16 rounds inputs to 11 bits. Rows beyond its range are scaled, so that nothing overflows.
* bfloat16 has 8 bits and multiplies with the rounded input and with the rest: 16 bits for twice the
  multiplications. A step of few rows waits for weights and takes no longer.

Products are summed and returned in float32. On CUDA a kernel does this; on a CPU weights are
widened a piece at a time, which gives the same numbers slowly.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from catenary_agent.decoders.model_files.sizes import TILE_BYTES

LARGEST_IN_ROWS = 32768.0
"""The largest number in float16 rows; rows with larger ones are scaled down to it."""


@dataclass(frozen=True, slots=True)
class MatrixOperand:
    """Rows in the form in which a matrix is multiplied with them."""

    rows: torch.Tensor
    """The rows, [n, inputs], or [2 n, inputs] if `halves`: float32 on a CPU, else of the matrix's
    datatype."""
    scale: torch.Tensor | None = None
    """The scale of each row, float32 [n, 1]; None if it is 1."""
    halves: bool = False
    """True if `rows` has the rounded values of all rows and then the rests."""


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> MatrixOperand:
    """Returns rows [n, inputs] as an operand of matrices of a datatype."""
    on_cpu = rows.device.type == "cpu"
    if dtype is torch.float32 or rows.dtype is dtype:
        return MatrixOperand(rows.float() if on_cpu or dtype is torch.float32 else rows)
    if dtype is torch.float16:
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True)
        scale = (largest / LARGEST_IN_ROWS).clamp_(min=1.0)
        narrow = (rows / scale).to(dtype)
        return MatrixOperand(narrow.float() if on_cpu else narrow, scale)
    rows = rows.float()
    if on_cpu:
        upper = rows.to(dtype).float()
        return MatrixOperand(upper.add_((rows - upper).to(dtype)))
    count = len(rows)
    both = torch.empty((2 * count, rows.shape[1]), dtype=dtype, device=rows.device)
    both[:count].copy_(rows)
    both[count:].copy_(rows - both[:count])
    return MatrixOperand(both, halves=True)


def product(entering: MatrixOperand, weight: torch.Tensor) -> torch.Tensor:
    """Returns float32 [n, outputs]: rows times a matrix [outputs, inputs]."""
    return joined(entering, unscaled(entering, weight))


def unscaled(entering: MatrixOperand, weight: torch.Tensor) -> torch.Tensor:
    """Returns a product as `joined` takes it: the rows as they are, times a matrix."""
    if weight.dtype is torch.float32:
        return functional.linear(entering.rows, weight)
    if weight.device.type == "cpu":
        return _in_tiles(entering.rows.float(), weight)
    return torch.mm(entering.rows, weight.t(), out_dtype=torch.float32)


def joined(entering: MatrixOperand, result: torch.Tensor) -> torch.Tensor:
    """Returns float32 [n, outputs] from a kernel's result for the rows of an operand."""
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


class OperandCache:
    """The rounded input of the last matrix, since several matrices read the same rows."""

    def __init__(self) -> None:
        self._source: weakref.ref[torch.Tensor] | None = None
        self._made: MatrixOperand | None = None

    def of(self, rows: torch.Tensor, dtype: torch.dtype) -> MatrixOperand:
        """Returns rows [.., inputs] for matrices of a datatype, which is the same at every call."""
        if self._made is None or self._source is None or self._source() is not rows:
            self.forget()
            self._made = rounded(rows.reshape(-1, rows.shape[-1]), dtype)
            self._source = weakref.ref(rows)
        return self._made

    def put(self, operand: MatrixOperand) -> torch.Tensor:
        """Returns the rows of an operand, for which `of` returns it."""
        self._made, self._source = operand, weakref.ref(operand.rows)
        return operand.rows

    def forget(self) -> None:
        self._source = self._made = None


class WideLinear(torch.nn.Module):
    """A `torch.nn.Linear` with 16-bit weights and float32 results."""

    def __init__(self, linear: Any, entering: OperandCache) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._entering = entering

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 [.., outputs] of [.., inputs]."""
        result = product(self._entering.of(rows, self.weight.dtype), self.weight)
        if self.bias is not None:
            result += self.bias
        return result.view(*rows.shape[:-1], -1)


class WideModule(torch.nn.Module):
    """A module, such as an embedding, whose results are converted to float32."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(entering)
        return result.float()


class WideNorm(torch.nn.Module):
    """A `torch.nn.LayerNorm` of float32 rows with 16-bit weights, which PyTorch's own rejects."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._shape, self._epsilon = norm.normalized_shape, norm.eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 of the same shape."""
        weight, bias = (None if x is None else x.float() for x in (self.weight, self.bias))
        return functional.layer_norm(rows, self._shape, weight, bias, self._epsilon)


def widened(module: torch.nn.Module, entering: OperandCache) -> torch.nn.Module:
    """Returns a module whose matrices and norms accept and return float32; itself if possible."""
    if isinstance(module, torch.nn.Linear):
        return WideLinear(module, entering)
    if isinstance(module, torch.nn.LayerNorm):
        return WideNorm(module)
    if isinstance(module, torch.nn.Embedding):
        return WideModule(module)
    for name, child in module.named_children():
        setattr(module, name, widened(child, entering))
    return module


def narrowed(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns queries, keys or values as attention takes them, clamped to the finite range."""
    if numbers.dtype is dtype:
        return numbers
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)
