"""The load generator of live server chains: a process of its own, open loop, over real gRPC.

Response times count from the moment a session was due to its last token here.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import catenary
from catenary_lab.live.chains.emulation import VOCABULARY
from catenary_lab.live.generator import generate_load, run_generator, send_all
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND

_SETTLE_S = 10.0
_POLL_S = 0.1
_QUEUE = "gateway.queue"


@dataclass(frozen=True, slots=True)
class Asked:
    """A session to be asked for."""

    due_s: float
    """Time at which it is due, in seconds from the start."""
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ChainsOrder:
    """The order of a load: the sessions to send, and where to."""

    target: str
    admin_target: str
    model: str
    timeout_s: float
    """Longest duration of a session, in seconds."""
    sessions: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of one session; times are in seconds from when it was due."""

    response_s: float
    first_token_s: float
    wait_s: float
    """Time until the session was given a chain, as the gateway saw it."""
    tokens: int
    problem: str = ""
    """Reason why the session has not all its tokens; empty if it has."""
    starts: int = 1
    """Number of times it was started; more than 1 if it was moved."""


@dataclass(frozen=True, slots=True)
class ChainsOutcome:
    """The outcome of all sessions, in the order they were sent."""

    sessions: tuple[Answered, ...]
    send_lag_p99_s: float
    """Delay of sending by the generator itself, 99th percentile; it counts against the servers."""
    left_reservations: int
    """Number of reservations in the scheduler's book when all was over."""
    left_sessions: int

    @property
    def lost(self) -> int:
        """Number of sessions that do not have all their tokens."""
        return sum(bool(each.problem) for each in self.sessions)


async def run_load(order: ChainsOrder, folder: Path) -> ChainsOutcome:
    """Returns the outcome of a load made by a process of its own.

    Raises:
        Unavailable: The process did not end well.
    """
    document = await generate_load("catenary_lab.live.chains.load", asdict(order), folder)
    sessions = tuple(Answered(**entry) for entry in document.pop("sessions"))
    return ChainsOutcome(sessions, **document)


class _Generator:
    def __init__(self, client: catenary.AsyncClient, order: ChainsOrder) -> None:
        self._client = client
        self._order = order

    async def run(self) -> ChainsOutcome:
        moments = [each.due_s for each in self._order.sessions]
        answered, lag_s = await send_all(moments, self._call)
        left = await self._left()
        traced = [await self._traced(number, each) for number, each in enumerate(answered)]
        return ChainsOutcome(tuple(traced), lag_s, *left)

    async def _call(self, number: int, due: float) -> Answered:
        asked = self._order.sessions[number]
        prompt = [1 + place % (VOCABULARY - 1) for place in range(asked.input_tokens)]
        stream = self._client.generate(
            self._order.model,
            prompt,
            stream=True,
            max_tokens=asked.output_tokens,
            ignore_eos=True,
            request_id=_id(number),
            timeout_s=self._order.timeout_s,
        )
        first, problem = 0.0, ""
        try:
            async for _ in stream:
                first = first or time.monotonic() - due
        except catenary.CatenaryError as error:
            problem = error.reason
        response = time.monotonic() - due
        tokens = len(stream.so_far.token_ids)
        if not problem and tokens != asked.output_tokens:
            problem = f"{tokens} of {asked.output_tokens} tokens"
        return Answered(response, first, 0.0, tokens, problem)

    async def _traced(self, number: int, answered: Answered) -> Answered:
        """Returns an outcome with the time that the session waited, which the gateway knows."""
        try:
            trace = await self._client.trace(_id(number))
        except catenary.CatenaryError as error:
            problem = answered.problem or f"no trace: {error.reason}"
            return Answered(**{**asdict(answered), "problem": problem})
        queues = [span for span in trace.spans if span.name == _QUEUE]
        ended_ns = max((span.start_ns + span.duration_ns for span in queues), default=0)
        found = {"wait_s": ended_ns / NANOSECONDS_PER_SECOND, "starts": len(queues)}
        return Answered(**{**asdict(answered), **found})

    async def _left(self) -> tuple[int, int]:
        """Returns how many reservations and sessions are not given back within a while."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            status = await self._client.status()
            left = status.live_reservations, status.sessions_in_flight
            if left == (0, 0) or time.monotonic() > deadline:
                return left
            await asyncio.sleep(_POLL_S)


def _id(number: int) -> str:
    return f"live-{number}"


async def _generate(document: dict[str, Any]) -> ChainsOutcome:
    sessions = tuple(Asked(**entry) for entry in document.pop("sessions"))
    order = ChainsOrder(sessions=sessions, **document)
    client = catenary.AsyncClient(order.target, admin_target=order.admin_target)
    async with client:
        await client.ready()  # the connection is open before the first session is due
        return await _Generator(client, order).run()


if __name__ == "__main__":
    run_generator(_generate)
