"""What of a term goes to Redis, and how a new term takes it over."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.directory import PeerDirectory
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.cluster.drain_marks import DrainMarks
from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.inflight.answer_lengths import LengthRecords
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.runtime.autoscaler import Autoscaler
from catenary_scheduler.storage.journal import Fields, Journal, JournalChanges
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.records import tables_of, write_reservations
from catenary_scheduler.storage.values.tables import placement_text


@dataclass(slots=True)
class PlanFileMark:
    """The plan file that was read last, so that a plan applied later outlives a restart."""

    digest: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotSources:
    """The state of a term."""

    dispatcher: CombinedDispatcher
    in_flight: InFlightBatches
    live: LiveSessions
    cluster: ClusterController
    deployments: Deployments
    measured: MeasuredProfiles
    peers: PeerDirectory
    file_mark: PlanFileMark
    planner: Planner
    autoscaler: Autoscaler
    lengths: LengthRecords
    availability: Availability
    drains: DrainMarks


class SnapshotWriter:
    """Moves changes into the journal; rare tables by comparing with what was written before."""

    def __init__(self, sources: SnapshotSources, journal: Journal) -> None:
        self._sources = sources
        self._journal = journal
        self._written: dict[RedisTable, Fields] = {}
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

    def snapshot(self) -> JournalChanges:
        """Returns everything as it is now."""
        self._sources.dispatcher.take_changes()  # all contained in what follows
        self._written = self._rare()
        self._rare_changed = False
        tables: dict[str, Fields] = {**tables_of(self._sources.dispatcher.snapshot())}
        tables[RedisTable.BATCHES] = self._sources.in_flight.records()
        tables[RedisTable.SESSIONS] = self._sources.live.records()
        tables[RedisTable.LENGTHS] = self._sources.lengths.records()
        tables.update({table: dict(fields) for table, fields in self._written.items()})
        return JournalChanges(tables, [], replace=True)

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

    def _rare(self) -> dict[RedisTable, Fields]:
        sources = self._sources
        return {
            RedisTable.DEPLOYMENTS: sources.deployments.records(),
            RedisTable.PLAN: _plan_records(sources),
            RedisTable.MEASURED: sources.measured.records(),
            RedisTable.AGENTS: {
                agent: encode_document(record.stored(sources.availability))
                for agent, record in sources.cluster.registry.items()
            },
            RedisTable.PEERS: sources.peers.records(),
            RedisTable.DRAINING: sources.drains.records(),
        }


def _plan_records(sources: SnapshotSources) -> Fields:
    cluster = sources.cluster
    records: Fields = {"file": sources.file_mark.digest}
    if cluster.desired.fixed is not None:
        records["fixed"] = placement_text(cluster.desired.fixed)
    if cluster.desired.fixed_before is not None:
        records["fixed_before"] = placement_text(cluster.desired.fixed_before)
    if sources.planner.provenance is not None:
        records["notes"] = encode_document(sources.planner.provenance.stored())
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
