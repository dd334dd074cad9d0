"""Linear layers of PyTorch with weights of eight or four bits.

On CUDA devices Triton kernels multiply with the codes. They are tested on a small matrix when a
process loads the first model that needs them. Where they are missing or deviate from these
formulas, weights are dequantised in every step, which is correct but slow. On a CPU this is always
done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from catenary_agent.decoders.model_files.quantisation import (
    GROUP,
    QuantisedLayout,
    StoredQuantisation,
    is_quantised,
)
from catenary_agent.decoders.torch.torch_wide import (
    MatrixOperand,
    OperandCache,
    joined,
    product,
    rounded,
)
from catenary_services.errors import InvalidInput
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.decoders")
_MIDDLE = 8
"""The offset of codes, which is subtracted from them."""
_HIGHEST_4, _HIGHEST_8 = 15, 127
_TOLERANCE = 0.01
"""The largest relative distance accepted of a kernel: bfloat16 has 8 bits."""
_TESTED_SHAPE = 80, 1024
_TESTED_ROWS = 1, 40, 100, 300
"""Numbers of rows for which kernels do different things."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within a word of AWQ of the code of each of eight outputs."""
TimesCodes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A function of rows, codes, steps and the scales of rows; see `quantised.times_codes`."""


class QuantisedLinear(torch.nn.Module):
    """A linear layer with codes as weights."""

    codes: torch.Tensor
    steps: torch.Tensor
    """The numbers that codes are multiplied with, and in four bits those that are then added."""
    entering: OperandCache | None = None
    """The rounded rows that several matrices share; None to round them for this one alone."""

    def __init__(self, codes: torch.Tensor, steps: torch.Tensor, bias: torch.Tensor | None):
        """Stores codes, and steps in the datatype that is computed in."""
        super().__init__()
        for name, tensor in (("codes", codes), ("steps", steps), ("bias", bias)):
            self.register_buffer(name, tensor, persistent=False)
        self._times_codes = kernel_for(codes.device, steps.dtype, group_of(codes, steps))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 [.., outputs] of [.., inputs]."""
        bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
        dtype = self.steps.dtype
        if self.entering is None:
            operand = rounded(rows.reshape(-1, rows.shape[-1]), dtype)
        else:
            operand = self.entering.of(rows, dtype)
        if self._times_codes is None:
            result = self._dequantised(operand)
        else:
            made = self._times_codes(operand.rows, self.codes, self.steps, operand.scale)
            result = joined(MatrixOperand(operand.rows, halves=operand.halves), made)
        result = result.view(*rows.shape[:-1], -1)
        return result if bias is None else result + bias

    def _dequantised(self, operand: MatrixOperand) -> torch.Tensor:
        raise NotImplementedError


class EightBitLinear(QuantisedLinear):
    """A linear layer of integers from -127 to 127 times one scale per output.

    Codes are int8 [outputs, inputs], steps are scales [outputs].
    """

    def _dequantised(self, operand: MatrixOperand) -> torch.Tensor:
        return product(operand, self.codes.to(self.steps.dtype)) * self.steps


class FourBitLinear(QuantisedLinear):
    """A linear layer of 16 steps times a scale plus an offset, both per group of inputs.

    Codes are uint8 [outputs, inputs / 2] with the first of two inputs in the upper half. Steps are
    scale and offset: [groups, outputs, 2]; a weight is (code - 8) * scale + offset.
    """

    def _dequantised(self, operand: MatrixOperand) -> torch.Tensor:
        return product(operand, numbers_of(self.codes, self.steps))


def quantised(
    weight: torch.Tensor, bias: torch.Tensor | None, precision: str, dtype: torch.dtype
) -> QuantisedLinear | None:
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


def group_of(codes: torch.Tensor, steps: torch.Tensor) -> int:
    """Returns the number of inputs that share a step; 0 for eight bits."""
    return 2 * codes.shape[1] // len(steps) if steps.dim() == 3 else 0


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, group: int) -> TimesCodes | None:
    """Returns the function that multiplies with codes on a device; None if there is none.

    Args:
        device: The device.
        dtype: The datatype of steps.
        group: Number of inputs that share a step; 0 for eight bits.
    """
    if device.type != "cuda" or dtype is torch.float32:
        return None
    try:
        from catenary_agent.decoders.triton_kernels.quantised import times_codes

        reason = why_not_kernel(times_codes, device, dtype, group)
    except Exception as error:
        # Whatever is amiss with Triton or its compilers, weights can be unpacked.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    if reason is None:
        return times_codes
    precision = "int4" if group else "int8"
    _log.warning("quantised_kernel_unavailable", precision=precision, reason=reason)
    return None


def why_not_kernel(
    times_codes: TimesCodes, device: torch.device, dtype: torch.dtype, group: int
) -> str | None:
    """Runs a kernel on a small matrix, in each of its forms, which are compiled thereby.

    Args:
        times_codes: The kernel.
        device: The device.
        dtype: The datatype of rows and steps.
        group: Number of inputs that share a step; 0 for eight bits.

    Returns:
        None if it agrees with the formulas, else the reason not to use it.
    """
    random = torch.Generator().manual_seed(8)
    outputs, inputs = _TESTED_SHAPE
    rows = torch.randn(max(_TESTED_ROWS), inputs, generator=random).to(device, dtype)
    # Rows of bfloat16 are not scaled.
    scales = None
    if dtype is torch.float16:
        scales = torch.rand(len(rows), 1, generator=random).add_(1).to(device)
    if group:
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=random).to(torch.uint8)
        steps = torch.rand(inputs // group, outputs, 2, generator=random)
        codes, steps = codes.to(device), steps.to(device, dtype)
        weights = numbers_of(codes, steps)
    else:
        codes = torch.randint(-127, 128, (outputs, inputs), generator=random).to(torch.int8)
        codes, steps = codes.to(device), torch.rand(outputs, generator=random).to(device, dtype)
        weights = codes * steps[:, None].float()
    expected = rows.double() @ weights.double().T
    if scales is not None:
        expected *= scales
    for count in _TESTED_ROWS:
        found = times_codes(rows[:count], codes, steps, None if scales is None else scales[:count])
        wanted = expected[:count]
        distance = float((found.double() - wanted).norm() / wanted.norm())
        if not distance <= _TOLERANCE:
            return f"it is off by {distance:.2g} for {count} rows"
    return None
