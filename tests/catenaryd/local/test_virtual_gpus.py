"""How local agents share devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from catenary_services.errors import InvalidInput
from catenaryd.local import local_cluster
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from catenaryd.local.virtual_gpus import cores_of, devices_for, share_settings
from catenaryd.process_options import command_line_of


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 4, 5}, raising=False)


def test_agents_are_dealt_out_to_whole_devices() -> None:
    assert (devices_for(4, 2), devices_for(3, 1), devices_for(8, 8)) == (2, 3, 1)
    for agents, level in ((3, 2), (2, 4), (4, 0), (4, -2)):
        with pytest.raises(InvalidInput, match="virtual_gpus"):
            devices_for(agents, level)


def test_virtual_gpus_of_a_device_share_its_link_and_its_cores() -> None:
    settings = [share_settings(index, 4, 2, "cpu") for index in range(4)]
    assert [each["device_id"] for each in settings] == ["device-0"] * 2 + ["device-1"] * 2
    assert [each["server_id"] for each in settings] == ["device-0"] * 2 + ["device-1"] * 2
    assert [each["cpu_cores"] for each in settings] == [[0, 1]] * 2 + [[4, 5]] * 2
    assert {(each["virtual_level"], each["host_devices"]) for each in settings} == {(2, 2)}


def test_agents_with_devices_of_their_own_are_servers_of_their_own() -> None:
    assert share_settings(1, 3, 1, "cpu") == {"host_devices": 3}
    assert share_settings(1, 3, 1, "emulated:T4") == {}
    assert "cpu_cores" not in share_settings(1, 4, 2, "emulated:T4")


def test_more_devices_than_cores_are_pinned_nowhere() -> None:
    assert cores_of(4, 5) == []
    assert cores_of(1, 4) == [1]


def test_a_cluster_starts_its_agents_with_their_shares(tmp_path: Path) -> None:
    options = ClusterOptions(agents=4, virtual_gpus=2, device="cuda:3", data_dir=tmp_path)
    children = LocalCluster(options)._settings()
    arguments = command_line_of(children["agent-3"][1])
    for flag, value in (
        ("--virtual-level", "2"),
        ("--device-id", "device-1"),
        ("--device", "cuda:3"),
    ):
        assert arguments[arguments.index(flag) + 1] == value


def test_gpus_are_dealt_out_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "count_gpus", lambda: 2)
    options = ClusterOptions(agents=4, virtual_gpus=2, device="cuda", data_dir=tmp_path)
    children = LocalCluster(options)._settings()
    devices = [children[f"agent-{index}"][1]["device"] for index in range(4)]
    assert devices == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_a_cluster_that_cannot_be_dealt_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="3 agents"):
        LocalCluster(ClusterOptions(agents=3, virtual_gpus=2, data_dir=tmp_path))
