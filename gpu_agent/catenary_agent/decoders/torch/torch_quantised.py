"""Linear layers of PyTorch with weights of eight or four bits.

On CUDA devices PyTorch's own kernels multiply with the codes. They are tested on a small matrix
when a process loads the first model that needs them. Where one is missing or deviates from these
formulas, weights are dequantised in every step, which is correct but slow. On a CPU this is always
done, because it is faster than PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from catenary_agent.decoders.model_files.quantisation import (
    GROUP,
    QuantisedLayout,
    StoredQuantisation,
    is_quantised,
)
from catenary_agent.decoders.torch.torch_wide import joined, product, rounded
from catenary_services.errors import InvalidInput
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.decoders")
_MIDDLE = 8
"""The offset of codes in kernels: they subtract it."""
_HIGHEST_4, _HIGHEST_8 = 15, 127
_TILES = 8
"""Number of tiles of 16 inputs that a thread of the kernel reads at a time."""
_TILE_INPUTS, _TILE_OUTPUTS = 16 * _TILES, 8
_KERNEL_ROWS_8 = 16
"""The most rows for the kernel; for more, the product of plain matrices is faster."""
_TOLERANCE = 0.02
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within a word of AWQ of the code of each of eight outputs."""


class EightBitLinear(torch.nn.Module):
    """A linear layer of integers from -127 to 127 times one scale per output."""

    codes: torch.Tensor
    """The codes: int8 [outputs, inputs]."""
    scales: torch.Tensor
    """The scales: [outputs]."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None):
        """Stores codes, and scales in the datatype that is computed in."""
        super().__init__()
        for name, tensor in (("codes", codes), ("scales", scales), ("bias", bias)):
            self.register_buffer(name, tensor, persistent=False)
        self._has_kernel = codes.is_cuda and _kernel_8(codes.device, scales.dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
        flat = rows.reshape(-1, rows.shape[-1])
        dtype = self.scales.dtype
        entering = rounded(flat, dtype)
        if self._has_kernel and len(flat) <= _KERNEL_ROWS_8:
            made = torch._weight_int8pack_mm(entering.rows, self.codes, self.scales)
            result = joined(entering, made)
        else:
            result = product(entering, self.codes.to(dtype)) * self.scales
        result = result.view(*rows.shape[:-1], -1)
        return result if bias is None else result + bias


class FourBitLinear(torch.nn.Module):
    """A linear layer of 16 steps times a scale plus an offset, both per group of inputs."""

    codes: torch.Tensor
    """The codes: uint8 [outputs, inputs / 2] with the first of two inputs in the upper half; for
    the CUDA kernel in its own layout."""
    steps: torch.Tensor
    """Scale and offset: [groups, outputs, 2]; a weight is (code - 8) * scale + offset."""

    def __init__(self, codes: torch.Tensor, steps: torch.Tensor, bias: torch.Tensor | None):
        """Stores plain codes, and steps in the datatype that is computed in."""
        super().__init__()
        outputs, inputs = codes.shape[0], 2 * codes.shape[1]
        self._group = inputs // len(steps)
        even = inputs % _TILE_INPUTS == 0 and outputs % _TILE_OUTPUTS == 0
        self._has_kernel = even and codes.is_cuda and _kernel_4(codes.device, steps.dtype)
        if self._has_kernel:
            codes = torch._convert_weight_to_int4pack(codes, _TILES)
        for name, tensor in (("codes", codes), ("steps", steps), ("bias", bias)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
        flat = rows.reshape(-1, rows.shape[-1])
        entering = rounded(flat, self.steps.dtype)
        if self._has_kernel:
            made = torch._weight_int4pack_mm(entering.rows, self.codes, self._group, self.steps)
            result = joined(entering, made)
        else:
            result = product(entering, numbers_of(self.codes, self.steps))
        result = result.view(*rows.shape[:-1], -1)
        return result if bias is None else result + bias


Quantised = EightBitLinear | FourBitLinear


def quantised(
    weight: torch.Tensor, bias: torch.Tensor | None, precision: str, dtype: torch.dtype
) -> Quantised | None:
    """Returns a layer of the nearest codes; None if the matrix is not to be quantised."""
    outputs, inputs = weight.shape
    if not is_quantised(precision, outputs, inputs):
        return None
    plain = weight.float()
    if precision == "int8":
        scales = plain.abs().amax(1).clamp(min=1e-12) / _HIGHEST_8
        # The rounded scale, which is the one in use, decides which code is nearest.
        used = scales.to(dtype)
        codes = (plain / used.float()[:, None]).round_().clamp_(-_HIGHEST_8, _HIGHEST_8)
        return EightBitLinear(codes.to(torch.int8), used, bias)
    groups = plain.view(outputs, -1, GROUP)
    least, most = groups.amin(2), groups.amax(2)
    scales = (most - least).clamp(min=1e-12) / _HIGHEST_4
    steps = torch.stack((scales, least + _MIDDLE * scales), -1).to(dtype)
    scale, offset = steps.float().unbind(-1)
    near = (groups - offset[..., None]) / scale[..., None] + _MIDDLE
    codes = near.round_().clamp_(0, _HIGHEST_4).to(torch.uint8).view(outputs, inputs)
    return FourBitLinear(packed(codes), steps.transpose(0, 1).contiguous(), bias)


def from_files(
    stored: StoredQuantisation,
    read: Callable[[str], torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    index: torch.Tensor | None,
) -> FourBitLinear:
    """Returns a layer with the codes of a file.

    Args:
        stored: The layout of the codes.
        read: Returns a part of the matrix by the ending of its name.
        bias: The bias; None if there is none.
        dtype: The datatype that is computed in.
        index: The group of each input; None if the file does not give it.

    Raises:
        InvalidInput: A group is not one of neighbouring inputs.
    """
    scales = read("scales").float()
    if stored.layout is QuantisedLayout.PLAIN:
        codes, offsets = read("qweight"), read("offsets").float() + _MIDDLE * scales
    else:
        words, zeros = read("qweight"), _nibbles(read("qzeros"))
        if stored.layout is QuantisedLayout.AWQ:
            whole = _nibbles(words)[..., _AWQ_ORDER].flatten(1)
            zeros = zeros[..., _AWQ_ORDER]
        else:
            whole = _nibbles(words).transpose(1, 2).flatten(0, 1)
        zeros = zeros.flatten(1).float() + (stored.layout is QuantisedLayout.GPTQ)
        codes, offsets = packed(whole.T.contiguous()), (_MIDDLE - zeros) * scales
    if index is not None:
        usual = torch.arange(len(index), device=index.device) // stored.group
        if not torch.equal(index.long(), usual):
            raise InvalidInput("g_idx", "orders groups by activations, which no agent does")
    return FourBitLinear(codes, torch.stack((scales, offsets), -1).to(dtype).contiguous(), bias)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Returns uint8 [outputs, inputs / 2] of codes uint8 [outputs, inputs]."""
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def numbers_of(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Returns the weights [outputs, inputs] of plain codes and their steps."""
    outputs, groups = len(codes), len(steps)
    whole = torch.stack((codes >> 4, codes & _HIGHEST_4), -1).view(outputs, groups, -1)
    scale, offset = steps.transpose(0, 1).unbind(-1)
    numbers = whole.to(steps.dtype).sub_(_MIDDLE).mul_(scale[..., None]).add_(offset[..., None])
    return numbers.view(outputs, -1)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Returns uint8 [..., 8] of int32 [...], lowest bits first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & _HIGHEST_4).to(torch.uint8)


def step_dtype(device: torch.device, dtype: torch.dtype, precision: str) -> torch.dtype:
    """Returns the datatype of the scales of a precision: bfloat16 where only that has a kernel.

    PyTorch's kernel for four bits has no float16, and rounds its results to 8 bits.
    """
    if precision != "int4" or dtype is not torch.float16 or device.type != "cuda":
        return dtype
    return torch.bfloat16 if _kernel_4(device, torch.bfloat16) else dtype


@cache
def _kernel_4(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if the device's kernel for four bits agrees with the formula."""

    def run(rows: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        tiles = torch._convert_weight_to_int4pack(codes, _TILES)
        return torch._weight_int4pack_mm(rows, tiles, GROUP, steps)

    random = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (64, _TILE_INPUTS), dtype=torch.uint8, generator=random)
    steps = torch.rand(2 * _TILE_INPUTS // GROUP, 64, 2, generator=random)
    given = (codes.to(device), steps.to(device, dtype))
    return _is_right("int4", run, given, lambda: numbers_of(*given))


@cache
def _kernel_8(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if the device's kernel for eight bits agrees with the formula."""
    random = torch.Generator().manual_seed(8)
    codes = torch.randint(-127, 128, (64, 256), dtype=torch.int8, generator=random)
    given = (codes.to(device), torch.rand(64, generator=random).to(device, dtype))
    return _is_right(
        "int8", torch._weight_int8pack_mm, given, lambda: given[0].to(dtype) * given[1][:, None]
    )


def _is_right(
    what: str,
    kernel: Callable[..., torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor],
    numbers: Callable[[], torch.Tensor],
) -> bool:
    reason: Any = "it computes something else"
    weights = numbers().float()
    rows = torch.linspace(-1, 1, 3 * weights.shape[1]).view(3, -1).to(given[1])
    expected = rows.float() @ weights.T
    try:
        found = kernel(rows, *given).float()
        if torch.allclose(
            found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.abs().max())
        ):
            return True
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:200]
    _log.warning("quantised_kernel_unavailable", precision=what, reason=reason)
    return False
