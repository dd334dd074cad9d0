"""How a new leader goes on where the last one stopped.

Redis knows what should be (deployments, placement), what was measured, and the book up to a few
milliseconds ago. Agents report what they host and hold, gateways what they wait for. Dispatching
begins when the agents of the plan have reported, or after `recovery_s` with those that have.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING

from redis.exceptions import ResponseError

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.deployments import Deployment
from catenary_scheduler.book import Reservation
from catenary_scheduler.cluster.plan_documents import check_blocks, load_plan_file
from catenary_scheduler.planning import Placement
from catenary_scheduler.replanning.provenance import PlanProvenance
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.storage.clock import now_ns, translation_ns
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.quarantine import described
from catenary_scheduler.storage.script import pass_cancellation
from catenary_scheduler.storage.store import Store, StoredState
from catenary_scheduler.storage.values.records import shifted
from catenary_scheduler.storage.values.stored import StoredPlan
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    ModelKey,
    Nanoseconds,
    PlanId,
    ResourceId,
)
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_scheduler.leadership.leader import LeaderRuntime

_log = get_logger(__name__)
_GRACE_NS = NANOSECONDS_PER_SECOND
"""A batch in an agent counts as lost this long after it should be done."""

_NAMELESS = "restored"
"""Id of a plan in force whose id cannot be read."""


_FAILURES_TOLERATED = 2
"""After so many failures with what is stored it is tried without."""


async def read_state(store: Store, lease: Lease, failures: int) -> StoredState:
    """Returns what a predecessor left, with what is unreadable put into the quarantine.

    Args:
        store: Where it is.
        lease: Ours.
        failures: How often taking over failed just now, whatever for. If it keeps failing, what
            is stored is the likeliest cause: then all of it is put away.

    Raises:
        StaleEpoch: the lease is gone or somebody else's.
    """
    stored = await store.load()
    if failures > _FAILURES_TOLERATED:
        _log.error("state_put_away", failures=failures)
        stored = stored.without_records()
    for table, count in Counter(each.table for each in stored.damage).items():
        mine = [each for each in stored.damage if each.table == table]
        names = described(mine)
        _log.warning("quarantined", table=table, names=names, count=count, why=mine[0].why)
    try:
        await store.put_away(stored.damage, lease)
    except ResponseError as error:  # perhaps an ACL file that grants less: to lead matters more
        pass_cancellation()
        _log.warning("quarantine_failed", error=str(error))
    return stored


async def take_over(leader: LeaderRuntime, stored: StoredState) -> list[str]:
    """Fills a new term from what is stored, then from its own settings.

    What is stored may be readable and still make a part of this fail: then that part begins empty,
    as on the first day. Agents and gateways report what they hold, so nothing is lost that way but
    what only Redis knew.

    Returns:
        What was left out and why, in words for people.

    Raises:
        InvalidInput: the plan file of our own settings is wrong.
    """
    problems: list[str] = []

    async def step(what: str, part: Callable[[], object]) -> None:
        try:
            done = part()
            if isinstance(done, Awaitable):
                await done
        except Exception as error:  # whatever it is: to go on without is better than not to lead
            _log.exception("not_taken_over", part=what)
            problems.append(f"{what}: {type(error).__name__}: {error}")

    await step("measurements", lambda: leader.measured.restore(stored.measured))
    await step("sessions", lambda: leader.live.remember(stored.sessions))
    await step("peers", lambda: leader.peers.restore(stored.peers, time.monotonic()))
    await step("drain marks", lambda: leader.drains.restore(stored.draining))
    await step("deployments", lambda: leader.deployments.restore(stored.deployments))
    await leader.deployments.want(leader.settings.models)
    await step("lengths", lambda: leader.lengths.restore(stored.lengths, leader.deployments.ready))
    await step("scaling", lambda: leader.autoscaler.restore(stored.plan.scaling))
    await _restore_desired(leader, stored.plan, problems)
    await step("plan", lambda: _restore_plan(leader, stored.plan, problems))
    await step("book", lambda: _restore_book(leader, stored))
    return problems


async def _restore_desired(leader: LeaderRuntime, plan: StoredPlan, problems: list[str]) -> None:
    settings, cluster = leader.settings, leader.cluster
    # A mark without the plan that was read from it would keep the file from being read again.
    leader.file_mark.digest = plan.file if "fixed" not in plan.lost else ""
    ready = leader.deployments.ready
    cluster.desired.fixed = _fitting(plan.fixed, ready, "fixed", problems)
    cluster.desired.fixed_before = _fitting(plan.fixed_before, ready, "fixed_before", problems)
    if plan.fixed is not None and cluster.desired.fixed is None:
        leader.file_mark.digest = ""
    report = RolloutReport.of_stored(plan.last_switch) if plan.last_switch is not None else None
    if report is not None:
        cluster.restore_report(report)
    if settings.plan_file is not None:
        await load_plan_file(leader, settings.plan_file)
    elif leader.file_mark.digest:  # the file was taken away: it no longer rules
        cluster.desired.fixed = cluster.desired.fixed_before = None
        leader.file_mark.digest = ""


def _restore_plan(leader: LeaderRuntime, plan: StoredPlan, problems: list[str]) -> None:
    cluster = leader.cluster
    active = _fitting(plan.active, leader.deployments.ready, "active", problems)
    if active is None or not active.models:
        return
    until_s = time.monotonic() + leader.settings.recovery_s
    cluster.restore(active, PlanId(plan.active_id or _NAMELESS), until_s)
    if cluster.desired.fixed is None:
        ready = leader.deployments.ready
        split = [ready[model.model] for model in active.models if model.model in ready]
        notes = PlanProvenance.of(plan.notes) if plan.notes is not None else None
        leader.planner.restore(active, [each.for_planning() for each in split], notes, now_ns())


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


def _restore_book(leader: LeaderRuntime, stored: StoredState) -> None:
    if stored.anchor is None:
        return
    shift = translation_ns(stored.anchor, stored.now)
    reservations = shifted(stored.book, shift)
    leader.dispatcher.restore(reservations)
    _log.info("book_restored", reservations=len(reservations), shift_ns=shift)


def queued_reservations(
    agent: AgentId,
    batches: Iterable[scheduler_pb2.BatchInAgent],
    known: Set[BatchId],
    now: Nanoseconds,
) -> list[Reservation]:
    """Returns bookings for the batches an agent holds that the book knows nothing of.

    They run one after the other, the running one first: that is what the device will really do.
    """
    found = []
    moment = now
    for batch in sorted(batches, key=lambda each: not each.running):
        batch_id = BatchId(batch.batch_id)
        if batch_id in known or batch.remaining_ns == 0:
            continue
        end = moment + batch.remaining_ns
        resource = ResourceId(f"gpu/{agent}")
        found.append(Reservation(batch_id, batch.position, resource, moment, end, end + _GRACE_NS))
        moment = end
    return found
