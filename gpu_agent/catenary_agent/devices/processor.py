"""The processor of this host: its model, and what an agent may use of it and of its memory."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import psutil

from catenary_agent.devices.container_limits import core_limit, memory_limit_bytes

CPU_INFO = Path("/proc/cpuinfo")
BOARD = Path("/proc/device-tree/model")
_USED_INSTRUCTIONS = (
    # x86, as the flags of Linux; ONNX Runtime and PyTorch choose their kernels by these.
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    # ARM.
    *("asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16", "sme"),
)
_NOISE = re.compile(r"\((?:r|tm)\)|\b(?:cpu|processor|with radeon graphics)\b|@", re.IGNORECASE)
_LONGEST_CLASS = 60


def processor_model() -> str:
    """Returns the model of the processor as its maker calls it; where it has no name, the board."""
    found = _cpu_info()
    named = found.get("model name") or found.get("hardware") or _board()
    if named:
        return named
    part = "-".join(found[key] for key in ("cpu implementer", "cpu part") if key in found)
    return " ".join(filter(None, (platform.processor() or platform.machine(), part)))


def vector_instructions() -> tuple[str, ...]:
    """Returns the vector instructions of the processor that compute libraries use."""
    found = _cpu_info()
    there = set((found.get("flags") or found.get("features") or "").split())
    return tuple(each for each in _USED_INSTRUCTIONS if each in there)


def host_cores() -> int:
    """Returns how many cores this process may use, in a container its share of their time."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    limit = core_limit()
    # A fraction of a core is not counted: one thread too many delays all others.
    return cores if limit is None else max(1, min(cores, int(limit)))


def host_memory_bytes() -> int:
    """Returns the memory that this process may use: the host's, or what its container allows."""
    there = int(psutil.virtual_memory().total)
    limit = memory_limit_bytes()
    return there if limit is None else min(there, limit)


def free_memory_bytes() -> int:
    """Returns the memory that the host can give without swapping, at most `host_memory_bytes`."""
    return min(int(psutil.virtual_memory().available), host_memory_bytes())


def processor_class(model: str, cores: int) -> str:
    """Returns the planner's name of so many cores of a processor, such as "amd-epyc-7763-x8".

    Processors of two models, or with other numbers of cores, are of two classes: no time measured
    on one of them says anything about the other.
    """
    words = re.sub(r"[^a-z0-9.]+", "-", _NOISE.sub(" ", model.lower())).strip("-.")
    return f"{words[:_LONGEST_CLASS].rstrip('-.') or 'cpu'}-x{cores}"


def _board() -> str:
    try:
        return BOARD.read_text(errors="replace").strip("\0 \n")
    except OSError:
        return ""


def _cpu_info() -> dict[str, str]:
    """Returns the first value of every line of the system's description, by key in lower case."""
    try:
        text = CPU_INFO.read_text(errors="replace")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip().lower(), value.strip())
    return found
