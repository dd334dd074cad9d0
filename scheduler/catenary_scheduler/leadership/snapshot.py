"""What of a term goes to Redis, and how a new term takes it over."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.directory import Peers
from catenary_scheduler.cluster.controller import Cluster
from catenary_scheduler.cluster.drain_marks import DrainMarks
from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.inflight.answer_lengths import LengthRecords
from catenary_scheduler.inflight.batches import InFlight
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.observed.profiles import Measured
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.runtime.autoscaler import Autoscaler
from catenary_scheduler.storage.journal import Changes, Fields, Journal
from catenary_scheduler.storage.keys import Table
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.records import tables_of, write_reservations
from catenary_scheduler.storage.values.tables import placement_text


@dataclass(slots=True)
class FileMark:
    """The plan file that was read last, so that a plan applied later outlives a restart."""

    digest: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """The state of a term."""

    dispatcher: CombinedDispatcher
    in_flight: InFlight
    live: LiveSessions
    cluster: Cluster
    deployments: Deployments
    measured: Measured
    peers: Peers
    file_mark: FileMark
    planner: Planner
    autoscaler: Autoscaler
    lengths: LengthRecords
    availability: Availability
    drains: DrainMarks


class Persistence:
    """Moves changes into the journal; rare tables by comparing with what was written before."""

    def __init__(self, sources: Sources, journal: Journal) -> None:
        self._sources = sources
        self._journal = journal
        self._written: dict[Table, Fields] = {}
        self._rare_changed = True

    def changed(self) -> None:
        """Something other than book and batches is not what it was."""
        self._rare_changed = True

    def collect(self) -> None:
        """Writes what changed since the last call into the journal."""
        write_reservations(self._journal, self._sources.dispatcher.take_changes())
        self._sources.in_flight.collect(self._journal)
        self._sources.live.collect(self._journal)
        self._sources.lengths.collect(self._journal)
        if self._rare_changed:
            self._rare_changed = False
            self._collect_rare()

    def snapshot(self) -> Changes:
        """Returns everything as it is now."""
        self._sources.dispatcher.take_changes()  # all contained in what follows
        self._written = self._rare()
        self._rare_changed = False
        tables: dict[str, Fields] = {**tables_of(self._sources.dispatcher.snapshot())}
        tables[Table.BATCHES] = self._sources.in_flight.records()
        tables[Table.SESSIONS] = self._sources.live.records()
        tables[Table.LENGTHS] = self._sources.lengths.records()
        tables.update({table: dict(fields) for table, fields in self._written.items()})
        return Changes(tables, [], replace=True)

    def _collect_rare(self) -> None:
        present = self._rare()
        for table, fields in present.items():
            before = self._written.get(table, {})
            for name, value in fields.items():
                if before.get(name) != value:
                    self._journal.put(table, name, value)
            for name in before.keys() - fields.keys():
                self._journal.put(table, name, None)
        self._written = present

    def _rare(self) -> dict[Table, Fields]:
        sources = self._sources
        return {
            Table.DEPLOYMENTS: sources.deployments.records(),
            Table.PLAN: _plan_records(sources),
            Table.MEASURED: sources.measured.records(),
            Table.AGENTS: {
                agent: encode_document(record.stored(sources.availability))
                for agent, record in sources.cluster.roster.items()
            },
            Table.PEERS: sources.peers.records(),
            Table.DRAINING: sources.drains.records(),
        }


def _plan_records(sources: Sources) -> Fields:
    cluster = sources.cluster
    records: Fields = {"file": sources.file_mark.digest}
    if cluster.wishes.fixed is not None:
        records["fixed"] = placement_text(cluster.wishes.fixed)
    if cluster.wishes.fixed_before is not None:
        records["fixed_before"] = placement_text(cluster.wishes.fixed_before)
    if sources.planner.notes is not None:
        records["notes"] = encode_document(sources.planner.notes.stored())
    if sources.autoscaler.models:
        records["scaling"] = sources.autoscaler.record()
    if cluster.last_switch is not None:
        records["last_switch"] = encode_document(cluster.last_switch.stored())
    if cluster.active is not None:
        records["active"] = placement_text(cluster.active.placement)
        records["active_id"] = cluster.active.plan.plan_id
    elif cluster.restored is not None:
        placement, plan_id = cluster.restored
        records["active"], records["active_id"] = placement_text(placement), plan_id
    return records
