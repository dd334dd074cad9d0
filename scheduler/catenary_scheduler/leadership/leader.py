"""A leader with all its parts, wired together; it exists only while this process leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.directory import PeerDirectory
from catenary_scheduler.agents.registry import AgentMetrics, AgentSender, AgentStream, StoredAgents
from catenary_scheduler.book import Book
from catenary_scheduler.cluster.controller import ClusterController, RetryLimits
from catenary_scheduler.cluster.drain_marks import DrainMarks
from catenary_scheduler.cluster.draining import Draining, DrainingDeps
from catenary_scheduler.cluster.plan_records import ActivePlanRecords, FixedPlanRecords
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.feedback.hop_reports import HopReports, HopStatistics
from catenary_scheduler.feedback.impairment_detector import ImpairmentDetector, ImpairmentRules
from catenary_scheduler.feedback.link_measurements import LinkDeps, LinkMeasurements
from catenary_scheduler.feedback.session_reports import SessionDeps, SessionReports
from catenary_scheduler.feedback.transfer_rates import TransferRates
from catenary_scheduler.inflight.answer_lengths import LengthRecords
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.not_ready_queue import NotReadyQueue
from catenary_scheduler.inflight.session_moves import SessionMoves
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.leadership.cluster_callbacks import CallbackDeps, LeaderCallbacks
from catenary_scheduler.leadership.factories import dispatcher_of, planner_of, questions_of
from catenary_scheduler.leadership.recovery import RestoreStep, read_state, restoring, take_over
from catenary_scheduler.leadership.snapshot import SnapshotWriter
from catenary_scheduler.leadership.takeover_failures import TakeoverFailures
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.observed.slowdowns import Slowdowns
from catenary_scheduler.observed.stuck_agents import StuckAgents
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.observed.utilisation import Utilisation
from catenary_scheduler.rpc.agent_streams import AgentStreamDeps, AgentStreams
from catenary_scheduler.rpc.announcer import Announcer, AnnouncerDeps
from catenary_scheduler.rpc.command_sender import CommandSender
from catenary_scheduler.rpc.epoch_fence import EpochFence
from catenary_scheduler.rpc.gateway_registry import GatewayRegistry
from catenary_scheduler.rpc.gateway_streams import GatewayStreamDeps, GatewayStreams
from catenary_scheduler.rpc.peer_quarantine import PeerQuarantine
from catenary_scheduler.rpc.plausibility import PlausibilityChecks, PlausibilityDeps
from catenary_scheduler.runtime.autoscaler import Autoscaler, ScalingDeps
from catenary_scheduler.runtime.availability_watch import AvailabilityWatch
from catenary_scheduler.runtime.book_audit import AuditDeps, BookAudits
from catenary_scheduler.runtime.deployment_retries import DeploymentRetries
from catenary_scheduler.runtime.dispatch_loop import DispatchLoop
from catenary_scheduler.runtime.dispatch_metrics import DispatchMetrics
from catenary_scheduler.runtime.held_requests import HeldRequests, QueuedRequests
from catenary_scheduler.runtime.periodic import PeriodicTasks, run_periodic_tasks
from catenary_scheduler.runtime.statistics_collector import WorkerDeps
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.book_records import BookRecords
from catenary_scheduler.storage.journal import Journal
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import Store
from catenary_scheduler.storage.write_behind import FlushSchedule, WriteBehind
from catenary_scheduler.storage.write_behind import StateSources as WriteSources
from catenary_services.domain.groups import first_id
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Epoch
from catenary_services.errors import CatenaryError
from catenary_services.models.model_repository import ModelRepository
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import Tracer

_RECONCILE_S = 0.25


@dataclass(frozen=True, slots=True)
class LeaderContext:
    """Settings and telemetry that a leader gets from its process."""

    settings: SchedulerSettings
    metrics: Metrics
    tracer: Tracer
    group: int = 0
    """Number of the group whose agents are led; 0 if there is only one group."""
    started_s: float = 0.0
    """Start of the process, in seconds since 1970."""


class LeaderRuntime:
    """All parts of a leader, from acquiring the lease to losing it: one term.

    Every part is given exactly the parts it needs, so the order in which they are made is the order
    in which they depend on each other. Only `LeaderCallbacks` is connected later: the cluster tells
    it of changes, and what it does about them needs the cluster.
    """

    def __init__(self, context: LeaderContext, lease: Lease, store: Store) -> None:
        self._context = context
        self._lease = lease
        self._store = store
        self._journal = Journal()
        self._takeover_failures = TakeoverFailures()
        self._left_out: list[str] = []
        """The parts of the predecessor's state that could not be used, in words for people."""
        self.quarantined = 0
        """Number of stored records that could not be read when this term began."""
        self._observe()
        self._dispatch()
        self._plan()
        self._run()
        self._keep()
        self._serve()
        self._follow()

    # ---- wiring, from what depends on nothing to what depends on everything ----

    def _observe(self) -> None:
        """Makes the parts that hold knowledge of agents and models."""
        settings, metrics = self.settings, self.metrics
        repository = ModelRepository(settings.model_repository)
        self.deployments = Deployments(repository, settings.packing_goal())
        self.availability = Availability()
        self.peer_quarantine = PeerQuarantine(self.availability, self.note, metrics)
        self.measured = MeasuredProfiles()
        self.peers = PeerDirectory(settings.silence_s)
        self.utilisation = Utilisation()
        self.timelines = Timelines()
        self.slowdowns = Slowdowns()
        self.times = BookedTimes()
        self.stuck = StuckAgents(settings.stuck_rules())

    def _dispatch(self) -> None:
        """Makes the book, the dispatcher, and the records of work that waits or is in flight."""
        settings = self.settings
        self.book, self.first_id = Book(), first_id(self._lease.epoch)
        self.slots = self.book.slots
        self.dispatcher = dispatcher_of(
            settings, self.book, self.availability, self.times, self.first_id
        )
        chained = self.dispatcher.chained
        self.in_flight = InFlightBatches()
        self.live = LiveSessions(self.slots, chained.view)
        self.lengths = LengthRecords(chained, self.deployments.ready)
        longest_ns = int(settings.max_wait_s * NANOSECONDS_PER_SECOND)
        self.waiting = NotReadyQueue(settings.max_waiting_requests, longest_ns)

    def _plan(self) -> None:
        """Makes the planner, and the cluster with its desired and its active plan."""
        settings = self.settings
        self.planner = planner_of(settings, self.deployments, self.measured, self.availability)
        self._callbacks = LeaderCallbacks(
            self._lease, self.availability, self.metrics, self._enter, self.note
        )
        self.cluster = ClusterController(
            self._callbacks, self.deployments, self.planner, self.measured, RetryLimits.of(settings)
        )
        self.planner.changed = lambda: self.cluster.reconcile(time.monotonic())
        self.gateways = GatewayRegistry()
        connected = self.gateways.connected
        self.cluster.sources.gateways = lambda: [each.gateway_id for each in connected()]
        self.agents = AgentSender(self.cluster.registry)
        self.marks = DrainMarks(self.cluster, self.availability)

    def _run(self) -> None:
        """Makes the dispatch loop, and the parts that act on its events."""
        settings, metrics, registry = self.settings, self.metrics, self.cluster.registry
        under_way = (self.in_flight, self.live, self.timelines)
        telemetry = (metrics, self._context.tracer)
        command_sender = CommandSender(
            self.gateways, self.agents, under_way, telemetry, self._lease, self.cluster
        )
        self.loop = DispatchLoop(self.dispatcher, command_sender.route, metrics)
        feed = self.loop.feed
        self.questions = questions_of(
            settings, self.deployments, self.measured, self.planner, self.loop
        )
        self.watch = AvailabilityWatch(self.availability, feed)
        self.held = HeldRequests(self.waiting, self.cluster, feed, command_sender.route)
        self.queued = QueuedRequests(self.waiting, self.dispatcher.chained, self.deployments)
        self.moves = SessionMoves(self.dispatcher.chained, feed, metrics)
        self.transfer_rates = TransferRates(
            self.measured.cache_rates, self.deployments, feed, self._state_changed, registry
        )
        rules = ImpairmentRules(settings.straggler_factor, settings.silence_s / 2)
        self.impairment_detector = ImpairmentDetector(
            rules, self.availability, self._connected_agents, self.note
        )
        self.hop_reports = HopReports(
            self.timelines,
            HopStatistics(self.slowdowns, self.utilisation, self.times, self.measured),
            self.impairment_detector,
            registry,
        )
        self.sessions = SessionReports(
            SessionDeps(
                cluster=self.cluster,
                deployments=self.deployments,
                chained=self.dispatcher.chained,
                live=self.live,
                slots=self.slots,
                planner=self.planner,
                measured=self.measured,
                timelines=self.timelines,
                slowdowns=self.slowdowns,
                utilisation=self.utilisation,
                agents=self.agents,
                epoch=self._epoch,
                feed=feed,
            )
        )
        self.link_measurements = LinkMeasurements(
            LinkDeps(
                links=self.measured.links,
                cluster=self.cluster,
                availability=self.availability,
                latency=self.sessions.latency,
                epoch=self._epoch,
                feed=feed,
                keep=self._state_changed,
                first_number=self.first_id,
                look_ns=int(settings.link_look_s * NANOSECONDS_PER_SECOND),
            )
        )
        self.draining = Draining(
            DrainingDeps(
                cluster=self.cluster,
                availability=self.availability,
                marks=self.marks,
                in_flight=self.in_flight,
                live=self.live,
                agents=self.agents,
                epoch=self._epoch,
                heed=self.watch.heed,
            )
        )
        self.autoscaler = Autoscaler(
            ScalingDeps(
                WorkerDeps(settings, self.cluster, self.dispatcher, self.live, self.waiting),
                self.availability,
                self.planner,
                self.draining,
                self.sessions.objectives,
                self.note,
            ),
            settings.scaling_policy(),
        )
        self.audits = BookAudits(
            AuditDeps(
                settings=settings,
                cluster=self.cluster,
                dispatcher=self.dispatcher,
                book=self.book,
                in_flight=self.in_flight,
                live=self.live,
                waiting=self.waiting,
                gateways=self.gateways,
                agents=self.agents,
                epoch=self._epoch,
                first_id=self.first_id,
                feed=feed,
                let_cached=self.sessions.let_cached,
            ),
            metrics,
        )

    def _keep(self) -> None:
        """Makes the parts that write state to Redis for the next leader."""
        settings, metrics = self.settings, self.metrics
        self._book_records = BookRecords(self.dispatcher)
        self._fixed_plan = FixedPlanRecords(self.cluster, self.deployments, settings.plan_file)
        self._active_plan = ActivePlanRecords(
            self.cluster, self.planner, self.deployments, settings.recovery_s
        )
        self._snapshot_writer = SnapshotWriter(
            self._journal,
            self._book_records,
            (self.in_flight, self.live, self.lengths),
            (
                self.deployments,
                self._fixed_plan,
                self.planner,
                self.autoscaler,
                self._active_plan,
                self.measured,
                StoredAgents(self.cluster.registry, self.availability),
                self.peers,
                self.marks,
            ),
        )
        self.write_behind = WriteBehind(
            self._store,
            self._lease,
            self._journal,
            WriteSources(
                self._snapshot_writer.collect,
                self._snapshot_writer.snapshot,
                metrics.epoch.set,
                lambda kind: metrics.redis_failures.labels(kind).inc(),
            ),
            FlushSchedule(renew_s=settings.lease_s / 4),
        )

    def _serve(self) -> None:
        """Makes the parts that serve the streams of gateways and agents."""
        settings, feed = self.settings, self.loop.feed
        self.announcer = Announcer(
            AnnouncerDeps(
                scheduler_id=settings.scheduler_id,
                lease=self._lease,
                peers=self.peers,
                cluster=self.cluster,
                deployments=self.deployments,
                marks=self.marks,
                gateways=self.gateways,
                agents=self.agents,
                heed=self.watch.heed,
                release=self.held.release,
                keep=self._state_changed,
            )
        )
        plausibility = PlausibilityChecks(
            PlausibilityDeps(
                peer_quarantine=self.peer_quarantine,
                dispatcher=self.dispatcher,
                deployments=self.deployments,
                registry=self.cluster.registry,
                measured=self.measured,
                timelines=self.timelines,
                live=self.live,
                epoch=self._epoch,
            )
        )
        self.gateway_streams = GatewayStreams(
            GatewayStreamDeps(
                registry=self.gateways,
                announcer=self.announcer,
                plausibility=plausibility,
                cluster=self.cluster,
                deployments=self.deployments,
                timelines=self.timelines,
                waiting=self.waiting,
                audits=self.audits,
                sessions=self.sessions,
                feed=feed,
                silence_s=settings.silence_s,
            )
        )
        self.agent_streams = AgentStreams(
            AgentStreamDeps(
                cluster=self.cluster,
                dispatcher=self.dispatcher,
                availability=self.availability,
                announcer=self.announcer,
                fence=EpochFence(self._lease, self.peer_quarantine, self.write_behind),
                plausibility=plausibility,
                stuck=self.stuck,
                draining=self.draining,
                moves=self.moves,
                sessions=self.sessions,
                transfers=self.transfer_rates,
                links=self.link_measurements,
                audits=self.audits,
                metrics=self.metrics,
                epoch=self._epoch,
                feed=feed,
                joined=self._callbacks.agent_joined,
                journal=self._enter,
                note=self.note,
                silence_s=settings.silence_s,
            )
        )

    def _follow(self) -> None:
        """Connects the parts that follow events, changes of the cluster and the passing of time."""
        self._callbacks.connect(
            CallbackDeps(
                registry=self.cluster.registry,
                in_flight=self.in_flight,
                live=self.live,
                hop_reports=self.hop_reports,
                sessions=self.sessions,
                transfer_rates=self.transfer_rates,
                link_measurements=self.link_measurements,
                announcer=self.announcer,
                feed=self.loop.feed,
            )
        )
        self.loop.observe(
            before=(self.planner.load.rates, self.planner, self.in_flight, self.hop_reports),
            after=(self.autoscaler.outcomes, self.autoscaler, self.live),
            fed=self.write_behind.touch,
        )
        self._retries = DeploymentRetries(self.deployments)
        exporting = (
            self.write_behind,
            self.in_flight,
            self.gateways,
            AgentMetrics(self.cluster.registry, self.availability),
            self.queued,
            self.sessions,
            self.sessions.latency,
            self.transfer_rates,
            self.link_measurements,
            self.autoscaler,
            self.hop_reports,
            DispatchMetrics(self.dispatcher),
        )
        turn = (self.held, self.hop_reports, self.impairment_detector, self.watch)
        beat = (self.announcer, self.gateway_streams, self.agent_streams)
        beat_books = (self.in_flight, self.live, self.lengths, self.utilisation)
        self._schedule = (
            PeriodicTasks(0.0, (*turn, self.autoscaler.outcomes, self.autoscaler, self.audits)),
            PeriodicTasks(
                self.settings.heartbeat_s, (*beat, *beat_books, self.link_measurements), exporting
            ),
            PeriodicTasks(0.0, (self._retries,)),
            PeriodicTasks(_RECONCILE_S, (self.peers, self.cluster, self.draining)),
        )

    # ---- what it is ----

    @property
    def settings(self) -> SchedulerSettings:
        """The settings of the process; numbers of agents in them are those of the group."""
        return self._context.settings

    @property
    def metrics(self) -> Metrics:
        return self._context.metrics

    @property
    def group(self) -> int:
        return self._context.group

    @property
    def epoch(self) -> Epoch:
        return self._lease.epoch

    @property
    def takeover_problems(self) -> list[str]:
        """Failed takeovers, and stored state that the leader could not use, in words for people."""
        self._takeover_failures.look(time.monotonic())
        said = self._takeover_failures.in_words()
        return [*([said] if said else []), *self._left_out]

    # ---- its life ----

    async def begin(self, takeover_failures: TakeoverFailures) -> None:
        """Takes over the state that the predecessor left; then streams may be served.

        `takeover_failures` counts how often in a row this process has failed to lead.
        """
        self._takeover_failures = takeover_failures
        stored = await read_state(self._store, self._lease, takeover_failures.failures)
        self.quarantined = len(stored.damage)
        for each in stored.damage:
            table = each.table.partition(":")[0]
            self.metrics.quarantined_records.labels(table).inc()
        self._left_out = await take_over(self._restore_steps(), stored)
        self._journal.require_snapshot()
        self._enter("leader", {"scheduler": self.settings.scheduler_id})
        self.cluster.reconcile(time.monotonic())

    def _restore_steps(self) -> tuple[RestoreStep, ...]:
        own_models, started_s = self.settings.models, self._context.started_s
        return (
            restoring("measurements", self.measured, lambda stored: stored.measured),
            restoring("sessions", self.live, lambda stored: stored.sessions),
            restoring("peers", self.peers, lambda stored: stored.peers),
            restoring("drain marks", self.marks, lambda stored: stored.draining),
            restoring("deployments", self.deployments, lambda stored: stored.deployments),
            RestoreStep(
                "own models",
                lambda _: self.deployments.want_own(own_models, started_s),
                must_work=True,
            ),
            restoring("lengths", self.lengths, lambda stored: stored.lengths),
            restoring("scaling", self.autoscaler, lambda stored: stored.plan),
            restoring("fixed plan", self._fixed_plan, lambda stored: stored.plan, must_work=True),
            restoring("plan", self._active_plan, lambda stored: stored.plan),
            RestoreStep("book", self._book_records.restore),
        )

    async def run(self) -> None:
        """Writes state to Redis and runs the periodic tasks until cancelled.

        Raises:
            StaleEpoch: This process no longer leads.
        """
        # Not a TaskGroup: in Python 3.11 it leaves its task marked as cancelled when a child
        # fails, and `pass_cancellation` would take that mark for a real cancellation.
        parts = {
            asyncio.create_task(self.write_behind.run(), name="write-behind"),
            asyncio.create_task(
                run_periodic_tasks(self._schedule, self.metrics), name="periodic-tasks"
            ),
        }
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            self._retries.close()
            await self.planner.close()

    def close(self, error: CatenaryError) -> None:
        """Ends every stream with `error`; peers then look for another leader."""
        self.loop.close()
        self.cluster.close()
        for gateway in self.gateways.connected():
            if gateway.session is not None:
                gateway.session.close(error)
        for _, session in self._connected_agents():
            session.close(error)

    def note(self, kind: str, facts: dict[str, str]) -> None:
        """Adds an entry to the event stream and has it written soon."""
        self._enter(kind, facts)
        self._state_changed()

    # ---- inside ----

    def _enter(self, kind: str, facts: dict[str, str]) -> None:
        self._journal.event(kind, {"epoch": str(self.epoch), **facts})

    def _state_changed(self) -> None:
        self._snapshot_writer.changed()
        self.write_behind.touch()

    def _epoch(self) -> Epoch:
        return self._lease.epoch

    def _connected_agents(self) -> Iterator[tuple[AgentId, AgentStream]]:
        for agent, record in self.cluster.registry.items():
            if record.session is not None:
                yield agent, record.session
