"""System calls of Linux that Python has no functions for."""

from __future__ import annotations

import ctypes
import os
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
CAP_DAC_READ_SEARCH = 2
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522


def machine() -> str:
    """Returns the architecture of the processor, by the kernel's name."""
    return os.uname().machine if hasattr(os, "uname") else ""


def syscall(number: int, *arguments: object) -> int:
    """Makes a system call and returns its result.

    Raises:
        OSError: The call failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *passed))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def prctl(option: int, *arguments: object) -> None:
    """Makes the system call prctl.

    Raises:
        OSError: The call failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    passed += [ctypes.c_ulong(0)] * (4 - len(passed))
    if libc.prctl(ctypes.c_int(option), *passed) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def keep_capabilities(kept: int) -> None:
    """Gives up all capabilities of this thread except those in the bit mask `kept`.

    Raises:
        OSError: The kernel refuses.
    """
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
    low = kept & 0xFFFFFFFF
    data = ctypes.create_string_buffer(struct.pack("=6I", low, low, 0, 0, 0, 0), 24)
    syscall(_CAPSET[machine()], header, data)
