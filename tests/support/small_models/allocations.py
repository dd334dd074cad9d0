"""What libraries really allocate: PyTorch by its own allocator, ONNX Runtime by that of libc."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any


def torch_peak_bytes(work: Callable[[], Any]) -> int:
    """Returns the most bytes that `work` had allocated at a time, of what PyTorch allocates.

    Every allocation of its CPU allocator counts, those within kernels included; memory that NumPy
    allocates does not.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    del kept
    held = most = 0
    events: Any = recorded.profiler
    records = [
        (event.start_ns(), event.nbytes())
        for event in events.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    assert records
    for _, nbytes in sorted(records, key=lambda each: each[0]):
        held += nbytes
        most = max(most, held)
    return most


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def malloc_bytes() -> int:
    """Returns what this process has allocated through libc: arenas, and blocks of their own."""
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = _Mallinfo
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)
