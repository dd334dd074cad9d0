"""Waits until real processes are as a live run needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from catenary_services.errors import Unavailable

_POLL_S = 0.25
Condition = Callable[[], Awaitable[bool]]


async def until(condition: Condition, what: str, seconds: float) -> None:
    """Waits for a condition, which `what` says in words, at most `seconds`.

    Raises:
        Unavailable: It does not hold in time.
    """
    if not await within(seconds, condition):
        raise Unavailable(f"it took longer than {seconds:g} s until {what}")


async def within(seconds: float, condition: Condition) -> bool:
    """Waits for a condition, at most `seconds`; returns whether it holds."""
    deadline = time.monotonic() + seconds
    while True:
        holds = await condition()
        if holds or time.monotonic() > deadline:
            return holds
        await asyncio.sleep(_POLL_S)
