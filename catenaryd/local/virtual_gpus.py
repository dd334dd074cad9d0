"""Sharing of this machine's devices among the agents of a local cluster."""

from __future__ import annotations

import os
from typing import Any

from catenary_services.errors import InvalidInput


def devices_for(agents: int, level: int) -> int:
    """Returns the number of devices of `agents` agents with `level` virtual GPUs per device.

    Raises:
        InvalidInput: A device would have fewer virtual GPUs than the others.
    """
    if level < 1 or agents % level:
        raise InvalidInput(
            "virtual_gpus",
            f"{agents} agents are no whole number of devices of {level} virtual GPUs",
        )
    return agents // level


def share_settings(index: int, agents: int, level: int, device: str) -> dict[str, Any]:
    """Returns the settings of agent `index`'s share of a device (`catenary_agent.settings`).

    Agents `0 .. level-1` are the first device, and so on. Each device counts as a server of its
    own, as that of a lone agent does: its virtual GPUs share a link, and those of different devices
    do not.
    """
    devices = devices_for(agents, level)
    settings: dict[str, Any] = {}
    if device == "cpu":
        settings["host_devices"] = devices
    if level > 1:
        name = f"device-{index // level}"
        settings.update(virtual_level=level, device_id=name, server_id=name)
        if device == "cpu":
            settings["cpu_cores"] = cores_of(index // level, devices)
    return settings


def cores_of(number: int, devices: int) -> list[int]:
    """Returns the cores of one of `devices` CPU devices; [] if there are fewer cores than devices.

    Without cores of their own, devices are better left to the balance of the operating system.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // devices
    return cores[number * each : (number + 1) * each]
