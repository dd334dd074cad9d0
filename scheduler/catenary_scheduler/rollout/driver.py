"""Begins rollouts from the plan in force to the target plan, and drives them to their end."""

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
    """Effects of a rollout on the cluster."""

    @property
    def plan_id(self) -> str:
        """Identifier of the plan in force."""
        ...

    def snapshot(self) -> ClusterSnapshot:
        """The state of the cluster at this moment."""
        ...

    def apply(self, rollout: PlanRollout) -> None:
        """Puts the new plan in force."""
        ...

    def hold(self, rollout: PlanRollout) -> Collection[ModelKey]:
        """Dispatches by the rest of the old plan; returns the models that have none left."""
        ...

    def empty(self, rollout: PlanRollout) -> None:
        """Forgets the old orders of crowded agents."""
        ...

    def release(self) -> None:
        """Dispatches by the whole old plan again."""
        ...

    def rejected(self, rollout: PlanRollout) -> None:
        """Notes that the new plan failed and is not to be tried again at once."""
        ...

    def switch_ended(self, report: RolloutReport) -> None:
        """Reports that a rollout is over."""
        ...


class RolloutController:
    """The rollout in progress, if any, and the report of the last one.

    Attributes:
        rollout: The rollout in progress; None while the plan in force is the target.
        last: The report of the last rollout that is over; None if there was none.
    """

    def __init__(self, actions: RolloutActions, timeout_ns: Nanoseconds) -> None:
        self._actions = actions
        self._timeout_ns = timeout_ns
        self.rollout: PlanRollout | None = None
        self.last: RolloutReport | None = None

    def report(self, now_ns: Nanoseconds) -> RolloutReport | None:
        """Returns the report of the rollout in progress, or else the last one."""
        return RolloutReport.of(self.rollout, now_ns) if self.rollout is not None else self.last

    def progressed(self, since_ns: Nanoseconds) -> None:
        """Notes that an agent got on with files or loading: the rollout counts from that moment."""
        if self.rollout is not None:
            self.rollout.progressed_ns = max(self.rollout.progressed_ns, since_ns)

    def follow(self, target: Placement, cause: str) -> None:
        """Takes the steps towards the target that are possible now."""
        snapshot = self._actions.snapshot()
        if self.rollout is not None and self.rollout.new != target:
            self._supersede(self.rollout, snapshot)
        if self.rollout is None:
            self._begin(target, cause, snapshot)
        while self.rollout is not None:
            rollout = self.rollout
            if not rollout.advance(self._actions.snapshot()):
                return
            self._entered(rollout)

    def _begin(self, target: Placement, cause: str, snapshot: ClusterSnapshot) -> None:
        models = changing(snapshot.active, target)
        if not models:
            return
        self.rollout = PlanRollout(
            new=target,
            models=models,
            cause=cause,
            from_plan=self._actions.plan_id,
            began_ns=snapshot.now_ns,
            timeout_ns=self._timeout_ns,
            since_ns=snapshot.now_ns,
        )
        named = agents_of(self.rollout.part)
        self.rollout.witnesses = frozenset(agent for agent in named if snapshot.is_present(agent))
        _log.info("switch_began", plan=self.rollout.from_plan, cause=cause)

    def _supersede(self, rollout: PlanRollout, snapshot: ClusterSnapshot) -> None:
        if rollout.phase is not RolloutPhase.RETURNING:
            rollout.go_back(_SUPERSEDED, snapshot)
            self._entered(rollout)

    def _entered(self, rollout: PlanRollout) -> None:
        """Carries out the actions of the phase that just began."""
        phase = rollout.phase
        if phase is RolloutPhase.FLUSHING:
            since_ns = self._actions.snapshot().now_ns
            rollout.pause(self._actions.hold(rollout), since_ns)
        elif phase is RolloutPhase.MOVING:
            self._actions.empty(rollout)
        elif phase is RolloutPhase.RETURNING:
            self._actions.empty(rollout)
            self._reject(rollout)
        elif phase is RolloutPhase.DONE:
            self._actions.apply(rollout)
            self._end(rollout)
        elif phase is RolloutPhase.ROLLED_BACK:
            if rollout.crowded:
                self._actions.release()
            self._end(rollout)
            if not rollout.has_moved:
                self._reject(rollout)

    def _reject(self, rollout: PlanRollout) -> None:
        _log.warning("switch_rolled_back", plan=rollout.from_plan, error=rollout.problem)
        if rollout.problem != _SUPERSEDED:
            self._actions.rejected(rollout)

    def _end(self, rollout: PlanRollout) -> None:
        now_ns = self._actions.snapshot().now_ns
        rollout.resume(now_ns)
        rollout.ended_ns = now_ns
        if rollout.phase is RolloutPhase.DONE:
            rollout.to_plan = self._actions.plan_id
        self.rollout = None
        self.last = RolloutReport.of(rollout, now_ns)
        self._actions.switch_ended(self.last)
