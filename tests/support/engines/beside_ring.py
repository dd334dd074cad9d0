"""A model that an engine and a ring of two agents serve, and what users and operators do with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

import catenary
from catenary_lab.live.cluster import LiveCluster
from machine_faults.idle_book import idle_book

ENGINE, RING = "engine", ("ring-0", "ring-1")
"""The names of the agents."""
_STEP_S, _START_S = 120.0, 600.0


async def until(
    condition: Callable[[], Awaitable[bool]], what: str, within_s: float = _STEP_S
) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


def engines_of(process: psutil.Process) -> list[psutil.Process]:
    """Returns the engines that agents below a process run, without what these start."""
    found = {}
    for child in process.children(recursive=True):
        try:
            if "engine_child.py" in " ".join(child.cmdline()) and child.status() != "zombie":
                found[child] = child.ppid()
        except psutil.NoSuchProcess:
            continue
    ids = {each.pid for each in found}
    return [each for each, parent in found.items() if parent not in ids]


@dataclass
class EngineBesideRing:
    """A running cluster, of which the engine's agent is `ENGINE`, and the ring's are `RING`."""

    cluster: LiveCluster
    client: catenary.AsyncClient
    model: str
    is_right: Callable[[catenary.GenerationResult], bool]
    """Whether an answer has the tokens that it should, wherever it was generated."""
    prompt: str = "hello"
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, tokens: int) -> asyncio.Task[catenary.GenerationResult]:
        asked = self.client.chat(self.model, self.prompt, max_tokens=tokens, **self.sampling)
        return asyncio.ensure_future(asked)

    async def by_agent(self) -> dict[str, list[int]]:
        """Returns the sessions that generate, by the first agent of their chain."""
        found: dict[str, list[int]] = {}
        for session in await self.client.sessions(self.model):
            if session.generates and not session.moving_to:
                found.setdefault(session.hops[0][0], []).append(session.session_id)
        return found

    async def sessions_are_on_both(self, count: int, tokens: int) -> None:
        asked = [self.ask(tokens) for _ in range(count)]  # more than the engine takes

        async def both() -> bool:
            return (await self.by_agent()).keys() == {ENGINE, RING[0]}

        await until(both, "sessions are on the engine and on the ring")
        await self._whole(asked, tokens)

    async def stream_moves_to_and_fro(self, tokens: int) -> None:
        """Moves one session twice while its client reads: from the engine and back, or to it."""
        answer = self.ask(tokens)
        seen = []
        for _ in range(3):
            agent, session = await self._only_session()
            seen.append(agent)
            if len(seen) < 3:
                moved = await self.client.move_session(session, wait_s=60.0)
                assert moved.outcome == "moved", moved.problem
                assert moved.mode == "tokens"
        assert seen in ([ENGINE, RING[0], ENGINE], [RING[0], ENGINE, RING[0]])
        await self._whole([answer], tokens)

    async def streams_survive_the_engine(self, count: int, tokens: int) -> None:
        asked = [self.ask(tokens) for _ in range(count)]

        async def on_engine() -> bool:
            return ENGINE in await self.by_agent()

        await until(on_engine, "the engine has sessions")
        engines = engines_of(psutil.Process())
        assert engines
        for engine in engines:  # two, while sessions end on one that a plan had left
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
        results = await self._whole(asked, tokens)
        assert any(result.chain_changes for result in results)

    async def engine_serves(self, tokens: int) -> None:
        """Asks until the engine has been started, and has sessions."""

        async def serves() -> bool:
            asked = [self.ask(tokens) for _ in range(6)]
            found: set[str] = set()
            while not all(task.done() for task in asked):
                found |= (await self.by_agent()).keys()
                await asyncio.sleep(0.05)
            await self._whole(asked, tokens)
            return ENGINE in found

        await until(serves, "the engine serves", _START_S)

    async def engine_is_drained(self, test: str) -> None:
        """Drains the engine's agent; what is asked then is answered, and the book gets empty."""
        assert await self.client.drain(ENGINE)
        await self._whole([self.ask(10) for _ in range(2)], 10)
        target, admin = self.cluster.target, self.cluster.admin_target
        await asyncio.to_thread(idle_book, target, admin, test, 60.0)

    async def _only_session(self) -> tuple[str, int]:
        """Returns the first agent and the id of the one session that generates."""

        async def generates() -> bool:
            return sum(map(len, (await self.by_agent()).values())) == 1

        await until(generates, "one session generates")
        ((agent, (session,)),) = (await self.by_agent()).items()
        return agent, session

    async def _whole(
        self, asked: list[asyncio.Task[catenary.GenerationResult]], tokens: int
    ) -> list[catenary.GenerationResult]:
        results = await asyncio.gather(*asked)
        assert [len(result.token_ids) for result in results] == [tokens] * len(results)
        assert all(self.is_right(result) for result in results)
        return results
