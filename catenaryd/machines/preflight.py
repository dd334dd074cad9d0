"""Checks before a machine joins: each raises one sentence that says what to do."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence

from catenary_agent.device_check import check_device
from catenary_agent.devices.device import count_gpus, default_memory_bytes
from catenary_agent.executors.device import Device
from catenary_services.addresses import check_reachable, host_port, is_unspecified
from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.version import software_version
from catenaryd.machines.enrolment_client import HostInfo

MOST_CLOCK_DIFFERENCE_S = 30.0
"""Certificates allow for five minutes; deadlines and stories that people read do not."""
MOST_DEVICES = 64
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.|$)")


def devices_of(asked: Sequence[str]) -> tuple[str, ...]:
    """Returns the devices of a machine, one for each agent; "cuda" stands for all its GPUs.

    Raises:
        InvalidInput: One is unknown or given twice, there are too many, or "cuda" finds no GPU.
    """
    found: list[str] = []
    for each in asked:
        if each != "cuda":
            found.append(str(Device.parse(each)))
            continue
        found += [f"cuda:{index}" for index in range(count_gpus())]
    if not 1 <= len(found) <= MOST_DEVICES:
        raise InvalidInput("device", f"a machine has 1 to {MOST_DEVICES} devices, not {len(found)}")
    twice = {each for each in found if found.count(each) > 1 and not each.startswith("emulated:")}
    if twice:
        raise InvalidInput("device", f"{min(twice)} is given twice; one agent uses a device")
    return tuple(found)


async def check_devices(devices: Sequence[str], memory_bytes: int) -> None:
    """Checks that an agent can compute on each device, and has the memory.

    Args:
        devices: The devices.
        memory_bytes: The memory of each agent; 0 for what it takes by itself.

    Raises:
        InvalidInput: One cannot be used; the sentence says why.
    """
    for each in devices:
        wanted = memory_bytes or default_memory_bytes(each)
        await asyncio.to_thread(check_device, Device.parse(each), wanted)


def check_version(theirs: str, ours: str | None = None) -> None:
    """Checks that this software can work with the host's.

    Raises:
        InvalidInput: The releases differ by more than a patch.
    """
    ours = software_version() if ours is None else ours
    known = [_RELEASE.match(each) for each in (theirs, ours)]
    if all(known) and len({each.groups() for each in known if each}) > 1:
        raise InvalidInput(
            "version",
            f"this machine runs Catenary {ours}, the host {theirs}: install the host's release",
        )


def check_clock(facts: HostInfo) -> None:
    """Checks that this machine's clock is near the host's.

    Raises:
        InvalidInput: It is not, beyond what the round trip leaves open.
    """
    difference = facts.clock_difference_s
    if abs(difference) > MOST_CLOCK_DIFFERENCE_S + facts.round_trip_s:
        side = "behind" if difference > 0 else "ahead of"
        raise InvalidInput(
            "clock",
            f"is {abs(difference):.0f} s {side} the host's; set it, or turn time synchronisation on"
            " (timedatectl set-ntp true)",
        )


def addresses_for(
    bind: str | None, advertise: str | None, on_the_way: str, observed: str
) -> tuple[str, str, str]:
    """Returns the address to listen on, the one to tell peers, and a remark for the user or "".

    Args:
        bind: The address to listen on, if the user said one.
        advertise: The address to tell peers, if the user said one.
        on_the_way: This machine's address on the way to the host.
        observed: The address the host sees.

    Raises:
        InvalidInput: Peers on other machines could not reach the address.
    """
    told = advertise or (bind if bind and not is_unspecified(bind) else on_the_way)
    check_reachable("advertise", told)
    listens = bind or (told if advertise is None else _all_of(on_the_way))
    remark = ""
    if advertise is None and observed and observed != on_the_way:
        remark = (
            f"the host sees this machine as {observed}, and it calls itself {told}: behind address"
            " translation give --advertise and --transport-port, and forward that port"
        )
    return listens, told, remark


def check_ports(bind: str, first: int, count: int) -> None:
    """Checks that this machine can listen on an address, and that `count` ports of it are free.

    `first` 0 stands for any free port.

    Raises:
        Unavailable: One is in use, or the address is not this machine's.
        InvalidInput: They are beyond the last port.
    """
    if first and first + count > 1 << 16:
        raise InvalidInput("transport_port", f"{count} ports from {first} on are too many")
    for port in range(first, first + count) if first else (0,):
        try:
            family = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((bind, port), family=family).close()
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host_port(bind, port)}: {error.strerror or error}; choose"
                " another --transport-port, or --host with an address of this machine"
            ) from error


def machine_name(asked: str | None) -> str:
    """Returns the name of a machine: as asked, or the first part of its host name.

    Raises:
        InvalidInput: The name has other characters than letters, digits, '-' and '_'.
    """
    name = asked or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])
    if re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,46}[A-Za-z0-9])?", name) is None:
        raise InvalidInput(
            "name", f"{name!r}: up to 48 letters, digits, '-' and '_'; give one (--name)"
        )
    return name


def _all_of(address: str) -> str:
    return "::" if ":" in address else "0.0.0.0"
