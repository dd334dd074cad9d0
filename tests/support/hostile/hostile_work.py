"""What an attacker would do who runs code in the jail: one function each, in one room."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from pathlib import Path

from catenary_services.jail.child import JailWorkspace


def attempts(job: bytes, room: JailWorkspace) -> bytes:
    """Evaluates the job as Python and answers what that says, or how it fails."""
    names = {
        "os": os,
        "socket": socket,
        "subprocess": subprocess,
        "ctypes": ctypes,
        "Path": Path,
        "room": room,
        "threading": threading,
        "libc": ctypes.CDLL(None, use_errno=True),
    }
    try:
        return f"did {eval(job.decode(), names)!r}".encode()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"refused {type(error).__name__}: {error}".encode()


def runs(job: bytes, room: JailWorkspace) -> bytes:
    """Executes the job as Python; what it raises is nobody's business here."""
    exec(job.decode(), {"os": os, "room": room, "Path": Path, "ctypes": ctypes})
    return b"done"


def echoes(job: bytes, room: JailWorkspace) -> bytes:
    """Sends back what comes over the channel, behind the job, until there is no more."""
    assert room.channel is not None
    while piece := os.read(room.channel, 1000):
        os.write(room.channel, job + piece)
    return b""


def attempts_again(job: bytes, room: JailWorkspace) -> bytes:
    """Evaluates what comes over the channel, and sends back what that says."""
    assert room.channel is not None
    while piece := os.read(room.channel, 1000):
        os.write(room.channel, attempts(piece, room))
    return b""
