"""A watchdog thread that detects steps which do not end, even without a scheduler.

The scheduler sees a step's age in every heartbeat and reacts sooner. The watchdog is for the time
when the scheduler is away, or when the event loop that sends heartbeats hangs as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from catenary_agent.supervision.steps import RunningStep, RunningSteps, StepKind
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

_LOOK_S = 0.25
_LONGEST_TURN_NS = NANOSECONDS_PER_SECOND
"""The most time that counts between two looks: a process that was stopped has not computed
meanwhile."""


@dataclass(frozen=True, slots=True)
class WatchdogRules:
    """The ages at which steps count as stuck."""

    floor_ns: Nanoseconds
    factor: float
    """Factor on the booked time of a step, if the product exceeds `floor_ns`."""
    load_ns: Nanoseconds
    """The limit for loading and measuring, for which nothing is booked."""

    def bound_ns(self, step: RunningStep) -> Nanoseconds:
        """Returns the age above which a step counts as stuck."""
        if step.kind in {StepKind.LOADING, StepKind.MEASURING}:
            return self.load_ns
        return max(self.floor_ns, round(self.factor * step.booked_ns))


class Watchdog:
    """Calls `stuck` with a step that is too old, and its age."""

    def __init__(
        self,
        steps: RunningSteps,
        rules: WatchdogRules,
        stuck: Callable[[RunningStep, Nanoseconds], None],
        clock: Callable[[], Nanoseconds] = time.monotonic_ns,
    ) -> None:
        self._steps = steps
        self._rules = rules
        self._stuck = stuck
        self._clock = clock
        self._looked: Nanoseconds | None = None
        self._ages: dict[RunningStep, Nanoseconds] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopping.set()

    def look(self) -> None:
        """Looks at all running steps once; `stuck` is called on the calling thread."""
        now = self._clock()
        turn = 0 if self._looked is None else min(now - self._looked, _LONGEST_TURN_NS)
        self._looked = now
        in_hand = self._steps.in_hand()
        self._ages = {
            step: self._ages[step] + turn if step in self._ages else min(now - step.began_ns, turn)
            for step in in_hand
        }
        for step, age in self._ages.items():
            if age > self._rules.bound_ns(step):
                self._stuck(step, age)
                return

    def _work(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            self.look()
