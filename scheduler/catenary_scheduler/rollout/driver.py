"""Leads from the plan in force to the one that should be: begins switches and sees them through."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.requirements import agents_of, changing
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.rollout.rollout import ClusterSnapshot, PlanRollout, RolloutPhase
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.log import get_logger

_log = get_logger(__name__)
_SUPERSEDED = "another plan took its place"


class RolloutActions(Protocol):
    """What a switch does to the cluster."""

    @property
    def plan_id(self) -> str:
        """Of the plan in force."""
        ...

    def facts(self) -> ClusterSnapshot:
        """The cluster at this moment."""
        ...

    def apply(self, switch: PlanRollout) -> None:
        """Puts the new plan in force."""
        ...

    def hold(self, switch: PlanRollout) -> Collection[ModelKey]:
        """Dispatches by what is left of the old plan; returns the models nothing is left of."""
        ...

    def empty(self, switch: PlanRollout) -> None:
        """Old orders of crowded agents say nothing any more."""
        ...

    def release(self) -> None:
        """Dispatches by the whole old plan again."""
        ...

    def rejected(self, switch: PlanRollout) -> None:
        """The new plan did not come about and is not to be tried again at once."""
        ...

    def switch_ended(self, report: RolloutReport) -> None:
        """A switch is over."""
        ...


class RolloutController:
    """The switch under way, if any, and the last one.

    Attributes:
        switch: Under way; None while the plan in force is the one that should be.
        last: The report of the last one that is over.
    """

    def __init__(self, helm: RolloutActions, timeout_ns: Nanoseconds) -> None:
        self._helm = helm
        self._timeout_ns = timeout_ns
        self.switch: PlanRollout | None = None
        self.last: RolloutReport | None = None

    def report(self, now_ns: Nanoseconds) -> RolloutReport | None:
        """Returns the switch under way, else the last one."""
        return RolloutReport.of(self.switch, now_ns) if self.switch is not None else self.last

    def follow(self, target: Placement, cause: str) -> None:
        """Does what can be done now to bring the target about."""
        facts = self._helm.facts()
        if self.switch is not None and self.switch.new != target:
            self._supersede(self.switch, facts)
        if self.switch is None:
            self._begin(target, cause, facts)
        while self.switch is not None:
            switch = self.switch
            if not switch.advance(self._helm.facts()):
                return
            self._entered(switch)

    def _begin(self, target: Placement, cause: str, facts: ClusterSnapshot) -> None:
        models = changing(facts.active, target)
        if not models:
            return
        self.switch = PlanRollout(
            new=target,
            models=models,
            cause=cause,
            from_plan=self._helm.plan_id,
            began_ns=facts.now_ns,
            timeout_ns=self._timeout_ns,
            since_ns=facts.now_ns,
        )
        named = agents_of(self.switch.part)
        self.switch.witnesses = frozenset(agent for agent in named if facts.is_present(agent))
        _log.info("switch_began", plan=self.switch.from_plan, cause=cause)

    def _supersede(self, switch: PlanRollout, facts: ClusterSnapshot) -> None:
        if switch.phase is not RolloutPhase.RETURNING:
            switch.go_back(_SUPERSEDED, facts)
            self._entered(switch)

    def _entered(self, switch: PlanRollout) -> None:
        """Carries out what the phase that just began is about."""
        phase = switch.phase
        if phase is RolloutPhase.FLUSHING:
            since_ns = self._helm.facts().now_ns
            switch.pause(self._helm.hold(switch), since_ns)
        elif phase is RolloutPhase.MOVING:
            self._helm.empty(switch)
        elif phase is RolloutPhase.RETURNING:
            self._helm.empty(switch)
            self._reject(switch)
        elif phase is RolloutPhase.DONE:
            self._helm.apply(switch)
            self._end(switch)
        elif phase is RolloutPhase.ROLLED_BACK:
            if switch.crowded:
                self._helm.release()
            self._end(switch)
            if not switch.has_moved:
                self._reject(switch)

    def _reject(self, switch: PlanRollout) -> None:
        _log.warning("switch_rolled_back", plan=switch.from_plan, error=switch.problem)
        if switch.problem != _SUPERSEDED:
            self._helm.rejected(switch)

    def _end(self, switch: PlanRollout) -> None:
        now_ns = self._helm.facts().now_ns
        switch.resume(now_ns)
        switch.ended_ns = now_ns
        if switch.phase is RolloutPhase.DONE:
            switch.to_plan = self._helm.plan_id
        self.switch = None
        self.last = RolloutReport.of(switch, now_ns)
        self._helm.switch_ended(self.last)
