"""What a leader does because time passed: by a schedule, and whatever one part does wrong."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from catenary_scheduler.runtime.periodic import PeriodicTasks, run_periodic_tasks
from catenary_services.domain.ids import Nanoseconds
from catenary_services.telemetry.metrics import Metrics
from scheduler_harness import until


class Part:
    def __init__(self, name: str, story: list[str], *, breaks: bool = False) -> None:
        self.name, self.story, self.breaks = name, story, breaks

    def tick(self, now: Nanoseconds) -> None:
        self.story.append(f"{self.name} ticks")
        if self.breaks:
            raise ZeroDivisionError

    def export(self, metrics: Metrics) -> None:
        self.story.append(f"{self.name} exports")
        if self.breaks:
            raise ZeroDivisionError


async def test_parts_are_called_in_order_even_behind_one_that_breaks() -> None:
    story: list[str] = []
    broken, whole = Part("broken", story, breaks=True), Part("whole", story)
    once = PeriodicTasks(3600.0, (broken, whole), (broken, whole))
    often = PeriodicTasks(0.0, (Part("often", story),))
    running = asyncio.create_task(run_periodic_tasks((once, often), Metrics()))
    await until(lambda: story.count("often ticks") >= 3, "some turns")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    called = ["broken ticks", "whole ticks", "broken exports", "whole exports"]
    assert story[:5] == [*called, "often ticks"]
    assert set(story[5:]) == {"often ticks"}
