"""What `catenaryd up` makes of its command line."""

from __future__ import annotations

from typing import Any

import pytest

from catenary_services.errors import InvalidInput
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from catenaryd.running import ADMIN_PORT, METRICS_PORT, options_of


def _options(devices: tuple[str, ...] = ("cpu",), **flags: Any) -> ClusterOptions:
    usual = {
        "agents": None,
        "admin_port": None,
        "metrics_port": None,
        "grpc_port": 8001,
        "virtual_gpus": 1,
    }
    return options_of(None, devices=devices, **{**usual, "max_agents": 0, **flags})


def test_three_agents_on_one_device_unless_said_otherwise() -> None:
    assert (_options().agents, _options().device, _options(agents=5).agents) == (3, "cpu", 5)


def test_several_devices_are_one_agent_each() -> None:
    options = _options(("emulated:L4", "emulated:P4", "emulated:P4"))
    children = LocalCluster(options)._settings()
    devices = [children[f"agent-{n}"][1]["device"] for n in range(3)]
    assert devices == ["emulated:L4", "emulated:P4", "emulated:P4"]
    assert "agent-3" not in children


@pytest.mark.parametrize("flags", [{"agents": 3}, {"virtual_gpus": 2}, {"max_agents": 4}])
def test_several_devices_go_with_no_other_number_of_agents(flags: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="device"):
        _options(("emulated:L4", "emulated:P4"), **flags)


def test_metrics_are_at_the_documented_port_unless_ports_are_free_ones() -> None:
    assert LocalCluster(_options()).metrics_port == METRICS_PORT
    assert _options(metrics_port=9000).metrics_port == 9000
    assert _options(grpc_port=0).metrics_port == 0
    assert LocalCluster(_options(grpc_port=0)).metrics_port not in (0, METRICS_PORT)


def test_the_admin_port_is_where_the_client_looks_unless_ports_are_free_ones() -> None:
    assert _options().admin_port == ADMIN_PORT
    assert LocalCluster(_options()).admin_target == f"127.0.0.1:{ADMIN_PORT}"
    assert _options(admin_port=9000).admin_port == 9000
    assert _options(grpc_port=0).admin_port == 0
    assert LocalCluster(_options(grpc_port=0)).admin_port > 0
