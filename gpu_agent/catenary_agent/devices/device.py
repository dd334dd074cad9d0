"""What a device is called and how much it holds, and keeping compute libraries in their bounds."""

from __future__ import annotations

import os

import psutil

from catenary_agent.devices.catalogue import find_device_class
from catenary_agent.devices.container_limits import memory_limit_bytes
from catenary_agent.devices.cuda_driver import card_of

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def default_device_class(device: str) -> str:
    """Returns the planner's name of a device: "cpu", "P4" of "emulated:P4", a GPU's model.

    A GPU of the catalogue has its name there ("Tesla T4" is "T4"), so that an estimated profile
    speaks of the same class as the agents; others have their own.
    """
    kind, _, detail = device.partition(":")
    if kind == "emulated" and detail:
        return detail
    if kind == "cuda":
        name = _cuda_name(int(detail or 0))
        known = find_device_class(name)
        if known is not None:
            return known.name
        return name.lower().replace("nvidia ", "").replace(" ", "-") if name else "cuda"
    return kind or "cpu"


def default_memory_bytes(device: str, sharers: int = 1) -> int:
    """Returns the memory partitions may use: a GPU's nine tenths, of a CPU half of the host's.

    In a container with a limit of its own that counts instead of the host's memory.

    Divided by `sharers`, the agents among which the device is shared. An emulated device has the
    memory of the hardware it stands for, if the catalogue knows that; a GPU that nobody sees has
    none.
    """
    kind, _, detail = device.partition(":")
    total = 0
    if kind == "cuda":
        return cuda_memory_bytes(int(detail or 0)) * 9 // 10 // sharers
    if kind == "emulated":
        known = find_device_class(detail)
        total = known.memory_bytes if known is not None else 0
    usable = total * 9 // 10 if total else _host_memory_bytes() // 2
    return usable // sharers


def _host_memory_bytes() -> int:
    there = int(psutil.virtual_memory().total)
    limit = memory_limit_bytes()
    return there if limit is None else min(there, limit)


def limit_threads(threads: int) -> None:
    """Makes compute libraries loaded later use `threads` threads that sleep when idle.

    Several agents share a host in tests and in `catenaryd up`; a library that takes every core, or
    spins while it waits, would slow down all of them. Variables set by the operator are kept.
    """
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _cuda_name(index: int) -> str:
    card = card_of(index)
    return "" if card is None else card.name


def cuda_memory_bytes(index: int) -> int:
    """Returns the memory of a CUDA device, 0 if the driver does not show it."""
    card = card_of(index)
    return 0 if card is None else card.total_bytes
