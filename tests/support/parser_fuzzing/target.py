"""A parser, what it may do with any bytes, and how that is found out."""

from __future__ import annotations

import resource
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MOST_S = 1.0
"""The most time of a processor for one input."""
MOST_MB = 64.0
"""The most by which one input makes the process larger than it ever was."""
_KIB_OF_MB = 1e6 / 1024


class BrokenPromise(Exception):  # noqa: N818 - what it is
    """A parser did not raise, but what it made of the bytes is wrong; the text says how."""


@dataclass(frozen=True)
class FuzzTarget:
    """One parser."""

    name: str
    read: Callable[[bytes], object]
    """Has the bytes parsed."""
    refusals: tuple[type[Exception], ...]
    """The errors that say of the bytes that they are wrong."""
    seeds: Callable[[], Iterable[bytes]]
    """Makes inputs of the right form, from which others are made."""
    longest_bytes: int = 4096
    words: tuple[bytes, ...] = ()
    """Pieces that inputs of this kind consist of."""


@dataclass(frozen=True)
class Finding:
    """An input that a parser does not cope with."""

    data: bytes
    kind: str
    """The same for inputs that break the same place."""
    told: str


def tried(target: FuzzTarget, data: bytes, slowness: float = 1.0) -> Finding | None:
    """Returns what is wrong with how a parser takes some bytes; None if nothing is.

    Args:
        target: The parser.
        data: The bytes.
        slowness: How many times as long everything may take, where it is watched.
    """
    largest_kib, begin_s = _largest_kib(), time.process_time()
    try:
        target.read(data)
    except target.refusals:
        pass
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of libraries are no `Exception`
        frames = traceback.extract_tb(error.__traceback__)
        ours = next((f for f in reversed(frames) if "/catenary_" in f.filename), frames[-1])
        kind = f"{type(error).__name__} in {ours.filename.rpartition('/')[2]}:{ours.lineno}"
        return Finding(data, kind, traceback.format_exc(limit=-12))
    took_s = time.process_time() - begin_s
    if took_s > MOST_S * slowness:
        return Finding(data, "time", f"takes {took_s:.1f} s of a processor")
    grown_mb = (_largest_kib() - largest_kib) / _KIB_OF_MB
    if grown_mb > MOST_MB:
        return Finding(data, "memory", f"takes {grown_mb:.0f} MB")
    return None


def smaller(data: bytes, is_one: Callable[[bytes], bool], most_tries: int = 400) -> bytes:
    """Returns a shorter input that is still a finding, by leaving out pieces."""
    size, tries = max(1, len(data) // 2), 0
    while size:
        at = 0
        while at < len(data) and tries < most_tries:
            shorter = data[:at] + data[at + size :]
            tries += 1
            if is_one(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def _largest_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
