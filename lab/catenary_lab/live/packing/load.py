"""The streams of a live run of packing, and the moves of their sessions."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import catenary
from catenary import CatenaryError, SessionInfo
from catenary_lab.live.generator import problem_of
from catenary_lab.live.packing.figures import Answer, Change, Moved

MODES = ("kv", "tokens")
_WAIT_S = 60.0
_POLL_S = 0.05
_END_S = 0.25
_TIMEOUT_S = 600.0
"""Longest duration of an answer, in seconds, so long that slow machines lose none."""
_LONGEST_S = 5.0
"""Seconds that a run may take for each wanted move; it gives up when moves take longer on
average."""
_TOPICS = (
    "a sailing boat",
    "the moon",
    "bread",
    "a bicycle",
    "volcanoes",
    "the printing press",
    "honey bees",
    "glass",
    "a lighthouse",
    "rainbows",
    "the compass",
    "coffee",
    "bridges",
    "penguins",
    "clocks",
    "rivers",
    "magnets",
    "chess",
    "tea",
    "kites",
)
_QUESTIONS = (
    "Write a short story about {}.",
    "Explain how {} came to be.",
    "Describe {} to a child.",
    "List ten facts about {}.",
)


def prompt_of(number: int) -> str:
    """Returns prompt `number`; every third one is about five times as long as the others."""
    question = _QUESTIONS[number % len(_QUESTIONS)].format(_TOPICS[number % len(_TOPICS)])
    if number % 3:
        return question
    mentioned = [_TOPICS[(number + at) % len(_TOPICS)] for at in range(1, len(_TOPICS))]
    return f"{question} Think of these as well, in this order: {', '.join(mentioned)}. {question}"


async def answer_of(
    client: catenary.AsyncClient, model: str, prompt: int, tokens: int, grammar: str = ""
) -> Answer:
    """Returns the greedy answer to a prompt, of exactly `tokens` tokens unless it breaks off.

    A grammar must not end before.
    """
    stream = client.chat(
        model,
        prompt_of(prompt),
        stream=True,
        max_tokens=tokens,
        ignore_eos=True,
        grammar=grammar,
        timings=True,
        timeout_s=_TIMEOUT_S,
    )
    problem = await problem_of(stream, tokens)
    found = stream.so_far
    return Answer(
        prompt,
        found.token_ids,
        problem,
        tuple(timing.since_previous_ns for timing in found.timings),
        tuple(Change(change.how, change.generated_tokens) for change in found.chain_changes),
    )


class Streams:
    """Asks for answers, a limited number at a time."""

    def __init__(self, client: catenary.AsyncClient, model: str, most: int) -> None:
        self._client = client
        self._model = model
        self._free = asyncio.Semaphore(most)

    async def one(self, prompt: int, tokens: int) -> Answer:
        """Returns the answer to a prompt."""
        async with self._free:
            return await answer_of(self._client, self._model, prompt, tokens)

    async def all_of(self, prompts: Iterable[int], tokens: int) -> tuple[Answer, ...]:
        """Returns the answers to prompts."""
        return tuple(await asyncio.gather(*(self.one(each, tokens) for each in prompts)))


class Mover:
    """Moves sessions at random, by turns with their caches and with their tokens."""

    def __init__(self, client: catenary.AsyncClient, model: str, wanted: int, seed: int) -> None:
        self.moved: list[Moved] = []
        self._client = client
        self._model = model
        self._wanted = wanted
        self._random = random.Random(seed)
        self._deadline_s = time.monotonic() + _LONGEST_S * wanted
        self._busy: set[int] = set()
        self._begun: Counter[str] = Counter()

    @property
    def is_done(self) -> bool:
        """Returns True if enough sessions were moved, or that takes far too long."""
        if time.monotonic() > self._deadline_s:
            return True
        return all(2 * self.done(mode) >= self._wanted for mode in MODES)

    def done(self, mode: str) -> int:
        """Returns how many moves of a mode came to their end."""
        return sum(each.outcome == "moved" and each.mode == mode for each in self.moved)

    async def run(self, told: Callable[[], None]) -> None:
        """Moves one session after the other until all is done; `told` is called for each."""
        while not self.is_done:
            found = await self._choice()
            if found is None:
                await asyncio.sleep(_POLL_S)
                continue
            session, chain_id = found
            mode = min(MODES, key=lambda mode: (self.done(mode) + self._begun[mode], mode))
            self._busy.add(session.session_id)
            self._begun[mode] += 1
            try:
                moved = await self.move(session, chain_id, mode)
                if moved.outcome == "failed" and await self._has_ended(session):
                    moved = replace(moved, outcome="none")
                self.moved.append(moved)
                if moved.outcome == "none":
                    await asyncio.sleep(_POLL_S)
                else:
                    told()
            finally:
                self._begun[mode] -= 1
                self._busy.discard(session.session_id)

    async def move(
        self, session: SessionInfo, chain_id: str, mode: str, *, wait_s: float = _WAIT_S
    ) -> Moved:
        """Returns the outcome of moving a session."""
        try:
            found = await self._client.move_session(
                session.session_id,
                chain_id=chain_id,
                mode=mode,
                wait_s=wait_s,
                timeout_s=wait_s + 10.0,
            )
        except CatenaryError as error:
            return Moved(mode, "none", f"{error.reason}: {error.message}")
        return Moved(
            found.mode,
            found.outcome,
            found.problem,
            found.tokens,
            found.rounds,
            found.duration_ns / 1e6,
            found.held_ns / 1e6,
        )

    async def _has_ended(self, session: SessionInfo) -> bool:
        """Returns True if a session has ended, so that a failed move of it has no meaning."""
        await asyncio.sleep(_END_S)  # agents know of the end before the scheduler does
        known = {each.session_id for each in await self._client.sessions()}
        return session.session_id not in known

    async def _choice(self) -> tuple[SessionInfo, str] | None:
        """Returns a session that can move, and a chain with room for it."""
        sessions = await self._client.sessions()
        status = await self._client.status()
        chains = [chain for model in status.models for chain in model.chains]
        options = [
            (session, chain.chain_id)
            for session in sessions
            for chain in chains
            if session.session_id not in self._busy
            and session.chain_id not in {"", chain.chain_id}
            and session.generates
            and not session.moving_to
            and chain.sessions < chain.capacity
        ]
        return self._random.choice(options) if options else None
