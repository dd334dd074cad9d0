"""Steps that do not end, seen by a clock that counts only time in which the process ran."""

from __future__ import annotations

import asyncio
import threading

import pytest

from catenary_agent.supervision.steps import RunningStep, RunningSteps, StepKind
from catenary_agent.supervision.termination import EXIT_STUCK, ProcessTermination
from catenary_agent.supervision.watchdog import Watchdog, WatchdogRules
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import ModelKey, PartitionKey

SECOND_NS = 1_000_000_000
KEY = PartitionKey(ModelKey("m", "1"), 0, 2)
RULES = WatchdogRules(5 * SECOND_NS, 10.0, 100 * SECOND_NS)


class World:
    def __init__(self) -> None:
        self.now = SECOND_NS
        self.steps = RunningSteps(clock=lambda: self.now)
        self.stuck: list[RunningStep] = []
        self.watchdog = Watchdog(
            self.steps, RULES, lambda step, age: self.stuck.append(step), lambda: self.now
        )

    def passes(self, seconds: float, turns: int = 1) -> None:
        for _ in range(turns):
            self.now += round(seconds * SECOND_NS)
            self.watchdog.look()

    def during(self, kind: StepKind, booked_ns: int, then) -> None:
        self.steps.run(then, kind, KEY, booked_ns)


def test_a_step_is_stuck_beyond_floor_and_booking():
    world = World()
    world.during(StepKind.BATCH, SECOND_NS // 10, lambda: world.passes(0.5, 9))
    assert world.stuck == []
    world.during(StepKind.BATCH, SECOND_NS // 10, lambda: world.passes(0.5, 13))
    assert [step.partition for step in world.stuck[:1]] == [KEY]


def test_what_is_booked_for_long_may_take_long():
    world = World()
    world.during(StepKind.GENERATION, SECOND_NS, lambda: world.passes(0.5, 19))
    assert world.stuck == []
    world.during(StepKind.GENERATION, SECOND_NS, lambda: world.passes(0.5, 23))
    assert world.stuck


def test_loading_has_a_bound_of_its_own():
    world = World()
    for kind in (StepKind.LOADING, StepKind.MEASURING):
        world.during(kind, 0, lambda: world.passes(0.5, 190))
    assert world.stuck == []
    world.during(StepKind.LOADING, 0, lambda: world.passes(0.5, 210))
    assert world.stuck


def test_a_process_that_was_stopped_for_an_hour_is_not_stuck():
    world = World()
    world.watchdog.look()

    def stopped() -> None:
        world.passes(0.5)
        world.passes(3600.0)
        world.passes(0.5)

    world.during(StepKind.BATCH, 0, stopped)
    assert world.stuck == []


def test_steps_one_after_the_other_are_no_long_step():
    world = World()
    for _ in range(50):
        world.during(StepKind.BATCH, 0, lambda: world.passes(0.5))
    assert world.stuck == []


def test_a_heartbeat_says_what_is_in_hand_and_for_how_long():
    world = World()
    beats = []

    def beat() -> None:
        world.now += 7
        beats.append(world.steps.heartbeat())

    world.during(StepKind.GENERATION, 3, beat)
    [step] = beats[0].steps
    assert (step.kind, step.age_ns, step.booked_ns) == (scheduler_pb2.STEP_KIND_GENERATION, 7, 3)
    assert (step.partition.model, step.partition.last_block) == ("m", 2)
    assert not world.steps.heartbeat().steps


class Exit:
    """Takes note of the codes a process would end with."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._over = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self._over.set()

    async def came(self) -> list[int]:
        assert await asyncio.to_thread(self._over.wait, 20)
        return self.codes


async def test_the_process_ends_once_and_says_why_first():
    said: list[tuple[str, str]] = []
    leave = Exit()

    async def farewell(reason: str, why: str) -> None:
        said.append((reason, why))

    ending = ProcessTermination(farewell, leave)
    ending.start()
    assert not ending.has_begun
    for _ in range(3):
        ending.begin(EXIT_STUCK, "DEVICE_FAILED", "why")
    assert await leave.came() == [EXIT_STUCK]
    assert (said, ending.has_begun) == ([("DEVICE_FAILED", "why")], True)


async def test_an_event_loop_that_hangs_as_well_keeps_no_process_alive():
    leave = Exit()

    async def farewell(reason: str, why: str) -> None:
        await asyncio.Event().wait()

    ending = ProcessTermination(farewell, leave)
    ending.start()
    ending.begin(EXIT_STUCK, "DEVICE_FAILED", "why")
    assert await leave.came() == [EXIT_STUCK]


async def test_a_process_ends_although_nobody_reads_what_it_says(monkeypatch: pytest.MonkeyPatch):
    leave = Exit()

    async def farewell(reason: str, why: str) -> None:
        raise ZeroDivisionError("nobody thought of this")

    def breaks(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("catenary_agent.supervision.termination._log.error", breaks)
    ending = ProcessTermination(farewell, leave)
    ending.start()
    ending.begin(EXIT_STUCK, "DEVICE_FAILED", "why")
    assert await leave.came() == [EXIT_STUCK]


async def test_a_process_that_gets_no_more_threads_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []

    async def farewell(reason: str, why: str) -> None:
        raise AssertionError

    def refuses(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    ending = ProcessTermination(farewell, codes.append)
    ending.start()
    monkeypatch.setattr(threading.Thread, "start", refuses)
    ending.begin(EXIT_STUCK, "DEVICE_FAILED", "why")
    assert codes == [EXIT_STUCK]
