"""Runs a load generator as a process of its own: it shares no event loop with what it loads.

The module is called as `python -m MODULE ORDER ANSWER`: it reads the one file and writes the other.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from catenary_services.errors import Unavailable


async def generate_load(module: str, order: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns what the generator wrote.

    Raises:
        Unavailable: it did not end well.
    """
    file, answer = folder / "load.json", folder / "outcome.json"
    answer.unlink(missing_ok=True)
    await asyncio.to_thread(file.write_text, json.dumps(order))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(file),
        str(answer),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, complaints = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode or not answer.exists():
        last = complaints.decode(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(f"the load generator failed: {' '.join(last)}")
    written: dict[str, Any] = json.loads(await asyncio.to_thread(answer.read_text))
    return written
