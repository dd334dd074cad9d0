"""Which agents compute a step that does not end, by what their heartbeats say. Pure.

A device driver may never return from a call, and the process beats on: its event loop is another
thread. So every heartbeat says what is computed, for how long, and how long it was booked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import AgentId, Nanoseconds

_BOOKED = frozenset({scheduler_pb2.STEP_KIND_BATCH, scheduler_pb2.STEP_KIND_GENERATION})
_BEATS = 2
"""A step is stuck when so many heartbeats in a row say so: a process that was stopped for a while
beats before its step has had a chance to end."""


@dataclass(frozen=True, slots=True)
class StuckRules:
    """How old a step may be."""

    floor_ns: Nanoseconds
    factor: float
    """Times what is booked, if that is more."""
    load_ns: Nanoseconds
    """Loading and measuring, for which nothing is booked."""

    def bound_ns(self, step: scheduler_pb2.StepInHand) -> Nanoseconds:
        """Returns how old a step may be."""
        if step.kind not in _BOOKED:
            return self.load_ns
        return max(self.floor_ns, round(self.factor * step.booked_ns))


class StuckAgents:
    """Hears heartbeats, and remembers who was told to end."""

    def __init__(self, rules: StuckRules) -> None:
        self._rules = rules
        self._beats: dict[AgentId, int] = {}
        """Heartbeats in a row with a step that is too old."""
        self._ended: dict[AgentId, int] = {}
        """Incarnations that were told to end."""

    def heard(self, agent: AgentId, beat: scheduler_pb2.Heartbeat) -> str:
        """Takes a heartbeat in; returns why the agent is stuck, in words, or nothing."""
        late = [step for step in beat.steps if step.age_ns > self._rules.bound_ns(step)]
        if not late:
            self._beats.pop(agent, None)
            return ""
        beats = self._beats[agent] = self._beats.get(agent, 0) + 1
        return _described(late[0]) if beats >= _BEATS else ""

    def told_to_end(self, agent: AgentId, incarnation: int) -> None:
        """A process was told to end: it is not to be worked with any more."""
        self._beats.pop(agent, None)
        self._ended[agent] = incarnation

    def must_end(self, agent: AgentId, incarnation: int) -> bool:
        """True for a process that was told to end, and came again."""
        return self._ended.get(agent) == incarnation

    def came(self, agent: AgentId) -> bool:
        """A process said hello that may stay; True if it replaces one that was told to end."""
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
