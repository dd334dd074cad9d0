"""Reports of a rollout: to operators, to the event stream, to the next leader."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.rollout.rollout import PlanRollout, RolloutPhase
from catenary_scheduler.storage.values.stored import StoredDowntime, StoredRollout
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    ModelKey,
    Nanoseconds,
)
from catenary_services.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Course and outcome of a rollout, in progress or over."""

    from_plan: str
    to_plan: str
    phase: RolloutPhase
    cause: str
    problem: str
    duration_ns: Nanoseconds
    downtime_ns: tuple[tuple[ModelKey, Nanoseconds], ...]

    @classmethod
    def of(cls, rollout: PlanRollout, now_ns: Nanoseconds) -> RolloutReport:
        downtime = dict(rollout.downtime_ns)
        for model, since_ns in rollout.paused.items():
            downtime[model] = downtime.get(model, 0) + now_ns - since_ns
        return cls(
            rollout.from_plan,
            rollout.to_plan,
            rollout.phase,
            rollout.cause,
            rollout.problem,
            (rollout.ended_ns if rollout.is_over else now_ns) - rollout.began_ns,
            tuple(sorted(downtime.items())),
        )

    @classmethod
    def of_stored(cls, stored: StoredRollout) -> RolloutReport | None:
        """Returns the stored report; None if its phase belongs to a later version."""
        if stored.phase not in {phase.value for phase in RolloutPhase}:
            return None
        return cls(
            from_plan=stored.from_plan,
            to_plan=stored.to_plan,
            phase=RolloutPhase(stored.phase),
            cause=stored.cause,
            problem=stored.problem,
            duration_ns=stored.duration_ns,
            downtime_ns=tuple(
                (ModelKey(*each.model), each.duration_ns) for each in stored.downtime_ns
            ),
        )

    def stored(self) -> StoredRollout:
        """Returns the record that Redis keeps."""
        downtime = tuple(
            StoredDowntime((key.name, key.version), ns) for key, ns in self.downtime_ns
        )
        return StoredRollout(
            self.from_plan,
            self.to_plan,
            self.phase.value,
            self.cause,
            self.problem,
            self.duration_ns,
            downtime,
        )

    def as_event(self) -> tuple[str, dict[str, str]]:
        """Returns kind and facts for the log and the event stream."""
        longest_ns = max((ns for _, ns in self.downtime_ns), default=0)
        kind = "plan_switched" if self.phase is RolloutPhase.DONE else "plan_rolled_back"
        return kind, {
            "from": self.from_plan,
            "to": self.to_plan,
            "cause": self.cause,
            "problem": self.problem,
            "duration_ms": f"{self.duration_ns / NANOSECONDS_PER_MILLISECOND:.1f}",
            "downtime_ms": f"{longest_ns / NANOSECONDS_PER_MILLISECOND:.1f}",
        }

    def as_message(self) -> admin_pb2.PlanSwitch:
        return admin_pb2.PlanSwitch(
            from_plan=self.from_plan,
            to_plan=self.to_plan,
            phase=self.phase,
            cause=self.cause,
            problem=self.problem,
            duration_ns=self.duration_ns,
            downtime=[
                admin_pb2.ModelDowntime(model=key.name, version=key.version, downtime_ns=ns)
                for key, ns in self.downtime_ns
            ],
        )

    def in_words(self) -> str:
        """Returns one or two sentences about the rollout."""
        taken = _seconds(self.duration_ns)
        if self.phase is RolloutPhase.DONE:
            said = f"The last switch, from {self.from_plan} to {self.to_plan}, took {taken}"
        elif self.phase is RolloutPhase.ROLLED_BACK:
            said = f"The last switch went back to {self.from_plan} after {taken}: {self.problem}"
        elif self.phase is RolloutPhase.RETURNING:
            said = f"A switch is going back to {self.from_plan}: {self.problem}"
        else:
            said = f"A switch from {self.from_plan} is {self.phase} since {taken}"
        pauses = [f"{key} was not dispatched for {_seconds(ns)}" for key, ns in self.downtime_ns]
        pause = ", ".join(pauses) or "no model was paused"
        return f"{said}; {pause}. Its cause: {self.cause}."


def observe_switch(report: RolloutReport, metrics: Metrics) -> None:
    """Records a rollout that is over in the metrics."""
    metrics.plan_switches.labels(report.phase.value).inc()
    metrics.plan_switch_seconds.observe(report.duration_ns / NANOSECONDS_PER_SECOND)
    for model, downtime_ns in report.downtime_ns:
        metrics.plan_downtime.labels(model.name).inc(downtime_ns / NANOSECONDS_PER_SECOND)


def _seconds(duration_ns: Nanoseconds) -> str:
    return f"{duration_ns / NANOSECONDS_PER_SECOND:.3f} s"
