"""Kernels that find the two finalists of each row of logits, in a handful of launches.

They do what `sampling.choosing` does, row for row and with its rules, and sort nothing. Every
kernel runs on pieces of each row; what they find of a row meets in its work memory by maxima and
sums of integers, which have one result in any order:

* `_peak_kernel`: the likeliest token, and whether the row is finite.
* `_tally_kernel`: the tokens that top-k leaves, or the weights that top-p adds up, counted by the
  size of the scaled logit. A scaled logit is negative or zero, so its bits without the sign are an
  integer that orders it. Three launches look at 11, 10 and 10 of these 31 bits and find the exact
  bound, as a radix sort would.
* `_draw_kernel`: the best two of each piece by scaled logit plus rough noise.
* `_finish_kernel`: the best two of the row, with what it takes to compare them exactly.

Sums and products are rounded one by one (no fused multiplication), so a device's weights are those
of the interpreter, bit by bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from catenary_agent.decoders.triton_kernels.launching import KernelLauncher
from catenary_agent.decoders.triton_kernels.row_table import (
    COLUMNS,
    NO_BOUND,
    RESULTS,
    RowColumn,
    StepFilters,
)

_PIECE = 8192
"""The number of tokens that a program handles, in tiles that its threads hold in registers."""
_TILE = 2048
_WARPS = 8
_MOST_PIECES = 128
MOST_WORDS = _PIECE * _MOST_PIECES
"""The largest vocabulary."""
_LEVELS = 3
_HEADER = 16
"""The first numbers of a row's work memory: its peak, and for each filter how far its search is."""

_BINS = tl.constexpr(2048)
"""The bins of a search's first launch; the later ones have half as many."""
_SMALL = tl.constexpr(1024)
_COPIES = tl.constexpr(4)
"""Copies of the first bins, which neighbouring tokens use in turn: they mostly meet in a few bins,
and a device adds to one address after the other."""
_TALLY = 2048 * 4 + 2 * 1024
"""Bins of one filter."""
_FIRST_SHARE = tl.constexpr(_HEADER)
_FIRST_COUNT = tl.constexpr(_HEADER + _TALLY)

_ROW = tl.constexpr(int(RowColumn.ROW))
_STREAM = tl.constexpr(int(RowColumn.STREAM))
_TEMPERATURE = tl.constexpr(int(RowColumn.TEMPERATURE))
_LEAST = tl.constexpr(int(RowColumn.LEAST))
_TOP_K = tl.constexpr(int(RowColumn.TOP_K))
_TOP_P = tl.constexpr(int(RowColumn.TOP_P))
_DRAWS = tl.constexpr(int(RowColumn.DRAWS))
_CODE = tl.constexpr(int(RowColumn.CODE))
_COLUMNS = tl.constexpr(COLUMNS)
_RESULTS = tl.constexpr(RESULTS)
_NO_BOUND = tl.constexpr(NO_BOUND)

# SplitMix64's numbers, as `gumbel` has them, in signed integers.
_STEP = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_TOKEN_BITS = tl.constexpr(30)
_LAST_TOKEN = tl.constexpr((1 << 30) - 1)
_SIGN = tl.constexpr(1 << 31)
_NEAR = tl.constexpr(2.0**-10)
"""Finalists that are further apart are in the order that rough noise says: its error is 2e-5 at
most above `_LOW_NOISE`."""
_LOW_NOISE = tl.constexpr(-2.0)
_SLIGHTLY_LESS = tl.constexpr(-(1 - 2.0**-24) * 2.0**-31)

_UNSPECIALISED = ["stride", "vocabulary", "work_numbers", "level"]


def row_bytes(vocabulary: int) -> int:
    """Returns the most bytes of device memory that a row takes, whatever filters it has."""
    return 8 * (_work_numbers(StepFilters(True, True, True)) + COLUMNS + RESULTS) + (
        16 * _pieces(vocabulary)
    )


def finalists(logits: torch.Tensor, table: torch.Tensor, filters: StepFilters) -> torch.Tensor:
    """Returns what `kernel_sampler.decided` needs of each row: int32 [rows, `RESULTS`].

    Args:
        logits: float32 [n, vocabulary] with contiguous rows; not changed.
        table: The parameters of the rows, int64 [rows, `COLUMNS`], on the device of the logits.
        filters: What some row of the table asks for.
    """
    rows, vocabulary, device = len(table), logits.shape[1], logits.device
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or table.dtype != torch.int64:
        raise ValueError(f"logits are {logits.dtype} with strides {logits.stride()}")
    numbers, pieces = _work_numbers(filters), _pieces(vocabulary)
    work = torch.zeros((rows, numbers), dtype=torch.int64, device=device)
    best = torch.empty((rows, pieces, 2), dtype=torch.int64, device=device)
    found = torch.empty((rows, RESULTS), dtype=torch.int32, device=device)
    grid, sizes = (pieces, rows), (logits.stride(0), vocabulary, numbers)
    peak, count, share, draw, finish = _launchers()
    peak(grid, (logits, table, work), *sizes)
    for is_asked, tally in ((filters.top_k, count), (filters.top_p, share)):
        for level in range(_LEVELS if is_asked else 0):
            tally(grid, (logits, table, work), *sizes, level)
    if filters.draws:
        draw(grid, (logits, table, work, best), *sizes)
    finish((1, rows), (logits, table, work, best, found), *sizes)
    return found


def _pieces(vocabulary: int) -> int:
    return -(-vocabulary // _PIECE)


def _work_numbers(filters: StepFilters) -> int:
    return _HEADER + _TALLY * (2 if filters.top_k else int(filters.top_p))


@cache
def _launchers() -> tuple[KernelLauncher, ...]:
    """Returns the launchers of all kernels; those of top-k and top-p share one."""
    tiles = {"PIECE": _PIECE, "TILE": _TILE}

    def of(kernel: Any, constants: dict[str, Any]) -> KernelLauncher:
        return KernelLauncher(kernel, constants, _WARPS, enable_fp_fusion=False)

    return (
        of(_peak_kernel, tiles),
        of(_tally_kernel, {"IS_SHARE": False, **tiles}),
        of(_tally_kernel, {"IS_SHARE": True, **tiles}),
        of(_draw_kernel, tiles),
        KernelLauncher(
            _finish_kernel, {"PIECES": _MOST_PIECES, "PIECE": _PIECE}, 1, enable_fp_fusion=False
        ),
    )


@triton.jit
def _packed(values, tokens):
    """Returns positive int64 in the order of the values; of equal ones the first token leads."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(bits >= 0, bits + _SIGN, -1 - bits)
    return (key << _TOKEN_BITS) | (_LAST_TOKEN - tokens)


@triton.jit
def _value(packed):
    key = packed >> _TOKEN_BITS
    bits = tl.where(key >= _SIGN, key - _SIGN, -1 - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _token(packed):
    return _LAST_TOKEN - (packed & _LAST_TOKEN)


@triton.jit
def _temperature(own):
    return tl.load(own + _TEMPERATURE).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _size(scaled):
    """Returns the integer that orders scaled logits: 0 for the likeliest."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight(scaled):
    """Returns int64 weights proportional to the probabilities: 2^40 for the likeliest."""
    within = tl.maximum(scaled, -30.0)  # the weight is zero below -27.8
    power = tl.floor(within * 1.44269504088896341 + 0.5)
    rest = within - power * 0.693359375
    rest = rest - power * -2.12194440e-4
    # The polynomial of Cephes' expf.
    series = 1.9875691500e-4 * rest + 1.3981999507e-3
    series = series * rest + 8.3334519073e-3
    series = series * rest + 4.1665795894e-2
    series = series * rest + 1.6666665459e-1
    series = series * rest + 5.0000001201e-1
    result = series * (rest * rest) + rest + 1.0
    factor = ((power.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)  # 2^(power + 40)
    return (result * factor).to(tl.int64)


@triton.jit
def _random_bits(stream, tokens):
    """Returns what `gumbel.random_bits_of` does, for int64 tokens."""
    mixed = ((tokens >> 1) + 1) * _STEP + stream
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _FIRST_FACTOR
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _SECOND_FACTOR
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    return ((mixed >> ((tokens & 1) << 5)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _rough_noise(bits):
    """Returns what `gumbel.rough_noise` does, but for the last bits."""
    share = (bits.to(tl.float32) + 0.5) * _SLIGHTLY_LESS
    # log1p: the error of the rounded sum is made good by the ratio of both differences.
    whole = share + 1.0
    rounded = whole - 1.0
    log = tl.where(rounded == 0.0, share, tl.log(whole) * (share / rounded))
    return -tl.log(-log)


@triton.jit
def _narrowed(work, bins, own, phase, level, IS_SHARE: tl.constexpr):
    """Returns how far a search is after `level` launches.

    These are the leading bits of the bound's size, and what is still to be passed among the tokens
    that have these bits.
    """
    at = tl.arange(0, _BINS)[None, :]
    copy = tl.arange(0, _COPIES)[:, None]
    is_first = level == 1
    start = tl.where(is_first, 0, _COPIES * _BINS + (level - 2) * _SMALL)
    inside = (at < tl.where(is_first, _BINS, _SMALL)) & (copy < tl.where(is_first, _COPIES, 1))
    numbers = tl.sum(tl.load(bins + start + copy * _BINS + at, mask=inside, other=0), 0)
    passed = tl.cumsum(numbers, 0)
    if IS_SHARE:
        share = tl.load(own + _TOP_P).to(tl.float64, bitcast=True)
        wanted = tl.ceil(share * tl.sum(numbers, 0).to(tl.float64)).to(tl.int64)
    else:
        wanted = tl.load(own + _TOP_K)
    before = work + phase + (level - 2) * 2
    prefix = tl.load(before, mask=level > 1, other=0)
    wanted = tl.where(is_first, wanted, tl.load(before + 1, mask=level > 1, other=0))
    is_passed = passed < wanted
    digit = tl.sum(is_passed.to(tl.int64), 0)
    prefix = prefix * tl.where(is_first, _BINS, _SMALL) + digit
    return prefix, wanted - tl.sum(tl.where(is_passed, numbers, 0), 0)


@triton.jit
def _count_bound(work, own, vocabulary):
    """Returns the size of the least likely scaled logit that top-k leaves."""
    bound = tl.full((), _NO_BOUND, tl.int64)
    top_k = tl.load(own + _TOP_K)
    if (top_k > 0) & (top_k < vocabulary):
        prefix, _ = _narrowed(work, work + _FIRST_COUNT, own, 5, 3, False)
        bound = tl.minimum(prefix, bound)
    return bound.to(tl.int32)


@triton.jit
def _share_bound(work, own):
    """Returns the size of the least likely scaled logit that top-p leaves."""
    bound = tl.full((), _NO_BOUND, tl.int64)
    if tl.load(own + _TOP_P).to(tl.float64, bitcast=True) < 1.0:
        prefix, _ = _narrowed(work, work + _FIRST_SHARE, own, 1, 3, True)
        bound = tl.minimum(prefix, bound)
    return bound.to(tl.int32)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _peak_kernel(
    logits,
    table,
    work,
    stride,
    vocabulary,
    work_numbers,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1)
    own = table + row * _COLUMNS
    values = logits + tl.load(own + _ROW) * stride
    best = tl.zeros([TILE], tl.int64)
    for start in range(0, PIECE, TILE):
        at = tl.program_id(0) * PIECE + start + tl.arange(0, TILE)
        inside = at < vocabulary
        value = tl.load(values + at, mask=inside, other=0.0)
        is_nan = value != value  # noqa: PLR0124
        value = tl.where(is_nan, float("inf"), value)  # which is as bad
        value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
        best = tl.maximum(best, tl.where(inside, _packed(value, at), 0))
    tl.atomic_max(work + row * work_numbers, tl.max(best, 0), sem="relaxed")


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _tally_kernel(
    logits,
    table,
    work,
    stride,
    vocabulary,
    work_numbers,
    level,
    IS_SHARE: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1)
    own = table + row * _COLUMNS
    work += row * work_numbers
    highest = _value(tl.load(work))
    if IS_SHARE:
        is_asked = tl.load(own + _TOP_P).to(tl.float64, bitcast=True) < 1.0
        bins = work + _FIRST_SHARE
        phase = 1
    else:
        is_asked = (tl.load(own + _TOP_K) > 0) & (tl.load(own + _TOP_K) < vocabulary)
        bins = work + _FIRST_COUNT
        phase = 5
    if (tl.abs(highest) == float("inf")) | (is_asked == 0):
        return
    prefix = tl.full((), 0, tl.int64)
    if level > 0:
        prefix, wanted = _narrowed(work, bins, own, phase, level, IS_SHARE)
        if tl.program_id(0) == 0:
            tl.store(work + phase + (level - 1) * 2, prefix)
            tl.store(work + phase + (level - 1) * 2 + 1, wanted)
    last = tl.full((), _NO_BOUND, tl.int32)
    if IS_SHARE:
        last = _count_bound(work, own, vocabulary)
    shift = 20 - level * 10
    digits = tl.where(level == 0, _BINS, _SMALL)
    start = tl.where(level == 0, 0, _COPIES * _BINS + (level - 1) * _SMALL)
    copies = tl.where(level == 0, _COPIES, 1)
    temperature = _temperature(own)
    values = logits + tl.load(own + _ROW) * stride
    for first in range(0, PIECE, TILE):
        at = tl.program_id(0) * PIECE + first + tl.arange(0, TILE)
        inside = at < vocabulary
        value = tl.load(values + at, mask=inside, other=0.0)
        scaled = tl.div_rn(value - highest, temperature)
        size = _size(scaled)
        leading = size >> shift
        digit = leading & (digits - 1)
        leads = tl.where(level == 0, 0, leading >> 10)
        inside = inside & (leads == prefix) & (size <= last)
        place = bins + start + (at & (copies - 1)) * _BINS + digit
        if IS_SHARE:
            weight = _weight(scaled)
            tl.atomic_add(place, weight, mask=inside & (weight > 0), sem="relaxed")
        else:
            tl.atomic_add(place, tl.full([TILE], 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _draw_kernel(
    logits,
    table,
    work,
    best,
    stride,
    vocabulary,
    work_numbers,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1)
    own = table + row * _COLUMNS
    work += row * work_numbers
    highest = _value(tl.load(work))
    if (tl.abs(highest) == float("inf")) | (tl.load(own + _DRAWS) == 0):
        return
    bound = tl.load(own + _LEAST).to(tl.int32)
    bound = tl.minimum(bound, _count_bound(work, own, vocabulary))
    bound = tl.minimum(bound, _share_bound(work, own))
    stream = tl.load(own + _STREAM)
    temperature = _temperature(own)
    values = logits + tl.load(own + _ROW) * stride
    leading = tl.zeros([TILE], tl.int64)
    second = tl.zeros([TILE], tl.int64)
    for start in range(0, PIECE, TILE):
        at = tl.program_id(0) * PIECE + start + tl.arange(0, TILE)
        inside = at < vocabulary
        value = tl.load(values + at, mask=inside, other=0.0)
        scaled = tl.div_rn(value - highest, temperature)
        inside = inside & (_size(scaled) <= bound)
        if tl.max(inside.to(tl.int32), 0) > 0:
            noise = _rough_noise(_random_bits(stream, at.to(tl.int64)))
            key = tl.where(inside, _packed(scaled + noise, at), 0)
            second = tl.maximum(second, tl.minimum(leading, key))
            leading = tl.maximum(leading, key)
    top = tl.max(leading, 0)
    next_to_it = tl.max(tl.where(leading == top, second, leading), 0)
    place = best + (row * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(place, top)
    tl.store(place + 1, next_to_it)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _finish_kernel(
    logits,
    table,
    work,
    best,
    found,
    stride,
    vocabulary,
    work_numbers,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(1)
    own = table + row * _COLUMNS
    found += row * _RESULTS
    peak = tl.load(work + row * work_numbers)
    highest = _value(peak)
    is_finite = tl.abs(highest) < float("inf")
    if (tl.load(own + _DRAWS) == 0) | (is_finite == 0):
        tl.store(found, tl.where(is_finite, _token(peak), tl.load(own + _CODE)).to(tl.int32))
        tl.store(found + 6, 0)
        return
    pieces = tl.cdiv(vocabulary, PIECE)
    at = tl.arange(0, PIECES)
    place = best + (row * pieces + at) * 2
    leading = tl.load(place, mask=at < pieces, other=0)
    second = tl.load(place + 1, mask=at < pieces, other=0)
    top = tl.max(leading, 0)
    next_to_it = tl.max(tl.where(leading == top, second, leading), 0)
    is_alone = next_to_it == 0
    next_to_it = tl.where(is_alone, top, next_to_it)
    two = tl.arange(0, 2)
    packed = tl.where(two == 0, top, next_to_it)
    tokens = _token(packed)
    value = tl.load(logits + tl.load(own + _ROW) * stride + tokens)
    scaled = tl.div_rn(value - highest, _temperature(own))
    tl.store(found + two, tokens.to(tl.int32))
    tl.store(found + 2 + two, _random_bits(tl.load(own + _STREAM), tokens))
    tl.store(found + 4 + two, scaled.to(tl.int32, bitcast=True))
    noise = tl.min(_value(packed) - scaled, 0)
    is_near = (_value(top) - _value(next_to_it) < _NEAR) | (noise < _LOW_NOISE)
    tl.store(found + 6, (is_near & (is_alone == 0)).to(tl.int32))
