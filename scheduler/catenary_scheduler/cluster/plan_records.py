"""Stores the plans of a cluster: the one from outside, and the one in force."""

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
"""Id of a restored plan whose own id cannot be read."""


class FixedPlanRecords:
    """Records of the plan from a file or from `ApplyPlan`, and of the plan file that was last read.

    The file is recorded so that a plan applied later outlives a restart.

    Args:
        cluster: The cluster of the plan.
        deployments: The models.
        path: The plan file of the settings; None without one.
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
        """Returns the fields of the plan from outside and of the plan file's digest."""
        desired = self._cluster.desired
        records: Fields = {"file": self._digest}
        if desired.fixed is not None:
            records["fixed"] = placement_text(desired.fixed)
        if desired.fixed_before is not None:
            records["fixed_before"] = placement_text(desired.fixed_before)
        return records

    async def restore(self, plan: StoredPlan) -> list[str]:
        """Takes over an earlier leader's plan from outside, unless the plan file has changed since.

        Returns:
            Reasons why stored plans could not be used.

        Raises:
            InvalidInput: The plan file cannot be read, or is not a plan.
        """
        problems: list[str] = []
        # A digest without the plan that was read from the file would keep it from being read again.
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
        elif self._digest:  # the settings name no plan file any more: its plan no longer holds
            desired.fixed = desired.fixed_before = None
            self._digest = ""
        return problems

    async def _load(self, path: Path) -> None:
        """Fixes the plan of a plan file, unless the file is the one that was last read."""
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
    """Records of the plan in force, and of the last change of plan.

    Args:
        cluster: The cluster of the plan.
        planner: Continues from the stored plan if it proposed it.
        deployments: The models.
        recovery_s: Seconds for which the agents of an earlier leader's plan are awaited.
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
        """Returns the fields of the plan in force and of the last change of plan."""
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
        """Has the cluster resume an earlier leader's plan; returns why it could not."""
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
    """Returns a placement if it fits the deployed models; else None, with a problem noted."""
    if placement is None:
        return None
    try:
        check_blocks(placement, ready)
    except CatenaryError as error:
        problems.append(f"plan {what}: {error.message}")
        _log.warning("stored_plan_unfit", plan=what, error=error.message)
        return None
    return placement
