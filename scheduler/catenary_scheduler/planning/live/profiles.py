"""Block times of a model on a group of agents: its profile, corrected by measurements.

Agents measure whole partitions when they load them. The ratio of measured to profiled time of a
partition applies to each of its blocks. If several partitions cover a block, the mean of their
ratios applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from catenary_scheduler.planning.even_split import DeployedModel
from catenary_scheduler.planning.live.groups import DeviceGroup
from catenary_scheduler.planning.pooled.problem import BlockTimes
from catenary_services.domain.ids import AgentId, Nanoseconds, PartitionKey
from catenary_services.domain.profile import DeviceProfile, ModelProfile

MeasuredTimes = Mapping[tuple[AgentId, PartitionKey], Sequence[Nanoseconds]]
"""Compute times in nanoseconds of loaded partitions at batch 1, 2, .. as agents reported them."""

_NS_PER_US = 1_000.0
_LEAST_US = 1.0


def unknown(
    models: Iterable[tuple[DeployedModel, ModelProfile | None]], groups: Iterable[DeviceGroup]
) -> list[str]:
    """Returns in words the times that a pooled plan of all agents needs and nobody knows."""
    lacking = []
    classes = list(groups)
    for model, profile in models:
        if profile is None:
            lacking.append(f"{model.key} has no profile")
            continue
        missing = [g.name for g in classes if profile.device(g.device_class, g.level) is None]
        if missing:
            lacking.append(f"the profile of {model.key} does not know {', '.join(missing)}")
    return lacking


def estimated(
    models: Iterable[tuple[DeployedModel, ModelProfile | None]], groups: Iterable[DeviceGroup]
) -> list[str]:
    """Returns in words the times of a plan that were estimates."""
    classes = list(groups)
    found = []
    for model, profile in models:
        for group in classes:
            device = profile and profile.device(group.device_class, group.level)
            if device and device.estimated:
                found.append(f"times of {model.key} on {group.name} are estimates: {device.source}")
    return found


def block_times(
    model: DeployedModel, device: DeviceProfile, group: DeviceGroup, measured: MeasuredTimes
) -> BlockTimes:
    """Returns block times in us, shape (blocks, batch sizes), up to the largest batch."""
    blocks = model.table.blocks
    times = np.array(
        [device.compute_ns(block, block + 1) for block in range(blocks)], dtype=np.float64
    )
    largest = model.max_batch if model.table.batched else 1
    times = times[:, :largest]
    times *= _correction(model, device, group, measured, times)
    return np.maximum(times / _NS_PER_US, _LEAST_US)


def _correction(
    model: DeployedModel,
    device: DeviceProfile,
    group: DeviceGroup,
    measured: MeasuredTimes,
    times: BlockTimes,
) -> BlockTimes:
    """Returns the factor by which measurements correct the profile, per block and batch size."""
    sums, counts = np.zeros_like(times), np.zeros(times.shape[0])
    members = {agent.agent_id for agent in group.agents}
    for (agent, key), taken in measured.items():
        if key.model != model.key or agent not in members or not taken:
            continue
        blocks = slice(key.first_block, key.last_block)
        ratio = _ratio(taken, times[blocks].sum(axis=0))
        if group.level > 1:
            # Agents measure on loading, when the other virtual GPUs may be idle; profiles are
            # measured with all of them busy.
            ratio = np.maximum(ratio, 1.0)
        sums[blocks] += ratio
        counts[blocks] += 1
    known = counts > 0
    factor = np.ones_like(times)
    factor[known] = sums[known] / counts[known, np.newaxis]
    if device.estimated and known.any():
        factor[~known] = factor[known].mean(axis=0)  # an estimate is likely off alike everywhere
    return factor


def _ratio(taken: Sequence[Nanoseconds], profiled: BlockTimes) -> BlockTimes:
    """Returns measured / profiled per batch size.

    Beyond the last measured size its ratio is repeated.
    """
    size = min(len(taken), len(profiled))
    ratio = np.full(len(profiled), taken[size - 1] / profiled[size - 1])
    ratio[:size] = np.asarray(taken[:size], dtype=np.float64) / profiled[:size]
    return ratio
