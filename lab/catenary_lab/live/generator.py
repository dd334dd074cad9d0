"""The load generator: a process of its own, open loop, that shares no event loop with the servers.

Every request is sent when it is due, whatever became of earlier ones, and times count from that
moment: a stalled server cannot hide behind a stalled generator. Run as a program, this module reads
one file, which `run_load` writes, and writes the other.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import catenary
from catenary.text.async_text_streams import AsyncTextStream
from catenary_services.errors import Unavailable
from catenaryd.local.supervisor import end_with_parent

T = TypeVar("T")
Send = Callable[[catenary.AsyncClient, int, float], Awaitable[T]]
"""Sends the request of a number, which is due at a time of `time.monotonic`; returns its
outcome."""
LEAD_S = 0.5
"""Seconds between the start of the load and the first arrival."""


async def run_load(
    target: str, due_s: Sequence[float], send: Send[T], folder: Path
) -> tuple[list[T], float]:
    """Returns the outcomes of requests that a process of its own sends, and how late it sent them.

    Lateness is the 99th percentile in seconds; it counts against the servers.

    Args:
        target: Address of the gateway.
        due_s: Time at which each request is to be sent, ascending, in seconds from about now.
        send: A function of a module, or a method of an object that can be pickled.
        folder: Folder for what the two processes tell each other.

    Raises:
        Unavailable: The process did not end well.
    """
    order, answer = folder / "load.pickle", folder / "outcomes.pickle"
    answer.unlink(missing_ok=True)
    await asyncio.to_thread(order.write_bytes, pickle.dumps((target, due_s, send)))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "catenary_lab.live.generator",
        str(order),
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
    written: tuple[list[T], float] = pickle.loads(await asyncio.to_thread(answer.read_bytes))
    return written


async def problem_of(stream: AsyncTextStream, tokens: int) -> str:
    """Reads a stream to its end; returns why it has not `tokens` tokens, empty if it has."""
    try:
        found = await stream.result()
    except catenary.CatenaryError as error:
        return f"{error.reason}: {error.message}"
    count = len(found.token_ids)
    return "" if count == tokens else f"{count} of {tokens} tokens ({found.finish_reason})"


async def _send_all(target: str, due_s: Sequence[float], send: Send[T]) -> tuple[list[T], float]:
    lags_s = [0.0]

    async def sent(number: int, due: float) -> T:
        lags_s.append(time.monotonic() - due)
        return await send(client, number, due)

    tasks: list[asyncio.Task[T]] = []
    async with catenary.AsyncClient(target) as client:
        await client.ready()  # the connection is open before the first request is due
        start = time.monotonic() + LEAD_S
        async with asyncio.TaskGroup() as group:
            for number, moment in enumerate(due_s):
                due = start + moment
                if (delay := due - time.monotonic()) > 0:
                    await asyncio.sleep(delay)
                tasks.append(group.create_task(sent(number, due)))
    lags_s.sort()
    return [task.result() for task in tasks], lags_s[int(0.99 * (len(lags_s) - 1))]


def _main() -> None:
    import uvloop

    end_with_parent()
    order, answer = (Path(each) for each in sys.argv[1:])
    target, due_s, send = pickle.loads(order.read_bytes())
    answer.write_bytes(pickle.dumps(uvloop.run(_send_all(target, due_s, send))))


if __name__ == "__main__":
    _main()
