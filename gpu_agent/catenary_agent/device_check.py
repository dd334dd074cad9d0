"""A check that an agent can compute on its GPU, before it reports that it is ready.

A driver that is too old, a wheel built for other cards, memory that another process holds: each
would otherwise be found by the first request. The fault is described in one sentence, as an error
of the configuration. `what_is_missing` decides from facts alone; `check_device` gathers them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

from catenary_agent.devices.cuda_driver import (
    CudaDevice,
    CudaDriver,
    NoDriverError,
    Version,
    ask_driver,
)
from catenary_agent.devices.processor import host_memory_bytes
from catenary_agent.executors.device import Device
from catenary_services.errors import InvalidInput
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.devices.device")

CUDA_PROVIDER = "CUDAExecutionProvider"
LEAST_SHARE = 0.75
"""The least free memory, as a share of `memory_bytes`, with which an agent starts. It is below 1
because contexts of virtual GPUs beside it take some hundred megabytes each."""
_OLDEST_DRIVERS = {11: "R450", 12: "R525", 13: "R580"}
"""The first driver series of each CUDA major version, within which any driver runs any runtime."""
_OLD_CARDS: Version = (7, 5)
"""Compute capabilities below this (Turing) are not supported by CUDA 13."""
_NEWEST_CUDA = 13
"""The newest CUDA major version for which there is an extra."""
_ARCHITECTURE = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<only>[af]?)")


@dataclass(frozen=True, slots=True)
class InstalledLibraries:
    """The facts about installed libraries that matter for a GPU."""

    torch: str = ""
    """PyTorch's version; empty if it is not installed."""
    torch_cuda: Version | None = None
    """The CUDA version PyTorch was built with; None if it was built without."""
    torch_architectures: Sequence[str] = ()
    """The architectures PyTorch has kernels for, e.g. "sm_90", "compute_90"."""
    onnx: str = ""
    """ONNX Runtime's version; empty if it is not installed."""
    onnx_providers: Sequence[str] = ()
    onnx_cuda: Version | None = None
    """The CUDA version ONNX Runtime was built with; None if its package does not say."""


def check_device(device: Device, memory_bytes: int) -> int | None:
    """Checks that an agent can compute on `device`, and that it has the memory.

    Args:
        device: The device of the agent.
        memory_bytes: The memory it intends to use for partitions.

    Returns:
        The free memory of a GPU in bytes; None if it is unknown.

    Raises:
        InvalidInput: It cannot; the message has one sentence that says why.
    """
    if device.kind == "cpu" and memory_bytes > host_memory_bytes():
        raise InvalidInput(
            "memory_bytes",
            f"is {_giga(memory_bytes)}, of {_giga(host_memory_bytes())} that are here",
        )
    if device.kind != "cuda":
        return None
    try:
        driver = ask_driver(free_of=device.index)
    except NoDriverError as error:
        raise InvalidInput("device", f"{device}: {error}") from None
    wheels = installed_wheels()
    missing = what_is_missing(device, driver, wheels, memory_bytes)
    if missing is not None:
        raise InvalidInput("device", f"{device}: {missing}")
    card = driver.cards[device.index]
    _log.info(
        "device_checked",
        device=str(device),
        card=card.name,
        capability=_dotted(card.capability),
        driver_cuda=_dotted(driver.cuda),
        free_bytes=card.free_bytes,
        torch=wheels.torch,
        onnxruntime=wheels.onnx,
        onnx_on_gpu=_onnx_fault(wheels, driver) is None,
    )
    return card.free_bytes


def what_is_missing(
    device: Device, driver: CudaDriver, wheels: InstalledLibraries, memory_bytes: int
) -> str | None:
    """Returns what keeps an agent from computing on a GPU, as one sentence; None if nothing does.

    One suitable library is enough: an agent of vision models needs no PyTorch, one of language
    models no ONNX Runtime. A model for the other library is refused when it is loaded.
    """
    if device.index >= len(driver.cards):
        there = len(driver.cards)
        names = f"cuda:0 to cuda:{there - 1}" if there > 1 else "cuda:0"
        return (
            f"there is no such GPU; the driver shows {there} ({names})"
            if there
            else ("the NVIDIA driver shows no GPU to this process")
        )
    card = driver.cards[device.index]
    of_torch = _torch_fault(wheels, driver, card.capability)
    if of_torch is not None and _onnx_fault(wheels, driver) is not None:
        of_onnx = _onnx_fault(wheels, driver)
        return f"{card.name} cannot be used: {of_torch}; {of_onnx}; {_advice(card, driver)}"
    if memory_bytes > card.total_bytes:
        return (
            f"{card.name} has {_giga(card.total_bytes)} and this agent counts on"
            f" {_giga(memory_bytes)}; set memory_bytes"
        )
    if card.free_bytes is not None and card.free_bytes < LEAST_SHARE * memory_bytes:
        return (
            f"{_giga(card.free_bytes)} of {_giga(card.total_bytes)} are free and this agent counts "
            f"on {_giga(memory_bytes)}; end what holds the rest, or set memory_bytes"
        )
    return None


def runs_on(architectures: Sequence[str], capability: Version) -> bool:
    """Returns True if kernels built for some architectures run on a card.

    Machine code ("sm_") runs on cards of the same major version that are no older; code of an
    intermediate form ("compute_") is compiled by the driver for any card that is no older. A suffix
    "a" restricts code to one card, "f" to those of its major version.
    """
    for each in architectures:
        found = _ARCHITECTURE.fullmatch(each)
        if found is None:
            continue
        built = int(found["major"]), int(found["minor"])
        if found["only"] == "a":
            fits = built == capability
        elif found["kind"] == "sm" or found["only"] == "f":
            fits = built[0] == capability[0] and built <= capability
        else:
            fits = built <= capability
        if fits:
            return True
    return False


def _torch_fault(wheels: InstalledLibraries, driver: CudaDriver, capability: Version) -> str | None:
    if not wheels.torch:
        return "PyTorch is not installed"
    if wheels.torch_cuda is None:
        return f"PyTorch {wheels.torch} is built without CUDA"
    if driver.cuda[0] < wheels.torch_cuda[0]:
        return f"PyTorch {wheels.torch} {_driver_needed(wheels.torch_cuda, driver)}"
    if not runs_on(wheels.torch_architectures, capability):
        return (
            f"PyTorch {wheels.torch} has no kernels for compute capability {_dotted(capability)}"
            f" (it has {' '.join(wheels.torch_architectures)})"
        )
    return None


def _onnx_fault(wheels: InstalledLibraries, driver: CudaDriver) -> str | None:
    if not wheels.onnx:
        return "ONNX Runtime is not installed"
    if CUDA_PROVIDER not in wheels.onnx_providers:
        return f"ONNX Runtime {wheels.onnx} has no CUDA provider"
    if wheels.onnx_cuda is not None and driver.cuda[0] < wheels.onnx_cuda[0]:
        return f"ONNX Runtime {wheels.onnx} {_driver_needed(wheels.onnx_cuda, driver)}"
    return None


def _driver_needed(cuda: Version, driver: CudaDriver) -> str:
    oldest = _OLDEST_DRIVERS.get(cuda[0])
    since = f" ({oldest} or newer)" if oldest else ""
    return (
        f"needs a driver for CUDA {cuda[0]}{since} and this one ends at CUDA {_dotted(driver.cuda)}"
    )


def _advice(card: CudaDevice, driver: CudaDriver) -> str:
    """Returns advice on what to install or update; docs/gpus.md has the table."""
    if card.capability < _OLD_CARDS:
        return "install the extra cuda12 with a cu126 build of PyTorch (docs/gpus.md)"
    if driver.cuda[0] < _NEWEST_CUDA:
        return "install the extra cuda12, or a newer driver and the extra cuda13 (docs/gpus.md)"
    return "install the extra cuda13 (docs/gpus.md)"


def installed_wheels() -> InstalledLibraries:
    """Returns the facts about PyTorch and ONNX Runtime, both of which it imports."""
    return InstalledLibraries(**_torch_facts(), **_onnx_facts())  # type: ignore[arg-type]


def _torch_facts() -> dict[str, object]:
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    if torch.version.cuda is None:
        return {"torch": torch.__version__}
    # `torch.cuda.get_arch_list` is empty wherever CUDA does not start, the case to be explained.
    flags = torch._C._cuda_getArchFlags()
    return {
        "torch": torch.__version__,
        "torch_cuda": _version(torch.version.cuda),
        "torch_architectures": tuple((flags or "").split()),
    }


def _onnx_facts() -> dict[str, object]:
    if importlib.util.find_spec("onnxruntime") is None:
        return {}
    import onnxruntime

    return {
        "onnx": onnxruntime.__version__,
        "onnx_providers": tuple(onnxruntime.get_available_providers()),
        "onnx_cuda": _onnx_cuda(),
    }


def _onnx_cuda() -> Version | None:
    """Returns the CUDA version of onnxruntime-gpu from its extra's libraries; None if unknown."""
    try:
        needs = importlib.metadata.requires("onnxruntime-gpu") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for each in needs:
        found = re.match(r"nvidia-cuda-runtime\S*?\s*~=\s*(\d+)\.(\d+)", each)
        if found is not None:
            return int(found[1]), int(found[2])
    return None


def _version(text: str) -> Version:
    major, _, rest = text.partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _giga(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
