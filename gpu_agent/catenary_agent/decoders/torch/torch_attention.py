"""Attention of one step over a pool of caches, as the function of `transformers` layers.

The layers come from `transformers` unchanged. Their attention modules call `attend`, which stores
the new keys and values and attends to what each session has cached. There are five ways to compute
it, all of them without repeating keys for grouped queries:

* `FLASH`: one FlashAttention-2 call per layer for the whole mixed batch (Dao, arXiv 2307.08691),
  straight out of the pool: `cum_seq_k` is where each session's extent begins and `seqused_k` how
  long it is. CUDA only. Captured steps with prompts make two calls: single queries have a path of
  their own there, where those of a chunk are tiles of up to 128 rows.
* `SPLIT`: decode rows by a Triton kernel that reads rows in place, and divides long sessions among
  its programs (`split_attention`); prompts one by one. For CUDA devices without FlashAttention.
* `FLASH_AND_SPLIT`: decode rows by that kernel, and prompts by FlashAttention.
* `PADDED`: decode rows in one call on gathered, padded rows with a mask; prompts one by one.
  For CUDA devices on which none of the former is to be had.
* `EACH`: one call per session on a view of its rows: no copy, no padding, and what a session gets
  does not depend on the others. Best on a CPU, where a call costs little.

Where scores are capped, or a head has a sink, no kernel knows the formula: it is computed step by
step, over some keys at a time (`torch_formula`), as `PADDED` or as `EACH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from catenary_agent.decoders.model_files.sizes import GATHERED_BYTES
from catenary_agent.decoders.torch.torch_cache import CachePool, SessionCache
from catenary_agent.decoders.torch.torch_formula import (
    ScoreFormula,
    by_formula,
    chunk_by_formula,
    chunk_mask,
)
from catenary_agent.decoders.torch.torch_wide import narrowed

ATTENTION = "catenary"
"""The name under which `attend` is registered with `transformers`."""


class AttentionKernel(Enum):
    """The ways to compute attention; see the module."""

    FLASH = "flash"
    FLASH_AND_SPLIT = "flash and split"
    SPLIT = "split"
    PADDED = "padded"
    EACH = "each"

    @property
    def has_flash(self) -> bool:
        """True if FlashAttention computes prompts."""
        return self in {AttentionKernel.FLASH, AttentionKernel.FLASH_AND_SPLIT}

    @property
    def has_split(self) -> bool:
        """True if single queries have a kernel of their own."""
        return self in {AttentionKernel.SPLIT, AttentionKernel.FLASH_AND_SPLIT}


class AttentionMetadata:
    """The places of one step's tokens in the pool; sessions are sorted by their entry layer."""

    def __init__(
        self, caches: Sequence[SessionCache], counts: Sequence[int], cached: Sequence[int]
    ) -> None:
        """Lays out a step.

        Args:
            caches: The rows of each session, by ascending first layer.
            counts: Number of new tokens of each session.
            cached: Number of cached tokens of each session.
        """
        self.caches = list(caches)
        self.counts = list(counts)
        self.used = [before + new for before, new in zip(cached, counts, strict=True)]
        self.bounds = [0, *accumulate(counts)]
        """The first row of each session, and the number of rows: [sessions + 1]."""
        self.entries = [cache.first_layer for cache in caches]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First pool row of each session: [layers, sessions]."""
        starts: NDArray[np.int64] = np.stack([cache.starts for cache in self.caches], axis=1)
        return starts

    @cached_property
    def session_of_row(self) -> NDArray[np.int64]:
        """The place of each row's session among the step's: [rows]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Index of each row's token in its session: [rows]."""
        shifts: NDArray[np.int64] = np.array(self.used) - np.array(self.bounds[1:])
        rows: NDArray[np.int64] = np.arange(self.bounds[-1])
        return rows + shifts[self.session_of_row]

    @cached_property
    def writes(self) -> NDArray[np.int64]:
        """Pool row at which each new token is stored: [layers, rows]."""
        return self.starts[:, self.session_of_row] + self.positions

    def active(self, layer: int) -> int:
        """Returns how many sessions, from the first on, run through a layer."""
        return int(np.searchsorted(self.entries, layer, "right"))


@dataclass(slots=True)
class StepTensors:
    """The layout of a step as tensors on the device; a CUDA graph reuses their addresses."""

    plan: AttentionMetadata | None
    """The layout on the host; None under a CUDA graph, where no kernel may read it."""
    pool: CachePool
    kernel: AttentionKernel
    writes: torch.Tensor
    """Pool row of each new token: int64 [layers, rows]."""
    query_starts: torch.Tensor
    """First row of each session: int32 [sessions + 1]."""
    key_starts: torch.Tensor
    """First pool row of each session: int32 [layers, sessions + 1]; the last entry is not used."""
    used: torch.Tensor
    """Number of tokens of each session, the new ones included: int32 [sessions]."""
    most_new: int
    """The most new tokens of a session, or more: it is the extent of the kernel's grid."""
    most_used: int
    singles: StepTensors | None = None
    """The layout of the sessions with one new token, which are computed apart; None if all are
    computed together."""
    are_single: torch.Tensor | None = None
    """The first rows that are such ones: bool [rows of `singles`, 1, 1]. Under a CUDA graph
    only."""
    single_rows: torch.Tensor | None = None
    """The row of each of `singles`: int64. Without a CUDA graph only."""
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    @staticmethod
    def of(plan: AttentionMetadata, pool: CachePool, kernel: AttentionKernel) -> StepTensors:
        """Copies a layout to the pool's device."""
        device = pool.shape.device
        empty = torch.empty(0, dtype=torch.int32)
        query_starts = key_starts = used = empty
        if kernel.has_flash or kernel.has_split:
            query_starts = torch.tensor(plan.bounds, dtype=torch.int32).to(device)
            padded = np.pad(plan.starts, ((0, 0), (0, 1)), mode="edge")
            key_starts = torch.from_numpy(padded.astype(np.int32)).to(device)
            used = torch.tensor(plan.used, dtype=torch.int32).to(device)
        writes = torch.from_numpy(plan.writes).to(device)
        most = max(plan.counts), max(plan.used)
        made = StepTensors(plan, pool, kernel, writes, query_starts, key_starts, used, *most)
        single = [i for i, count in enumerate(plan.counts) if count == 1]
        if kernel.has_split and single and most[0] > 1:
            caches, cached = [plan.caches[i] for i in single], [plan.used[i] - 1 for i in single]
            alone = AttentionMetadata(caches, [1] * len(single), cached)
            made.singles = StepTensors.of(alone, pool, kernel)
            rows = torch.tensor([plan.bounds[i] for i in single])
            made.single_rows = rows.to(device)
        return made


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of `attend` from the executor, for one layer of one step."""

    step: StepTensors
    layer: int
    sessions: int
    """Number of the step's sessions, from the first on, that run through this layer."""


def attend(  # noqa: PLR0913, PLR0917  (transformers fixes the signature)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stores keys and values of the new tokens and attends to all cached ones.

    Args:
        module: The attention module.
        query: [1, heads, rows, head size], rotated.
        key: [1, key-value heads, rows, head size], rotated.
        value: The same shape as `key`.
        attention_mask: Not used; the positions determine the visible tokens.
        scaling: Factor on the scores.
        sliding_window: The most tokens that one attends to, itself included; None for all before
            it.
        softcap: The bound that scores are bent to by a hyperbolic tangent; None for none.
        s_aux: The sinks, [heads]: a score of each head that takes part in the softmax and stands
            for no token; None without.
        **others: `catenary` is the `LayerCall`.

    Returns:
        [1, rows, heads, head size] in the datatype of the caches, to which queries, keys and values
            are rounded; and None for the attention weights.
    """
    call: LayerCall = others["catenary"]
    step = call.step
    rows = query.shape[2]
    query, key, value = (narrowed(each, step.pool.shape.dtype) for each in (query, key, value))
    step.pool.write(
        step.writes[call.layer, :rows], key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return attend_stored(call, query, (scaling, sliding_window, softcap, s_aux)), None


def attend_stored(call: LayerCall, query: torch.Tensor, how: ScoreFormula) -> torch.Tensor:
    """Attends to all cached tokens of each session, the new ones included.

    Args:
        call: The layer of a step.
        query: [1, heads, rows, head size], rotated, in the datatype of the caches.
        how: The formula of scores.

    Returns:
        The same datatype, [1, rows, heads, head size].
    """
    step, plan = call.step, call.step.plan
    scaling, window, _, _ = how
    if step.kernel.has_flash or (step.kernel.has_split and step.most_new == 1):
        return _mixed(call, query[0].transpose(0, 1), scaling, window)[None]
    output = torch.empty_like(query.transpose(1, 2))
    assert plan is not None  # what follows does not run under a CUDA graph
    singly = list(range(call.sessions))
    if step.singles is not None:
        _set_singles(call, query[0].transpose(0, 1), output[0], (scaling, window))
        singly = [i for i in singly if plan.counts[i] > 1]
    if step.kernel is AttentionKernel.PADDED:
        groups = _gathered(step, [i for i in singly if plan.counts[i] == 1])
        singly = sorted(set(singly) - {i for group in groups for i in group})
        for decoding in groups:
            rows_of = torch.tensor([plan.bounds[i] for i in decoding], device=query.device)
            output[0, rows_of] = _padded(call, query[0, :, rows_of].transpose(0, 1), decoding, how)
    for i in singly:
        part = slice(plan.bounds[i], plan.bounds[i + 1])
        output[:, part] = _one(call, query[:, :, part], i, how)
    return output


def _gathered(step: StepTensors, sessions: list[int]) -> list[list[int]]:
    """Returns groups of sessions whose padded caches fit into `GATHERED_BYTES`.

    Sessions that do not fit alone are in no group.
    """
    assert step.plan is not None
    token_bytes = step.pool.keys[0].nbytes + step.pool.values[0].nbytes
    groups: list[list[int]] = []
    for session in sorted(sessions, key=step.plan.used.__getitem__):
        # The last session of a group is its longest, and all are padded to its length.
        most = GATHERED_BYTES // (step.plan.used[session] * token_bytes)
        if groups and len(groups[-1]) < most:
            groups[-1].append(session)
        elif most:
            groups.append([session])
    return groups


def _one(call: LayerCall, query: torch.Tensor, index: int, how: ScoreFormula) -> torch.Tensor:
    """Attends for one session; returns [1, rows, heads, head size]."""
    scaling, window, cap, sinks = how
    plain = cap is None and sinks is None
    step = call.step
    assert step.plan is not None
    used, new = step.plan.used[index], step.plan.counts[index]
    first = int(step.plan.starts[call.layer, index])
    # No row of the chunk attends to anything before the window of its first row.
    hidden = max(0, used - new + 1 - window) if window else 0
    keys = step.pool.keys[first + hidden : first + used].transpose(0, 1)[None]
    values = step.pool.values[first + hidden : first + used].transpose(0, 1)[None]
    if new == 1 and plain:
        # The heads that share a key head become rows of one query, so no key is repeated.
        grouped = query.reshape(1, keys.shape[1], -1, query.shape[3])
        result = functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
        return result.reshape(1, 1, query.shape[1], -1)
    if not plain:
        return chunk_by_formula(query, keys, values, (used - hidden, how)).transpose(1, 2)
    place = (index, window)
    if place not in step.masks:
        step.masks[place] = chunk_mask(new, used, window, query.device)[:, hidden:]
    result = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=step.masks[place], scale=scaling, enable_gqa=True
    )
    return result.transpose(1, 2)


def _padded(
    call: LayerCall, query: torch.Tensor, sessions: list[int], how: ScoreFormula
) -> torch.Tensor:
    """Attends for one row of each of some sessions; query and result [sessions, heads, size]."""
    scaling, window, cap, sinks = how
    step, pool = call.step, call.step.pool
    assert step.plan is not None
    used = torch.tensor([step.plan.used[i] for i in sessions], device=query.device)
    starts = torch.from_numpy(step.plan.starts[call.layer, sessions]).to(query.device)
    longest = max(step.plan.used[i] for i in sessions)
    place = torch.arange(longest, device=query.device)
    seen = place < used[:, None]
    if window:
        seen &= place >= used[:, None] - window
    places = (starts[:, None] + place).clamp_(max=pool.scratch).flatten()
    gathered = []
    for rows in (pool.keys, pool.values):
        part = rows.index_select(0, places).view(len(sessions), longest, *rows.shape[1:])
        # Rows after a session's end may be NaN, and 0 * NaN is not 0.
        part.masked_fill_(~seen[:, :, None, None], 0)
        gathered.append(part.transpose(1, 2))
    keys, values = gathered
    if cap is not None or sinks is not None:
        return by_formula(query[:, :, None], keys, values, seen[:, None], how)[:, :, 0]
    grouped = query.reshape(len(sessions), keys.shape[1], -1, query.shape[2])
    result = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=seen[:, None, None, :], scale=scaling
    )
    return result.reshape(query.shape)


def _mixed(
    call: LayerCall, query: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Attends for all sessions; query and result [rows, heads, head size]."""
    step = call.step
    if step.kernel.has_split and step.most_new == 1:
        return _split(call, query, scaling, window)
    result = _flash(call, query, scaling, window)
    singles, there = step.singles, step.are_single
    if singles is not None and there is not None:
        most = len(there)
        alone = _mixed(LayerCall(singles, call.layer, most), query[:most], scaling, window)
        torch.where(there, alone, result[:most], out=result[:most])
    elif singles is not None:
        _set_singles(call, query, result, (scaling, window))
    return result


def _set_singles(
    call: LayerCall, query: torch.Tensor, result: torch.Tensor, how: tuple[float, int | None]
) -> None:
    """Sets the rows of sessions with one new token; query and result [rows, heads, head size]."""
    singles, rows = call.step.singles, call.step.single_rows
    assert singles is not None
    assert singles.plan is not None
    assert rows is not None
    alone = LayerCall(singles, call.layer, singles.plan.active(call.layer))
    if alone.sessions:
        rows = rows[: alone.sessions]
        result.index_copy_(0, rows, _mixed(alone, query.index_select(0, rows), *how))


def _split(
    call: LayerCall, query: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Attends for one row of each session; query and result [rows, heads, head size]."""
    # Imported late: only CUDA devices have Triton.
    from catenary_agent.decoders.triton_kernels.split_attention import attend_singly

    pool = call.step.pool
    return attend_singly(
        query,
        (pool.keys, pool.values, pool.tokens),
        (call.step.key_starts, call.layer, call.step.used),
        (scaling, window),
    )


def _flash(
    call: LayerCall, query: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Attends for all sessions at once; query and result [rows, heads, head size]."""
    step = call.step
    sessions = call.sessions
    result: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        step.pool.keys,
        step.pool.values,
        step.query_starts[: sessions + 1],
        step.key_starts[call.layer, : sessions + 1],
        step.most_new,
        step.most_used,
        0.0,
        True,  # causal, aligned to the last key
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=step.used[:sessions],
    )[0]
    return result
