"""Products with weights of eight or four bits.

Every path multiplies with the same 16-bit numbers and sums in float32. Up to `MOST_ROWS` rows codes
are read once for a tile of rows, and numbers exist in registers only. The matrix's shape alone says
in how many parts its inputs are multiplied, and parts are added in order, so that what a row
results in does not depend on the others. For more rows, and on cards before Ampere, the numbers are
written once, for the product of plain matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from catenary_agent.decoders.triton_kernels.launching import KernelLauncher
from catenary_agent.decoders.triton_kernels.quantised_kernels import (
    dequantise_kernel,
    finish_kernel,
    product_kernel,
)

MOST_ROWS = 256
"""The most rows for which codes are multiplied with. Captured decode steps have no more, so that
their graphs keep no matrix of numbers."""
_PROGRAMS = 512
"""The programs for a tile of rows up to which inputs are divided: about four for each
multiprocessor of a large card."""
_TILE_OUTPUTS = 64
_PART_INPUTS = 512
"""The inputs of a part are a multiple of this, which all tiles divide."""
_DEQUANTISED = {"OUTPUTS": 16, "INPUTS": 256}
_FINISHED = 1024


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """The part of a product that a program computes at a time."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    """The number of blocks of inputs that are on their way or in use at a time."""


TILES = (
    MatrixTile(16, _TILE_OUTPUTS, 128, warps=4, stages=4),
    MatrixTile(64, _TILE_OUTPUTS, 128, warps=4, stages=3),
    MatrixTile(128, 2 * _TILE_OUTPUTS, 64, warps=8, stages=3),
)
"""The tiles by number of rows. Few rows wait for codes, of which many blocks are on their way; many
rows are read less often by programs with more outputs."""
_FOUR_BITS = MatrixTile(64, 2 * _TILE_OUTPUTS, 64, warps=8, stages=4)
"""The tile of four bits for up to 64 rows, where unpacking codes takes longer than reading them."""


def tile_of(rows: int, *, is_four_bits: bool) -> MatrixTile:
    """Returns the tile for a number of rows, the fastest of those that were timed on an H200."""
    if is_four_bits and TILES[0].rows < rows <= _FOUR_BITS.rows:
        return _FOUR_BITS
    return next((each for each in TILES if rows <= each.rows), TILES[-1])


def times_codes(
    rows: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    row_scales: torch.Tensor | None = None,
    tile: MatrixTile | None = None,
) -> torch.Tensor:
    """Returns float32 [n, outputs]: rows times the weights of codes, times the scale of each row.

    Args:
        rows: float16 or bfloat16 [n, inputs].
        codes: int8 [outputs, inputs], or uint8 [outputs, inputs / 2] with the first of two inputs
            in the upper half.
        steps: Scales [outputs] of int8, or scales and offsets [groups, outputs, 2], of the datatype
            of the rows.
        row_scales: float32 [n, 1]; None if they are 1.
        tile: The tile; None for the one of this number of rows.

    Raises:
        ValueError: Shapes or datatypes contradict each other.
    """
    _check(rows, codes, steps)
    count, outputs, inputs = len(rows), len(codes), rows.shape[1]
    if tile is None and count > (MOST_ROWS if _has_tiles(rows.device) else 0):
        numbers = dequantised(codes, steps)
        result = torch.mm(rows, numbers.t(), out_dtype=torch.float32)
        return scaled(result, None if steps.dim() == 3 else steps, row_scales)
    result = torch.empty((count, outputs), dtype=torch.float32, device=rows.device)
    if not count:
        return result
    tile = tile or tile_of(count, is_four_bits=steps.dim() == 3)
    parts, part_inputs = parts_of(outputs, inputs)
    summands = result if parts == 1 else result.new_empty((parts, count, outputs))
    row_tiles = triton.cdiv(count, tile.rows)
    launch = _product(
        tile, _group(codes, steps), rows.dtype, row_scales is not None, _is_even(outputs, inputs)
    )
    scales = result if row_scales is None else row_scales
    launch(
        (triton.cdiv(outputs, tile.outputs), row_tiles * parts),
        (rows.contiguous(), codes.view(torch.uint8), _words(steps), scales, summands),
        *(count, outputs, inputs, codes.shape[1], part_inputs, row_tiles),
    )
    if parts > 1:
        _finish(summands, None, None, result)
    return result


def dequantised(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Returns the weights [outputs, inputs] of codes, those of eight bits without their scale.

    After the product they are freed, and the next matrix gets the same memory of the allocator.
    """
    outputs, inputs = len(codes), codes.shape[1] * (2 if steps.dim() == 3 else 1)
    numbers = torch.empty((outputs, inputs), dtype=steps.dtype, device=codes.device)
    launch = _dequantisation(_group(codes, steps), steps.dtype, _is_even(outputs, inputs))
    blocks = _DEQUANTISED["OUTPUTS"], _DEQUANTISED["INPUTS"]
    launch(
        (triton.cdiv(outputs, blocks[0]), triton.cdiv(inputs, blocks[1])),
        (codes.view(torch.uint8), _words(steps), numbers),
        *(outputs, inputs, codes.shape[1]),
    )
    return numbers


def scaled(
    result: torch.Tensor, scales: torch.Tensor | None, row_scales: torch.Tensor | None
) -> torch.Tensor:
    """Returns float32 [n, outputs] times scales of outputs and of rows, in the same memory."""
    if scales is not None or row_scales is not None:
        _finish(result[None], scales, row_scales, result)
    return result


def parts_of(outputs: int, inputs: int) -> tuple[int, int]:
    """Returns how many parts the inputs of a matrix have, and the inputs of all but the last."""
    tiles, blocks = triton.cdiv(outputs, _TILE_OUTPUTS), triton.cdiv(inputs, _PART_INPUTS)
    each = triton.cdiv(blocks, max(1, min(blocks, _PROGRAMS // tiles)))
    return triton.cdiv(blocks, each), each * _PART_INPUTS


def _finish(
    summands: torch.Tensor,
    scales: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    result: torch.Tensor,
) -> None:
    count, outputs = result.shape
    stepped, row_scaled = scales is not None, row_scales is not None
    factors = result if scales is None else scales
    # Rows are the first dimension, which has no bound of 65,535.
    _addition(factors.dtype, stepped, row_scaled)(
        (count, triton.cdiv(outputs, _FINISHED)),
        (summands, factors, result if row_scales is None else row_scales, result),
        *(count, outputs, len(summands)),
    )


# A launcher keeps what is compiled for the datatypes of its first launch, so each has its own.
@cache
def _product(
    tile: MatrixTile,
    group: int,
    dtype: torch.dtype,
    scaled: bool,
    even: bool,
) -> KernelLauncher:
    constants = {
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
        "GROUP": group,
        "SCALED": scaled,
        "EVEN": even,
        "STAGES": tile.stages,
    }
    return KernelLauncher(product_kernel, constants, tile.warps)


@cache
def _dequantisation(
    group: int,
    dtype: torch.dtype,
    even: bool,
) -> KernelLauncher:
    return KernelLauncher(dequantise_kernel, {**_DEQUANTISED, "GROUP": group, "EVEN": even}, 4)


@cache
def _addition(
    dtype: torch.dtype,
    stepped: bool,
    scaled: bool,
) -> KernelLauncher:
    constants = {"BLOCK": _FINISHED, "STEPPED": stepped, "SCALED": scaled}
    return KernelLauncher(finish_kernel, constants, 4)


def _check(rows: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor) -> None:
    if rows.dtype not in {torch.float16, torch.bfloat16} or rows.dtype is not steps.dtype:
        raise ValueError(f"rows are {rows.dtype} and steps {steps.dtype}")
    group = _group(codes, steps)
    outputs, inputs = len(codes), codes.shape[1] * (2 if group else 1)
    expected = (inputs // group, outputs, 2) if group else (outputs,)
    if rows.shape[1:] != (inputs,) or steps.shape != expected:
        raise ValueError(f"rows {list(rows.shape)} do not go with codes {list(codes.shape)}")
    if group and (group & (group - 1) or group < 2 or inputs % group):
        raise ValueError(f"groups of {group} inputs are not a power of two")


def _group(codes: torch.Tensor, steps: torch.Tensor) -> int:
    """Returns the number of inputs that share a step; 0 for eight bits."""
    return 2 * codes.shape[1] // len(steps) if steps.dim() == 3 else 0


@cache
def _has_tiles(device: torch.device) -> bool:
    """Returns False for cards before Ampere, whose matrix units Triton does not use."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _words(steps: torch.Tensor) -> torch.Tensor:
    """Returns scale and offset as one word of 32 bits; scales of eight bits as they are."""
    return steps.view(torch.int32) if steps.dim() == 3 else steps


def _is_even(outputs: int, inputs: int) -> bool:
    """Returns True if 16 bytes of any of the tensors can be read at once."""
    return inputs % 32 == 0 and outputs % 16 == 0
