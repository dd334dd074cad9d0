"""How a local cluster is laid out."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from catenary_agent.devices.cuda_driver import NoDriverError, ask_driver
from catenary_services.errors import InvalidInput
from catenaryd.local import local_cluster
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, device_of, free_port


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "emulated:p4"])
def test_a_named_device_is_every_agents(device: str) -> None:
    assert device_of(device, 2) == device


def test_gpus_are_dealt_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "count_gpus", lambda: 2)
    assert [device_of("cuda", index) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_without_a_gpu_cuda_is_refused() -> None:
    try:
        ask_driver()
    except NoDriverError:
        with pytest.raises(InvalidInput, match=r"device: cuda: no NVIDIA driver .* --device cpu"):
            device_of("cuda", 0)
    else:
        pytest.skip("there is a driver")


def test_devices_are_checked_before_models_are_prepared(tmp_path: Path) -> None:
    try:
        ask_driver()
    except NoDriverError:
        pass
    else:
        pytest.skip("there is a driver")
    command = [
        sys.executable,
        "-m",
        "catenaryd",
        "up",
        "--device",
        "cuda:1",
        "--model",
        "smollm2-135m",
    ]
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("device: cuda:1: no NVIDIA driver is installed")
    assert not (tmp_path / "models").exists()


def test_agents_are_dealt_out_to_scheduler_groups_device_by_device() -> None:
    cluster = LocalCluster(
        ClusterOptions(agents=6, device="emulated:p4", virtual_gpus=2, schedulers=3, groups=2)
    )
    children = cluster._settings()
    names = ["scheduler", "scheduler-1", "scheduler-2"]
    ids = [children[name][1]["scheduler_id"] for name in names]
    assert ids == ["scheduler-0", "scheduler-1", "scheduler-2"]
    groups = [children[f"agent-{n}"][1]["scheduler_group"] for n in range(6)]
    assert groups == ["0", "0", "1", "1", "0", "0"]
    assert all(settings["scheduler_groups"] == 2 for _, settings in children.values())
    # Group 1 has two agents: more must not be waited for there.
    assert children["scheduler"][1]["expected_agents"] // 2 == 2
    addresses = {tuple(children[name][1]["scheduler_addresses"]) for name in ("gateway", "agent-3")}
    assert [len(each) for each in addresses] == [3]


def test_a_cluster_of_one_group_says_nothing_of_groups() -> None:
    children = LocalCluster(ClusterOptions(agents=3))._settings()
    said = {name for _, settings in children.values() for name in settings}
    assert not {"scheduler_groups", "scheduler_group"} & said
    assert children["scheduler"][1]["expected_agents"] == 3


def test_a_plan_for_several_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="plan"):
        LocalCluster(ClusterOptions(groups=2, plan_file=tmp_path / "plan.json"))


_PORTS_OF_A_SEED = """
import random
from catenaryd.local import local_cluster
from catenaryd.local.local_cluster import free_port
random.seed(3)
print([free_port() for _ in range(5)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_two_processes_that_choose_at_the_same_time_get_different_ports() -> None:
    random.seed(3)
    mine = {free_port() for _ in range(5)}
    done = subprocess.run(
        [sys.executable, "-c", _PORTS_OF_A_SEED], capture_output=True, check=True, timeout=60
    )
    assert mine.isdisjoint(json.loads(done.stdout))
