"""The addresses of a cluster that machines beside its own can reach."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from catenary_services.addresses import (
    CONTROL_APART,
    check_reachable,
    checked_host,
    default_route_address,
    host_port,
    is_loopback,
    is_unspecified,
)
from catenary_services.errors import InvalidInput, Unavailable

SCHEDULER_PORT = 8004
SCHEDULERS_APART = 10
"""The second scheduler listens ten ports above the first, and so on."""


@dataclass(frozen=True, slots=True)
class AdvertisedAddress:
    """The address that a host listens on, and the one that other machines are told."""

    bind: str
    advertise: str

    @classmethod
    def of(cls, host: str, advertise: str | None = None) -> AdvertisedAddress:
        """Returns the addresses that the flags `--host` and `--advertise` mean.

        Raises:
            InvalidInput: Other machines could not reach the address, or there is no default route
                whose address could be told them.
        """
        checked_host("host", host)
        if advertise is not None:
            return cls(host, check_reachable("advertise", advertise))
        if not is_unspecified(host):
            return cls(host, check_reachable("host", host))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = default_route_address(family)
        if found is None and family == socket.AF_INET6:
            found = default_route_address()
        if found is None or is_loopback(found):
            raise InvalidInput(
                "advertise",
                f"{host} listens on every address, and this machine has no default route that says"
                " which one the others can reach: give it (--advertise 10.0.0.5)",
            )
        return cls(host, found)

    @property
    def own(self) -> str:
        """The address at which processes of this machine reach each other."""
        if not is_unspecified(self.bind):
            return self.bind
        return "::1" if ":" in self.bind else "127.0.0.1"


def scheduler_ports(first: int, schedulers: int) -> list[int]:
    """Returns the ports of schedulers that other machines reach.

    Raises:
        InvalidInput: They are beyond the last port.
    """
    ports = [first + SCHEDULERS_APART * number for number in range(schedulers)]
    if not 0 < ports[0] <= ports[-1] + CONTROL_APART < 1 << 16:
        raise InvalidInput("scheduler_port", f"{schedulers} of them from {first} on are too many")
    return ports


def control_ports(schedulers: Iterable[int]) -> list[int]:
    """Returns the ports at which schedulers take control streams, by those at which they serve."""
    return [port + CONTROL_APART for port in schedulers]


def check_free(bind: str, ports: Iterable[int], flag: str) -> None:
    """Checks, before minutes of work, that this machine can listen on ports.

    Args:
        bind: The address.
        ports: The ports.
        flag: The flag that changes them.

    Raises:
        Unavailable: One is in use, or the address is not this machine's.
    """
    for port in ports:
        with suppress(socket.gaierror):
            bind = str(socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0][4][0])
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            socket.create_server((bind, port), family=family).close()
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host_port(bind, port)}: {error.strerror or error}; is another"
                f" cluster running here? {flag} chooses another port"
            ) from error
