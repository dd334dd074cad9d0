"""How a new leader goes on where the last one stopped.

Redis knows what should be (deployments, placement), what was measured, and the book up to a few
milliseconds ago. Agents report what they host and hold, gateways what they wait for. Dispatching
begins when the agents of the plan have reported, or after `recovery_s` with those that have.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, TypeVar

from catenary_protos.catenary.v1 import scheduler_pb2
from scheduler.book import Reservation
from scheduler.clock import now_ns, translation_ns
from scheduler.plan_notes import PlanNotes
from scheduler.planning import Placement, parse_placement
from scheduler.plans import load_plan_file
from scheduler.state.keys import Table
from scheduler.state.records import reservations_of
from scheduler.state.store import StoredState
from scheduler.switch_report import SwitchReport
from services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    Nanoseconds,
    PlanId,
    ResourceId,
)
from services.errors import CatenaryError
from services.log import get_logger

if TYPE_CHECKING:
    from scheduler.term import Term

_log = get_logger(__name__)
T = TypeVar("T")
_GRACE_NS = NANOSECONDS_PER_SECOND
"""A batch in an agent counts as lost this long after it should be done."""


async def take_over(term: Term, stored: StoredState) -> None:
    """Fills a new term from what is stored, then from its own settings."""
    tables = stored.tables
    term.measured.restore(tables[Table.MEASURED])
    term.live.remember(tables[Table.SESSIONS])
    term.peers.restore(tables[Table.PEERS], time.monotonic())
    term.drains.restore(tables[Table.DRAINING])
    await term.deployments.restore(tables[Table.DEPLOYMENTS])
    await term.deployments.want(term.settings.models)
    term.lengths.restore(tables[Table.LENGTHS], term.deployments.ready)
    await _restore_plans(term, tables[Table.PLAN])
    if stored.anchor is not None:
        shift = translation_ns(stored.anchor, stored.now)
        reservations = reservations_of(stored.book, shift)
        term.dispatcher.restore(reservations)
        _log.info("book_restored", reservations=len(reservations), shift_ns=shift)


async def _restore_plans(term: Term, records: dict[str, str]) -> None:
    settings, cluster = term.settings, term.cluster
    term.file_mark.digest = records.get("file", "")
    if "fixed" in records:
        cluster.wishes.fixed = _readable(records["fixed"])
    if "fixed_before" in records:
        cluster.wishes.fixed_before = _readable(records["fixed_before"])
    if "scaling" in records:
        term.autoscaler.restore(records["scaling"])
    if (report := _read(SwitchReport.of_record, records.get("last_switch"))) is not None:
        cluster.restore_report(report)
    if settings.plan_file is not None:
        await load_plan_file(term, settings.plan_file)
    elif term.file_mark.digest:  # the file was taken away: it no longer rules
        cluster.wishes.fixed = cluster.wishes.fixed_before = None
        term.file_mark.digest = ""
    active = _readable(records["active"]) if "active" in records else None
    if active is None or not active.models:
        return
    cluster.restore(active, PlanId(records["active_id"]), time.monotonic() + settings.recovery_s)
    if cluster.wishes.fixed is None:
        ready = term.deployments.ready
        split = [ready[model.model] for model in active.models if model.model in ready]
        notes = _read(PlanNotes.of_record, records.get("notes"))
        term.planner.restore(active, [each.for_planning() for each in split], notes, now_ns())


def _read(parse: Callable[[str], T], text: str | None) -> T | None:
    """Returns what a predecessor left for people; nothing depends on it."""
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        _log.warning("stored_notes_unreadable", error=str(error))
        return None


def _readable(text: str) -> Placement | None:
    try:
        return parse_placement(json.loads(text))
    except (ValueError, CatenaryError) as error:
        _log.warning("stored_plan_unreadable", error=str(error))
        return None


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
