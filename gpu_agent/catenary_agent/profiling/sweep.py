"""The measurement of a device: every level, block and batch size, with all virtual GPUs busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from catenary_agent.devices.device import default_device_class
from catenary_agent.devices.processor import host_cores, processor_model
from catenary_agent.executors.device import Device
from catenary_agent.profiling.progress import MeasurementStep, ProfileProgress
from catenary_agent.profiling.samples import SHARED_SPAN_NS, MeasurementSummary, summarise
from catenary_agent.profiling.siblings import SiblingProcesses, virtual_gpus
from catenary_agent.profiling.worker import LoadBlock, RunBlock
from catenary_agent.share import default_threads, isolation_of
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.profile import DeviceProfile
from catenary_services.errors import Unavailable
from catenary_services.models.model_repository import ModelRepository

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class ProfileSweep:
    """The range of a measurement."""

    device: Device
    device_class: str
    levels: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    runs: int
    """The least number of runs for each block, batch size and virtual GPU."""


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """The model that is measured."""

    repository: ModelRepository
    key: ModelKey
    blocks: int


def measure_device(
    subject: ProfiledModel,
    sweep: ProfileSweep,
    progress: ProfileProgress,
    on_step: Callable[[MeasurementStep], None],
) -> list[DeviceProfile]:
    """Returns the times of every level; steps that `progress` has already are not repeated.

    Raises:
        CatenaryError: A block cannot be loaded or run on the device.
        Unavailable: A measuring process died.
    """
    found = []
    for level in sweep.levels:
        device = replace(sweep.device, virtual_level=level)
        source = describe_measurement(subject, device, sweep.runs)
        name = sweep.device_class
        left = [
            [
                MeasurementStep(level, block, rows)
                for rows in sweep.batch_sizes
                if not progress.is_done(name, source, MeasurementStep(level, block, rows))
            ]
            for block in range(subject.blocks)
        ]
        if any(left):
            with virtual_gpus(subject.repository.root, device) as siblings:
                for step, summary in _measure(subject, siblings, left, sweep.runs):
                    progress.add(name, source, step, summary)
                    on_step(step)
        found.append(
            progress.device_profile(name, source, level, subject.blocks, sweep.batch_sizes)
        )
    return found


def count_left(subject: ProfiledModel, sweep: ProfileSweep, progress: ProfileProgress) -> int:
    """Returns the number of steps that `measure_device` will take."""
    return sum(
        not progress.is_done(
            sweep.device_class,
            describe_measurement(subject, replace(sweep.device, virtual_level=level), sweep.runs),
            MeasurementStep(level, block, rows),
        )
        for level in sweep.levels
        for block in range(subject.blocks)
        for rows in sweep.batch_sizes
    )


def _measure(
    subject: ProfiledModel, siblings: SiblingProcesses, left: list[list[MeasurementStep]], runs: int
) -> Iterator[tuple[MeasurementStep, MeasurementSummary]]:
    float16 = subject.repository.manifest(subject.key).float16_boundaries
    for block, steps in enumerate(left):
        if not steps:
            continue
        siblings.load(LoadBlock(PartitionKey(subject.key, block, block + 1), float16))
        for step in steps:
            yield step, _one_step(siblings, step, runs)


def _one_step(siblings: SiblingProcesses, step: MeasurementStep, runs: int) -> MeasurementSummary:
    span_ns = SHARED_SPAN_NS * runs if step.level > 1 else 0
    for _ in range(_ATTEMPTS):
        summary = summarise(siblings.run(RunBlock(step.rows, runs, span_ns)))
        if summary is not None:
            return summary
    raise Unavailable(
        f"block {step.block}: {step.level} processes never ran at the same time; is the host busy?"
    )


def describe_measurement(subject: ProfiledModel, device: Device, runs: int) -> str:
    """Returns in words how a level is measured; results with equal words may be mixed."""
    torch = subject.repository.manifest(subject.key).platform == "pytorch_exported"
    runtime = "torch" if torch else "onnxruntime"
    parts = [f"measured: {runtime} {_version(runtime)}", _hardware(device)]
    if device.kind == "cpu":
        threads = default_threads(device)
        parts.append(f"{threads} thread{'s' if threads > 1 else ''} each")
    if device.virtual_level > 1:
        parts.append(f"{device.virtual_level} busy processes, {isolation_of(device)}")
    return ", ".join((*parts, f"{runs} runs"))


def _hardware(device: Device) -> str:
    if device.kind == "cuda":
        return default_device_class(str(device))
    return f"{host_cores()} cores of {processor_model()}"


def _version(package: str) -> str:
    for name in (package, f"{package}-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
