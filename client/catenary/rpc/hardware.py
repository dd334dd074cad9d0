"""The facts about the devices of a cluster, as its agents tell them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts about an agent's device; 0 and empty where nobody says.

    Attributes:
        name: The device as its maker calls it.
        total_bytes: Memory of the GPU, or the part of the host's that the agent may use.
        free_bytes: The part of it that was free when the agent started.
        cores: Cores that the device has, if it is a processor.
        vector_instructions: Those instructions of a processor that compute libraries use.
        compute_capability: That of a GPU, such as "8.9".
        cuda: The newest CUDA version of the driver.
        driver: The release of the driver.
        uuid: The GPU's own number.
        pcie_generation: Generation of its PCIe link.
        pcie_width: Lanes of its PCIe link.
        power_limit_milliwatts: The most power it is allowed.
        mig_mode: "on", "off", or empty for a GPU that cannot be divided.
    """

    name: str
    total_bytes: int = 0
    free_bytes: int = 0
    cores: int = 0
    vector_instructions: tuple[str, ...] = ()
    compute_capability: str = ""
    cuda: str = ""
    driver: str = ""
    uuid: str = ""
    pcie_generation: int = 0
    pcie_width: int = 0
    power_limit_milliwatts: int = 0
    mig_mode: str = ""

    def __str__(self) -> str:
        parts = [self.name]
        if self.cores:
            parts.append(f"{self.cores} core{'s' if self.cores > 1 else ''}")
        parts.append(f"{self.total_bytes / 1e9:.1f} GB")
        if self.compute_capability:
            parts.append(f"compute capability {self.compute_capability}")
        if self.driver or self.cuda:
            cuda = f"CUDA {self.cuda}" if self.cuda else ""
            parts.append(" ".join(filter(None, ("driver", self.driver, cuda))))
        if self.pcie_generation and self.pcie_width:
            parts.append(f"PCIe {self.pcie_generation} x{self.pcie_width}")
        if self.power_limit_milliwatts:
            parts.append(f"{self.power_limit_milliwatts / 1e3:.0f} W")
        if self.mig_mode == "on":
            parts.append("MIG")
        return ", ".join([*parts, *self.vector_instructions])
