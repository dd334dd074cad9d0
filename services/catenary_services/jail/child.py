"""Runs a jailed order: `python -P -m catenary_services.jail.child`, a `JailOrder` on its input.

Messages go to the descriptor named as its argument, one line of JSON each. The child trusts the
order and what it imports; nobody trusts what the child says once it has looked at the file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.jail.confinement import confine, limit_memory
from catenary_services.jail.orders import JailAnswer, JailOrder, JailProgress, JailRefusal, Told

_WORDS = 400


@dataclass(frozen=True, slots=True)
class JailWorkspace:
    """The folders in which jailed work is done, and the way to report progress."""

    inputs: tuple[Path, ...]
    """Files and folders to read, in the order in which the order named them."""
    output: Path
    """Folder whose files are taken over at the end."""
    scratch: Path
    """Folder that is deleted with the process."""
    tell: Callable[[str], None]
    """Sends a sentence about the progress."""
    channel: int | None = None
    """Descriptor of the socket on which a resident process is given orders; None for others."""


JailedWork = Callable[[bytes, JailWorkspace], bytes]
"""A function that runs in the jail: it takes an encoded job and returns an encoded result."""


def main(messages: BinaryIO) -> None:
    """Runs the order that standard input holds."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=JailOrder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def say(message: Told) -> None:
        messages.write(msgspec.json.encode(message) + b"\n")
        messages.flush()

    missing = sorted(set(order.expected) - confine(order))
    if missing:
        raise SystemExit(f"the jail cannot be closed: {', '.join(missing)}")
    for needed in order.imports:
        importlib.import_module(needed)
    module, _, name = order.target.partition(":")
    work: JailedWork = getattr(importlib.import_module(module), name)
    limit_memory(order.limits)
    room = JailWorkspace(
        inputs=tuple(Path(path) for path in order.inputs),
        output=Path(order.output),
        scratch=Path(order.scratch),
        tell=lambda text: say(JailProgress(text[:_WORDS])),
        channel=order.channel,
    )
    try:
        say(JailAnswer(work(order.job, room)))
    except CatenaryError as error:
        field = error.field if isinstance(error, InvalidInput) else ""
        say(JailRefusal(error.reason, error.message, field))
    except MemoryError:
        say(JailRefusal("", "MemoryError"))
    except BaseException as error:  # bindings raise panics that are no `Exception`
        say(JailRefusal("", f"{type(error).__name__}: {error}"[:_WORDS]))


if __name__ == "__main__":
    main(os.fdopen(int(sys.argv[1]), "wb"))
    sys.stdout.flush()
    # Threads of libraries may be in any state; none is worth waiting for.
    os._exit(0)
