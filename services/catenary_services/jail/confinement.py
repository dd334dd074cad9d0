"""Confinement of a jailed process, before it imports the code that touches the file.

Landlock and seccomp bind the thread that asks for them and those it starts later, so all of this
happens while the process has one thread. Memory is limited last, when it is known how much the code
itself takes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from catenary_services.jail import kernel, landlock, seccomp
from catenary_services.jail.orders import JailLimits, JailOrder, JailProtection

_NEW_NETWORK = 0x40000000
_FILE_DESCRIPTORS = 1024
_READABLE = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/etc/passwd",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/version",
    "/proc/filesystems",
    "/proc/sys/vm",
    "/sys/devices/system",
    "/sys/fs/cgroup",
    "/sys/kernel/mm/transparent_hugepage",
    "/dev/urandom",
    "/dev/random",
)
"""Paths of libraries, and of facts about the machine that libraries read. Nothing there is secret.
"""
_DEVICES = ("/dev/null", "/dev/zero")


def confine(order: JailOrder) -> set[JailProtection]:
    """Gives up every right that the kernel lets it, and returns the protections that now hold."""
    had = {JailProtection.RESOURCE_LIMITS}
    _limit(order)
    readable = (*_READABLE, *code_paths(), *order.inputs)
    with suppress(OSError):
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # Only root has the capability for this; seccomp refuses sockets to everybody.
    with suppress(OSError):
        _unshare_network()
        had.add(JailProtection.NO_NETWORK)
    if order.uid is not None:
        _become(order.uid, keep_reading=order.reads_as_root)
        had.add(JailProtection.OWN_USER)
    with suppress(OSError, KeyError):
        kept = 1 << kernel.CAP_DAC_READ_SEARCH if order.reads_as_root else 0
        kernel.keep_capabilities(kept)
        had.add(JailProtection.NO_CAPABILITIES)
    with suppress(OSError):
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        had.add(JailProtection.NO_NEW_PRIVILEGES)
    with suppress(OSError):
        landlock.restrict(readable, (order.output, order.scratch, *_DEVICES))
        had.add(JailProtection.LANDLOCK)
    with suppress(OSError):
        seccomp.install()
        had |= {JailProtection.SECCOMP, JailProtection.NO_NETWORK}
    return had


def limit_memory(limits: JailLimits) -> None:
    """Limits the address space to `memory_bytes` more than it is now."""
    most = _address_space() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def keep_memory(more_bytes: int) -> None:
    """Limits the address space to `more_bytes` more than it is now, within the limit it has."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _address_space() + more_bytes
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def code_paths() -> list[str]:
    """Returns the paths of Python's own files, of installed packages and of this project.

    A source folder of this project counts package by package, because keys and models may lie
    beside the packages.
    """
    whole = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    found = {str(Path(path).resolve()) for path in whole if Path(path).exists()}
    for entry in filter(None, sys.path):
        folder = Path(entry).resolve()
        if any(folder.is_relative_to(path) for path in found) or not folder.is_dir():
            continue
        if folder.name in ("site-packages", "dist-packages"):
            found.add(str(folder))
            continue
        for path in folder.iterdir():
            if path.suffix in (".py", ".so") or (path / "__init__.py").is_file():
                found.add(str(path))
            elif path.is_dir() and path.name.isidentifier() and any(path.glob("*/__init__.py")):
                found.add(str(path))  # a package without an `__init__.py` of its own
    return sorted(found)


def _limit(order: JailOrder) -> None:
    limits = order.limits
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, _FILE_DESCRIPTORS),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))
    # This counts all threads of a user. It limits only a user of the child's own, which begins with
    # none; as another user's it would count processes that do not belong to the jail.
    if order.uid is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (_THREADS, _THREADS))
    # For the writer, a file that grows too long is an error, not the end of the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


_THREADS = 512


def _unshare_network() -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace of its own")


def _become(uid: int, *, keep_reading: bool) -> None:
    if keep_reading:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # Without this, its own /proc would belong to root.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
