"""Work of the jail as a call in this process, for tests of what it does and not of the jail."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from catenary_services.jail.child import JailWorkspace
from catenary_services.jail.run import JailedWork


def run_here(
    work: JailedWork, into: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> bytes:
    """Does what `run_jailed` does, unconfined."""
    module, _, name = work.target.partition(":")
    with tempfile.TemporaryDirectory() as scratch:
        room = JailWorkspace(work.inputs, into or Path(scratch), Path(scratch), progress)
        answer: bytes = getattr(importlib.import_module(module), name)(work.job, room)
    return answer
