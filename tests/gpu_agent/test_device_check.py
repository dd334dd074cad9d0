"""Whether an agent can compute on its GPU: decided from described cards, and tried without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from catenary_agent.device_check import (
    CUDA_PROVIDER,
    InstalledLibraries,
    check_device,
    installed_wheels,
    runs_on,
    what_is_missing,
)
from catenary_agent.devices.cuda_driver import CudaDevice, CudaDriver, NoDriverError, ask_driver
from catenary_agent.executors.device import Device
from catenary_agent.process import AgentProcess
from catenary_agent.settings import AgentSettings
from catenary_services.errors import InvalidInput

GIGA = 10**9
ROOT = Path(__file__).resolve().parents[2]
GPU = Device("cuda")

P4 = CudaDevice("Tesla P4", (6, 1), 8 * GIGA, 8 * GIGA)
V100 = CudaDevice("Tesla V100-SXM2-16GB", (7, 0), 16 * GIGA, 16 * GIGA)
T4 = CudaDevice("Tesla T4", (7, 5), 16 * GIGA, 15 * GIGA)
A10 = CudaDevice("NVIDIA A10", (8, 6), 24 * GIGA, 23 * GIGA)
L4 = CudaDevice("NVIDIA L4", (8, 9), 24 * GIGA, 23 * GIGA)
H100 = CudaDevice("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIGA, 79 * GIGA)

# As the builds of 2.11 for CUDA 13.0 and 12.6 list them.
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
TORCH_13 = InstalledLibraries(torch="2.11.0+cu130", torch_cuda=(13, 0), torch_architectures=CU130)
TORCH_126 = InstalledLibraries(torch="2.11.0+cu126", torch_cuda=(12, 6), torch_architectures=CU126)
ON_CPU = InstalledLibraries(
    torch="2.13.0+cpu", onnx="1.31.1", onnx_providers=("CPUExecutionProvider",)
)
ONNX_13 = InstalledLibraries(onnx="1.31.1", onnx_providers=(CUDA_PROVIDER,), onnx_cuda=(13, 0))


def missing(card: CudaDevice, wheels: InstalledLibraries, cuda: tuple[int, int] = (13, 0)) -> str:
    wanted = card.total_bytes * 9 // 10
    return what_is_missing(GPU, CudaDriver(cuda, (card,)), wheels, wanted) or ""


@pytest.mark.parametrize("card", [T4, A10, L4, H100], ids=lambda card: card.name)
def test_the_usual_wheels_fit_cards_since_turing(card: CudaDevice) -> None:
    assert missing(card, TORCH_13) == ""


@pytest.mark.parametrize("card", [P4, V100], ids=lambda card: card.name)
def test_older_cards_need_the_last_wheels_that_have_them(card: CudaDevice) -> None:
    said = missing(card, TORCH_13)
    assert card.name in said
    assert "no kernels for compute capability" in said
    assert "cu126" in said
    assert missing(card, TORCH_126) == ""


@pytest.mark.parametrize("cuda", [(12, 9), (12, 2), (11, 8)])
def test_a_driver_that_is_too_old_is_named_with_the_one_that_is_needed(
    cuda: tuple[int, int],
) -> None:
    said = missing(H100, TORCH_13, cuda)
    assert "needs a driver for CUDA 13 (R580 or newer)" in said
    assert f"ends at CUDA {cuda[0]}.{cuda[1]}" in said
    assert "cuda12" in said


def test_within_a_major_version_a_driver_runs_what_is_newer() -> None:
    assert missing(A10, TORCH_126, (12, 0)) == ""
    assert missing(A10, TORCH_126, (13, 0)) == ""


def test_libraries_without_cuda_are_named() -> None:
    said = missing(T4, ON_CPU)
    assert "PyTorch 2.13.0+cpu is built without CUDA" in said
    assert "ONNX Runtime 1.31.1 has no CUDA provider" in said
    assert "cuda13" in said
    assert "PyTorch is not installed; ONNX Runtime is not installed" in missing(
        T4, InstalledLibraries()
    )


def test_one_library_that_fits_is_enough() -> None:
    assert missing(T4, ONNX_13) == ""
    only_torch = replace(TORCH_13, onnx="1.31.1", onnx_providers=("CPUExecutionProvider",))
    assert missing(T4, only_torch) == ""
    assert "ONNX Runtime 1.31.1 needs a driver for CUDA 13" in missing(T4, ONNX_13, (12, 8))


def test_memory_that_others_hold_is_missing() -> None:
    taken = replace(A10, free_bytes=6 * GIGA)
    assert missing(taken, TORCH_13) == (
        "6.0 GB of 24.0 GB are free and this agent counts on 21.6 GB; end what holds the rest, or "
        "set memory_bytes"
    )
    driver = CudaDriver((13, 0), (taken,))
    assert what_is_missing(GPU, driver, TORCH_13, 6 * GIGA) is None
    # A sibling that shares the device holds half of it, and its context besides.
    half = replace(A10, free_bytes=11 * GIGA)
    assert (
        what_is_missing(GPU, CudaDriver((13, 0), (half,)), TORCH_13, A10.total_bytes * 9 // 20)
        is None
    )
    unknown = replace(A10, free_bytes=None)
    assert missing(unknown, TORCH_13) == ""


def test_more_memory_than_there_is_is_refused() -> None:
    driver = CudaDriver((13, 0), (A10,))
    assert what_is_missing(GPU, driver, TORCH_13, 25 * GIGA) == (
        "NVIDIA A10 has 24.0 GB and this agent counts on 25.0 GB; set memory_bytes"
    )
    with pytest.raises(InvalidInput, match=r"memory_bytes: is 1000000\.0 GB, of .* that are here"):
        check_device(Device("cpu"), 10**15)


def test_a_gpu_that_is_not_there_is_said_so() -> None:
    both = CudaDriver((13, 0), (T4, T4))
    said = what_is_missing(Device("cuda", 2), both, TORCH_13, GIGA)
    assert said == "there is no such GPU; the driver shows 2 (cuda:0 to cuda:1)"
    said = what_is_missing(Device("cuda", 1), CudaDriver((13, 0), (T4,)), TORCH_13, GIGA)
    assert said == "there is no such GPU; the driver shows 1 (cuda:0)"
    none = what_is_missing(GPU, CudaDriver((13, 0), ()), TORCH_13, GIGA)
    assert none == "the NVIDIA driver shows no GPU to this process"


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
        ("sm_120", (12, 1), True),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 9), False),
        ("sm_100", (10, 0), True),
        ("gfx90a", (9, 0), False),
        ("", (9, 0), False),
    ],
)
def test_kernels_run_on_cards_they_were_built_for(
    architecture: str, capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on([architecture], capability) is runs


def test_other_devices_are_not_looked_at() -> None:
    check_device(Device("cpu"), GIGA)
    check_device(Device.parse("emulated:T4"), GIGA)


def test_what_is_installed_is_what_the_libraries_say() -> None:
    torch = pytest.importorskip("torch")
    wheels = installed_wheels()
    assert wheels.torch == torch.__version__
    assert (wheels.torch_cuda is None) == (torch.version.cuda is None)
    assert bool(wheels.torch_architectures) == (torch.version.cuda is not None)


def test_without_a_driver_an_agent_says_so_before_it_is_ready(tmp_path: Path) -> None:
    try:
        ask_driver()
    except NoDriverError:
        pass
    else:
        pytest.skip("there is a driver")
    with pytest.raises(InvalidInput, match="cuda:0: no NVIDIA driver is installed"):
        AgentProcess(AgentSettings(agent_id="a", device="cuda:0", insecure=True))


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `libcuda.so.1` whose card the environment describes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "tests/support/fake_driver.c"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o"]
    subprocess.run([*command, str(folder / "libcuda.so.1"), str(source)], check=True)
    return folder


def started(driver_folder: Path, **described: object) -> subprocess.CompletedProcess[str]:
    """Starts an agent of `cuda:0` for real; the card is described, the libraries are those here."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver_folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **{f"FAKE_{name.upper()}": str(value) for name, value in described.items()},
    }
    command = [sys.executable, "-m", "catenaryd", "agent", "--agent-id", "a", "--insecure"]
    return subprocess.run(
        [*command, "--device", "cuda:0", "--log-level", "error"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_an_agent_whose_wheels_have_no_cuda_ends_with_one_sentence(driver_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch is built with CUDA")
    done = started(driver_folder, name="NVIDIA L4", capability=89, total=24 * GIGA)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("device: cuda:0: NVIDIA L4 cannot be used: PyTorch ")
    assert "is built without CUDA" in line


def test_a_driver_that_does_not_start_is_said_in_its_own_words(driver_folder: Path) -> None:
    assert "CUDA error 803, system has unsupported display driver" in (
        started(driver_folder, init=803).stderr
    )
    assert "CUDA error 999" in started(driver_folder, init=999).stderr
    assert "shows no GPU to this process" in started(driver_folder, init=100).stderr


def test_the_driver_is_asked_as_its_interface_wants(driver_folder: Path) -> None:
    code = (
        "from catenary_agent.devices.cuda_driver import ask_driver; print(ask_driver(free_of=1));"
        "from catenary_agent.devices.device import *; print(default_device_class('cuda:0'),"
        " default_memory_bytes('cuda:0', 2), default_memory_bytes('cuda:7'))"
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver_folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FAKE_CUDA": "12040",
        "FAKE_COUNT": "2",
        "FAKE_FREE": "7000000000",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    described, facts = done.stdout.splitlines()
    card = CudaDevice("Tesla T4", (7, 5), 16 * GIGA, None, "00010203-0405-0607-0809-0a0b0c0d0e0f")
    other = replace(card, free_bytes=7 * GIGA, uuid="10111213-1415-1617-1819-1a1b1c1d1e1f")
    assert described == repr(CudaDriver((12, 4), (card, other)))
    assert facts == f"T4 {16 * GIGA * 9 // 10 // 2} 0"
