"""The making of a profile: times are measured on the device at hand and estimated for others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from catenary_agent.devices.device import default_device_class
from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.partitioning.jailed import answer_of, work_on_model
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.preparing.counting import count_kernels
from catenary_agent.profiling.progress import MeasurementStep, ProfileProgress
from catenary_agent.profiling.sweep import ProfiledModel, ProfileSweep, count_left, measure_device
from catenary_services.devices.catalogue import PRECISIONS, device_class
from catenary_services.devices.roofline import estimate
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.model import BlockCosts, BlockTable
from catenary_services.domain.profile import (
    DeviceProfile,
    ModelProfile,
    merged,
    parse_profile,
    profile_document,
    tensors_at_cuts,
)
from catenary_services.errors import InvalidInput
from catenary_services.jail.child import JailWorkspace
from catenary_services.jail.run import run_jailed
from catenary_services.models.model_repository import ModelRepository, write_file


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """The wanted content of a profile. `checked` completes it and refuses impossible values."""

    device: str | None
    """The device to measure ("cpu", "cuda:0"); None to measure nothing."""
    device_class: str = ""
    """The name of that device in the profile; if empty, the name of its class."""
    levels: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    runs: int = 20
    estimates: tuple[str, ...] = ()
    """Device classes of the catalogue to estimate at the same levels and batch sizes."""
    precision: str = "tf32"
    """The precision of the estimates."""
    again: bool = False
    """True if what was measured before is measured again."""

    def checked(self) -> ProfileOrder:
        """Returns the order with levels and batch sizes ascending and the class named.

        Raises:
            InvalidInput: A value is out of range; the field names it.
        """
        if self.runs < 1:
            raise InvalidInput("runs", f"is {self.runs}, not at least 1")
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InvalidInput("precision", f"{self.precision!r} is none of {known}")
        if not self.levels:
            raise InvalidInput("levels", "names none")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise InvalidInput("batches", "has to be sizes from 1 on")
        if self.device is None and not self.estimates:
            raise InvalidInput("estimate", "nothing to measure and nothing to estimate")
        for level in self.levels:
            Device.parse(self.device or "cpu", virtual_level=level)
        if self.device is not None and Device.parse(self.device).kind == "emulated":
            raise InvalidInput("device", "an emulated device cannot be measured: estimate it")
        name = self.device_class
        if self.device is not None and not name:
            name = default_device_class(self.device)
        return replace(
            self,
            device_class=name,
            levels=tuple(sorted(set(self.levels))),
            # Batch 1 is always in a profile, because all others are compared with it.
            batch_sizes=tuple(sorted({1, *self.batch_sizes})),
            estimates=tuple(device_class(each).name for each in self.estimates),
        )


@dataclass(frozen=True, slots=True)
class ProfileCallbacks:
    """Functions that are told the progress of the work."""

    begin: Callable[[int], None] = lambda _steps: None
    """Called with the number of measurements that are left."""
    step: Callable[[MeasurementStep], None] = lambda _step: None
    """Called after each measurement."""


def profile_model(
    repository: ModelRepository,
    key: ModelKey,
    order: ProfileOrder,
    target: Path,
    callbacks: ProfileCallbacks | None = None,
) -> ModelProfile:
    """Writes and returns the model's profile: what its file has already, and what was ordered.

    Until everything is measured, results are kept beside the target in a file that is removed at
    the end. A later call with the same model file, cuts, device and settings continues from there.

    Args:
        repository: The repository with the model, cut into blocks.
        key: The model.
        order: What to measure and estimate.
        target: The profile's file. One of another model file or of other cuts is replaced.
        callbacks: Functions that are told the progress.

    Raises:
        ModelNotFound: The model has no block table or no file.
        InvalidInput: The order is impossible.
        CatenaryError: The device cannot run the model.
    """
    order = order.checked()
    callbacks = callbacks or ProfileCallbacks()
    table = repository.block_table(key)
    repository.model_hash(key)  # raises if the model's file is missing
    if not table.batched:
        order = replace(order, batch_sizes=(1,))
    fresh = describe_model(repository, key, table)
    known = _still_good(target, table)
    progress = ProfileProgress(target.with_name(f"{target.name}.partial"), table)
    if not order.again:
        progress.take_up(known)
    devices: list[DeviceProfile] = []
    if order.device is not None:
        subject = ProfiledModel(repository, key, table.blocks)
        sweep = ProfileSweep(
            Device.parse(order.device),
            order.device_class,
            order.levels,
            order.batch_sizes,
            order.runs,
        )
        callbacks.begin(count_left(subject, sweep, progress))
        devices += measure_device(subject, sweep, progress, callbacks.step)
    if order.estimates:
        costs = count_costs(repository, key, table)
        devices += [
            estimate(costs, device_class(name), level, order.batch_sizes, order.precision)
            for name in order.estimates
            for level in order.levels
        ]
    profile = fresh.with_devices(devices)
    if known is not None:
        profile = merged(known, profile)
    write_file(target, json.dumps(profile_document(profile)) + "\n")
    progress.finish()
    return profile


def describe_model(repository: ModelRepository, key: ModelKey, table: BlockTable) -> ModelProfile:
    """Returns the profile without any times: bytes over the cuts, weights of the parts."""
    float16 = repository.manifest(key).float16_boundaries
    inner = [boundary.wire_row_bytes(float16=float16) for boundary in table.boundaries[1:-1]]
    weights = []
    for block in range(table.blocks):
        # This also extracts each part into the cache, so that the measuring processes only read it.
        executor = load_executor(
            repository,
            PartitionKey(key, block, block + 1),
            device=Device("cpu"),
            float16_boundaries=float16,
        )
        weights.append(executor.memory_bytes)
        executor.close()
    return ModelProfile(
        model=key,
        model_hash=table.model_hash,
        blocks=table.blocks,
        cut_row_bytes=(0, *inner, 0),
        block_weight_bytes=tuple(weights),
        devices=(),
        cut_tensors=tensors_at_cuts(table),
    )


def count_costs(repository: ModelRepository, key: ModelKey, table: BlockTable) -> BlockCosts:
    """Returns the kernels of every block for one row: those of the table, or counted in the jail.

    Raises:
        InvalidInput: The model cannot be read.
    """
    if table.kernels:
        return table.kernels
    platform, file = repository.manifest(key).platform, repository.model_file(key)
    blocks = [PartitionKey(key, block, block + 1) for block in range(table.blocks)]
    order = CostOrder(
        platform,
        file.name,
        table,
        tuple(PartitionSignature.of(repository, block, False) for block in blocks),
    )
    target = f"{count_in_jail.__module__}:{count_in_jail.__name__}"
    answer = run_jailed(work_on_model(file, platform, target, msgspec.json.encode(order)))
    costs = answer_of(answer, BlockCosts, file.name)
    if len(costs) != table.blocks:
        raise InvalidInput(file.name, "has costs of other blocks than its own")
    return costs


class CostOrder(msgspec.Struct, frozen=True):
    """The order to count a model's arithmetic."""

    platform: str
    file: str
    table: BlockTable
    blocks: tuple[PartitionSignature, ...]


def count_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Counts the kernels of an encoded `CostOrder`; answers with encoded `BlockCosts`."""
    order = msgspec.json.decode(job, type=CostOrder)
    file = room.inputs[0] / order.file
    return msgspec.json.encode(count_kernels(order.platform, file, order.table, order.blocks))


def _still_good(file: Path, table: BlockTable) -> ModelProfile | None:
    """Returns the profile in a file; None if it is of another model file or other cuts.

    Raises:
        InvalidInput: The file is no profile at all, so it might be something else of value.
    """
    try:
        known = parse_profile(json.loads(file.read_bytes()), file.name)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInput(file.name, f"is not a profile: {error}") from None
    return known if known.model_hash == table.model_hash and known.is_cut_like(table) else None
