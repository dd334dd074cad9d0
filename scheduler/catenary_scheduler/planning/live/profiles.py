"""Block times of a model on a group of agents: its profile, corrected by measurements.

Agents measure whole partitions when they load them. The ratio of measured to profiled time of a
partition applies to each of its blocks. If several partitions cover a block, the mean of their
ratios applies.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from catenary_scheduler.planning.even_split import DeployedModel
from catenary_scheduler.planning.live.groups import DeviceGroup
from catenary_scheduler.planning.pooled.problem import BlockTimes
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey
from catenary_services.domain.profile import DeviceProfile, ModelProfile

MeasuredTimes = Mapping[tuple[AgentId, PartitionKey], Sequence[Nanoseconds]]
"""Compute times in nanoseconds of loaded partitions at batch 1, 2, .. as agents reported them."""

_NS_PER_US = 1_000.0
_LEAST_US = 1.0


def origins(
    models: Iterable[tuple[DeployedModel, ModelProfile]],
    groups: Iterable[DeviceGroup],
    measured: MeasuredTimes,
    served: Container[tuple[AgentId, PartitionKey]],
) -> list[str]:
    """Returns a statement about every model and group: where its times come from.

    Args:
        models: The models with their completed profiles.
        groups: The groups of agents.
        measured: The times that agents measured.
        served: The places whose times were corrected by batches that were served.
    """
    classes = list(groups)
    return [
        _origin(model, device, group, measured, served)
        for model, profile in models
        for group in classes
        if (device := profile.device(group.device_class, group.level)) is not None
    ]


def _origin(
    model: DeployedModel,
    device: DeviceProfile,
    group: DeviceGroup,
    measured: MeasuredTimes,
    served: Container[tuple[AgentId, PartitionKey]],
) -> str:
    kind = "estimates" if device.estimated else "those of its profile"
    said = f"times of {model.key} on {group.name} are {kind}: {device.source}"
    members = {agent.agent_id for agent in group.agents}
    places = [p for p in measured if p[0] in members and p[1].model == model.key]
    if not places:
        return said
    when = "while serving" if any(place in served for place in places) else "at load"
    agents = len({agent for agent, _ in places})
    return f"{said}; corrected by what {agents} of its agents measured {when}"


def corrections(
    models: Iterable[tuple[DeployedModel, ModelProfile]],
    groups: Iterable[DeviceGroup],
    measured: MeasuredTimes,
) -> dict[tuple[ModelKey, str], float]:
    """Returns the mean factor by which measurements correct the times of each model and group."""
    classes = list(groups)
    found: dict[tuple[ModelKey, str], float] = {}
    for model, profile in models:
        for group in classes:
            device = profile.device(group.device_class, group.level)
            if device is not None:
                times = _profiled_times(model, device)
                factor = _correction(model, device, group, measured, times)
                found[model.key, group.name] = float(factor.mean())
    return found


def block_times(
    model: DeployedModel, device: DeviceProfile, group: DeviceGroup, measured: MeasuredTimes
) -> BlockTimes:
    """Returns block times in us, shape (blocks, batch sizes), up to the largest batch."""
    times = _profiled_times(model, device)
    times *= _correction(model, device, group, measured, times)
    return np.maximum(times / _NS_PER_US, _LEAST_US)


def _profiled_times(model: DeployedModel, device: DeviceProfile) -> BlockTimes:
    """Returns the times of a profile in ns, at least 1."""
    blocks = model.table.blocks
    times = np.array(
        [device.compute_ns(block, block + 1) for block in range(blocks)], dtype=np.float64
    )
    largest = model.max_batch if model.table.batched else 1
    return np.maximum(times[:, :largest], 1.0)


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
        per_row = taken[model.table.row_units - 1 :: model.table.row_units]
        if not per_row:
            continue
        blocks = slice(key.first_block, key.last_block)
        ratio = _ratio(per_row, times[blocks].sum(axis=0))
        if group.level > 1 and not device.estimated:
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
