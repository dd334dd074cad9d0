"""Messages between the two sides of the jail, and the limits of a jailed process."""

from __future__ import annotations

from enum import StrEnum

import msgspec

_GIBI = 1 << 30


class JailLimit(StrEnum):
    """The limit that ended a jailed process: `details["limit"]` of the error."""

    WALL_CLOCK = "wall_clock"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    OUTPUT = "output"
    """Bytes that the process printed."""
    RESULT = "result"
    """Bytes of its answer."""
    FILES = "files"
    """Number, size or kind of the files it wrote."""
    CRASH = "crash"
    """A signal that the jail itself did not send."""


class JailProtection(StrEnum):
    """A means by which the child is confined."""

    RESOURCE_LIMITS = "resource_limits"
    OWN_USER = "own_user"
    NO_CAPABILITIES = "no_capabilities"
    NO_NEW_PRIVILEGES = "no_new_privileges"
    NO_NETWORK = "no_network"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"


class JailLimits(msgspec.Struct, frozen=True):
    """The most resources a jailed process may use."""

    wall_clock_s: float = 900.0
    cpu_s: int = 7200
    """Seconds of processor time of all its threads together."""
    memory_bytes: int = 8 * _GIBI
    """Address space beyond what the code itself takes."""
    file_bytes: int = 8 * _GIBI
    """Bytes of one file."""
    folder_bytes: int = 16 * _GIBI
    """Bytes of all files it writes."""
    files: int = 256
    printed_bytes: int = 64 << 20
    result_bytes: int = 64 << 20


class JailOrder(msgspec.Struct, frozen=True):
    """The order that the child reads from its standard input."""

    target: str
    """"module:function" in a package of this project."""
    imports: tuple[str, ...]
    """Modules to load before memory is limited, so that their size does not count against the file.
    """
    job: bytes
    inputs: tuple[str, ...]
    """Files and folders the child may read."""
    limits: JailLimits
    output: str = ""
    scratch: str = ""
    uid: int | None = None
    """Number of the user the child becomes; None to stay the same user."""
    reads_as_root: bool = False
    """Whether the child keeps the right to read files of other users; Landlock then limits the
    paths."""
    expected: tuple[JailProtection, ...] = ()
    """Protections without any one of which the child reads nothing."""
    channel: int | None = None
    """Descriptor of the socket on which a resident process is given orders; None for others."""


class JailProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A sentence on the progress, for whoever waits."""

    text: str


class JailAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The result of work that succeeded."""

    result: bytes


class JailRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The error of work that failed: one of the project's, or any other, with an empty reason."""

    reason: str
    message: str
    field: str = ""


Told = JailProgress | JailAnswer | JailRefusal
"""A message of the child, sent as one line of JSON."""
