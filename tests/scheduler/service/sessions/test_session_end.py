"""How a session ends while it is in the middle of a write."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from catenary_scheduler.wire.streams import PeerStream


async def test_a_peer_that_hangs_up_twice_leaves_no_writer_behind() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    writes, told = asyncio.Event(), asyncio.Event()

    async def send(messages: list[str]) -> None:
        writes.set()
        await told.wait()

    session = PeerStream(send)
    session.send("an order")
    running = asyncio.create_task(session.run(asyncio.Event().wait()))  # type: ignore[arg-type]
    await writes.wait()
    for _ in range(2):  # gRPC cancels the call, and then whatever the call waits for
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    told.set()
    await asyncio.wait({running})
    assert running.cancelled()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if "PackedWriter" in repr(task)]
    del running, others
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints, complaints
