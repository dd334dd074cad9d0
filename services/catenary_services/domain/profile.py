"""A model's cost on each class of device, block by block: the input of the planner.

A *profile* holds, per device class and virtual-GPU level, the time of every block at some batch
sizes, taken while all virtual GPUs of the device were busy; and, whatever the device, the bytes
that cross each cut and the weights of each block. Times are measured (`catenaryd profile`) or, for
hardware one does not have, estimated; an estimate says so wherever it goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.domain.model import BlockTable
from catenary_services.errors import InvalidInput
from catenary_services.json_fields import Count, Positive, check_version, converted, document_of

PROFILE_FORMAT = "catenary-profile"
PROFILE_VERSION = 1

BlockTimes = tuple[tuple[Count, ...], ...]
"""Nanoseconds, per block, per entry of `batch_sizes`."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Block times on one virtual GPU of a device class while all its siblings are busy."""

    device_class: str
    virtual_level: Positive
    """Number of virtual GPUs the device is divided into."""
    estimated: bool
    """True if nothing was run and the times come from a model of the hardware."""
    source: str
    """A sentence that says what measured or estimated the profile, with which settings."""
    batch_sizes: tuple[Positive, ...]
    """Batch sizes with a time, ascending; the first is 1."""
    p50_ns: BlockTimes
    p95_ns: BlockTimes

    @property
    def identity(self) -> tuple[str, int]:
        """Class and level; a model's profile has at most one entry of each such pair."""
        return self.device_class, self.virtual_level

    def compute_ns(self, first: int, last: int) -> tuple[Nanoseconds, ...]:
        """Returns the times of blocks `[first, last)` at batch 1, 2, .. the largest in the profile.

        A time is the sum of the blocks' medians, interpolated linearly between measured batch
        sizes. It never falls with the batch size: a larger batch that looks faster is noise, and
        dispatch relies on the order.
        """
        sums = [sum(times) for times in zip(*self.p50_ns[first:last], strict=True)]
        rising = list(itertools.accumulate(sums, max))
        times = [rising[0]]
        for (left, below), (right, above) in itertools.pairwise(
            zip(self.batch_sizes, rising, strict=True)
        ):
            span = right - left
            times += [
                below + ((above - below) * step + span // 2) // span for step in range(1, span + 1)
            ]
        return tuple(times)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The cost of one model: times per device class and level, bytes per cut and per block."""

    model: ModelKey
    model_hash: str
    """SHA-256 of the model file. The times of another file say nothing about this one."""
    blocks: int
    cut_row_bytes: tuple[int, ...]
    """Bytes of one row on the wire in front of block i, `blocks + 1` entries; 0 at both ends."""
    block_weight_bytes: tuple[int, ...]
    devices: tuple[DeviceProfile, ...]
    cut_tensors: tuple[tuple[str, ...], ...] = ()
    """Names of the tensors at each of the `blocks + 1` boundaries; () if unknown."""

    def device(self, device_class: str, level: int) -> DeviceProfile | None:
        """Returns the times of a class at a level, None if there are none."""
        wanted = (device_class, level)
        return next((device for device in self.devices if device.identity == wanted), None)

    def levels(self, device_class: str) -> tuple[int, ...]:
        """Returns the levels at which the times of a class are known, ascending."""
        known = (d.virtual_level for d in self.devices if d.device_class == device_class)
        return tuple(sorted(known))

    def is_cut_like(self, table: BlockTable) -> bool:
        """Returns True if this profile and a block table divide the model into the same blocks."""
        if self.blocks != table.blocks:
            return False
        return not self.cut_tensors or self.cut_tensors == tensors_at_cuts(table)

    def compute_ns(
        self, device_class: str, level: int, first: int, last: int
    ) -> tuple[Nanoseconds, ...]:
        """Returns the time of blocks `[first, last)` at batch 1, 2, ..; index 0 is batch 1.

        Raises:
            InvalidInput: If `[first, last)` is not a non-empty range of blocks, or the profile
                has no times of this class and level.
        """
        if not 0 <= first < last <= self.blocks:
            raise InvalidInput("blocks", f"[{first}, {last}) is no range of {self.blocks} blocks")
        device = self.device(device_class, level)
        if device is None:
            raise InvalidInput(
                "device_class",
                f"the profile of {self.model} has no times of {device_class!r} with {level} virtual"
                f" GPU{'s' if level > 1 else ''} per device",
            )
        return device.compute_ns(first, last)

    def with_devices(self, devices: Iterable[DeviceProfile]) -> ModelProfile:
        """Returns this profile with further times, which replace those of the same class and level.

        The times are sorted by class and level, so that equal measurements give equal documents.
        """
        known = {device.identity: device for device in (*self.devices, *devices)}
        return replace(self, devices=tuple(known[each] for each in sorted(known)))


def tensors_at_cuts(table: BlockTable) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the tensors at each boundary."""
    return tuple(tuple(t.name for t in boundary.tensors) for boundary in table.boundaries)


def merged(a: ModelProfile, b: ModelProfile) -> ModelProfile:
    """Returns a profile with the times of both; those of `b` where both know a class and level.

    Measured times are never replaced by estimates.

    Raises:
        InvalidInput: The profiles are of different model files or of different cuts.
    """
    for name in ("model_hash", "blocks", "cut_row_bytes", "cut_tensors"):
        if getattr(a, name) != getattr(b, name):
            raise InvalidInput(name, f"the profiles of {a.model} and {b.model} differ in it")
    measured = {device.identity for device in a.devices if not device.estimated}
    return replace(a, block_weight_bytes=b.block_weight_bytes or a.block_weight_bytes).with_devices(
        device for device in b.devices if not (device.estimated and device.identity in measured)
    )


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as it lies on disk."""

    format: str = PROFILE_FORMAT
    version: int = PROFILE_VERSION
    model: str
    model_version: str
    model_hash: str
    blocks: Positive
    cut_row_bytes: tuple[Count, ...]
    block_weight_bytes: tuple[Count, ...]
    cut_tensors: tuple[tuple[str, ...], ...] = ()
    devices: tuple[DeviceProfile, ...]


_SAME = ("model_hash", "blocks", "cut_row_bytes", "block_weight_bytes", "cut_tensors", "devices")


def profile_document(profile: ModelProfile) -> dict[str, Any]:
    """Returns the JSON form of a profile."""
    same = {name: getattr(profile, name) for name in _SAME}
    name, version = profile.model
    document: dict[str, Any] = document_of(_Written(model=name, model_version=version, **same))
    return document


def parse_profile(document: Mapping[str, Any], where: str = "profile") -> ModelProfile:
    """Returns the profile in its JSON form.

    Raises:
        InvalidInput: A key is missing, of the wrong type or inconsistent; the field names it.
    """
    check_version(document, PROFILE_VERSION, where)
    form = document.get("format")
    if form != PROFILE_FORMAT:
        raise InvalidInput(f"{where}.format", f"is {form!r}, not {PROFILE_FORMAT!r}")
    written = converted(document, _Written, where)
    blocks, cuts = written.blocks, written.cut_row_bytes
    if len(cuts) != blocks + 1 or cuts[0] or cuts[-1]:
        raise InvalidInput(
            f"{where}.cut_row_bytes", f"does not have {blocks + 1} entries, 0 at both ends"
        )
    if len(written.block_weight_bytes) != blocks:
        raise InvalidInput(f"{where}.block_weight_bytes", f"does not have {blocks} entries")
    if len(written.cut_tensors) not in (0, blocks + 1):
        raise InvalidInput(f"{where}.cut_tensors", f"is not {blocks + 1} lists of tensor names")
    for i, device in enumerate(written.devices):
        _check_device(device, blocks, f"{where}.devices[{i}]")
    if len({device.identity for device in written.devices}) < len(written.devices):
        raise InvalidInput(f"{where}.devices", "names a class and level twice")
    same = {name: getattr(written, name) for name in _SAME}
    return ModelProfile(ModelKey(written.model, written.model_version), **same)


def _check_device(device: DeviceProfile, blocks: int, where: str) -> None:
    sizes = device.batch_sizes
    if sizes[:1] != (1,) or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise InvalidInput(f"{where}.batch_sizes", "does not ascend from 1")
    for name, rows in (("p50_ns", device.p50_ns), ("p95_ns", device.p95_ns)):
        if len(rows) != blocks:
            raise InvalidInput(
                f"{where}.{name}", f"does not have one row for each of {blocks} blocks"
            )
        for i, row in enumerate(rows):
            if len(row) != len(sizes):
                said = f"does not have one time per batch size {sizes}"
                raise InvalidInput(f"{where}.{name}[{i}]", said)
