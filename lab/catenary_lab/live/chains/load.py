"""The load generator of live server chains: a process of its own, open loop, over real gRPC.

`python -m catenary_lab.live.chains.load ORDER ANSWER` sends the sessions of the order file at their
moments, whatever became of those before, and writes what came of each. Response times count from
the moment a session was due to its last token here: a stalled server cannot hide behind a stalled
generator.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import catenary
from catenary_lab.live.chains.emulation import VOCABULARY
from catenary_lab.live.generator import generate_load
from catenary_lab.live.load import LEAD_S
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenaryd.supervisor import end_with_parent

_SETTLE_S = 10.0
_POLL_S = 0.1
_QUEUE = "gateway.queue"


@dataclass(frozen=True, slots=True)
class Asked:
    """One session."""

    due_s: float
    """From the start."""
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ChainsOrder:
    """What to send where."""

    target: str
    admin_target: str
    model: str
    timeout_s: float
    """Of each session."""
    sessions: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of one session; times in seconds from when it was due."""

    response_s: float
    first_token_s: float
    wait_s: float
    """Until it was given a chain, as the gateway saw it."""
    tokens: int
    problem: str = ""
    """Why it has not all its tokens; empty if it has."""
    starts: int = 1
    """More than one: it was moved."""


@dataclass(frozen=True, slots=True)
class ChainsOutcome:
    """What became of all of them, in the order they were sent."""

    sessions: tuple[Answered, ...]
    send_lag_p99_s: float
    """How late the generator itself was; counts against the servers."""
    left_reservations: int
    """In the scheduler's book when all was over."""
    left_sessions: int

    @property
    def lost(self) -> int:
        """Sessions that do not have all their tokens."""
        return sum(bool(each.problem) for each in self.sessions)


async def run_load(order: ChainsOrder, folder: Path) -> ChainsOutcome:
    """Returns the outcome of a load made by a process of its own.

    Raises:
        Unavailable: it did not end well.
    """
    document = await generate_load("catenary_lab.live.chains.load", asdict(order), folder)
    sessions = tuple(Answered(**entry) for entry in document.pop("sessions"))
    return ChainsOutcome(sessions, **document)


class _Generator:
    def __init__(self, client: catenary.AsyncClient, order: ChainsOrder) -> None:
        self._client = client
        self._order = order
        self._lags_s: list[float] = []

    async def run(self) -> ChainsOutcome:
        sessions = self._order.sessions
        start = time.monotonic() + LEAD_S
        calls = []
        for number, asked in enumerate(sessions):
            due = start + asked.due_s
            if (delay := due - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            calls.append(asyncio.ensure_future(self._call(number, asked, due)))
        answered = list(await asyncio.gather(*calls))
        left = await self._left()
        traced = [await self._traced(number, each) for number, each in enumerate(answered)]
        lags = sorted(self._lags_s)
        return ChainsOutcome(tuple(traced), lags[int(0.99 * (len(lags) - 1))], *left)

    async def _call(self, number: int, asked: Asked, due: float) -> Answered:
        prompt = [1 + place % (VOCABULARY - 1) for place in range(asked.input_tokens)]
        self._lags_s.append(time.monotonic() - due)
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
        """Returns it with the time it waited, which the gateway knows."""
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
        """Returns the reservations and sessions that are not given back within a while."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            status = await self._client.status()
            left = status.live_reservations, status.sessions_in_flight
            if left == (0, 0) or time.monotonic() > deadline:
                return left
            await asyncio.sleep(_POLL_S)


def _id(number: int) -> str:
    return f"live-{number}"


async def _generate(order: ChainsOrder) -> ChainsOutcome:
    client = catenary.AsyncClient(order.target, admin_target=order.admin_target)
    async with client:
        await client.ready()  # the connection is open before the first session is due
        return await _Generator(client, order).run()


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process."""
    import uvloop

    end_with_parent()
    document = json.loads(Path(arguments[0]).read_text())
    sessions = tuple(Asked(**entry) for entry in document.pop("sessions"))
    outcome = uvloop.run(_generate(ChainsOrder(sessions=sessions, **document)))
    Path(arguments[1]).write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(sys.argv[1:])
