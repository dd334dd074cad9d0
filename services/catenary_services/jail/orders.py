"""What the two sides of the jail tell each other, and the limits of a stay."""

from __future__ import annotations

from enum import StrEnum

import msgspec

_GIBI = 1 << 30


class JailLimit(StrEnum):
    """Which limit ended a stay; `details["limit"]` of the error."""

    WALL_CLOCK = "wall_clock"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    OUTPUT = "output"
    """What it printed."""
    RESULT = "result"
    """What it answered."""
    FILES = "files"
    """Number, size or kind of what it wrote."""
    CRASH = "crash"
    """A signal that nobody of ours sent."""


class JailProtection(StrEnum):
    """One thing that confines the child."""

    RESOURCE_LIMITS = "resource_limits"
    OWN_USER = "own_user"
    NO_CAPABILITIES = "no_capabilities"
    NO_NEW_PRIVILEGES = "no_new_privileges"
    NO_NETWORK = "no_network"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"


class JailLimits(msgspec.Struct, frozen=True):
    """What a stay may use at most."""

    wall_clock_s: float = 900.0
    cpu_s: int = 7200
    """Of all threads together."""
    memory_bytes: int = 8 * _GIBI
    """Address space beyond what the code itself takes."""
    file_bytes: int = 8 * _GIBI
    """Of one file."""
    folder_bytes: int = 16 * _GIBI
    """Of everything it writes."""
    files: int = 256
    printed_bytes: int = 64 << 20
    result_bytes: int = 64 << 20


class JailOrder(msgspec.Struct, frozen=True):
    """What the child is told on its standard input."""

    target: str
    """"module:function" of ours."""
    imports: tuple[str, ...]
    """Modules to load before memory is limited: what they take is not the file's doing."""
    job: bytes
    inputs: tuple[str, ...]
    """Files and folders it may read."""
    output: str
    scratch: str
    limits: JailLimits
    uid: int | None
    """User to become; None: stay."""
    reads_as_root: bool
    """Keep the right to read what other users may not: paths are Landlock's to limit then."""
    expected: tuple[JailProtection, ...]
    """Without one of these nothing is read."""


class JailProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A sentence for whoever waits."""

    text: str


class JailAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """It worked."""

    result: bytes


class JailRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """It did not: an error of our tree, or anything else with an empty reason."""

    reason: str
    message: str
    field: str = ""


Told = JailProgress | JailAnswer | JailRefusal
"""A message of the child: a line of JSON each."""
