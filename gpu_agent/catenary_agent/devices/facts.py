"""The facts about its device that an agent tells the cluster once, when it says hello."""

from __future__ import annotations

import re

from catenary_agent.devices.cuda_driver import NoDriverError, ask_driver
from catenary_agent.devices.nvml import ask_nvml
from catenary_agent.devices.processor import (
    free_memory_bytes,
    host_memory_bytes,
    processor_model,
    vector_instructions,
)
from catenary_protos.catenary.v1 import common_pb2

_LONGEST_NAME = 256
_LONGEST_WORD = 64


def device_facts(
    device: str, cores: int, free_bytes: int | None = None
) -> common_pb2.DeviceFacts | None:
    """Returns what is known about a device; None for an emulated one, which is none.

    Args:
        device: The device, as agents are given it: "cpu", "cuda:0".
        cores: Cores that the device has, if it is a processor.
        free_bytes: Free memory of a GPU, if it is known already.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return common_pb2.DeviceFacts(
            name=_label(processor_model()),
            total_bytes=host_memory_bytes(),
            free_bytes=free_memory_bytes(),
            cores=cores,
            vector_instructions=vector_instructions(),
        )
    if kind != "cuda":
        return None
    try:
        driver = ask_driver()
        card = driver.cards[int(index or 0)]
    except (NoDriverError, IndexError):
        return None
    managed = ask_nvml(card.uuid)
    return common_pb2.DeviceFacts(
        name=_label(card.name),
        total_bytes=card.total_bytes,
        free_bytes=free_bytes or managed.free_bytes,
        compute_capability=".".join(map(str, card.capability)),
        cuda=".".join(map(str, driver.cuda)),
        driver=_word(managed.driver),
        uuid=managed.uuid or card.uuid,
        pcie_generation=min(managed.pcie_generation, 255),
        pcie_width=min(managed.pcie_width, 255),
        power_limit_milliwatts=min(managed.power_limit_milliwatts, 1 << 24),
        mig_mode=managed.mig_mode,
    )


def _label(text: str) -> str:
    """Returns a text as a message may have it: whatever stands there, the agent can say hello."""
    return "".join(each for each in text if each.isprintable() and each != "|")[:_LONGEST_NAME]


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_ ./+-]", "", text)[:_LONGEST_WORD]
