"""What an agent tells of its device: from this processor, from described ones, and from libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from catenary_agent.devices import processor
from catenary_agent.devices.device import default_device_class
from catenary_agent.devices.facts import device_facts
from catenary_agent.devices.processor import (
    host_cores,
    host_memory_bytes,
    processor_class,
    processor_model,
    vector_instructions,
)
from catenary_agent.executors.device import Device
from catenary_agent.share import ShareRequest, device_cores, take_share
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.devices.catalogue import CATALOGUE, class_of_gpu
from catenary_services.rules.checking import check

SUPPORT = Path(__file__).resolve().parents[2] / "support"
XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor @ 2.80GHz
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512_vnni rdrand
processor\t: 1
model name\t: Intel(R) Xeon(R) Processor @ 2.80GHz
"""
NEOVERSE = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd asimdhp sve bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def described(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, board: str = "") -> None:
    (folder / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPU_INFO", folder / "cpuinfo")
    monkeypatch.setattr(processor, "BOARD", folder / "board")
    if board:
        (folder / "board").write_text(board + "\0")


def test_a_processor_is_told_by_its_model_and_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described(monkeypatch, tmp_path, XEON)
    assert processor_model() == "Intel(R) Xeon(R) Processor @ 2.80GHz"
    assert vector_instructions() == ("avx", "avx2", "fma", "avx512f", "avx512_vnni")
    described(monkeypatch, tmp_path, NEOVERSE)
    assert processor_model().endswith("0x41-0xd40")
    assert vector_instructions() == ("asimd", "asimdhp", "sve", "bf16")
    described(monkeypatch, tmp_path, NEOVERSE, "Raspberry Pi 4 Model B Rev 1.4")
    assert processor_model() == "Raspberry Pi 4 Model B Rev 1.4"
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "nowhere")
    assert vector_instructions() == ()


@pytest.mark.parametrize(
    ("model", "cores", "name"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.80GHz", 2, "intel-xeon-2.80ghz-x2"),
        ("AMD EPYC 7763 64-Core Processor", 64, "amd-epyc-7763-64-core-x64"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", 1, "intel-core-i7-8550u-1.80ghz-x1"),
        ("Raspberry Pi 4 Model B Rev 1.4", 4, "raspberry-pi-4-model-b-rev-1.4-x4"),
        ("", 3, "cpu-x3"),
        ("|" * 500 + "a" * 500, 1, "a" * 60 + "-x1"),
    ],
)
def test_unlike_processors_are_unlike_classes(model: str, cores: int, name: str) -> None:
    assert processor_class(model, cores) == name


def test_a_cpu_agent_is_of_the_class_of_its_cores() -> None:
    whole = take_share(ShareRequest(Device("cpu")))
    assert whole.device_class == default_device_class("cpu")
    assert whole.device_class.endswith(f"-x{host_cores()}")
    halves = take_share(ShareRequest(Device("cpu", virtual_level=2)))
    assert halves.device_class == whole.device_class
    shared = take_share(ShareRequest(Device("cpu"), host_devices=2))
    assert shared.device_class.endswith(f"-x{device_cores(2)}")
    assert take_share(ShareRequest(Device("cpu"), threads=7)).device_class.endswith("-x7")
    assert take_share(ShareRequest(Device("cpu"), "cpu")).device_class == "cpu"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", ""),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", ""),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", ""),
        ("NVIDIA A10G", ""),
    ],
)
def test_a_gpu_is_of_a_class_of_the_catalogue_only_by_its_exact_name(name: str, known: str) -> None:
    assert class_of_gpu(name) == known
    assert known in {"", *CATALOGUE}


def test_what_a_cpu_agent_tells_keeps_the_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described(monkeypatch, tmp_path, XEON.replace("Intel", "In|tel\x07" + "x" * 2000))
    facts = device_facts("cpu", 2)
    assert facts is not None
    assert facts.name.startswith("Intelxxx")
    assert facts.total_bytes == host_memory_bytes()
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert (facts.cores, facts.compute_capability) == (2, "")
    check(scheduler_pb2.AgentHello(
        agent_id="a",
        peer=common_pb2.Peer(peer_id="a"),
        link_bytes_per_second=1,
        device_facts=facts,
    ))  # fmt: skip
    assert device_facts("emulated:T4", 1) is None


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver and a management library of two described cards."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("libraries")
    for library, source in (
        ("libcuda.so.1", "fake_driver.c"),
        ("libnvidia-ml.so.1", "fake_nvml.c"),
    ):
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / library)]
        subprocess.run([*command, str(SUPPORT / source)], check=True)
    return folder


def told(libraries: Path, device: str, **described: str) -> common_pb2.DeviceFacts:
    """Returns what an agent of a device tells, asked in a process of its own."""
    code = (
        "from catenary_agent.devices.facts import device_facts;"
        f"found = device_facts({device!r}, 1, int({described.pop('free', '0')}) or None);"
        "print(found.SerializeToString().hex())"
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FAKE_COUNT": "2",
        **described,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=100
    )
    return common_pb2.DeviceFacts.FromString(bytes.fromhex(done.stdout.splitlines()[-1].decode()))


def test_a_gpu_is_told_by_its_driver_and_the_management_library(libraries: Path) -> None:
    pytest.importorskip("pynvml")
    assert told(libraries, "cuda:0") == common_pb2.DeviceFacts(
        name="Tesla T4",
        total_bytes=16 * 10**9,
        free_bytes=15_500_000_000,
        compute_capability="7.5",
        cuda="13.0",
        driver="580.65.06",
        uuid="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        pcie_generation=3,
        pcie_width=16,
        power_limit_milliwatts=70_000,
        mig_mode="off",
    )
    # The library counts in another order, and does not tell everything of everyone.
    second = told(libraries, "cuda:1", free="123")
    assert (second.uuid[:12], second.pcie_generation) == ("GPU-10111213", 4)
    assert (second.power_limit_milliwatts, second.free_bytes) == (0, 123)


def test_without_the_management_library_the_driver_says_what_it_knows(libraries: Path) -> None:
    pytest.importorskip("pynvml")
    alone = told(libraries, "cuda:0", FAKE_NVML_INIT="9")
    assert (alone.name, alone.compute_capability, alone.cuda) == ("Tesla T4", "7.5", "13.0")
    assert alone.uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert (alone.driver, alone.free_bytes, alone.mig_mode) == ("", 0, "")


def test_without_the_package_the_driver_says_what_it_knows(libraries: Path, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    alone = told(libraries, "cuda:1", PYTHONPATH=path)
    assert (alone.name, alone.driver) == ("Tesla T4", "")
