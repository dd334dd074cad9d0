"""Addresses that processes listen on, and those that other machines are told."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from catenary_services.errors import InvalidInput

LONGEST_HOST = 253
CONTROL_APART = 3
"""A scheduler takes control streams at a port so many above that of gRPC, where none is set."""
_HOST_NAME = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*"
    r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?"
)
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849): nobody has them, so the default route leads
there."""


def host_port(host: str, port: int) -> str:
    """Returns "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Returns host, without brackets, and port of "host:port" or "[v6]:port".

    Raises:
        InvalidInput: The text has another form.
    """
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InvalidInput("address", f"{text!r} does not end in a port, as in 10.0.0.5:8004")
    if (":" in host) != bracketed:
        raise InvalidInput("address", f"{text!r}: an IPv6 address stands in brackets")
    return checked_host("address", host.removeprefix("[").removesuffix("]")), int(port)


def checked_host(field: str, host: str) -> str:
    """Returns an IP address or host name as it is.

    Raises:
        InvalidInput: The text is neither.
    """
    if _address_of(host) is None:
        looks_numeric = re.fullmatch(r"[0-9.]*", host) is not None
        if looks_numeric or len(host) > LONGEST_HOST or _HOST_NAME.fullmatch(host) is None:
            raise InvalidInput(field, f"{host[:64]!r} is no IP address or host name")
    return host


def is_unspecified(host: str) -> bool:
    """Returns True for an address that stands for all of a machine: 0.0.0.0, :: or nothing."""
    address = _address_of(host)
    return not host or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Returns True for an address that means another machine on every machine."""
    address = _address_of(host)
    if address is None:
        return host.rstrip(".").lower() in ("localhost", "localhost.localdomain")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def check_reachable(field: str, host: str) -> str:
    """Returns an address that other machines are to be told.

    Raises:
        InvalidInput: On another machine the address stands for that machine, or for none.
    """
    if is_loopback(host) or is_unspecified(host):
        raise InvalidInput(
            field,
            f"{host or 'nothing'} leads no other machine to this one; give the address at which"
            " the others reach it, as in 10.0.0.5",
        )
    return checked_host(field, host)


def check_advertised(bind: str, advertised: str | None, schedulers: Iterable[str]) -> None:
    """Checks the address that peers are told of a process.

    Args:
        bind: The address that the process listens on.
        advertised: The address that peers are told; None for `bind`, or the name of the machine if
            `bind` stands for all of its addresses.
        schedulers: "host:port" of each scheduler: if one is on another machine, so may be peers.

    Raises:
        ValueError: Peers on other machines would be told a loopback or unspecified address.
    """
    if advertised is not None and is_unspecified(advertised):
        raise ValueError(
            f"advertise_host: {advertised or 'nothing'} is no address that a peer can connect to;"
            " give the one at which other machines reach this one"
        )
    told = bind if advertised is None else advertised
    away = [each for each in schedulers if not is_loopback(_host_of(each))]
    if away and is_loopback(told):
        raise ValueError(
            f"advertise_host: peers on other machines would be told {told}, and a scheduler is at"
            f" {away[0]}; set advertise_host, or transport_host, to the address at which other"
            " machines reach this one"
        )


def default_route_address(family: int = socket.AF_INET) -> str | None:
    """Returns this machine's address on its default route; None if there is no such route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_OUTSIDE[socket.AddressFamily(family)], 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
