"""The facts that NVIDIA's management library has of a GPU and CUDA has not: link, power, MIG.

It is asked through the package `nvidia-ml-py`, which the extras for GPUs bring. Without the package
or the library, or where a query is not supported or not allowed, the fact is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from catenary_services.log import get_logger

T = TypeVar("T")
_MIG_MODES = {0: "off", 1: "on"}
_log = get_logger("catenary_agent.devices.device")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The facts about one GPU; 0 and empty texts stand for what the library does not say."""

    driver: str = ""
    uuid: str = ""
    """The number with its prefix, "GPU-" or "MIG-"."""
    free_bytes: int = 0
    pcie_generation: int = 0
    pcie_width: int = 0
    power_limit_milliwatts: int = 0
    mig_mode: str = ""


def ask_nvml(uuid: str) -> GpuFacts:
    """Returns the facts about the GPU with a UUID as CUDA gives it, without a prefix.

    GPUs are not found by number: CUDA and the management library count in different orders, and
    CUDA counts only what it was left by CUDA_VISIBLE_DEVICES.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return GpuFacts()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _log.info("nvml_absent", why=str(error))
        return GpuFacts()

    def asked(query: Callable[[], T], otherwise: T) -> T:
        try:
            return query()
        except nvml.NVMLError:
            return otherwise

    try:
        driver = str(asked(nvml.nvmlSystemGetDriverVersion, ""))
        for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
            gpu = asked(partial(nvml.nvmlDeviceGetHandleByUUID, name), None)
            if gpu is not None:
                break
        else:
            return GpuFacts(driver=driver)
        # An instance of a divided GPU has memory of its own; the rest is that of the whole.
        whole = asked(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu), gpu)
        return GpuFacts(
            driver,
            name,
            asked(lambda: int(nvml.nvmlDeviceGetMemoryInfo(gpu).free), 0),
            asked(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(whole)), 0),
            asked(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(whole)), 0),
            asked(lambda: int(nvml.nvmlDeviceGetEnforcedPowerLimit(whole)), 0),
            _MIG_MODES.get(asked(lambda: int(nvml.nvmlDeviceGetMigMode(whole)[0]), -1), ""),
        )
    finally:
        asked(nvml.nvmlShutdown, None)
