"""Who is told of an event: observers before the dispatcher decides, and after its commands."""

from __future__ import annotations

import asyncio

from catenary_scheduler.dispatch import events
from catenary_scheduler.dispatch.events import Command, Event
from catenary_scheduler.runtime.dispatch_loop import DispatchLoop
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import AgentId, BatchId, Nanoseconds
from catenary_services.telemetry.metrics import Metrics
from scheduler_harness import until

FAILED = events.BatchFailed(BatchId(1), None, "X", "why", False)
LOST = events.AgentLost(AgentId("a"))
CANCEL = events.CancelBatch(BatchId(1), (AgentId("a"),))


class Story:
    """A dispatcher, observers and commands, in the order in which they happened."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.wakeup: Nanoseconds | None = None
        self.wakeup_after_next: Nanoseconds | None = None
        """When it asks to be woken once it has handled the next event."""
        self.loop = DispatchLoop(self, self.route, Metrics())

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        self.told.append(f"dispatcher {type(event).__name__}")
        self.wakeup, self.wakeup_after_next = self.wakeup_after_next, None
        return [CANCEL]

    def next_wakeup(self) -> Nanoseconds | None:
        return self.wakeup

    def route(self, command: Command, now: Nanoseconds) -> None:
        self.told.append("command")

    def fed(self) -> None:
        self.told.append("fed")


class Observer:
    def __init__(self, name: str, story: Story, *observes: type[Event]) -> None:
        self.observes = observes
        self._name, self._story = name, story

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        self._story.told.append(f"{self._name} {type(event).__name__}")


async def test_observers_are_told_in_order_around_the_decision() -> None:
    story = Story()
    first = Observer("first", story, events.BatchFailed, events.AgentLost)
    second = Observer("second", story, events.BatchFailed)
    last = Observer("last", story, events.BatchFailed)
    story.loop.observe(before=(first, second), after=(last,), fed=story.fed)
    story.loop.feed(FAILED, now_ns())
    assert story.told == [
        "first BatchFailed",
        "second BatchFailed",
        "dispatcher BatchFailed",
        "command",
        "last BatchFailed",
        "fed",
    ]
    await asyncio.sleep(0)
    story.loop.close()


async def test_an_observer_is_told_of_the_kinds_it_named_only() -> None:
    story = Story()
    story.loop.observe(before=[Observer("one", story, events.BatchFailed)], fed=story.fed)
    story.loop.feed(LOST, now_ns())
    assert story.told == ["dispatcher AgentLost", "command", "fed"]
    await asyncio.sleep(0)
    story.loop.close()


async def test_a_wake_up_of_the_loop_itself_is_written_but_no_news_to_observers() -> None:
    story = Story()
    story.loop.observe(after=[Observer("one", story, events.Tick)], fed=story.fed)
    story.wakeup_after_next = now_ns()
    story.loop.feed(events.Tick(), now_ns())
    assert story.told == ["dispatcher Tick", "command", "one Tick", "fed"]
    await until(lambda: len(story.told) > 6, "it wakes up")
    assert story.told[4:] == ["dispatcher Tick", "command", "fed"]
    story.loop.close()


async def test_a_wait_that_no_timer_can_measure_turns_the_loop_a_few_times_only() -> None:
    story = Story()
    asked: list[Nanoseconds] = []

    def next_wakeup() -> Nanoseconds | None:
        asked.append(now_ns())
        return story.wakeup

    story.next_wakeup = next_wakeup  # type: ignore[method-assign]
    story.wakeup_after_next = now_ns() + 2_300_000
    story.loop.feed(FAILED, now_ns())
    await until(lambda: "dispatcher Tick" in story.told, "it wakes up")
    assert len(asked) <= 8
    story.loop.close()


async def test_the_dispatcher_is_never_told_an_earlier_moment_than_before() -> None:
    story = Story()
    moments: list[Nanoseconds] = []

    def handle(event: Event, now: Nanoseconds) -> list[Command]:
        moments.append(now)
        return []

    story.handle = handle  # type: ignore[method-assign]
    story.loop.feed(FAILED, 2_000)
    story.loop.feed(FAILED, 1_000)
    assert moments == [2_000, 2_000]
    story.loop.close()
