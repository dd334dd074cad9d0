"""What may be told to other machines, and how addresses are written and read."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_services.addresses import (
    check_advertised,
    check_reachable,
    default_route_address,
    host_port,
    is_loopback,
    is_unspecified,
    split_host_port,
)
from catenary_services.errors import InvalidInput
from catenary_services.settings import load_settings


@pytest.mark.parametrize(
    ("host", "text"),
    [("10.0.0.5", "10.0.0.5:8004"), ("fd00::5", "[fd00::5]:8004"), ("pi4.lan", "pi4.lan:8004")],
)
def test_an_address_is_read_as_it_is_written(host: str, text: str) -> None:
    assert host_port(host, 8004) == text
    assert split_host_port(text) == (host, 8004)


NO_ADDRESSES = ["10.0.0.5", "10.0.0.5:", "10.0.0.5:0", "10.0.0.5:70000", "fd00::5:8004", ":8004"]
NO_ADDRESSES += ["a b:1", "[fd00::5:8004", "[10.0.0.5]:1", "host\n:1", "host:१", "10.0.0.999:1"]


@pytest.mark.parametrize("text", [*NO_ADDRESSES, "-x:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        split_host_port(text)


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    try:
        host, port = split_host_port(text)
    except InvalidInput:
        return
    assert split_host_port(host_port(host, port)) == (host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_addresses_are_told_to_nobody(host: str) -> None:
    assert is_loopback(host)
    with pytest.raises(InvalidInput, match="give the address"):
        check_reachable("advertise", host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_addresses_that_stand_for_all_are_told_to_nobody(host: str) -> None:
    assert is_unspecified(host)
    with pytest.raises(InvalidInput, match="give the address"):
        check_reachable("advertise", host)


def test_on_one_machine_loopback_may_be_advertised() -> None:
    check_advertised("127.0.0.1", None, ["127.0.0.1:8004", "localhost:8005", "[::1]:1"])


@pytest.mark.parametrize(
    ("bind", "advertised"), [("127.0.0.1", None), ("0.0.0.0", "127.0.0.1"), ("::1", None)]
)
@pytest.mark.parametrize("scheduler", ["10.0.0.5:8004", "[fd00::5]:8004", "scheduler:8004"])
def test_a_loopback_address_advertised_to_another_host_is_an_error(
    bind: str, advertised: str | None, scheduler: str
) -> None:
    with pytest.raises(ValueError, match="at which other machines reach this one"):
        check_advertised(bind, advertised, [scheduler])


def test_agents_and_gateways_are_held_to_it() -> None:
    far = {"scheduler_addresses": ["10.0.0.5:8004"]}
    for cls, own in ((AgentSettings, {"agent_id": "a"}), (GatewaySettings, {})):
        with pytest.raises(InvalidInput, match="advertise_host"):
            load_settings(cls, file=None, section="any", flags={**far, **own})
        told = {**far, **own, "transport_host": "0.0.0.0", "advertise_host": "10.0.0.7"}
        assert load_settings(cls, file=None, section="any", flags=told).insecure is False


def test_lists_of_ipv6_addresses_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"agent_id": "a", "transport_host": "fd00::7"}
    monkeypatch.setenv("CATENARY_SCHEDULER_ADDRESSES", "[fd00::5]:8004,[fd00::6]:8004")
    read = load_settings(AgentSettings, file=None, section="agent", flags=told)
    assert read.scheduler_addresses == ["[fd00::5]:8004", "[fd00::6]:8004"]
    monkeypatch.setenv("CATENARY_SCHEDULER_ADDRESSES", '["[fd00::5]:8004"]')
    read = load_settings(AgentSettings, file=None, section="agent", flags=told)
    assert read.scheduler_addresses == ["[fd00::5]:8004"]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_address_of_the_default_route_is_one_that_can_be_listened_on(
    family: socket.AddressFamily,
) -> None:
    found = default_route_address(family)
    if found is not None:
        socket.create_server((found, 0), family=family).close()
