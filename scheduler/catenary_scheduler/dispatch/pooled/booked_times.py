"""Learns the times that partitions take on agents, which are then booked for them.

A plan books what was measured when a partition was loaded, on a quiet machine. A device that is
always one and a half times slower than that should not be avoided but booked at its true speed. So
each report moves an estimate of the time of one agent, partition and batch size towards itself, by
three per cent at most: fourteen reports learn a factor of one and a half, and a batch that took a
second counts no more than any other slow one.

Without reports an estimate fades, and the plan counts again: otherwise times so long that every
request is turned away would never be corrected. The first report brings the estimate back. The
module does no I/O and reads no clock: moments are passed in.
"""

from __future__ import annotations

import math

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds, PartitionKey

_STEP = 0.03
"""A report moves the logarithm of an estimate by this at most."""
_FEWEST_REPORTS = 5
"""Nothing is concluded from fewer reports than this."""
_NOTABLE = 0.1
"""Estimates that moved by less than this share do not change what is booked."""
_PAUSE_NS = NANOSECONDS_PER_SECOND
"""Least time between changes of what is booked, since routes are made anew each time."""
_LEAST, _MOST = 0.5, 8.0
"""Bounds of the ratio of real to planned time: beyond them something else is wrong."""
_MOST_WEIGHT = 64
_FADES_AFTER_NS = 2 * NANOSECONDS_PER_SECOND
_HALVED_AFTER_NS = 2 * NANOSECONDS_PER_SECOND
_LEAST_TRUST = 0.05

Place = tuple[AgentId, PartitionKey]


class _Estimate:
    """Estimated time of one batch size, as a logarithm of nanoseconds."""

    __slots__ = ("at", "log_ns", "reports", "told", "trust")

    def __init__(self, log_ns: float) -> None:
        self.log_ns = log_ns
        self.at: Nanoseconds = 0
        self.trust = 1.0
        """Share of its distance from the plan that is believed, 0 to 1."""
        self.told = log_ns
        """The estimate with which routes were last made."""
        self.reports = 0


class BookedTimes:
    """Ratios of real to planned times, by agent, partition and batch size.

    `version` grows when routes should be made anew.
    """

    def __init__(self) -> None:
        self._places: dict[Place, dict[int, _Estimate]] = {}
        self._changed = False
        self._changed_at: Nanoseconds = 0
        self._faded_at: Nanoseconds = 0
        self.version = 0

    def reported(
        self,
        agent: AgentId,
        partition: PartitionKey,
        rows: int,
        real_ns: Nanoseconds,
        now: Nanoseconds,
    ) -> None:
        """Takes in the compute time of a batch."""
        log_ns = math.log(max(1, real_ns))
        sizes = self._places.setdefault((agent, partition), {})
        estimate = sizes.get(rows)
        if estimate is None:
            estimate = sizes[rows] = _Estimate(log_ns)
        estimate.reports += 1
        # The first few reports are averaged: there is no estimate to protect yet.
        share = 1.0 / estimate.reports if estimate.reports <= _FEWEST_REPORTS else 1.0
        step = share if estimate.reports <= _FEWEST_REPORTS else _STEP
        difference = share * (log_ns - estimate.log_ns)
        estimate.log_ns += max(-step, min(step, difference))
        estimate.at = now
        is_first = estimate.reports == _FEWEST_REPORTS or estimate.trust < 1.0
        estimate.trust = 1.0
        if is_first or abs(estimate.log_ns - estimate.told) > _NOTABLE:
            self._changed = True
        if self._changed and now - self._changed_at >= _PAUSE_NS:
            self._changed, self._changed_at = False, now
            self.version += 1
            for each in self._places.values():
                for known in each.values():
                    known.told = known.log_ns

    def fade(self, now: Nanoseconds) -> None:
        """Reduces the trust in estimates without recent reports."""
        if now - self._faded_at < _PAUSE_NS:
            return
        self._faded_at = now
        for sizes in self._places.values():
            for estimate in sizes.values():
                idle_ns = now - estimate.at - _FADES_AFTER_NS
                trust = 0.5 ** (idle_ns / _HALVED_AFTER_NS) if idle_ns > 0 else 1.0
                trust = trust if trust >= _LEAST_TRUST else 0.0
                if trust < estimate.trust:
                    estimate.trust = trust
                    self.version += 1

    def forget(self, agent: AgentId) -> None:
        """Drops the estimates of an agent that is gone; another may come under its name."""
        for place in [place for place in self._places if place[0] == agent]:
            del self._places[place]

    def scale(self, agent: AgentId, partition: PartitionKey, planned: tuple[int, ...]) -> float:
        """Returns an agent's ratio of real to planned time over all sizes; 1 if it is unknown."""
        weights = 0.0
        total = 0.0
        for rows, estimate in self._places.get((agent, partition), {}).items():
            if estimate.reports >= _FEWEST_REPORTS and 0 < rows <= len(planned):
                weight = float(min(estimate.reports, _MOST_WEIGHT))
                weights += weight
                total += weight * _distance(estimate, planned[rows - 1])
        return _bounded(math.exp(total / weights)) if weights else 1.0

    def booked(
        self, agents: tuple[AgentId, ...], partition: PartitionKey, planned: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Returns the times to book for a pool, by batch size: those of its slowest member.

        Sizes that were reported have their own estimates, the others use the common ratio. Larger
        batches never take less time than smaller ones.
        """
        booked = [0] * len(planned)
        for agent in agents:
            scale = self.scale(agent, partition, planned)
            sizes = self._places.get((agent, partition), {})
            for at, planned_ns in enumerate(planned):
                estimate = sizes.get(at + 1)
                factor = scale
                if estimate is not None and estimate.reports >= _FEWEST_REPORTS:
                    factor = _bounded(math.exp(_distance(estimate, planned_ns)))
                booked[at] = max(booked[at], round(planned_ns * factor))
        for at in range(1, len(booked)):
            booked[at] = max(booked[at], booked[at - 1])
        return tuple([max(1, each) for each in booked])


def _distance(estimate: _Estimate, planned_ns: Nanoseconds) -> float:
    """Returns the believed part of the logarithm of the ratio of real to planned time."""
    return estimate.trust * (estimate.told - math.log(max(1, planned_ns)))


def _bounded(scale: float) -> float:
    return max(_LEAST, min(_MOST, scale))
