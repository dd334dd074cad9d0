"""The share that an agent has of its device: the whole device, or one of its virtual GPUs.

A virtual GPU is an agent process that uses 1/level of a physical device:

    cpu        a thread pool of (cores / devices on this host / level) threads; `cpu_cores` pins it
    cuda       with an MPS control daemon: 100/level percent of the multiprocessors, by the MPS
               variable, which counts only if it is set before the process first touches CUDA;
               without: streams of their own that the driver shares out in time. Both ways the
               frameworks' memory is capped at 1/level of the device's
    emulated   the times of the profile at that level
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from catenary_agent.devices.device import default_device_class, default_memory_bytes, limit_threads
from catenary_agent.devices.processor import host_cores
from catenary_agent.executors.device import Device
from catenary_services.errors import InvalidInput
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.share")
_MPS_CONTROL = "nvidia-cuda-mps-control"
MPS = "MPS"
MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class ShareRequest:
    """The share that an agent asks for; zeros and empty texts are derived from the device."""

    device: Device
    device_class: str = ""
    memory_bytes: int = 0
    threads: int = 0
    host_devices: int = 1
    """The number of CPU devices that share this host's cores and memory; ignored for CUDA."""
    cpu_cores: Sequence[int] = ()
    """The cores that the process is pinned to; empty for no pinning."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The share that an agent has got."""

    device: Device
    device_class: str
    memory_bytes: int
    """The memory for partitions in bytes."""
    threads: int
    """Number of compute threads of the executors."""
    cores: int
    """Cores of the device, if it is a processor: those of all its virtual GPUs together."""
    isolation: str
    """The mechanism that separates the virtual GPUs of the device, in words."""


def take_share(request: ShareRequest) -> DeviceShare:
    """Configures this process for its share and returns the share.

    It has to be called before anything in the process uses CUDA, and before compute libraries start
    their thread pools.

    Raises:
        InvalidInput: The operating system refuses the cores.
    """
    device = request.device
    if request.cpu_cores:
        _pin(request.cpu_cores)
    isolation = isolation_of(device)
    if isolation == MPS:
        # A choice of the operator takes precedence.
        os.environ.setdefault(MPS_PERCENTAGE, str(100 // device.virtual_level))
    cores = request.threads * device.virtual_level or device_cores(
        request.host_devices, request.cpu_cores
    )
    threads = request.threads or default_threads(device, request.host_devices, request.cpu_cores)
    limit_threads(threads)
    sharers = device.virtual_level * (request.host_devices if device.kind != "cuda" else 1)
    share = DeviceShare(
        device,
        request.device_class or default_device_class(str(device), cores),
        request.memory_bytes or default_memory_bytes(str(device), sharers),
        threads,
        cores,
        isolation,
    )
    _log.info(
        "device_share",
        device=str(device),
        level=device.virtual_level,
        threads=threads,
        memory_bytes=share.memory_bytes,
        isolation=isolation,
    )
    return share


def default_threads(device: Device, host_devices: int = 1, cpu_cores: Sequence[int] = ()) -> int:
    """Returns the threads of one virtual GPU: its part of the cores on a CPU, else one."""
    if device.kind != "cpu":
        return 1
    return max(1, device_cores(host_devices, cpu_cores) // device.virtual_level)


def device_cores(host_devices: int = 1, cpu_cores: Sequence[int] = ()) -> int:
    """Returns the cores of a CPU device: those it is pinned to, or its part of the host's."""
    return max(1, len(cpu_cores) or host_cores() // host_devices)


def isolation_of(device: Device) -> str:
    """Returns in words what separates the virtual GPUs of a device on this host."""
    if device.virtual_level == 1:
        return "whole device"
    if device.kind == "cuda":
        return MPS if mps_answers() else "time slices"
    return "profile" if device.kind == "emulated" else "thread pools"


def mps_answers() -> bool:
    """Returns True if an MPS control daemon answers on this host.

    The control program finds the daemon by CUDA_MPS_PIPE_DIRECTORY, as CUDA itself does. Asking a
    daemon for its servers starts none.
    """
    program = shutil.which(_MPS_CONTROL)
    if program is None:
        return False
    try:
        done = subprocess.run(
            [program],
            input="get_server_list\n",
            capture_output=True,
            text=True,
            timeout=_MPS_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "cannot find" not in (done.stdout + done.stderr).lower()


def _pin(cores: Sequence[int]) -> None:
    # On macOS and Windows, which have no pinning, only the number of threads is limited.
    if not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise InvalidInput("cpu_cores", f"{list(cores)} cannot be used: {error}") from None
