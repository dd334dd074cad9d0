"""Completes a model's profile with estimates, so that every class of a cluster has times.

A class of the catalogue gets times from its data sheet, if the kernels of the model were counted
when it was prepared. Any other class is assumed to be as fast as the machine that prepared the
model, until its agents have measured what they loaded: `profiles` corrects estimates by that.
"""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.planning.even_split import DeployedModel
from catenary_scheduler.planning.live.groups import DeviceGroup
from catenary_services.devices.catalogue import find_device_class
from catenary_services.devices.roofline import estimate
from catenary_services.domain.model import BlockTable
from catenary_services.domain.profile import DeviceProfile, ModelProfile, tensors_at_cuts

_WEIGHT_BYTES = 4


def completed(
    model: DeployedModel, profile: ModelProfile | None, groups: Iterable[DeviceGroup]
) -> ModelProfile:
    """Returns the profile of a model with times of every group; what it knows already stays."""
    known = profile if profile is not None else _without_times(model)
    missing = [g for g in groups if known.device(g.device_class, g.level) is None]
    return known.with_devices(_estimated(model, group) for group in missing)


def weights_of(table: BlockTable) -> tuple[int, ...]:
    """Returns the bytes of each block's weights as the kernels tell them; empty if unknown."""
    sizes = [sum(each.weight_elements for each in block) for block in table.kernels]
    return tuple(round(size * _WEIGHT_BYTES) for size in sizes)


def _without_times(model: DeployedModel) -> ModelProfile:
    table = model.table
    inner = [
        each.wire_row_bytes(float16=model.float16_boundaries) for each in table.boundaries[1:-1]
    ]
    weights = model.block_bytes or weights_of(table)
    return ModelProfile(
        model.key,
        table.model_hash,
        table.blocks,
        (0, *inner, 0),
        weights,
        (),
        tensors_at_cuts(table),
    )


def _estimated(model: DeployedModel, group: DeviceGroup) -> DeviceProfile:
    table = model.table
    sizes = _batch_sizes(model.max_batch if table.batched else 1)
    sheet = find_device_class(group.device_class)
    if sheet is not None and table.kernels:
        found = estimate(table.kernels, sheet, group.level, sizes)
        return DeviceProfile(
            group.device_class,
            group.level,
            True,
            found.source,
            sizes,
            found.p50_ns,
            found.p95_ns,
        )
    times = tuple(
        tuple(max(1, block_ns) * rows * group.level for rows in sizes)
        for block_ns in table.compute_ns
    )
    source = "the speed of the machine that prepared the model"
    return DeviceProfile(group.device_class, group.level, True, source, sizes, times, times)


def _batch_sizes(largest: int) -> tuple[int, ...]:
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return tuple(sizes)
