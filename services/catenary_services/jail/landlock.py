"""Landlock: the paths this process may read and write, whichever user it is.

Source: https://docs.kernel.org/userspace-api/landlock.html. The numbers are the same on every
architecture.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from catenary_services.jail.kernel import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_HANDLED_NEWER = (1 << 16) - 1
"""File rights a ruleset handles from version 5 on, which adds ioctl on devices."""
_NETWORK = 0b11
"""Network rights from version 4 on: binding and connecting TCP sockets."""
_SCOPES = 0b11
"""Scopes from version 6 on: abstract sockets and signals stay inside."""

_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER
_WRITE |= _TRUNCATE
_ON_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE


def version() -> int:
    """Returns the version of Landlock the kernel has, 0 without Landlock."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Denies this thread, and those it starts, all paths except these and what lies below them.

    A path that does not exist is left out. Symbolic links, devices and sockets can be made nowhere.

    Raises:
        OSError: The kernel has no Landlock.
    """
    known = version()
    if known < 1:
        raise OSError("the kernel has no Landlock")
    handled = _HANDLED.get(known, _HANDLED_NEWER)
    attributes = [handled]
    if known >= 4:
        attributes.append(_NETWORK)
    if known >= 6:
        attributes.append(_SCOPES)
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    ruleset = syscall(_CREATE_RULESET, buffer, len(packed), 0)
    try:
        for paths, access in ((readable, _READ), (writable, _WRITE)):
            for path in paths:
                _allow(ruleset, path, access & handled)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(beneath).st_mode):
            access &= _ON_FILES
        packed = struct.pack("=Qi", access, beneath)
        rule = ctypes.create_string_buffer(packed, len(packed))
        syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(beneath)
