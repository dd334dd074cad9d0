"""Checks before a machine joins: each says in a sentence what is wrong and what helps."""

from __future__ import annotations

import socket

import pytest

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.errors import InvalidInput, Unavailable
from catenaryd.machines.enrolment_client import HostInfo
from catenaryd.machines.preflight import (
    addresses_for,
    check_clock,
    check_ports,
    check_version,
    devices_of,
    machine_name,
)


def seen(difference_s: float, round_trip_s: float = 0.01) -> HostInfo:
    return HostInfo(pb.ClusterIdentity(), round_trip_s, difference_s, "10.0.0.7")


def test_a_clock_that_is_near_enough_is_good() -> None:
    for difference_s in (0.0, 29.0, -29.0):
        check_clock(seen(difference_s))
    check_clock(seen(35.0, round_trip_s=10.0))  # so much of it may be the way


@pytest.mark.parametrize(("difference_s", "side"), [(40.0, "behind"), (-40.0, "ahead of")])
def test_a_clock_that_is_off_is_said_to_be(difference_s: float, side: str) -> None:
    with pytest.raises(InvalidInput, match=f"40 s {side} the host's; set it"):
        check_clock(seen(difference_s))


def test_releases_may_differ_by_a_patch() -> None:
    check_version("1.4.2", "1.4.0")
    check_version("unknown", "1.4.0")
    check_version("1.4.0.dev3", "1.4.0")
    for theirs in ("1.5.0", "2.4.0"):
        with pytest.raises(InvalidInput, match=f"the host {theirs}: install"):
            check_version(theirs, "1.4.0")


def test_a_machine_listens_where_it_is_reached() -> None:
    there = "10.0.0.7"
    assert addresses_for(None, None, there, there) == (there, there, "")
    assert addresses_for("0.0.0.0", None, there, there) == ("0.0.0.0", there, "")
    assert addresses_for(None, "pi4.lan", there, there) == ("0.0.0.0", "pi4.lan", "")
    assert addresses_for(None, "fd00::9", "fd00::7", "fd00::7") == ("::", "fd00::9", "")
    assert addresses_for("10.0.0.8", None, there, there) == ("10.0.0.8", "10.0.0.8", "")


def test_address_translation_is_noticed() -> None:
    *_, remark = addresses_for(None, None, "192.168.1.7", "10.0.0.1")
    assert "--advertise" in remark
    assert addresses_for(None, "10.0.0.1", "192.168.1.7", "10.0.0.1")[2] == ""


@pytest.mark.parametrize(
    ("bind", "advertise", "way"),
    [("127.0.0.1", None, "10.0.0.7"), (None, "0.0.0.0", "10.0.0.7"), (None, None, "127.0.0.1")],
)
def test_an_address_that_leads_nowhere_is_refused(
    bind: str | None, advertise: str | None, way: str
) -> None:
    with pytest.raises(InvalidInput, match="give the address"):
        addresses_for(bind, advertise, way, way)


def test_a_port_in_use_is_found_before_the_token_is_spent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"{port}.*--transport-port"):
            check_ports("127.0.0.1", port - 1, 2)
    with pytest.raises(Unavailable, match="cannot listen"):
        check_ports("192.0.2.1", 0, 1)
    with pytest.raises(InvalidInput, match="too many"):
        check_ports("127.0.0.1", 65_535, 2)
    check_ports("127.0.0.1", 0, 4)


def test_devices_are_said_once_and_right() -> None:
    assert devices_of(["cpu", "emulated:p4", "emulated:p4"]) == (
        "cpu",
        "emulated:p4",
        "emulated:p4",
    )
    assert devices_of(["cuda:1"]) == ("cuda:1",)
    for wrong in (["cpu", "cpu"], ["gpu"], ["cuda:x"], ["emulated:p4"] * 65):
        with pytest.raises(InvalidInput):
            devices_of(wrong)


def test_a_name_is_taken_from_the_host_name_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "pi_4.lan.example.org")
    assert machine_name(None) == "pi_4"
    assert machine_name("box-7") == "box-7"
    for wrong in ("a/b", "-a", "a" * 49, "a.b", "ä"):
        with pytest.raises(InvalidInput, match="give one"):
            machine_name(wrong)
