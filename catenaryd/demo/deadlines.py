"""The demo's fourth screen: a request that cannot be in time is refused at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from statistics import median

import catenary
from catenaryd.demo import screens

BEFORE = 96
"""Requests that come before the one with the tight deadline, enough for several batches each."""
_TIGHT = 1.25
"""A tight deadline, as a multiple of the time of a lone request."""
_TIGHTER = 0.8
"""The next deadline, as a share of the one that was met because a device was just free."""
_TRIES = 8
_BETWEEN_BATCHES_S = 0.1
"""Seconds from the first answers until the tight request: they come by the batch."""


@dataclass(frozen=True, slots=True)
class DeadlineAttempt:
    """One request with a tight deadline, and the requests before it.

    Attributes:
        error: The error it got; None if it was answered.
        took_ms: Time until it was answered or refused.
        others_ms: Median time of those before it.
    """

    error: catenary.CatenaryError | None
    took_ms: float
    others_ms: float


async def refuse(client: catenary.AsyncClient, request: catenary.InferRequest) -> bool:
    """Asks for an answer sooner than there can be one; False unless that is refused at once."""
    alone_ms = min([await _answer_ms(client, request) for _ in range(3)])
    due_ms = _TIGHT * alone_ms
    screens.begin(
        4,
        "a deadline that cannot be met",
        f"""Every request is booked on its devices before it starts, so the scheduler knows when
        it would end. The emulated devices of the first screen answer one photograph in
        {alone_ms:.0f} ms. Now {BEFORE} come at once, and one more is due in {due_ms:.0f} ms: better
        a "no" at once than an answer too late.""",
    )
    for _ in range(_TRIES):
        attempt = await _under_load(client, replace(request, slo_ms=due_ms), request)
        if isinstance(attempt.error, catenary.SloUnattainableError):
            return judged(attempt)
        if attempt.error is None:
            screens.say(f"Answered within {due_ms:.0f} ms: a device was just free.")
        else:
            screens.say(f"Slower than booked, for this machine is busy: {attempt.error.message}.")
        due_ms *= _TIGHTER
        screens.say(f"Once more, due in {due_ms:.0f} ms:")
    screens.say(f"None of {_TRIES} such requests was refused.")
    return False


def judged(attempt: DeadlineAttempt) -> bool:
    """Prints a refusal; False if answers did not take longer than it did."""
    error = attempt.error
    assert error is not None
    advice = "" if error.retry_after_s is None else f", try again in {error.retry_after_s:.2f} s"
    screens.say(f"{error.reason} after {attempt.took_ms:.1f} ms: {error.message}{advice}.")
    screens.say(f"Those that were there before it waited for {attempt.others_ms:.0f} ms (median).")
    return attempt.took_ms < attempt.others_ms


async def _under_load(
    client: catenary.AsyncClient, tight: catenary.InferRequest, other: catenary.InferRequest
) -> DeadlineAttempt:
    """Sends a request with a tight deadline behind many others, and waits for all of them."""
    before = [asyncio.create_task(_answer_ms(client, other)) for _ in range(BEFORE)]
    try:
        await asyncio.wait(before, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(_BETWEEN_BATCHES_S)
        began, error = time.monotonic(), None
        try:
            await client.send(tight)
        except (catenary.SloUnattainableError, catenary.DeadlineExceededError) as caught:
            error = caught
        took_ms = (time.monotonic() - began) * 1e3
        return DeadlineAttempt(error, took_ms, median(await asyncio.gather(*before)))
    finally:
        for task in before:
            task.cancel()
        await asyncio.gather(*before, return_exceptions=True)


async def _answer_ms(client: catenary.AsyncClient, request: catenary.InferRequest) -> float:
    """Returns the milliseconds that an answer takes."""
    began = time.monotonic()
    await client.send(request)
    return (time.monotonic() - began) * 1e3
