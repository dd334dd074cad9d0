"""The plans of a cluster as they are stored: the one from outside, and the one in force."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

from catenary_scheduler.agents.deployments import Deployment, Deployments
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.cluster.plan_documents import check_blocks, placement_of
from catenary_scheduler.planning import Placement
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.replanning.provenance import PlanProvenance
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.storage.journal import Fields
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.stored import StoredPlan
from catenary_scheduler.storage.values.tables import placement_text
from catenary_services.domain.ids import ModelKey, PlanId
from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.log import get_logger

_log = get_logger(__name__)
_NAMELESS = "restored"
"""Id of a plan in force whose id cannot be read."""


class FixedPlanRecords:
    """The plan of a file or of `ApplyPlan`, and which file was read last.

    That is remembered so that a plan applied later outlives a restart.

    Args:
        cluster: Whose plan it is.
        deployments: The models.
        path: The plan file of the settings, if any.
    """

    table = RedisTable.PLAN

    def __init__(
        self, cluster: ClusterController, deployments: Deployments, path: Path | None
    ) -> None:
        self._cluster = cluster
        self._deployments = deployments
        self._path = path
        self._digest = ""

    def records(self) -> Fields:
        """Returns what Redis keeps of it."""
        desired = self._cluster.desired
        records: Fields = {"file": self._digest}
        if desired.fixed is not None:
            records["fixed"] = placement_text(desired.fixed)
        if desired.fixed_before is not None:
            records["fixed_before"] = placement_text(desired.fixed_before)
        return records

    async def restore(self, plan: StoredPlan) -> list[str]:
        """Takes over a predecessor's, unless the plan file is another one by now.

        Raises:
            InvalidInput: the plan file cannot be read, or is not a plan.
        """
        problems: list[str] = []
        # A mark without the plan that was read from it would keep the file from being read again.
        self._digest = plan.file if "fixed" not in plan.lost else ""
        desired, ready = self._cluster.desired, self._deployments.ready
        desired.fixed = _fitting(plan.fixed, ready, "fixed", problems)
        desired.fixed_before = _fitting(plan.fixed_before, ready, "fixed_before", problems)
        if plan.fixed is not None and desired.fixed is None:
            self._digest = ""
        report = RolloutReport.of_stored(plan.last_switch) if plan.last_switch is not None else None
        if report is not None:
            self._cluster.restore_report(report)
        if self._path is not None:
            await self._load(self._path)
        elif self._digest:  # the file was taken away: it no longer rules
            desired.fixed = desired.fixed_before = None
            self._digest = ""
        return problems

    async def _load(self, path: Path) -> None:
        """Makes a plan file the plan, unless another plan was applied since it was read last."""
        try:
            text = await asyncio.to_thread(path.read_text, "utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput("plan_file", f"cannot be read: {error}") from error
        digest = hashlib.sha256(text.encode()).hexdigest()  # tells one plan file from another
        if digest == self._digest:
            return
        self._cluster.fix(await placement_of(text, self._deployments))
        self._digest = digest


class ActivePlanRecords:
    """The plan in force, and the last change of plan.

    Args:
        cluster: Whose plan it is.
        planner: Goes on from what it proposed.
        deployments: The models.
        recovery_s: The agents of a predecessor's plan are waited for as long as that.
    """

    table = RedisTable.PLAN

    def __init__(
        self,
        cluster: ClusterController,
        planner: Planner,
        deployments: Deployments,
        recovery_s: float,
    ) -> None:
        self._cluster = cluster
        self._planner = planner
        self._deployments = deployments
        self._recovery_s = recovery_s

    def records(self) -> Fields:
        """Returns what Redis keeps of it."""
        cluster = self._cluster
        records: Fields = {}
        if cluster.last_switch is not None:
            records["last_switch"] = encode_document(cluster.last_switch.stored())
        if cluster.active is not None:
            records["active"] = placement_text(cluster.active.placement)
            records["active_id"] = cluster.active.plan.plan_id
        elif cluster.restored is not None:
            placement, plan_id = cluster.restored
            records["active"], records["active_id"] = placement_text(placement), plan_id
        return records

    def restore(self, plan: StoredPlan) -> list[str]:
        """Has the cluster go on by what a predecessor dispatched by."""
        problems: list[str] = []
        cluster, ready = self._cluster, self._deployments.ready
        active = _fitting(plan.active, ready, "active", problems)
        if active is None or not active.models:
            return problems
        until_s = time.monotonic() + self._recovery_s
        cluster.restore(active, PlanId(plan.active_id or _NAMELESS), until_s)
        if cluster.desired.fixed is None:
            split = [ready[model.model] for model in active.models if model.model in ready]
            provenance = PlanProvenance.of(plan.notes) if plan.notes is not None else None
            models = [each.for_planning() for each in split]
            self._planner.restore(active, models, provenance, now_ns())
        return problems


def _fitting(
    placement: Placement | None,
    ready: Mapping[ModelKey, Deployment],
    what: str,
    problems: list[str],
) -> Placement | None:
    """Returns a placement if the models that can be served have the blocks it speaks of."""
    if placement is None:
        return None
    try:
        check_blocks(placement, ready)
    except CatenaryError as error:
        problems.append(f"plan {what}: {error.message}")
        _log.warning("stored_plan_unfit", plan=what, error=error.message)
        return None
    return placement
