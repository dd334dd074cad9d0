"""Answers kept for a moment: one caller asks, all others share."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from catenary_gateway.dashboard.answers import MAX_AGE_NS, MAX_ERROR_AGE_NS, DocumentCache
from catenary_services.errors import CatenaryError, Unavailable


@dataclass
class Clock:
    now_ns: int = 10**9

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class Source:
    """Answers when it is let, and counts."""

    calls: int = 0
    error: CatenaryError | None = None
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def make(self) -> Callable[[], object]:
        self.calls += 1
        number = self.calls
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return lambda: {"call": number}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def answers(clock: Clock) -> DocumentCache:
    return DocumentCache(clock=clock)


async def test_callers_at_the_same_time_share_one_call(answers: DocumentCache) -> None:
    source = Source()
    waiting = [asyncio.create_task(answers.get("status", source.make)) for _ in range(10)]
    await asyncio.sleep(0)
    source.open.set()
    bodies = {answer.body for answer in await asyncio.gather(*waiting)}
    assert bodies == {b'{"call":1}'}
    assert source.calls == 1


async def test_an_answer_serves_until_it_is_old(answers: DocumentCache, clock: Clock) -> None:
    source = Source()
    source.open.set()
    await answers.get("status", source.make)
    clock.now_ns += MAX_AGE_NS - 1
    assert (await answers.get("status", source.make)).body == b'{"call":1}'
    clock.now_ns += 1
    assert (await answers.get("status", source.make)).body == b'{"call":2}'


async def test_kinds_do_not_share(answers: DocumentCache) -> None:
    source = Source()
    source.open.set()
    await answers.get("timelines-2", source.make)
    await answers.get("timelines-30", source.make)
    assert source.calls == 2


async def test_one_who_goes_away_leaves_the_call_to_the_others(answers: DocumentCache) -> None:
    source = Source()
    first = asyncio.create_task(answers.get("status", source.make))
    second = asyncio.create_task(answers.get("status", source.make))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    source.open.set()
    assert (await second).body == b'{"call":1}'


async def test_an_error_is_shared_for_a_moment_and_asked_again_then(
    answers: DocumentCache, clock: Clock
) -> None:
    source = Source(error=Unavailable("no scheduler is connected"))
    source.open.set()
    for _ in range(3):
        with pytest.raises(Unavailable, match="no scheduler"):
            await answers.get("status", source.make)
    assert source.calls == 1
    source.error = None
    clock.now_ns += MAX_ERROR_AGE_NS
    assert json.loads((await answers.get("status", source.make)).body) == {"call": 2}


async def test_an_old_answer_is_not_given_out_in_place_of_an_error(
    answers: DocumentCache, clock: Clock
) -> None:
    source = Source()
    source.open.set()
    await answers.get("status", source.make)
    clock.now_ns += MAX_AGE_NS
    source.error = Unavailable("gone")
    with pytest.raises(Unavailable):
        await answers.get("status", source.make)


async def test_large_answers_are_compressed_once(answers: DocumentCache) -> None:
    async def make() -> Callable[[], object]:
        return lambda: ["the same words"] * 1000

    answer = await answers.get("status", make)
    assert gzip.decompress(answer.packed) == answer.body
    assert len(answer.packed) < len(answer.body) / 10


async def test_closing_ends_what_is_under_way(answers: DocumentCache) -> None:
    source = Source()
    waiting = asyncio.create_task(answers.get("status", source.make))
    await asyncio.sleep(0)
    await answers.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "dashboard-status"]
