"""Has agents measure the links between servers, for planners, the book and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import AgentSender, address_of, staying
from catenary_scheduler.dispatch.events import AgentJoined, Event
from catenary_scheduler.observed.link_schedule import (
    ANSWER_NS,
    LinkEnd,
    LinkOutcome,
    LinkSchedule,
)
from catenary_scheduler.observed.link_watch import links_in_use
from catenary_scheduler.planning.live import LinkFigures, ServerPair
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Epoch, Nanoseconds
from catenary_services.domain.plan import Agent
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_scheduler.agents.registry import AgentRegistry, AgentState
    from catenary_scheduler.cluster.controller import ClusterController
    from catenary_scheduler.dispatch.availability import Availability
    from catenary_scheduler.feedback.latency_refit import LatencyRefit
    from catenary_scheduler.observed.links import MeasuredLinks
    from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_MOST_BYTES = 16 << 20
_LOOK_BYTES = 1
"""Bytes of a look, which is for the round trip only: the least that an order may name."""
_NOTABLE = 0.05
"""A rate that differs by a larger share is told to the dispatcher."""
_OUTCOMES = {
    scheduler_pb2.LinkMeasured.OUTCOME_MEASURED: LinkOutcome.MEASURED,
    scheduler_pb2.LinkMeasured.OUTCOME_SAME_HOST: LinkOutcome.SAME_HOST,
    scheduler_pb2.LinkMeasured.OUTCOME_BUSY: LinkOutcome.BUSY,
}


@dataclass(frozen=True, slots=True)
class LinkDeps:
    """The parts that measurements of links need, and those that hear of them."""

    links: MeasuredLinks
    cluster: ClusterController
    availability: Availability
    latency: LatencyRefit
    """The latency lines of chains, which go by links."""
    epoch: Callable[[], Epoch]
    feed: Callable[[Event, Nanoseconds], None]
    keep: Callable[[], None]
    """Called when there are new figures to store."""
    first_number: int
    """The number of the first order; larger than all of earlier leaders."""
    look_ns: Nanoseconds
    """Time between two looks at a link that chains pass."""

    @property
    def registry(self) -> AgentRegistry:
        return self.cluster.registry


class LinkMeasurements:
    """Orders measurements of links, one at a time, and tells the dispatcher what came of them."""

    def __init__(self, deps: LinkDeps) -> None:
        self._deps = deps
        self._agents = AgentSender(deps.registry)
        self._schedule = LinkSchedule(deps.links, deps.first_number, deps.look_ns)
        self._told: dict[AgentId, int] = {}
        """Bytes per second of the network card of each agent, as the dispatcher has them."""
        self._shown: set[tuple[str, str]] = set()

    def seen(self, agent: Agent) -> Agent:
        """Returns an agent that joins, as the dispatcher is to have it."""
        (seen,) = self._deps.links.known.seen((agent,))
        self._told[agent.agent_id] = seen.link_bytes_per_second
        return seen

    def tick(self, now: Nanoseconds) -> None:
        """Orders the next measurement, if one is due."""
        if not self._schedule.is_time(now):
            return
        ends = [
            LinkEnd(agent.agent_id, agent.server, address)
            for record in staying(self._deps.registry, self._deps.availability)
            if (agent := record.agent) and (address := address_of(record.peer))
        ]
        order = self._schedule.next_order(ends, now, int(time.time()), self._in_use())
        if order is None:
            return
        command = scheduler_pb2.MeasureLinkTo(
            number=order.number,
            peer_id=order.target.agent,
            most_bytes=_LOOK_BYTES if order.is_look else _MOST_BYTES,
            deadline_ns=ANSWER_NS,
            even_if_busy=order.even_if_busy,
        )
        message = scheduler_pb2.SchedulerToAgentMessage(
            epoch=self._deps.epoch(), measure_link=command
        )
        self._agents.send(order.source.agent, message)

    def measured(
        self, record: AgentState, said: scheduler_pb2.LinkMeasured, now: Nanoseconds
    ) -> None:
        """Takes in an agent's answer; one that nobody waits for any more is ignored."""
        figures = None
        if said.round_trip_ns and said.bytes_per_second:
            figures = LinkFigures(said.round_trip_ns, said.bytes_per_second)
        outcome = _OUTCOMES.get(said.outcome, LinkOutcome.FAILED)
        if outcome is LinkOutcome.MEASURED and figures is None:
            outcome = LinkOutcome.FAILED
        agent = record.agent.agent_id
        before = self._deps.links.known
        order = self._schedule.answered(agent, said.number, outcome, figures, now, int(time.time()))
        known = self._deps.links.known
        if order is None or (order.is_look and known is before):
            return
        figures = known.figures.get(order.pair) if outcome is LinkOutcome.MEASURED else None
        facts = {
            "source": agent,
            "target": order.target.agent,
            "outcome": outcome.value,
            "is_look": order.is_look,
        }
        if figures is None:
            _log.info("link_not_measured", **facts, why=said.why)
            return
        _log.info(
            "link_measured",
            **facts,
            round_trip_ns=figures.round_trip_ns,
            bytes_per_second=figures.bytes_per_second,
        )
        self._tell(now)
        for refitted in self._deps.latency.relinked():
            self._deps.feed(refitted, now)
        self._deps.keep()

    def export(self, metrics: Metrics) -> None:
        """Sets the gauges of links between the servers of known agents."""
        servers = {record.agent.server for record in self._deps.registry.values()}
        shown = set()
        for (source, target), link in self._deps.links.all():
            if source in servers and target in servers:
                labels = str(source), str(target)
                metrics.server_link_rate.labels(*labels).set(link.figures.bytes_per_second)
                round_trip_s = link.figures.round_trip_ns / NANOSECONDS_PER_SECOND
                metrics.server_link_round_trip.labels(*labels).set(round_trip_s)
                shown.add(labels)
        for gone in self._shown - shown:
            metrics.server_link_rate.remove(*gone)
            metrics.server_link_round_trip.remove(*gone)
        self._shown = shown

    def _in_use(self) -> AbstractSet[ServerPair]:
        active, registry = self._deps.cluster.active, self._deps.registry
        if active is None:
            return frozenset()
        servers = {name: record.agent.server for name, record in registry.items()}
        return links_in_use(active.plan, servers)

    def _tell(self, now: Nanoseconds) -> None:
        """Has the dispatcher book transfers by the new figures, where they changed notably."""
        present = [each.agent for each in self._deps.registry.values() if each.session is not None]
        self._told = {a: rate for a, rate in self._told.items() if a in self._deps.registry}
        for seen in self._deps.links.known.seen(present):
            rate, told = seen.link_bytes_per_second, self._told.get(seen.agent_id)
            if told is not None and abs(rate - told) > _NOTABLE * told:
                self._told[seen.agent_id] = rate
                self._deps.feed(AgentJoined(seen), now)
