"""The Triton kernels of `quantised`: products with codes, and weights of codes.

Every kernel gets its numbers by `_numbers`, so that all paths multiply with the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _in_float32(codes, MIDDLE: tl.constexpr):
    """Returns whole numbers below 2^23 less the middle of their range, in float32.

    They become the last bits of 2^23, since conversions are slow instructions on most cards.
    """
    return (codes ^ 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)


@triton.jit
def _known_multiple(number, FACTOR: tl.constexpr, KNOWN: tl.constexpr):
    """Returns a number that is a multiple of a factor, in a form in which Triton sees this.

    Assertions about parameters are ignored, and not all that matters fits a specialisation.
    """
    if KNOWN:
        number = number // FACTOR * FACTOR
    return number


@triton.jit
def _half(words, KIND: tl.constexpr):
    """Returns the lower 16 bits of words, which are a number of a datatype, in float32."""
    return words.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _numbers(
    codes,
    steps,
    output,
    first,
    outputs,
    inputs,
    width,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
):
    """Returns the weights [OUTPUTS, INPUTS] from an input on, zero beyond the matrix.

    Those of eight bits (`GROUP` is 0) are without their scale. For four bits, steps are words of
    32 bits: scale and offset. An output has `width` bytes of codes.
    """
    there = output < outputs
    if GROUP == 0:
        at = first + tl.arange(0, INPUTS)
        place = output.to(tl.int64)[:, None] * width + at[None, :]
        byte = tl.load(codes + place, mask=there[:, None] & (at < inputs)[None, :], other=0)
        # With the sign bit inverted, a byte is the code plus 128.
        made = _in_float32(byte.to(tl.int32) ^ 128, 128)
    else:
        span: tl.constexpr = GROUP if GROUP < INPUTS else INPUTS
        begin = first + span * tl.arange(0, INPUTS // span)
        inside = there[:, None] & (begin < inputs)[None, :]
        pair = (begin // 2)[:, None] + tl.arange(0, span // 2)[None, :]
        place = (output.to(tl.int64) * width)[:, None, None] + pair[None, :, :]
        byte = tl.load(codes + place, mask=inside[:, :, None], other=0).to(tl.int32)
        place = (begin // GROUP)[None, :] * outputs + output[:, None]
        step = tl.load(steps + place, mask=inside, other=0)
        scale, offset = _half(step, KIND)[:, :, None], _half(step >> 16, KIND)[:, :, None]
        upper = _in_float32(byte >> 4, 8) * scale + offset
        lower = _in_float32(byte & 15, 8) * scale + offset
        made = tl.reshape(tl.join(upper, lower), (OUTPUTS, INPUTS))
    return made.to(KIND)


@triton.jit(do_not_specialize=["count", "outputs", "inputs", "width", "part_inputs", "row_tiles"])
def product_kernel(
    rows,
    codes,
    steps,
    row_scales,
    result,
    count,
    outputs,
    inputs,
    width,
    part_inputs,
    row_tiles,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiplies a tile of rows with a part of the inputs of a tile of outputs."""
    inputs, width = _known_multiple(inputs, 32, EVEN), _known_multiple(width, 16, EVEN)
    outputs = _known_multiple(outputs, 16, EVEN)
    part_inputs = _known_multiple(part_inputs, 512, True)
    part = tl.program_id(1) // row_tiles
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = (tl.program_id(1) % row_tiles) * ROWS + tl.arange(0, ROWS)
    row_place = row.to(tl.int64) * inputs
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    begin = part * part_inputs
    end = tl.minimum(begin + part_inputs, inputs)
    for first in tl.range(begin, end, INPUTS, num_stages=STAGES):
        kind = rows.dtype.element_ty
        numbers = _numbers(
            codes, steps, output, first, outputs, inputs, width, OUTPUTS, INPUTS, GROUP, kind
        )
        at = first + tl.arange(0, INPUTS)
        inside = (at < inputs)[:, None] & (row < count)[None, :]
        entering = tl.load(rows + row_place[None, :] + at[:, None], mask=inside, other=0.0)
        total = tl.dot(numbers, entering, total)
    if GROUP == 0:
        scales = tl.load(steps + output, mask=output < outputs, other=0.0)
        total *= scales.to(tl.float32)[:, None]
    if SCALED:
        total *= tl.load(row_scales + row, mask=row < count, other=0.0)[None, :]
    place = (part * count + row).to(tl.int64) * outputs
    inside = (output < outputs)[:, None] & (row < count)[None, :]
    tl.store(result + place[None, :] + output[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["outputs", "inputs", "width"])
def dequantise_kernel(
    codes,
    steps,
    result,
    outputs,
    inputs,
    width,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Writes the weights of a block, those of eight bits without their scale."""
    inputs, width = _known_multiple(inputs, 32, EVEN), _known_multiple(width, 16, EVEN)
    outputs = _known_multiple(outputs, 16, EVEN)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * INPUTS
    kind = result.dtype.element_ty
    numbers = _numbers(
        codes, steps, output, first, outputs, inputs, width, OUTPUTS, INPUTS, GROUP, kind
    )
    at = first + tl.arange(0, INPUTS)
    place = output.to(tl.int64)[:, None] * inputs + at[None, :]
    tl.store(result + place, numbers, mask=(output < outputs)[:, None] & (at < inputs)[None, :])


@triton.jit(do_not_specialize=["count", "outputs", "parts"])
def finish_kernel(
    summands,
    steps,
    row_scales,
    result,
    count,
    outputs,
    parts,
    BLOCK: tl.constexpr,
    STEPPED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Adds the parts of a row's results in order, or scales a row's results in place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < outputs
    place = row * outputs + at
    total = tl.load(summands + place, mask=inside, other=0.0)
    step = count.to(tl.int64) * outputs
    for part in range(1, parts):
        total += tl.load(summands + (part * step + place), mask=inside, other=0.0)
    if STEPPED:
        total *= tl.load(steps + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        total *= tl.load(row_scales + row)
    tl.store(result + place, total, mask=inside)
