"""Where schedulers take control streams: next to their ports, where other machines must be let through."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from catenary_scheduler.settings import SchedulerSettings
from catenary_services.errors import InvalidInput
from catenaryd.local.public_address import control_ports, scheduler_ports


@pytest.mark.parametrize(
    ("said", "port"),
    [
        ({}, 8007),
        ({"port": 9000}, 9003),
        ({"port": 0}, 0),
        ({"control_port": 0}, 0),
        ({"port": 0, "control_port": 9999}, 9999),
        ({"port": 65534, "control_port": 9999}, 9999),
    ],
)
def test_it_is_said_or_follows_from_the_port_of_grpc(said: dict[str, int], port: int) -> None:
    assert SchedulerSettings(insecure=True, **said).port_of_control == port  # type: ignore[arg-type]


def test_a_port_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(ValidationError, match="control_port: there is none 3 above 65534"):
        SchedulerSettings(insecure=True, port=65534)
    assert scheduler_ports(65522, 2) == [65522, 65532]
    with pytest.raises(InvalidInput, match="2 of them from 65523 on are too many"):
        scheduler_ports(65523, 2)


def test_a_firewall_is_told_the_ports_that_schedulers_take() -> None:
    ports = scheduler_ports(8004, 3)
    assert control_ports(ports) == [8007, 8017, 8027]
    assert control_ports(ports) == [SchedulerSettings(port=port).port_of_control for port in ports]
