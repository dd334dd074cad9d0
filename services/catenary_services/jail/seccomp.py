"""seccomp: a filter for the system calls that no reader of a model needs.

The filter is classic BPF, written by hand: a list of refused numbers, and four calls that are
looked at more closely. Refused calls fail with EPERM, which libraries turn into exceptions.
Threads may be made, processes not; signals go to this process only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from catenary_services.jail.kernel import PR_SET_SECCOMP, machine, prctl

_FILTER_MODE = 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD = 0x00010000
_NOT_X86_64 = 0x40000000
"""Numbers from this one on are calls of the x32 ABI."""


@dataclass(frozen=True, slots=True)
class _Calls:
    audit: int
    clone: int
    tgkill: int
    prlimit64: int
    refused: tuple[int, ...]


_CLONE3 = 435
_REFUSED = (
    ("sockets", "41-55 288 299 307", "198-212 242 243 269"),
    ("fork, vfork, execve, execveat", "57-59 322", "221 281"),
    ("kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo", "62 200 129 297", "129 130 138 240"),
    ("ptrace, process_vm_readv and _writev, kcmp", "101 310-312", "117 270-272"),
    ("System V memory, semaphores and queues", "29-31 64-71 220", "186-197"),
    ("POSIX queues", "240-245", "180-185"),
    ("link, symlink, mknod and their *at forms", "86 88 133 259 265 266", "33 36 37"),
    ("pivot_root, chroot, mount, umount2, swap", "155 161 165-168", "41 51 40 39 224 225"),
    ("unshare, setns", "272 308", "97 268"),
    ("keys", "248-250", "217-219"),
    ("bpf, perf_event_open, userfaultfd, memfd_create", "321 298 323 319", "280 241 282 279"),
    ("name_to_handle_at, open_by_handle_at", "303 304", "264 265"),
    ("kexec, reboot, modules, ports", "246 320 169 172-176 313", "104 294 142 105 106 273"),
    ("syslog, acct, quota, personality", "103 163 179 135", "116 89 60 92"),
    ("fanotify, lookup_dcookie, vhangup", "300 301 212 153", "262 263 18 58"),
    ("clocks and names of the host", "159 164 170 171 227 305", "112 161 162 170 171 266"),
    ("priorities of other processes", "141 142 144 251 314", "140 118 119 30 274"),
    ("places of other processes' memory", "256 279 450", "238 239 450"),
    ("pidfd_send_signal, pidfd_open and _getfd", "424 434 438", "424 434 438"),
    ("io_uring, the new mount calls", "425-433 442", "425-433 442"),
    ("process_madvise, process_mrelease", "440 448", "440 448"),
    ("quotactl_fd, memfd_secret", "443 447", "443 447"),
)
"""The refused calls, with their numbers on x86_64 and on aarch64."""


def _numbers(column: int) -> Iterator[int]:
    for row in _REFUSED:
        for text in row[column].split():
            first, _, last = text.partition("-")
            yield from range(int(first), int(last or first) + 1)


_CALLS = {
    "x86_64": _Calls(0xC000003E, 56, 234, 302, tuple(_numbers(1))),
    "aarch64": _Calls(0xC00000B7, 220, 131, 261, tuple(_numbers(2))),
}


def is_known() -> bool:
    """Returns True if there is a filter for this architecture."""
    return machine() in _CALLS


def install() -> None:
    """Filters the calls of this thread and of those it starts; needs no_new_privs.

    Raises:
        OSError: The kernel has no seccomp, or there is no filter for this architecture.
    """
    if not is_known():
        raise OSError(f"no filter for {machine()}")
    program = _program(_CALLS[machine()], os.getpid())
    code = ctypes.create_string_buffer(b"".join(program))
    # struct sock_fprog is a length, padding and a pointer.
    header = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(code))
    prctl(PR_SET_SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(header, len(header)))


def _program(calls: _Calls, pid: int) -> list[bytes]:
    refuse = [_op(_RETURN, _ERRNO | errno.EPERM)]
    allow = [_op(_RETURN, _ALLOW)]
    program = [
        _op(_LOAD, _ARCHITECTURE_AT),
        _op(_EQUAL, calls.audit, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER_AT),
        _op(_AT_LEAST, _NOT_X86_64, 0, 1),
        *refuse,
        # glibc falls back to clone, whose flags a filter can see.
        _op(_EQUAL, _CLONE3, 0, 1),
        _op(_RETURN, _ERRNO | errno.ENOSYS),
        _op(_EQUAL, calls.clone, 0, 4),
        _op(_LOAD, _ARGUMENT_AT),
        _op(_ANY_BIT, _CLONE_THREAD, 0, 1),
        *allow,
        *refuse,
        *_only_own(calls.tgkill, (pid,)),
        *_only_own(calls.prlimit64, (0, pid)),
    ]
    for number in calls.refused:
        program += [_op(_EQUAL, number, 0, 1), *refuse]
    return program + allow


def _only_own(number: int, pids: tuple[int, ...]) -> list[bytes]:
    """Returns instructions that allow a call only if its first argument is one of `pids`."""
    checks = []
    for pid in pids:
        checks += [_op(_EQUAL, pid, 0, 1), _op(_RETURN, _ALLOW)]
    return [
        _op(_EQUAL, number, 0, 2 + len(checks)),
        _op(_LOAD, _ARGUMENT_AT),
        *checks,
        _op(_RETURN, _ERRNO | errno.EPERM),
    ]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
