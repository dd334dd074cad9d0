"""Detection of agents whose present step does not end, from what their heartbeats say.

A device driver may never return from a call while the process still sends heartbeats: its event
loop is another thread. So every heartbeat says what is being computed, for how long, and how long
it was booked for. The module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import AgentId, Nanoseconds

_BOOKED = frozenset({scheduler_pb2.STEP_KIND_BATCH, scheduler_pb2.STEP_KIND_GENERATION})
_BEATS = 2
"""A step is stuck when this many heartbeats in a row say so: a process that was stopped for a while
sends a heartbeat before its step has had a chance to end."""


@dataclass(frozen=True, slots=True)
class StuckRules:
    """Limits on the age of a step, by kind."""

    floor_ns: Nanoseconds
    factor: float
    """A booked step may take this many times the booked time, but `floor_ns` at least."""
    load_ns: Nanoseconds
    """Limit for loading and measuring a partition, for which nothing is booked."""

    def bound_ns(self, step: scheduler_pb2.StepInHand) -> Nanoseconds:
        """Returns the age in nanoseconds above which a step counts as stuck."""
        if step.kind not in _BOOKED:
            return self.load_ns
        return max(self.floor_ns, round(self.factor * step.booked_ns))


class StuckAgents:
    """Judges heartbeats, and remembers which processes were told to end."""

    def __init__(self, rules: StuckRules) -> None:
        self._rules = rules
        self._beats: dict[AgentId, int] = {}
        """Number of successive heartbeats whose step was too old, by agent."""
        self._ended: dict[AgentId, int] = {}
        """The incarnation of each agent that was told to end."""

    def heard(self, agent: AgentId, beat: scheduler_pb2.Heartbeat) -> str:
        """Takes a heartbeat in; returns why the agent is stuck, in words, or an empty text."""
        late = [step for step in beat.steps if step.age_ns > self._rules.bound_ns(step)]
        if not late:
            self._beats.pop(agent, None)
            return ""
        beats = self._beats[agent] = self._beats.get(agent, 0) + 1
        return _described(late[0]) if beats >= _BEATS else ""

    def told_to_end(self, agent: AgentId, incarnation: int) -> None:
        """Notes that a process was told to end; it gets no more work."""
        self._beats.pop(agent, None)
        self._ended[agent] = incarnation

    def must_end(self, agent: AgentId, incarnation: int) -> bool:
        """True if this incarnation was told to end and has connected again."""
        return self._ended.get(agent) == incarnation

    def came(self, agent: AgentId) -> bool:
        """Notes that a process may stay; True if it replaces one that was told to end."""
        self._beats.pop(agent, None)
        return self._ended.pop(agent, None) is not None


def _described(step: scheduler_pb2.StepInHand) -> str:
    kind = scheduler_pb2.StepKind.Name(step.kind).removeprefix("STEP_KIND_").lower()
    key = step.partition
    what = f" of {key.model}:{key.model_version}[{key.first_block},{key.last_block})"
    return (
        f"a step ({kind}){what if key.model else ''} goes on for {step.age_ns / 1e9:.1f} s,"
        f" booked were {step.booked_ns / 1e9:.3f} s"
    )
