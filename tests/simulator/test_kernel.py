"""The event kernel: what comes first at one moment, when it ends, and what it takes for stuck."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from catenary_scheduler.dispatch.events import Command, Event, Reject, SessionsProgressed, Tick
from catenary_services.domain.ids import RequestId
from catenary_services.errors import InternalError

SOURCE = Path(__file__).parents[2] / "simulator" / "catenary_simulator" / "kernel.py"


def plain(source: Path) -> ModuleType:
    """A module of its source: no class of a test may inherit from a compiled one."""
    loader = SourceFileLoader("plain_kernel", str(source))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module


kernel_module = plain(SOURCE)
GATEWAY, NEVER, Kernel = kernel_module.GATEWAY, kernel_module.NEVER, kernel_module.Kernel
REJECTED: Command = Reject(RequestId(GATEWAY, 0), "QUEUE_FULL", "no")
NEWS = SessionsProgressed(())


class Asleep:
    """A dispatcher that wants to be woken at given moments."""

    def __init__(self, wakeups: Sequence[int] = (), answer: Sequence[Command] = ()) -> None:
        self.wakeups = list(wakeups)
        self.answer = list(answer)
        self.heard: list[tuple[int, Event]] = []

    def handle(self, event: Event, now: int) -> list[Command]:
        self.heard.append((now, event))
        if isinstance(event, Tick):
            self.wakeups.pop(0)
        return self.answer

    def next_wakeup(self) -> int | None:
        return self.wakeups[0] if self.wakeups else None


class Diary(Kernel):
    """Notes what happens, and is over when a given number of things has happened."""

    def __init__(
        self,
        dispatcher: Asleep | None,
        arrivals: Sequence[int] = (),
        things: int = 0,
        ticks: int = 1,
        periodic_from: int = NEVER,
    ) -> None:
        super().__init__(dispatcher, arrivals, ticks, periodic_from)
        self.things = things
        self.noted: list[tuple[int, object]] = []

    def arrive(self, number: int) -> None:
        self.noted.append((self.now, f"arrival {number}"))

    def happen(self, order: int, what: object) -> None:
        self.noted.append((self.now, what))
        if what == "news":
            self.tell(NEWS)
        elif what == "again":
            self.at(self.now + 1, order, what)
        elif what == "enough":
            self.stop()

    def carry_out(self, commands: list[Command]) -> None:
        self.noted.append((self.now, commands[0]))

    def unanswered(self) -> int:
        return self.things - len(self.noted)

    def is_over(self) -> bool:
        return len(self.noted) >= self.things


def test_at_one_moment_what_is_due_comes_before_arrivals_and_these_before_the_wake_up() -> None:
    dispatcher = Asleep([5, 6])
    kernel = Diary(dispatcher, [5], things=4)
    kernel.at(5, 1, "second")
    kernel.at(5, 0, "first")
    kernel.at(6, 0, "news")
    kernel.run()
    assert kernel.noted == [(5, "first"), (5, "second"), (5, "arrival 0"), (6, "news")]
    assert dispatcher.heard == [(5, Tick()), (6, NEWS)], "over, before it was woken again"


def test_entries_of_one_moment_and_order_happen_as_they_were_entered() -> None:
    kernel = Diary(None, things=20)
    for number in range(20):
        kernel.at(3, 0, number)
    kernel.run()
    assert [what for _, what in kernel.noted] == list(range(20))


def test_commands_are_carried_out_at_the_moment_of_what_they_answer() -> None:
    kernel = Diary(Asleep([7], [REJECTED]), things=1)
    kernel.run()
    assert kernel.noted == [(7, REJECTED)]
    assert kernel.told == 1


def test_a_finer_clock_tells_the_dispatcher_nanoseconds_rounded_up() -> None:
    dispatcher = Asleep([2])
    kernel = Diary(dispatcher, [1], things=2, ticks=1000)
    kernel.at(2500, 0, "news")
    kernel.run()
    assert kernel.noted == [(1000, "arrival 0"), (2500, "news")]
    assert dispatcher.heard == [(2, Tick()), (3, NEWS)]


def test_a_wake_up_in_the_past_does_not_turn_the_clock_back() -> None:
    dispatcher = Asleep([1])
    kernel = Diary(dispatcher, things=2)
    kernel.at(4, 0, "at four")
    kernel.at(9, 0, "at nine")
    kernel.now = 4
    kernel.run()
    assert dispatcher.heard == [(4, Tick())]
    assert kernel.now == 9


def test_it_is_stopped_though_much_is_open() -> None:
    kernel = Diary(None, [1, 8], things=50)
    kernel.at(2, 0, "enough")
    kernel.run()
    assert kernel.noted == [(1, "arrival 0"), (2, "enough")]


def test_the_sweep_comes_every_1024_arrivals() -> None:
    swept: list[int] = []
    kernel = Diary(None, range(3000), things=3000)
    kernel.sweep = lambda: swept.append(kernel.arrived)
    kernel.run()
    assert swept == [0, 1024, 2048]


def test_requests_that_nothing_will_answer_are_our_bug() -> None:
    with pytest.raises(InternalError, match="2 requests are never answered"):
        Diary(None, [1], things=3).run()
    with pytest.raises(InternalError, match="never answered"):
        Diary(Asleep([NEVER]), things=1).run()


def test_a_simulation_in_which_only_the_clock_goes_on_is_stuck() -> None:
    kernel = Diary(None, things=10**9, periodic_from=3)
    kernel.at(1, 3, "again")
    with pytest.raises(InternalError, match="wait and nothing happens"):
        kernel.run()
    with pytest.raises(InternalError, match="wait and nothing happens"):
        Diary(Asleep([5] * 20_000), things=1).run()


def test_what_happens_again_and_again_for_a_reason_is_no_sign_of_that() -> None:
    kernel = Diary(None, things=20_000, periodic_from=3)
    kernel.at(1, 2, "again")
    kernel.run()
    assert kernel.now == 20_000
