"""The demo's fourth screen: a request that cannot be in time is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import catenary
from catenary.load import LoadSettings, run_load
from catenaryd.demo import screens
from catenaryd.demo.unlike_devices import AT_ONCE

_TIGHT = 1.25
"""A tight deadline, as a multiple of the time of a lone request."""
_TIGHTER = 0.8
"""Where a device was just free, and the request answered, the next one has so much of its time."""
_TRIES = 8
_LONGEST_LOAD_S = 60.0
_UNDER_WAY_S = 1.0


async def refuse(client: catenary.AsyncClient, request: catenary.InferRequest) -> bool:
    """Asks for an answer sooner than there can be one; False unless that is refused at once."""
    alone_ms = await _answer_ms(client, request)
    due_ms = _TIGHT * alone_ms
    screens.begin(
        4,
        "a deadline that cannot be met",
        f"""Every request is booked on its devices before it starts, so the scheduler knows when
        it would end. The emulated devices of the first screen answer one photograph in
        {alone_ms:.0f} ms. Now {AT_ONCE} are under way, and one more is due in {due_ms:.0f} ms:
        better a "no" at once than an answer too late.""",
    )
    async with _under_load(client, request):
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                await client.send(replace(request, slo_ms=due_ms))
                screens.say(f"Answered within {due_ms:.0f} ms: a device was just free.")
            except catenary.SloUnattainableError as error:
                return judged(error, (time.monotonic() - began) * 1e3)
            except catenary.DeadlineExceededError as error:
                screens.say(f"Slower than booked, as this machine is busy: {error.message}.")
            due_ms *= _TIGHTER
            screens.say(f"Once more, due in {due_ms:.0f} ms.")
    screens.say(f"None of {_TRIES} such requests was refused.")
    return False


def judged(error: catenary.SloUnattainableError, took_ms: float) -> bool:
    """Prints a refusal; False if the answer itself would not have taken longer."""
    advice = "" if error.retry_after_s is None else f", try again in {error.retry_after_s:.2f} s"
    screens.say(f"{error.reason} after {took_ms:.1f} ms: {error.message}{advice}")
    would_take_ms = error.earliest_finish_ms
    return would_take_ms is not None and took_ms < would_take_ms


async def _answer_ms(client: catenary.AsyncClient, request: catenary.InferRequest) -> float:
    """Returns the milliseconds of a lone request, the best of three."""
    taken = []
    for _ in range(3):
        began = time.monotonic()
        await client.send(request)
        taken.append((time.monotonic() - began) * 1e3)
    return min(taken)


@asynccontextmanager
async def _under_load(
    client: catenary.AsyncClient, request: catenary.InferRequest
) -> AsyncIterator[None]:
    """Keeps the devices busy for as long as the context is open."""
    settings = LoadSettings(_LONGEST_LOAD_S, concurrency=AT_ONCE)
    load = asyncio.create_task(run_load(client, request, settings))
    try:
        await asyncio.sleep(_UNDER_WAY_S)
        yield
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
