"""What an agent makes of being one of several virtual GPUs. No GPU runs here: only the decisions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psutil
import pytest

from catenary_agent import share
from catenary_agent.devices import device as device_facts
from catenary_agent.executors.device import Device
from catenary_agent.executors.onnx_device import provider_options
from catenary_agent.executors.torch_part import memory_fraction
from catenary_agent.settings import AgentSettings
from catenary_agent.share import MPS_PERCENTAGE, Claim, default_threads, isolation_of, take_share
from catenary_services.errors import InvalidInput

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `take_share` sets is undone after the test."""
    for name in (*device_facts._THREAD_VARIABLES, "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(MPS_PERCENTAGE, raising=False)


def eight_cores(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    pinned: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _pid, cores: pinned.append(list(cores)), raising=False
    )
    return pinned


def control_program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a program called like the one that asks the MPS daemon first on the path."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


ANSWERS = 'read line; test "$line" = get_server_list && echo 4711'
NO_DAEMON = 'echo "Cannot find MPS control daemon process"; exit 1'


@pytest.mark.parametrize(
    ("level", "devices", "cores", "threads"),
    [
        (1, 1, (), 8),
        (2, 1, (), 4),
        (3, 1, (), 2),
        (8, 1, (), 1),
        (1, 3, (), 2),
        (2, 3, (), 1),
        (8, 8, (), 1),
        (2, 4, (4, 5), 1),
        (1, 4, (4, 5), 2),
    ],
)
def test_virtual_gpus_of_a_cpu_divide_its_cores(
    monkeypatch: pytest.MonkeyPatch, level: int, devices: int, cores: tuple[int, ...], threads: int
) -> None:
    eight_cores(monkeypatch)
    assert default_threads(Device("cpu", virtual_level=level), devices, cores) == threads


def test_what_the_operator_sets_is_not_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = eight_cores(monkeypatch)
    device = Device("cpu", virtual_level=2)
    taken = take_share(Claim(device, "mine", memory_bytes=7, threads=3, cpu_cores=(1, 2)))
    assert (taken.device_class, taken.memory_bytes, taken.threads) == ("mine", 7, 3)
    assert pinned == [[1, 2]]


def test_memory_is_divided_among_those_who_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    half = psutil.virtual_memory().total // 2
    assert take_share(Claim(Device("cpu"))).memory_bytes == half
    level_two = Device("cpu", virtual_level=2)
    assert take_share(Claim(level_two, host_devices=3)).memory_bytes == half // 6
    monkeypatch.setattr(device_facts, "cuda_memory_bytes", lambda _index: 100 * GIB)
    assert take_share(Claim(Device("cuda", virtual_level=4))).memory_bytes == 90 * GIB // 4


def test_an_emulated_device_has_the_memory_of_what_it_stands_for() -> None:
    taken = take_share(Claim(Device.parse("emulated:T4", virtual_level=2)))
    assert taken.memory_bytes == 16 * 10**9 * 9 // 10 // 2
    assert (taken.threads, taken.isolation) == (1, "profile")
    assert take_share(Claim(Device.parse("emulated:new"))).memory_bytes > GIB // 8


def test_cores_that_are_not_there_are_refused() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system pins no processes")
    with pytest.raises(InvalidInput, match="cpu_cores"):
        take_share(Claim(Device("cpu"), cpu_cores=(100_000,)))


@pytest.mark.parametrize(("level", "percent"), [(2, "50"), (3, "33"), (4, "25"), (8, "12")])
def test_with_an_mps_daemon_a_virtual_gpu_takes_its_percentage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int, percent: str
) -> None:
    control_program(tmp_path, monkeypatch, ANSWERS)
    taken = take_share(Claim(Device("cuda", virtual_level=level)))
    assert taken.isolation == "MPS"
    assert os.environ[MPS_PERCENTAGE] == percent


def test_a_percentage_the_operator_set_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_program(tmp_path, monkeypatch, ANSWERS)
    monkeypatch.setenv(MPS_PERCENTAGE, "70")
    take_share(Claim(Device("cuda", virtual_level=2)))
    assert os.environ[MPS_PERCENTAGE] == "70"


@pytest.mark.parametrize("script", [NO_DAEMON, 'echo "Cannot find MPS control daemon"', "exit 3"])
def test_without_a_daemon_virtual_gpus_take_time_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    control_program(tmp_path, monkeypatch, script)
    assert take_share(Claim(Device("cuda", virtual_level=2))).isolation == "time slices"
    assert MPS_PERCENTAGE not in os.environ


def test_a_daemon_that_hangs_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_program(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(share, "_MPS_ANSWER_S", 0.05)
    assert isolation_of(Device("cuda", virtual_level=2)) == "time slices"


def test_a_whole_gpu_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control_program(tmp_path, monkeypatch, ANSWERS)
    assert take_share(Claim(Device("cuda"))).isolation == "whole device"
    assert MPS_PERCENTAGE not in os.environ


def test_the_share_is_taken_before_cuda_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPS reads its variable when the process first uses CUDA, and never again."""
    control_program(tmp_path, monkeypatch, ANSWERS)
    seen = []

    def name(_index: int) -> str:
        seen.append(os.environ.get(MPS_PERCENTAGE))
        return "NVIDIA H200"

    monkeypatch.setattr(device_facts, "_cuda_name", name)
    monkeypatch.setattr(device_facts, "cuda_memory_bytes", lambda _index: GIB)
    assert take_share(Claim(Device("cuda", virtual_level=2))).device_class == "H200"
    assert seen == ["50"]


def test_the_frameworks_memory_is_capped_at_the_share() -> None:
    quarter = Device("cuda", index=1, virtual_level=4)
    assert memory_fraction(quarter) == 0.25
    assert provider_options("CUDAExecutionProvider", quarter, 80 * GIB) == {
        "device_id": "1",
        "gpu_mem_limit": str(20 * GIB),
    }
    assert provider_options("TensorrtExecutionProvider", quarter, 80 * GIB) == {
        "device_id": "1",
        "trt_max_workspace_size": str(20 * GIB),
    }
    for device, total in ((Device("cuda", index=1), 80 * GIB), (quarter, 0)):
        assert provider_options("CUDAExecutionProvider", device, total) == {"device_id": "1"}


def test_settings_name_a_device_of_its_own_unless_told() -> None:
    alone = AgentSettings(agent_id="a", insecure=True, device="cuda:1")
    assert (alone.virtual_level, alone.server_id, alone.device_id) == (1, "a", "a/cuda:1")
    second = AgentSettings(agent_id="b", insecure=True, server_id="s", device="cuda:1")
    assert second.device_id == "s/cuda:1"
    with pytest.raises(ValueError, match="virtual_level"):
        AgentSettings(agent_id="a", insecure=True, virtual_level=9)


async def test_the_scheduler_is_told_level_and_device(bench) -> None:  # type: ignore[no-untyped-def]
    scheduler = await bench.scheduler()
    await bench.agent(
        scheduler.port, device="emulated:T4", virtual_level=2, device_id="gpu-7", server_id="s"
    )
    (hello,) = await scheduler.wait_for("hello")
    assert (hello.virtual_level, hello.device_id, hello.server_id) == (2, "gpu-7", "s")
    assert (hello.device_class, hello.memory_bytes) == ("T4", 16 * 10**9 * 9 // 10 // 2)
