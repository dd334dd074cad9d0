"""Attention of single queries to what each session has cached, read where it lies in the pool.

A program attends for all query heads of one key head, so that each key is read once, and to a part
of a session's tokens, so that few sessions keep a device busy, too. Its result is a sum weighted by
exponentials, with their largest exponent and their total, all in float32; a second kernel adds the
parts in order. The number of parts follows from the shape of the step alone, and how many tokens
one has is computed on the device, so a captured launch holds for all lengths. The design is
flash-decoding's; see "ADR 0055".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import e, log2

import torch
import triton
import triton.language as tl

from catenary_agent.decoders.model_files.sizes import GATHERED_BYTES
from catenary_agent.decoders.triton_kernels.launching import KernelLauncher

MOST_SIZE = 256
"""The largest head."""
MOST_GROUP = 64
"""The most query heads of a key head."""
_PROGRAMS = 1024
"""The programs up to which tokens are divided: about eight for each multiprocessor of a large
card, two rounds of what is there at a time."""
_MOST_PARTS = 64
_MATRIX_ROWS = 16
"""The fewest rows that matrix units multiply."""
_SUMMED = 8192
"""The products that a program without matrix units has in registers at a time."""
_EVERYTHING = 2**31 - 1
"""The window of a layer without one."""


@triton.jit
def _part_tokens(tokens, parts, BLOCK: tl.constexpr):
    """Returns how many tokens all but the last part have."""
    return tl.cdiv(tl.cdiv(tokens, parts), BLOCK) * BLOCK


@triton.jit(do_not_specialize=["first_start", "window"])
def part_kernel(
    query,
    keys,
    values,
    key_starts,
    used,
    result,
    sums,
    weights,
    first_start,
    window,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DOTS: tl.constexpr,
):
    """Attends to a part of a session's tokens with the query heads of a key head."""
    place = tl.program_id(0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    session, head = place // KEY_HEADS, place % KEY_HEADS
    last = tl.load(used + session)
    hidden = tl.maximum(last - window, 0)
    tokens = _part_tokens(last - hidden, parts, BLOCK)
    begin = hidden + part * tokens
    if begin >= last:
        return
    end = tl.minimum(begin + tokens, last)
    member, column = tl.arange(0, TILE), tl.arange(0, WIDE)
    is_column = column < SIZE
    is_number = (member < GROUP)[:, None] & is_column[None, :]
    numbers = (place * GROUP + member)[:, None] * SIZE + column[None, :]
    asked = tl.load(query + numbers, mask=is_number, other=0.0)
    start = tl.load(key_starts + first_start + session).to(tl.int64) + begin
    cached = (start * KEY_HEADS + head) * SIZE
    offset = tl.arange(0, BLOCK)[:, None] * (KEY_HEADS * SIZE) + column[None, :]
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sum_ = tl.zeros((TILE, WIDE), tl.float32)
    for first in tl.range(begin, end, BLOCK, num_stages=STAGES):
        is_token = first + tl.arange(0, BLOCK) < end
        # Rows after a session's end may be NaN, and 0 * NaN is not 0.
        there = is_token[:, None] & is_column[None, :]
        key = tl.load(keys + cached + offset, mask=there, other=0.0)
        value = tl.load(values + cached + offset, mask=there, other=0.0)
        if DOTS:
            scores = tl.dot(asked, tl.trans(key))
        else:
            product = asked.to(tl.float32)[:, None, :] * key.to(tl.float32)[None, :, :]
            scores = tl.sum(product, 2)
        scores = tl.where(is_token[None, :], scores * SCALE, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        shrunk = tl.exp2(top - peak)
        weight = tl.exp2(scores - peak[:, None])
        total = total * shrunk + tl.sum(weight, 1)
        sum_ = sum_ * shrunk[:, None]
        if DOTS:
            sum_ = tl.dot(weight.to(value.dtype), value, sum_)
        else:
            sum_ += tl.sum(weight[:, :, None] * value.to(tl.float32)[None, :, :], 1)
        top = peak
        cached += BLOCK * KEY_HEADS * SIZE
    if parts == 1:
        made = (sum_ / total[:, None]).to(result.dtype.element_ty)
        tl.store(result + numbers, made, mask=is_number)
    else:
        row = (place * GROUP + member) * parts + part
        tl.store(sums + row[:, None].to(tl.int64) * SIZE + column[None, :], sum_, mask=is_number)
        tl.store(weights + 2 * row, top, mask=member < GROUP)
        tl.store(weights + 2 * row + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["parts", "window"])
def sum_kernel(
    used,
    sums,
    weights,
    result,
    parts,
    window,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Adds the parts of one head of a session, some at a time."""
    place = tl.program_id(0)
    last = tl.load(used + place // HEADS)
    tokens = last - tl.maximum(last - window, 0)
    count = tl.cdiv(tokens, _part_tokens(tokens, parts, BLOCK))
    column = tl.arange(0, WIDE)
    is_column = column < SIZE
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sum_ = tl.zeros((WIDE,), tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        is_part = part < count
        row = place * parts + part
        tops = tl.load(weights + 2 * row, mask=is_part, other=float("-inf"))
        totals = tl.load(weights + 2 * row + 1, mask=is_part, other=0.0)
        there = is_part[:, None] & is_column[None, :]
        rows = tl.load(
            sums + row[:, None].to(tl.int64) * SIZE + column[None, :], mask=there, other=0.0
        )
        peak = tl.maximum(top, tl.max(tops, 0))
        shrunk, weight = tl.exp2(top - peak), tl.exp2(tops - peak)
        total = total * shrunk + tl.sum(weight * totals, 0)
        sum_ = sum_ * shrunk + tl.sum(weight[:, None] * rows, 0)
        top = peak
    made = (sum_ / total).to(result.dtype.element_ty)
    tl.store(result + place * SIZE + column, made, mask=is_column)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The block that a program attends to at a time, and how."""

    tokens: int
    stages: int
    """The number of blocks of tokens that are on their way or in use at a time."""
    warps: int = 4
    has_dots: bool = True
    """Whether matrix units multiply; else products are added one by one."""


def tile_of(group: int, size: int, *, has_dots: bool) -> AttentionTile:
    """Returns the tile for some query heads of a key head."""
    wide = triton.next_power_of_2(size)
    if has_dots:
        return AttentionTile(64 if wide <= 128 else 32, stages=3)
    tokens = max(2, min(64, _SUMMED // (triton.next_power_of_2(group) * wide)))
    return AttentionTile(tokens, stages=1, has_dots=False)


def parts_of(sessions: int, key_heads: int, pool_tokens: int, part_bytes: int) -> int:
    """Returns into how many parts the tokens of each session are divided.

    Args:
        sessions: Number of sessions, with those that pad a captured step.
        key_heads: Number of heads of the keys.
        pool_tokens: The most tokens of a session.
        part_bytes: The bytes of the results of one part of all sessions.
    """
    room = max(1, sessions * key_heads)
    return max(1, min(_PROGRAMS // room, _MOST_PARTS, pool_tokens // 64, _most(part_bytes)))


def _most(part_bytes: int) -> int:
    # Captured steps keep one of the two buffers that tables count for gathered caches.
    return GATHERED_BYTES // max(1, part_bytes)


def attend_singly(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor, int],
    places: tuple[torch.Tensor, int, torch.Tensor],
    how: tuple[float, int | None],
    tile: AttentionTile | None = None,
) -> torch.Tensor:
    """Attends for one query of each session; query and result [sessions, heads, head size].

    Args:
        query: The queries, in the datatype of the caches.
        pool: Keys and values [rows, key heads, head size], and the most rows of a session.
        places: First pool row of each session in each layer, int32 [layers, columns]; the layer;
            and how many tokens each session has, int32.
        how: The factor on scores, and the most tokens that one attends to, None for all.
        tile: The tile; None for the one of this device.
    """
    keys, values, pool_tokens = pool
    starts, layer, used = places
    scaling, window = how
    sessions, heads, size = query.shape
    key_heads = keys.shape[1]
    if heads % key_heads or keys.shape[2] != size or not starts.is_contiguous():
        raise ValueError(f"queries {list(query.shape)} do not go with keys {list(keys.shape)}")
    if tile is None:
        tile = tile_of(heads // key_heads, size, has_dots=_has_matrix_units(query.device))
    attend, add = _launchers(key_heads, heads // key_heads, size, scaling, tile)
    query = query.contiguous()
    result = torch.empty_like(query)
    parts = parts_of(sessions, key_heads, pool_tokens, 4 * sessions * heads * (size + 2))
    sums = weights = result  # of one part there is nothing to add
    if parts > 1:
        sums = query.new_empty((sessions, heads, parts, size), dtype=torch.float32)
        weights = query.new_empty((sessions, heads, parts, 2), dtype=torch.float32)
    seen = _EVERYTHING if window is None else window
    tensors = query, keys, values, starts, used, result, sums, weights
    attend((sessions * key_heads, parts), tensors, layer * starts.shape[1], seen)
    if parts > 1:
        add((sessions * heads, 1), (used, sums, weights, result), parts, seen)
    return result


@cache
def _has_matrix_units(device: torch.device) -> bool:
    """Returns False for cards before Ampere, whose matrix units Triton does not use."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _launchers(
    key_heads: int, group: int, size: int, scaling: float, tile: AttentionTile
) -> tuple[KernelLauncher, KernelLauncher]:
    wide, rows = triton.next_power_of_2(size), triton.next_power_of_2(group)
    heads = {
        "KEY_HEADS": key_heads,
        "GROUP": group,
        "SIZE": size,
        "SCALE": scaling * log2(e),
        "TILE": max(rows, _MATRIX_ROWS) if tile.has_dots else rows,
        "WIDE": wide,
        "BLOCK": tile.tokens,
        "STAGES": tile.stages,
        "DOTS": tile.has_dots,
    }
    added = {
        "HEADS": key_heads * group,
        "SIZE": size,
        "WIDE": wide,
        "BLOCK": tile.tokens,
        "PARTS": 16,
    }
    attend = KernelLauncher(part_kernel, heads, tile.warps)
    return attend, KernelLauncher(sum_kernel, added, warps=4)
