"""Work that is due after every change: at once if it rests, else once for all changes meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from catenary_scheduler.cluster.pacing import PacedWork
from shared_helpers.waiting import until

TAKES_S = 0.03


class Work:
    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.done = 0
        self.fails = False

    def __call__(self) -> None:
        self.done += 1
        end = time.thread_time() + self.takes_s
        while time.thread_time() < end:
            pass
        if self.fails:
            raise RuntimeError("no")


async def test_the_first_change_is_acted_on_at_once() -> None:
    work = Work()
    PacedWork(work).ask()
    assert work.done == 1


async def test_work_that_takes_little_follows_every_change_at_once() -> None:
    work = Work()
    paced = PacedWork(work)
    for number in range(1, 20):
        paced.ask()
        assert work.done == number
        await asyncio.sleep(0)


async def test_changes_while_it_pauses_are_acted_on_in_one_go() -> None:
    work = Work(TAKES_S)
    paced = PacedWork(work)
    began_s = time.monotonic()
    for _ in range(100):
        paced.ask()
        await asyncio.sleep(0)
    pauses = (time.monotonic() - began_s) / (9 * TAKES_S)
    assert work.done <= 1 + pauses
    before = work.done
    paced.ask()
    await until(lambda: work.done > before, "what was asked for last is done")
    before = work.done
    await asyncio.sleep(11 * TAKES_S)
    assert work.done == before


async def test_work_that_asks_for_itself_is_done_again_behind_a_pause() -> None:
    done: list[float] = []

    def again() -> None:
        done.append(time.monotonic())
        if len(done) < 3:
            paced.ask()

    paced = PacedWork(again)
    paced.ask()
    assert len(done) == 1
    await until(lambda: len(done) == 3, "asked for thrice")


async def test_a_failure_reaches_who_asks_and_later_ones_end_nothing() -> None:
    work = Work()
    work.fails = True
    paced = PacedWork(work)
    with pytest.raises(RuntimeError):
        paced.ask()
    paced.ask()  # is due in a later turn
    await until(lambda: work.done == 2, "it is tried again")
    work.fails = False
    paced.ask()
    await until(lambda: work.done == 3, "it goes on")


async def test_nothing_is_done_once_it_is_closed() -> None:
    work = Work(TAKES_S)
    paced = PacedWork(work)
    paced.ask()
    await asyncio.sleep(0)
    paced.ask()
    paced.close()
    paced.ask()
    await asyncio.sleep(11 * TAKES_S)
    assert work.done == 1
