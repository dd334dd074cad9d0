"""Agents that compute much more slowly than booked, and are set aside until they are themselves.

A slow agent is worse than a lost one: every batch goes to whoever seems to be free first, and that
is what a slow agent seems to be until its report comes. So it gets no new batches of models served
by pools while others of its pools can take them, is tried again after a while, and left alone for
twice as long if it is still slow. Pure; moments are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds
from services.domain.plan import ModelPlan, Plan

_REPORTS = 5
"""The middle one of so many last reports counts: one late batch, or two, are noise."""
_RECENT_NS = 20 * NANOSECONDS_PER_SECOND
_FIRST_HOLD_NS = 5 * NANOSECONDS_PER_SECOND
_LONGEST_HOLD_NS = 60 * NANOSECONDS_PER_SECOND


@dataclass(slots=True)
class _Record:
    ratios: deque[tuple[Nanoseconds, float]] = field(default_factory=lambda: deque(maxlen=_REPORTS))
    hold_ns: Nanoseconds = _FIRST_HOLD_NS
    aside_until: Nanoseconds | None = None
    tried_again: bool = False


class Stragglers:
    """Who is set aside at the moment.

    Invariant: an agent that is set aside has reported `_REPORTS` times since it last took batches,
    most of them as slow; all it reports later is of batches it had before.
    """

    def __init__(self, factor: float) -> None:
        """An agent is slow if it takes `factor` times what the others take of what is booked.

        0 sets nobody aside.
        """
        self._factor = factor
        self._records: dict[AgentId, _Record] = {}
        self._quiet: frozenset[AgentId] = frozenset()

    @property
    def slow(self) -> frozenset[AgentId]:
        """The agents that are set aside because they are slow."""
        return frozenset(a for a, r in self._records.items() if r.aside_until is not None)

    @property
    def aside(self) -> frozenset[AgentId]:
        """All that are set aside."""
        return self.slow | self._quiet

    def reported(
        self, agent: AgentId, real_ns: Nanoseconds, booked_ns: Nanoseconds, now: Nanoseconds
    ) -> None:
        """An agent took so long for what was booked to take so long."""
        if booked_ns > 0 and real_ns >= 0:
            self._records.setdefault(agent, _Record()).ratios.append((now, real_ns / booked_ns))

    def forget(self, agent: AgentId) -> None:
        """An agent is gone; whoever comes by its name may be another."""
        self._records.pop(agent, None)

    def look(self, now: Nanoseconds, quiet: frozenset[AgentId] = frozenset()) -> bool:
        """Decides anew who is set aside; True if that changed.

        `quiet` were not heard of for a while: they may be lost, and what they get may be, too.
        """
        before, self._quiet = self.aside, quiet
        usual = self._medians(now)
        for agent, record in self._records.items():
            if record.aside_until is not None:
                if now >= record.aside_until:
                    record.aside_until, record.tried_again = None, True
                    record.ratios.clear()
            elif self._is_slow(agent, usual):
                record.hold_ns = (
                    min(2 * record.hold_ns, _LONGEST_HOLD_NS)
                    if record.tried_again
                    else _FIRST_HOLD_NS
                )
                record.aside_until = now + record.hold_ns
            elif agent in usual and len(record.ratios) == _REPORTS:
                record.tried_again = False
        return self.aside != before

    def without(self, plan: Plan) -> Plan:
        """Returns a plan in which they are in no pool that has others."""
        aside = self.aside
        if not aside:
            return plan
        return replace(plan, models=tuple(_without(model, aside) for model in plan.models))

    def _medians(self, now: Nanoseconds) -> Mapping[AgentId, float]:
        found = {}
        for agent, record in self._records.items():
            while record.ratios and record.ratios[0][0] < now - _RECENT_NS:
                record.ratios.popleft()
            if len(record.ratios) == _REPORTS:
                found[agent] = median(ratio for _, ratio in record.ratios)
        return found

    def _is_slow(self, agent: AgentId, usual: Mapping[AgentId, float]) -> bool:
        if not self._factor or agent not in usual:
            return False
        # If all are slow, e.g. on one busy machine, nobody else would be better.
        others = [ratio for other, ratio in usual.items() if other != agent]
        return bool(others) and usual[agent] > self._factor * max(1.0, median(others))


def _without(model: ModelPlan, aside: frozenset[AgentId]) -> ModelPlan:
    if not any(aside.intersection(s.agents) for p in model.pipelines for s in p.stages):
        return model
    pipelines = []
    for pipeline in model.pipelines:
        stages = []
        for stage in pipeline.stages:
            left = tuple(agent for agent in stage.agents if agent not in aside)
            stages.append(replace(stage, agents=left) if left else stage)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(model, pipelines=tuple(pipelines))
