"""Detection of agents that compute much more slowly than they themselves did a while ago.

A slow agent is worse than a lost one: every batch goes to the agent that seems to be free first,
and a slow agent seems free until its report comes. An agent that is merely slower than planned is
handled by learning its times (`BookedTimes`). This module finds agents that *became* slow, where
neither the noise of their host nor a slowness shared by all explains it:

* A time is compared with a reference of the same agent, partition and batch size, which follows the
  reports by one per cent a second at most, and then with the agent's own windows of the last
  minutes.
* Each window of half a second counts with its median report, so that a pause of the host, which
  delays only the batch in hand, has no effect.
* Four such windows in a row must be slower by the factor, on average, than those of the other
  agents in its pools; none of them by less than half the factor (on a logarithmic scale); and each
  must lie farther out than the agent's own windows scatter (median and median absolute deviation).
* An agent that is tried again is set aside again after half as many windows: it was found slow
  before, and each window that it is given work in delays what is given to it.
* An agent that computes as usual when it is tried again was no straggler: the next time it takes
  twice as many windows in a row.

A straggler is tried again after a while, and avoided for twice as long if it is still slow. The
module does no I/O and reads no clock: moments are passed in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import mean, median

from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    AgentId,
    Nanoseconds,
    PartitionKey,
)

_WINDOW_NS = 500 * NANOSECONDS_PER_MILLISECOND
_FEWEST_REPORTS = 3
"""A window ends when it is long enough and has at least this many reports."""
_WINDOWS = 4
"""An agent is a straggler after this many slow windows in a row."""
_MOST_WINDOWS = 32
_HISTORY = 240
_LEAST_HISTORY = 4
"""An agent with fewer windows than this is not judged: its usual times are unknown."""
_SCATTER = 2.5
"""A slow window lies this many standard deviations out, estimated by the median absolute
deviation."""
_TO_DEVIATION = 1.4826
_LEAST_DEVIATION = 0.05
_RECENT_NS = 5 * NANOSECONDS_PER_SECOND
"""Windows of other agents that are older than this are not compared with."""
_DRIFT_PER_S = 0.01
_LONGEST_STEP_NS = 100 * NANOSECONDS_PER_MILLISECOND
_FIRST_REPORTS = 8
_FIRST_HOLD_NS = 5 * NANOSECONDS_PER_SECOND
_LONGEST_HOLD_NS = 60 * NANOSECONDS_PER_SECOND
_TRUSTED_AGAIN_NS = 600 * NANOSECONDS_PER_SECOND
"""After this long without a mistake an agent is judged as quickly as any other."""


@dataclass(slots=True)
class _Reference:
    """The usual time of batches of one size on one agent, as a logarithm of nanoseconds."""

    first: list[float] = field(default_factory=list)
    log_ns: float = 0.0
    at: Nanoseconds = 0

    def follow(self, log_ns: float, now: Nanoseconds) -> None:
        if len(self.first) < _FIRST_REPORTS:
            self.first.append(log_ns)
            self.log_ns = median(self.first)
        else:
            passed_s = min(now - self.at, _LONGEST_STEP_NS) / NANOSECONDS_PER_SECOND
            most = _DRIFT_PER_S * passed_s
            self.log_ns += max(-most, min(most, log_ns - self.log_ns))
        self.at = now


@dataclass(slots=True)
class _Record:
    """Everything remembered of one agent."""

    references: dict[tuple[PartitionKey, int], _Reference] = field(default_factory=dict)
    partitions: set[PartitionKey] = field(default_factory=set)
    window: list[float] = field(default_factory=list)
    """Logarithms of the ratio of real to reference time, one per report."""
    since: Nanoseconds = 0
    latest: tuple[Nanoseconds, float] | None = None
    """Moment and value (a logarithm) of the last window that ended."""
    history: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    usual: float = 0.0
    """The median of `history`."""
    run: list[tuple[float, float, float]] = field(default_factory=list)
    """The present run of slow windows: value, change from the usual, and excess of that change over
    the change of other agents. All are logarithms."""
    needed: int = _WINDOWS
    hold_ns: Nanoseconds = _FIRST_HOLD_NS
    aside_until: Nanoseconds | None = None
    on_trial: bool = False
    wrong_at: Nanoseconds = 0

    def remember(self, values: list[float]) -> None:
        self.history.extend(values)
        self.usual = median(self.history)


@dataclass(frozen=True, slots=True)
class Straggler:
    """An agent that is avoided until a moment."""

    agent: AgentId
    until: Nanoseconds
    ratio: float
    """The agent's times in relation to its earlier ones: 2 means twice as slow."""


class StragglerDetector:
    """Finds agents that became slow.

    Args:
        factor: An agent is slow if its times grew by this factor, both compared with its earlier
            times and with those of others in its pools. 0: no agent is ever slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._records: dict[AgentId, _Record] = {}

    @property
    def slow(self) -> frozenset[AgentId]:
        """The agents that are avoided now."""
        return frozenset(a for a, r in self._records.items() if r.aside_until is not None)

    def reported(
        self,
        agent: AgentId,
        partition: PartitionKey,
        rows: int,
        real_ns: Nanoseconds,
        now: Nanoseconds,
    ) -> Straggler | None:
        """Adds the compute time of a batch; returns the agent if that makes it a straggler."""
        if not self._factor:
            return None
        record = self._records.get(agent)
        if record is None:
            record = self._records[agent] = _Record()
        record.partitions.add(partition)
        reference = record.references.get((partition, rows))
        if reference is None:
            reference = record.references[partition, rows] = _Reference()
        log_ns = math.log(max(1, real_ns))
        is_known = len(reference.first) == _FIRST_REPORTS
        distance = log_ns - reference.log_ns
        if record.aside_until is None:  # an avoided agent still reports batches from before
            reference.follow(log_ns, now)
        if not is_known:
            return None
        if not record.window:
            record.since = now
        record.window.append(distance)
        if now - record.since < _WINDOW_NS or len(record.window) < _FEWEST_REPORTS:
            return None
        value = median(record.window)
        record.window.clear()
        record.latest = (now, value)
        if record.aside_until is not None:
            return None
        return self._judge(agent, record, value, now)

    def look(self, now: Nanoseconds) -> list[AgentId]:
        """Returns the agents that are to be tried again from now on."""
        found = []
        for agent, record in self._records.items():
            if record.aside_until is not None and now >= record.aside_until:
                record.aside_until, record.on_trial = None, True
                record.window.clear()
                record.run.clear()
                found.append(agent)
        return found

    def forget(self, agent: AgentId) -> None:
        """Drops what is known of an agent that is gone; another may come under its name."""
        self._records.pop(agent, None)

    def _judge(
        self, agent: AgentId, record: _Record, value: float, now: Nanoseconds
    ) -> Straggler | None:
        others, factor = self._others(agent, record, now), math.log(self._factor)
        change = value - record.usual
        explained = _SCATTER * _deviation(record.history, record.usual)
        excess = change - max(0.0, others) if others is not None else 0.0
        is_known = len(record.history) >= _LEAST_HISTORY
        if not is_known or excess <= factor / 2 or change <= explained:
            self._was_itself(record, value, now)
            return None
        record.run.append((value, change, excess))
        if len(record.run) < (record.needed // 2 if record.on_trial else record.needed):
            return None
        if mean([each for _, _, each in record.run]) <= factor:
            record.remember([record.run.pop(0)[0]])
            return None
        ratio = math.exp(mean([each for _, each, _ in record.run]))
        record.run.clear()
        record.hold_ns = (
            min(2 * record.hold_ns, _LONGEST_HOLD_NS) if record.on_trial else _FIRST_HOLD_NS
        )
        record.aside_until = now + record.hold_ns
        return Straggler(agent, record.aside_until, ratio)

    def _was_itself(self, record: _Record, value: float, now: Nanoseconds) -> None:
        record.remember([*[each for each, _, _ in record.run], value])
        record.run.clear()
        if record.on_trial:
            record.on_trial = False
            record.needed = min(2 * record.needed, _MOST_WINDOWS)
            record.wrong_at = now
        elif record.needed > _WINDOWS and now - record.wrong_at > _TRUSTED_AGAIN_NS:
            record.needed = _WINDOWS

    def _others(self, agent: AgentId, mine: _Record, now: Nanoseconds) -> float | None:
        """Returns the median change of the other agents in its pools, as a logarithm.

        None if no other agent was measured lately.
        """
        found = [
            record.latest[1] - record.usual
            for other, record in self._records.items()
            if other != agent
            and record.latest is not None
            and record.latest[0] >= now - _RECENT_NS
            and not mine.partitions.isdisjoint(record.partitions)
        ]
        return median(found) if found else None


def _deviation(values: deque[float], middle: float) -> float:
    if not values:
        return _LEAST_DEVIATION
    # Only the quicker half counts, so that a slowness that has begun does not explain itself.
    return max(
        _LEAST_DEVIATION, _TO_DEVIATION * median([middle - v for v in values if v <= middle])
    )
