"""What a device is called and how much it holds, and keeping compute libraries in their bounds."""

from __future__ import annotations

import os

import psutil

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def default_device_class(device: str) -> str:
    """Returns the planner's name of a device: "cpu", "p4" of "emulated:p4", a GPU's model."""
    kind, _, detail = device.partition(":")
    if kind == "emulated" and detail:
        return detail
    if kind == "cuda":
        name = _cuda_name(int(detail or 0))
        return name.lower().replace("nvidia ", "").replace(" ", "-") if name else "cuda"
    return kind or "cpu"


def default_memory_bytes(device: str) -> int:
    """Returns the memory partitions may use: nine tenths of a GPU's, else half of the host's."""
    kind, _, detail = device.partition(":")
    if kind == "cuda":
        total = _cuda_memory(int(detail or 0))
        if total:
            return total * 9 // 10
    return int(psutil.virtual_memory().total) // 2


def limit_threads(threads: int) -> None:
    """Makes compute libraries loaded later use `threads` threads that sleep when idle.

    Several agents share a host in tests and in `catenaryd up`; a library that takes every core, or
    spins while it waits, would slow down all of them. Variables set by the operator are kept.
    """
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _cuda_name(index: int) -> str:
    try:
        import torch

        return torch.cuda.get_device_name(index) if torch.cuda.is_available() else ""
    except (ImportError, RuntimeError, AssertionError):
        return ""


def _cuda_memory(index: int) -> int:
    try:
        import torch

        if not torch.cuda.is_available():
            return 0
        return int(torch.cuda.get_device_properties(index).total_memory)
    except (ImportError, RuntimeError, AssertionError):
        return 0
