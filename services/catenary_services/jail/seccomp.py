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


_NEW = (
    424,
    425,
    426,
    427,
    428,
    429,
    430,
    431,
    432,
    433,
    434,
    438,
    440,
    442,
    443,
    447,
    448,
    450,
)
"""Calls with the same number on all architectures: pidfd_send_signal, io_uring, the new mount
calls, pidfd_open and pidfd_getfd, process_madvise, mount_setattr, quotactl_fd, memfd_secret,
process_mrelease and set_mempolicy_home_node."""
_CLONE3 = 435

_CALLS = {
    "x86_64": _Calls(
        audit=0xC000003E,
        clone=56,
        tgkill=234,
        prlimit64=302,
        refused=(
            *range(41, 56),  # sockets
            288,
            299,
            307,  # accept4, recvmmsg, sendmmsg
            57,
            58,
            59,
            322,  # fork, vfork, execve, execveat
            62,
            200,
            129,
            297,  # kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo
            101,
            310,
            311,
            312,  # ptrace, process_vm_readv and _writev, kcmp
            29,
            30,
            31,
            67,
            64,
            65,
            66,
            220,
            68,
            69,
            70,
            71,  # System V memory, semaphores, queues
            240,
            241,
            242,
            243,
            244,
            245,  # POSIX queues
            86,
            88,
            265,
            266,
            133,
            259,  # link, symlink, linkat, symlinkat, mknod, mknodat
            155,
            161,
            165,
            166,
            167,
            168,  # pivot_root, chroot, mount, umount2, swap
            272,
            308,  # unshare, setns
            248,
            249,
            250,  # keys
            321,
            298,
            323,
            319,  # bpf, perf_event_open, userfaultfd, memfd_create
            303,
            304,  # name_to_handle_at, open_by_handle_at
            246,
            320,
            169,
            174,
            175,
            176,
            313,
            172,
            173,  # kexec, reboot, modules, ports
            103,
            163,
            179,
            135,
            300,
            301,
            212,
            153,  # syslog, acct, quota, personality, fanotify
            164,
            170,
            171,
            227,
            159,
            305,  # clocks and names of the host
            141,
            142,
            144,
            251,
            314,
            256,
            279,  # priorities and places of other processes
        ),
    ),
    "aarch64": _Calls(
        audit=0xC00000B7,
        clone=220,
        tgkill=131,
        prlimit64=261,
        refused=(
            *range(198, 213),
            242,
            243,
            269,
            221,
            281,
            129,
            130,
            138,
            240,
            117,
            270,
            271,
            272,
            *range(180, 198),
            33,
            36,
            37,
            39,
            40,
            41,
            51,
            224,
            225,
            97,
            268,
            217,
            218,
            219,
            280,
            241,
            282,
            279,
            264,
            265,
            104,
            294,
            142,
            105,
            106,
            273,
            116,
            89,
            60,
            92,
            262,
            263,
            18,
            58,
            112,
            161,
            162,
            170,
            171,
            266,
            118,
            119,
            140,
            274,
            30,
            238,
            239,
        ),
    ),
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
    for number in (*calls.refused, *_NEW):
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
