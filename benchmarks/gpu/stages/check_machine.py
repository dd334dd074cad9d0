"""Stages about the machine: installed versions, ceilings, the project's tests, the sanitizer."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.stage import Context, Skipped
from catenary_agent.device_check import installed_wheels, what_is_missing
from catenary_agent.devices.cuda_driver import NoDriverError, ask_driver

ROOT = Path(__file__).resolve().parents[3]
_SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
_TESTS = (
    "tests/gpu_agent/decoders/torch",
    "tests/gpu_agent/decoders/transfers",
    "tests/gpu_agent/decoders/triton_kernels",
    "tests/gpu_agent/decoders/sampling",
    "tests/gpu_agent/executors/test_torch_part.py",
    "tests/gpu_agent/executors/test_torch_device.py",
    "tests/gpu_agent/kv/test_cache_pieces.py",
)
_TINY_TESTS = ("tests/gpu_agent/devices/test_device_errors.py",)
_TEST_PROCESSES = 6
GIGA = 1e9


def versions(here: Context) -> None:
    """Notes the installed versions; fails if an agent on the GPU would not start."""
    here.row("python", platform.python_version())
    for name in ("torch", "transformers", "triton", "numpy", "grpcio", "protobuf", "onnxruntime"):
        here.row(name, _version(name))
    try:
        driver = ask_driver(free_of=0)
    except NoDriverError as reason:
        here.row("driver", "none", note=str(reason))
        if here.is_cuda:
            raise
        return
    here.row("driver", f"CUDA {driver.cuda[0]}.{driver.cuda[1]}")
    for card in driver.cards:
        capability = f"sm_{card.capability[0]}{card.capability[1]}"
        here.row("card", card.name, note=f"{capability}, {card.total_bytes / GIGA:.1f} GB")
    wheels = installed_wheels()
    missing = what_is_missing(here.device, driver, wheels, driver.cards[0].total_bytes * 9 // 10)
    here.row(
        "start-up check finds missing",
        0 if missing is None else 1,
        at_most=0,
        note=missing or " ".join(wheels.torch_architectures),
    )
    _compare_with_torch(here)


def _compare_with_torch(here: Context) -> None:
    import torch

    if not torch.cuda.is_available():
        return
    card = ask_driver(free_of=0).cards[0]
    facts = torch.cuda.get_device_properties(0)
    here.row("CUDA of PyTorch", str(torch.version.cuda))
    here.row("multiprocessors", facts.multi_processor_count)
    same = (facts.name, (facts.major, facts.minor), facts.total_memory) == (
        card.name,
        card.capability,
        card.total_bytes,
    )
    here.row("driver and PyTorch disagree", 0 if same else 1, at_most=0)
    free = torch.cuda.mem_get_info(0)[0]
    here.row(
        "free, by the driver and by PyTorch",
        (card.free_bytes or 0) / GIGA,
        "GB",
        note=f"PyTorch {free / GIGA:.1f} GB, with its context",
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def ceilings(here: Context) -> None:
    """Measures ceilings of any code: copies, a matrix product, a launch."""
    import torch

    device = here.torch_device
    count = (1 << 30) if here.is_cuda else (1 << 20)
    source = torch.randn(count, device=device).to(torch.bfloat16)
    target = torch.empty_like(source)
    taken = here.time(lambda: target.copy_(source), 20)
    here.row("device copy, read and written", 2 * source.nbytes / taken.span_s / GIGA, "GB/s")
    size = (256 << 20) if here.is_cuda else (1 << 20)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    for name, pinned in (("pageable", False), ("pinned", True)):
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned and here.is_cuda)
        taken = here.time(lambda host=host: on_device.copy_(host, non_blocking=True), 5)
        here.row(f"host to device, {name}", size / taken.wall_s / GIGA, "GB/s")
        taken = here.time(lambda host=host: host.copy_(on_device, non_blocking=True), 5)
        here.row(f"device to host, {name}", size / taken.wall_s / GIGA, "GB/s")
    side = 8192 if here.is_cuda else 64
    left, right = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    taken = here.time(lambda: left @ right, 20)
    here.row(f"bf16 product, {side} a side", 2 * side**3 / taken.span_s / 1e12, "TFLOP/s")
    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    here.row("a launch", here.time(launches, 5).wall_s / 1000 * 1e6, "us")


def tests(here: Context) -> None:
    """Runs the project's own tests of code for GPUs."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    files = _TINY_TESTS if here.tiny else _TESTS
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--tb=short"]
    if not here.tiny:
        command += ["-n", str(_TEST_PROCESSES), "--dist", "loadfile"]
    lines = []
    with subprocess.Popen(
        [*command, *files], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:  # said at once, for the log of a stage that is killed
            print(line, end="", flush=True)
            lines.append(line.strip())
    counted = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    summary = next((line for line in reversed(lines) if " in " in line), "")
    for count, what in re.findall(r"(\d+) (passed|failed|error|skipped)", summary):
        counted[what] = int(count)
    here.row("tests that failed", counted["failed"] + counted["error"], at_most=0, note=summary)
    here.row("tests that passed", counted["passed"], at_least=1)
    here.row("tests that were skipped", counted["skipped"])


def sanitizer(here: Context) -> None:
    """Runs one mixed step under compute-sanitizer; on a CPU without it."""
    program = next((found for each in _SANITIZERS if (found := shutil.which(each))), None)
    if program is None and here.is_cuda:
        raise Skipped("there is no compute-sanitizer")
    command = [sys.executable, "-m", "benchmarks.gpu.stages.one_step", str(here.folder)]
    if program is not None and here.is_cuda:
        options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
        command = [program, *options, *command, "cuda"]
    # Every tensor gets an allocation of its own. Otherwise a read beyond one hits another's memory.
    # Such allocations cannot be captured: that call fails, as expected, and steps run eagerly.
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    print(done.stdout[-6000:], done.stderr[-4000:], flush=True)
    if "Device not supported" in done.stdout + done.stderr:
        raise Skipped("compute-sanitizer does not reach the device here")
    lines = (done.stdout or done.stderr).splitlines()
    here.row(
        "a mixed step under the sanitizer, exit code",
        done.returncode,
        at_most=0,
        note=lines[-1][:120] if lines else "",
    )
