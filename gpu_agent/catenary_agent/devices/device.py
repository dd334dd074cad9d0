"""Names and memory sizes of devices, and limits on the threads of compute libraries."""

from __future__ import annotations

import os

from catenary_agent.devices.cuda_driver import NoDriverError, ask_driver, card_of
from catenary_agent.devices.processor import (
    host_cores,
    host_memory_bytes,
    processor_class,
    processor_model,
)
from catenary_services.devices.catalogue import class_of_gpu, find_device_class
from catenary_services.errors import InvalidInput

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def default_device_class(device: str, cores: int = 0) -> str:
    """Returns the planner's name of a device: "P4" of "emulated:P4", a GPU's or a CPU's model.

    A GPU in the catalogue has its name there ("Tesla T4" is "T4"), so that an estimated profile and
    the agents use the same class; others, among them instances of a divided GPU, have a name of
    their own. So has each model of processors with each number of cores.

    Args:
        device: The device, as agents are given it.
        cores: Cores of a processor that count; 0 for all that this process may use.
    """
    kind, _, detail = device.partition(":")
    if kind == "emulated" and detail:
        return detail
    if kind == "cuda":
        name = _cuda_name(int(detail or 0))
        known = class_of_gpu(name)
        if known:
            return known
        return name.lower().replace("nvidia ", "").replace(" ", "-") if name else "cuda"
    return processor_class(processor_model(), cores or host_cores())


def default_memory_bytes(device: str, sharers: int = 1) -> int:
    """Returns the bytes partitions may use: 9/10 of a GPU's memory, or half of the host's.

    In a container with a memory limit, the limit counts if it is less than the host's memory. The
    result is divided by `sharers`, the number of agents that share the device. An emulated device
    has 9/10 of the memory of the hardware it emulates if the catalogue knows it. A GPU that the
    driver does not show has none.
    """
    kind, _, detail = device.partition(":")
    total = 0
    if kind == "cuda":
        return cuda_memory_bytes(int(detail or 0)) * 9 // 10 // sharers
    if kind == "emulated":
        known = find_device_class(detail)
        total = known.memory_bytes if known is not None else 0
    usable = total * 9 // 10 if total else host_memory_bytes() // 2
    return usable // sharers


def limit_threads(threads: int) -> None:
    """Limits compute libraries that are loaded later to `threads` threads, which sleep when idle.

    Several agents share a host in tests and in `catenaryd up`; a library that takes every core, or
    spins while it waits, would slow down all of them. Variables that the operator has set are kept.
    """
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _cuda_name(index: int) -> str:
    card = card_of(index)
    return "" if card is None else card.name


def cuda_memory_bytes(index: int) -> int:
    """Returns the memory of a CUDA device in bytes; 0 if the driver does not show it."""
    card = card_of(index)
    return 0 if card is None else card.total_bytes


def count_gpus() -> int:
    """Returns the number of GPUs that the driver shows to this process.

    Raises:
        InvalidInput: There is no driver, or no GPU.
    """
    try:
        if cards := ask_driver().cards:
            return len(cards)
    except NoDriverError as error:
        why = str(error)
    else:
        why = "the NVIDIA driver shows no GPU to this process"
    raise InvalidInput("device", f"cuda: {why}; --device cpu uses the processor")
