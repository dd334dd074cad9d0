"""Cost of packing at the dispatcher: 1,000 running sessions on 40 chains, in virtual time.

Sessions arrive, grow and end, about 65 of each per second. Gateways report ten times a second. Once
a second all sessions are examined, and those that should move are moved. A *decision* is the start
or the end of a session: admission, choice of a chain, slots, orders. An *epoch* examines all
sessions and begins the moves; its cost per session event is that over the starts and ends since the
epoch before. Times are CPU time of the thread.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.packing.packing_cluster import PackedCluster
from benchmarks.packing.packing_setup import S, Setup
from catenary_lab.limits import Figure, at_least, at_most
from catenary_scheduler.dispatch.chained.packing import session_packing as compiled_part
from catenary_scheduler.dispatch.events import (
    Command,
    Event,
    RequestCompleted,
    SessionRequested,
    SessionsProgressed,
)
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.packing import PackingGoal

LIMIT_P50_US = 200.0
SESSIONS = 1000
CHAINS = 40
LINES = LatencyLines(0.124e6, 13.9e6, 45.0, 0.0756e6, 22.5e6, 23.1e6)
_MEAN_ANSWER_S = 15.0


class Timed(PackedCluster):
    """A cluster that takes the time of every event."""

    def __init__(self, setup: Setup) -> None:
        self.is_on = False
        self.decision_us: list[float] = []
        self.report_us: list[float] = []
        self.epoch_us: list[float] = []
        self.events_between: list[int] = []
        self._events_since = 0
        self._epochs = 0
        super().__init__(setup)

    def tell(self, event: Event) -> list[Command]:
        """Passes an event to the dispatcher, carries out its commands, and takes the time."""
        if self.is_on:
            self._events_since += isinstance(event, (SessionRequested, RequestCompleted))
        return super().tell(event)

    def asked(self, event: Event) -> list[Command]:
        """Lets the dispatcher handle an event, and takes the time."""
        before = time.thread_time_ns()
        commands = super().asked(event)
        took = (time.thread_time_ns() - before) / 1000
        if not self.is_on:
            return commands
        epochs = self.dispatcher.statistics()["packing_epochs"]
        if epochs > self._epochs:
            if self._epochs:
                self.epoch_us.append(took)
                self.events_between.append(max(1, self._events_since))
            self._epochs, self._events_since = epochs, 0
        elif isinstance(event, (SessionRequested, RequestCompleted)):
            self.decision_us.append(took)
        elif isinstance(event, SessionsProgressed):
            self.report_us.append(took)
        return commands


def trial(goal: PackingGoal, seconds: float) -> Timed:
    """Returns a cluster that was busy for `seconds`, after some time to fill up."""
    draw = random.Random(3)
    cluster = Timed(
        Setup(chains=CHAINS, goal=goal, slots=64, cache_tokens=32_000, lines=LINES, move_ns=S // 20)
    )
    rate = SESSIONS / _MEAN_ANSWER_S
    warm = 1.6 * _MEAN_ANSWER_S
    while cluster.now < (warm + seconds) * S:
        cluster.is_on = cluster.now > warm * S
        cluster.run(cluster.now + int(draw.expovariate(rate) * S))
        prompt = min(1500, max(8, int(draw.lognormvariate(5.0, 0.8))))
        cluster.arrive(prompt, min(2500, max(8, int(draw.lognormvariate(6.28, 0.5)))))
    return cluster


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    compiled = not compiled_part.__file__.endswith(".py")
    results = [at_least("compiled modules in use", float(compiled), "", 1)]
    seconds = 8.0 if quick else 20.0
    for goal in ("off", "balance", "pack"):
        found = trial(goal, seconds)
        sessions = found.dispatcher.statistics()["sessions_in_flight"]
        share = [t / n for t, n in zip(found.epoch_us, found.events_between, strict=True)]
        results += [
            at_most(f"{goal}: sessions at the end", sessions, ""),
            at_most(f"{goal}: chains in use", len(found.in_use()), ""),
            at_most(f"{goal}: moves", len(found.moves) / (found.now / S), "1/s"),
            at_most(f"{goal}: decision p50", _p50(found.decision_us), "us", LIMIT_P50_US),
            at_most(f"{goal}: decision p99", _p99(found.decision_us), "us"),
            at_most(f"{goal}: report of all sessions p50", _p50(found.report_us), "us"),
        ]
        if goal != "off":
            results += [
                at_most(f"{goal}: epoch p50", _p50(found.epoch_us) / 1000, "ms"),
                at_most(f"{goal}: epoch, longest", max(found.epoch_us) / 1000, "ms"),
                at_most(f"{goal}: epoch per session event p50", _p50(share), "us", LIMIT_P50_US),
            ]
    return results


def _p50(times: list[float]) -> float:
    return statistics.median(times)


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]
