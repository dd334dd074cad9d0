"""An agent that computes chats beside photographs is compared with photographs alone."""

from __future__ import annotations

import pytest

from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.events import DispatchBatch, PlannedHop, StageReported
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.feedback.hop_reports import HopReports, HopStatistics
from catenary_scheduler.feedback.impairment_detector import ImpairmentDetector, ImpairmentRules
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.observed.slowdowns import Slowdowns
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.observed.utilisation import Utilisation
from catenary_services.domain.ids import AgentId, BatchId, ModelKey, PartitionKey

MS = 1_000_000
COMPUTE_NS, STEP_NS = 10 * MS, 8 * MS
PART = PartitionKey(ModelKey("cats", "1"), 0, 1)
AGENTS = (AgentId("shares"), AgentId("alone"))


class Reports:
    """Photographs on two agents, of which one also serves chats after a while."""

    def __init__(self) -> None:
        self.availability = Availability()
        for agent in AGENTS:
            self.availability.connected(agent)
        self.timelines, self.slowdowns = Timelines(), Slowdowns()
        detector = ImpairmentDetector(
            ImpairmentRules(1.5, 60.0), self.availability, lambda: (), lambda kind, facts: None
        )
        self.reports = HopReports(
            self.timelines,
            HopStatistics(self.slowdowns, Utilisation(), BookedTimes(), MeasuredProfiles()),
            detector,
            AgentRegistry(),
        )
        self.now = self.batches = 0

    def run(self, batches: int, spent_ns: int, *, chats: bool) -> None:
        """Books and reports batches of both agents; `shares` takes `spent_ns` for each."""
        for _ in range(batches):
            for agent in AGENTS:
                self.batches += 1
                is_shared = chats and agent == AGENTS[0]
                steps_ns = STEP_NS if is_shared else 0
                start = self.now + steps_ns  # a step goes first; the report is of the batch alone
                end = start + (spent_ns if agent == AGENTS[0] else COMPUTE_NS)
                hop = PlannedHop(agent, PART, self.now, COMPUTE_NS + steps_ns, steps_ns=steps_ns)
                batch = BatchId(self.batches)
                self.timelines.dispatched(DispatchBatch(batch, 1, (), (hop,), end), self.now)
                self.reports.on_event(StageReported(batch, 0, start, end), end)
            self.now += 50 * MS
            self.reports.tick(self.now)

    def is_aside(self) -> bool:
        return self.availability.mark_of(AGENTS[0], Impairment.STRAGGLING) is not None


def test_chats_on_an_agent_make_it_no_straggler_and_not_slow() -> None:
    reports = Reports()
    reports.run(100, COMPUTE_NS, chats=False)
    reports.run(200, COMPUTE_NS, chats=True)
    assert not reports.is_aside()
    assert reports.slowdowns.ratio(AGENTS[0], reports.now) == pytest.approx(1.0)


def test_an_agent_that_became_slow_beside_chats_is_still_found() -> None:
    reports = Reports()
    reports.run(100, COMPUTE_NS, chats=True)
    assert not reports.is_aside()
    reports.run(100, 3 * COMPUTE_NS, chats=True)
    assert reports.is_aside()
    assert reports.slowdowns.ratio(AGENTS[0], reports.now) == pytest.approx(3.0)
