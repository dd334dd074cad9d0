"""Load generators: processes of their own, open loop, that share no event loop with the servers.

A generator's module is called as `python -m MODULE ORDER ANSWER`: it reads the one file and writes
the other. Every request is sent when it is due, whatever became of earlier ones, and times count
from that moment: a stalled server cannot hide behind a stalled generator.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from catenary_services.errors import Unavailable
from catenaryd.local.supervisor import end_with_parent

T = TypeVar("T")
LEAD_S = 0.5
"""Seconds between the start of the process and the first arrival."""


async def generate_load(module: str, order: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the document that the generator wrote.

    Raises:
        Unavailable: The process did not end well.
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


async def send_all(
    due_s: Sequence[float], send: Callable[[int, float], Awaitable[T]]
) -> tuple[list[T], float]:
    """Returns the outcomes of all requests, and how late they were sent (p99, seconds).

    Args:
        due_s: Time at which each is to be sent, ascending, in seconds from about now.
        send: Sends the request of a number, which is due at a time of `time.monotonic`.
    """
    lags_s = [0.0]

    async def sent(number: int, due: float) -> T:
        lags_s.append(time.monotonic() - due)
        return await send(number, due)

    start = time.monotonic() + LEAD_S
    tasks: list[asyncio.Task[T]] = []
    async with asyncio.TaskGroup() as group:
        for number, moment in enumerate(due_s):
            due = start + moment
            if (delay := due - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            tasks.append(group.create_task(sent(number, due)))
    lags_s.sort()
    return [task.result() for task in tasks], lags_s[int(0.99 * (len(lags_s) - 1))]


def run_generator(generate: Callable[[dict[str, Any]], Coroutine[Any, Any, Any]]) -> None:
    """Runs the process of a generator.

    Args:
        generate: Makes the load that an order's document describes; returns a dataclass of the
            outcome.
    """
    import uvloop

    end_with_parent()
    order, answer = (Path(each) for each in sys.argv[1:])
    outcome = uvloop.run(generate(json.loads(order.read_text())))
    answer.write_text(json.dumps(asdict(outcome)))
