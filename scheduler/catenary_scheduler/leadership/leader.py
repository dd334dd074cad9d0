"""One term of leadership: everything that exists only while this process leads, wired together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.directory import Peers
from catenary_scheduler.agents.epoch_claims import Claim, EpochClaims, Verdict
from catenary_scheduler.agents.registry import AgentRecord, AgentSession, servers_of
from catenary_scheduler.book import Book
from catenary_scheduler.cluster.controller import Cluster, Limits
from catenary_scheduler.cluster.drain_marks import DrainMarks
from catenary_scheduler.dispatch import ChainedDispatcher, CombinedDispatcher, PooledDispatcher
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    BatchFailed,
    Event,
    PlanActivated,
    RequestArrived,
    SessionMoved,
    SessionRequested,
    SessionsClosed,
    StageReported,
    Tick,
)
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.feedback.session_reports import SessionDesk
from catenary_scheduler.feedback.slow_and_silent import SlowAndSilent, SlowAndSilentRules
from catenary_scheduler.feedback.transfer_rates import BoundaryDesk
from catenary_scheduler.inflight.answer_lengths import LengthRecords
from catenary_scheduler.inflight.batches import InFlight
from catenary_scheduler.inflight.not_ready_queue import WaitingRoom
from catenary_scheduler.inflight.session_moves import SessionMoves
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.leadership.recovery import queued_reservations, read_state, take_over
from catenary_scheduler.leadership.snapshot import FileMark, Persistence, Sources
from catenary_scheduler.leadership.takeover_trouble import TakeoverTrouble
from catenary_scheduler.observed.profiles import Measured
from catenary_scheduler.observed.slowdowns import Slowdowns
from catenary_scheduler.observed.stuck_agents import StuckAgents
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.observed.utilisation import Utilisation
from catenary_scheduler.planning.survival import survival_of
from catenary_scheduler.replanning.factory import planner_of
from catenary_scheduler.rollout.report import SwitchReport, observe_switch
from catenary_scheduler.rpc.agent_streams import AgentSessions
from catenary_scheduler.rpc.command_sender import Router, Stamp
from catenary_scheduler.rpc.gateway_registry import GatewaySession
from catenary_scheduler.rpc.gateway_streams import GatewaySessions
from catenary_scheduler.rpc.model_table import model_table
from catenary_scheduler.rpc.offenders import Offenders
from catenary_scheduler.rpc.plausibility import Plausibility
from catenary_scheduler.runtime.autoscaler import Autoscaler
from catenary_scheduler.runtime.book_audit import Audits
from catenary_scheduler.runtime.dispatch_loop import Engine
from catenary_scheduler.runtime.periodic import keep_house
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.storage.journal import Journal
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.store import Store
from catenary_scheduler.storage.write_behind import Rhythm, WriteBehind
from catenary_scheduler.storage.write_behind import Sources as WriteSources
from catenary_scheduler.wire.messages import rejection
from catenary_services.domain.groups import EPOCH_FIELD, first_id
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    Epoch,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
)
from catenary_services.domain.plan import Agent, Plan
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    InvalidMessage,
    StaleEpoch,
    Unavailable,
)
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository
from catenary_services.security.identity import Role
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import Tracer

_log = get_logger(__name__)
_STUCK_NS = 60 * NANOSECONDS_PER_SECOND
"""An agent that was told to end counts as broken for so long, unless a new process comes sooner."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a term is given by its process."""

    settings: SchedulerSettings
    metrics: Metrics
    tracer: Tracer
    group: int = 0
    """Of the cluster's agents, those of this group are led."""


class Term:
    """From acquiring the lease to losing it."""

    def __init__(self, around: Surroundings, lease: Lease, store: Store) -> None:
        settings = around.settings
        self._around = around
        self._lease = lease
        self._store = store
        self._changed = asyncio.Event()
        self.deployments = Deployments(
            ModelRepository(settings.model_repository), settings.packing_goal()
        )
        self.availability = Availability()
        self.offenders = Offenders(self.availability, self.note, around.metrics)
        self._heeded = 0
        """Version of the availability the dispatcher was last told to look at."""
        self.measured = Measured()
        self.peers = Peers(settings.silence_s)
        self.file_mark = FileMark()
        self.in_flight = InFlight()
        self.utilisation = Utilisation()
        self.timelines = Timelines()
        self.slowdowns = Slowdowns()
        self.times = BookedTimes()
        self.slow_and_silent = SlowAndSilent(
            SlowAndSilentRules(settings.straggler_factor, settings.silence_s / 2),
            self.availability,
            self._connected_agents,
            self.note,
        )
        book, first = Book(), first_id(lease.epoch)
        self.book, self.slots = book, book.slots
        self.first_id = first
        self.live = LiveSessions(book.slots)
        self.dispatcher = CombinedDispatcher(
            PooledDispatcher(
                settings.dispatching(),
                book=book,
                availability=self.availability,
                times=self.times,
                first_batch=first,
            ),
            ChainedDispatcher(
                settings.dispatching_sessions(),
                book,
                availability=self.availability,
                policy=settings.chain_policy,
                first_session=first,
            ),
            book,
        )
        self.planner = planner_of(settings, self.deployments, self.measured, self.availability)
        limits = Limits(
            settings.load_timeout_s,
            settings.load_attempts,
            int(settings.switch_timeout_s * NANOSECONDS_PER_SECOND),
        )
        self.cluster = Cluster(self, self.deployments, self.planner, self.measured, limits)
        self.planner.changed = lambda: self.cluster.reconcile(time.monotonic())
        self.waiting = WaitingRoom(
            settings.max_waiting_requests, int(settings.max_wait_s * NANOSECONDS_PER_SECOND)
        )
        self.plausibility = Plausibility(self)
        self.gateways = GatewaySessions(self, self.waiting)
        self.stuck = StuckAgents(settings.stuck_rules())
        self.agents = AgentSessions(self, self.cluster)
        self.sessions = SessionDesk(self, self.live, book.slots)
        self.moves = SessionMoves(self.dispatcher.chained, self.feed, around.metrics)
        self.boundaries = BoundaryDesk(
            self.measured.links, self.deployments, self.feed, self._measured_links
        )
        self._connect_dispatcher(around)
        self._connect_storage(store, lease)
        self._claims = EpochClaims()
        self._directory = b""
        self._models = b""
        self._trouble = TakeoverTrouble()
        self._left_out: list[str] = []
        """What of the predecessor's state could not be used, in words for people."""
        self.quarantined = 0
        """Stored records that could not be read when this term began."""

    def _connect_dispatcher(self, around: Surroundings) -> None:
        telemetry = (around.metrics, around.tracer)
        under_way = (self.in_flight, self.live, self.timelines)
        router = Router(self.gateways, self.agents, under_way, telemetry, self._stamp)
        self._engine = Engine(self.dispatcher, router.route, around.metrics)
        self._router = router
        self.lengths = LengthRecords(self.dispatcher.chained)
        self.autoscaler = Autoscaler(self, around.settings.scaling_policy())
        self.audits = Audits(self, around.metrics)
        self.drains = DrainMarks(self)

    def _connect_storage(self, store: Store, lease: Lease) -> None:
        self._journal = Journal()
        self._persistence = Persistence(
            Sources(
                self.dispatcher,
                self.in_flight,
                self.live,
                self.cluster,
                self.deployments,
                self.measured,
                self.peers,
                self.file_mark,
                self.planner,
                self.autoscaler,
                self.lengths,
                self.availability,
                self.drains,
            ),
            self._journal,
        )
        self.write_behind = WriteBehind(
            store,
            lease,
            self._journal,
            WriteSources(
                self._persistence.collect,
                self._persistence.snapshot,
                self._epoch_raised,
                lambda kind: self._around.metrics.redis_failures.labels(kind).inc(),
            ),
            Rhythm(renew_s=self.settings.lease_s / 4),
        )

    # ---- the term itself ----

    @property
    def epoch(self) -> Epoch:
        """The present fencing epoch."""
        return self._lease.epoch

    @property
    def group(self) -> int:
        """The scheduler group it leads; 0 if there is only one."""
        return self._around.group

    @property
    def settings(self) -> SchedulerSettings:
        """Of this process."""
        return self._around.settings

    @property
    def takeover_problems(self) -> list[str]:
        """What was left out when this term began, and how often it could not; for people."""
        self._trouble.look(time.monotonic())
        said = self._trouble.in_words()
        return [*([said] if said else []), *self._left_out]

    async def begin(self, trouble: TakeoverTrouble) -> None:
        """Takes over what the predecessor left; from then on sessions may be served.

        `trouble` is what this process had with that lately.
        """
        self._trouble = trouble
        stored = await read_state(self._store, self._lease, trouble.failures)
        self.quarantined = len(stored.damage)
        for each in stored.damage:
            table = each.table.partition(":")[0]
            self._around.metrics.quarantined_records.labels(table).inc()
        self._left_out = await take_over(self, stored)
        self._journal.require_snapshot()
        self._journal_event("leader", {"scheduler": self.settings.scheduler_id})
        self.cluster.reconcile(time.monotonic())

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            StaleEpoch: this process no longer leads.
        """
        # Not a TaskGroup: in Python 3.11 it leaves its task marked as cancelled when a child
        # fails, and `pass_cancellation` would take that for a real one.
        parts = {
            asyncio.create_task(self.write_behind.run(), name="write-behind"),
            asyncio.create_task(keep_house(self, self._around.metrics), name="keep-house"),
        }
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            await self.planner.close()

    def close(self, error: CatenaryError) -> None:
        """Ends every session with `error`; peers then look for another leader."""
        self._engine.close()
        for gateway in self.gateways.gateways.values():
            if gateway.session is not None:
                gateway.session.close(error)
        for record in self.cluster.roster.values():
            if record.session is not None:
                record.session.close(error)

    async def changed(self, timeout_s: float) -> None:
        """Returns when anything about the cluster changed, or after `timeout_s`."""
        waiter = self._changed
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await waiter.wait()
        except TimeoutError:
            return

    # ---- what gateway and agent sessions ask for ----

    def feed(self, event: Event, now: Nanoseconds) -> None:
        """Gives an event to the dispatcher."""
        if isinstance(event, RequestArrived):
            self.planner.arrived(event.model, event.rows, now)
        elif isinstance(event, StageReported):
            self.in_flight.stage_done(event.batch, event.position)
            self._compare(event, now)
        elif isinstance(event, BatchFailed):
            self.in_flight.over(event.batch)
        elif isinstance(event, SessionRequested) and event.in_flight is None:
            self.planner.session_arrived(event.model, event.prompt_tokens, now)
        self._engine.feed(event, now)
        self.autoscaler.heard(event, now)
        if isinstance(event, SessionsClosed):
            self.live.may_be_over(event.sessions)
        elif isinstance(event, SessionRequested) and event.in_flight is not None:
            self.live.adopted(event.in_flight.session, event.request, event.in_flight.hops)
        elif isinstance(event, SessionMoved):  # perhaps to one that a predecessor started
            view = self.dispatcher.chained.view(event.session)
            if view is not None:
                self.live.adopted(view.session, view.request, view.hops)
        self.write_behind.touch()

    def requests_in(self, batch: BatchId) -> list[RequestId]:
        """Returns the requests with rows in a batch of this term; none if it is forgotten."""
        entry = self.timelines.entry(batch)
        return [piece.request for piece in entry.command.slices] if entry is not None else []

    def greet_gateway(self, session: GatewaySession) -> None:
        """Sends welcome, directory and model table."""
        message = scheduler_pb2.SchedulerToGatewayMessage
        session.send(message(welcome=self._welcome()))
        session.send(message(directory=self._everyone()))
        session.send(message(models=self.model_table()))

    def gateways_changed(self) -> None:
        """Called when a gateway came or went."""
        now_s = time.monotonic()
        for gateway in self.gateways.gateways.values():
            if gateway.session is not None:
                self.peers.joined(gateway.gateway_id, gateway.peer)
            else:
                self.peers.left(gateway.gateway_id, now_s)
        self.cluster_changed()

    def resolve(self, name: str, version: str) -> ModelKey | None:
        """Returns a deployed model; the version may be empty."""
        return self.deployments.resolve(name, version)

    def is_ready(self, model: ModelKey) -> bool:
        """True if requests for it can be dispatched now."""
        return self.cluster.is_ready(model)

    def greet_agent(self, record: AgentRecord, hello: scheduler_pb2.AgentHello) -> None:
        """Sends welcome and directory, and enters what it holds into the book."""
        assert record.session is not None
        agent_id = record.agent.agent_id
        self.peers.joined(agent_id, record.peer)
        self.drains.arrived(record, says_so=hello.draining)
        message = scheduler_pb2.SchedulerToAgentMessage
        record.session.send(message(epoch=self.epoch, welcome=self._welcome()))
        record.session.send(message(epoch=self.epoch, directory=self._everyone()))
        if hello.batches:
            known = {reservation.batch for reservation in self.dispatcher.snapshot()}
            queued = queued_reservations(agent_id, hello.batches, known, now_ns())
            self.dispatcher.restore(queued)
        self._journal_event("agent_joined", {"agent": agent_id, "device": record.device})

    def welcomes(self) -> scheduler_pb2.SchedulerToAgentMessage:
        """Returns what greets an agent."""
        return scheduler_pb2.SchedulerToAgentMessage(epoch=self.epoch, welcome=self._welcome())

    def agent_stuck(self, agent: AgentId, why: str) -> None:
        """An agent computes a step that does not end, and was told to end itself."""
        until = now_ns() + _STUCK_NS
        self.availability.impair(agent, Impairment.BROKEN, until=until, why=why)
        self._around.metrics.agents_stuck.inc()
        self.note("agent_stuck", {"agent": agent, "why": why})

    def agent_replaced(self, agent: AgentId) -> None:
        """A new process has come in place of one that was told to end."""
        self.availability.clear(agent, Impairment.BROKEN)

    def agent_ends(self, agent: AgentId, reason: str, why: str) -> None:
        """An agent cannot compute any more, and ends by itself."""
        self.note("agent_ends", {"agent": agent, "reason": reason, "why": why[:300]})

    def refusal_of(self, claim: Claim) -> CatenaryError | None:
        """Returns why an agent cannot be led that obeys this epoch; None if it can.

        A claim that is to be followed makes our own epoch go beyond it soon. Who claims what cannot
        be true is put in quarantine for a while.
        """
        verdict = self._claims.judge(claim, self.epoch, self._lease.token, now_ns())
        if verdict is Verdict.OBEYS:
            return None
        if verdict is Verdict.LIE:
            why = f"it says that it obeys {claim.epoch}; ours is {self.epoch}"
            lie = InvalidMessage("AgentHello", "epoch", why)
            self.offenders.accuse(Role.AGENT, claim.agent, lie, at_once=True)
            return InvalidInput(EPOCH_FIELD, f"{claim.epoch} cannot be true here; forget it")
        if verdict is Verdict.FOLLOW:
            self.write_behind.go_beyond(claim.epoch, shared=bool(claim.leader))
        return StaleEpoch(f"{claim.agent} obeys epoch {claim.epoch}, not yet ours")

    def was_busy(self, agent: AgentId, duration_ns: Nanoseconds) -> None:
        """An agent computed for so long."""
        self.utilisation.add(agent, duration_ns)

    # ---- what the cluster asks for ----

    def agent_joined(self, agent: Agent) -> None:
        """The dispatcher may use an agent for what it has loaded."""
        self.availability.connected(agent.agent_id)
        self.feed(AgentJoined(agent), now_ns())

    def agent_lost(self, agent: AgentId) -> None:
        """What an agent held and was to do is lost."""
        self.in_flight.lost(agent)
        self.slow_and_silent.forget(agent)
        self.times.forget(agent)
        self.slowdowns.forget(agent)
        self.availability.disconnected(agent)
        held = self.sessions.let_go(agent)
        self.feed(AgentLost(agent), now_ns())
        self.live.may_be_over(held)

    def dispatch_by(self, plan: Plan) -> None:
        """Dispatch by this plan, or this part of one, from now on."""
        self.boundaries.planned(plan)
        self.feed(PlanActivated(self.sessions.latency.refreshed(plan)), now_ns())

    def plan_activated(self, plan: Plan) -> None:
        """This is the plan in force from now on."""
        self._around.metrics.set_active_plan(plan.plan_id)
        self._journal_event("plan_activated", {"plan": plan.plan_id})
        servers = servers_of(self.cluster.roster)
        survivals = [(str(model.model), survival_of(model, servers)) for model in plan.models]
        fragile = {name: survival for name, survival in survivals if survival.is_fragile}
        self._around.metrics.fragile_models.set(len(fragile))
        for name, survival in fragile.items():
            _log.warning("plan_is_fragile", model=name, problem=survival.in_words())

    def switch_ended(self, report: SwitchReport) -> None:
        """A change of plan is done, or was rolled back."""
        kind, facts = report.as_event()
        _log.info(kind, **facts)
        self._journal_event(kind, facts)
        observe_switch(report, self._around.metrics)

    def is_in_use(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True while a batch in flight, or a session, needs a partition."""
        if self.in_flight.uses_partition(agent, partition):
            return True
        return self.live.uses_partition(agent, partition)

    def move_sessions(
        self, agent: AgentId, partition: PartitionKey, *, must: bool, moving: bool
    ) -> None:
        """Has the sessions on a partition go on elsewhere: move or, if they must, begin again."""
        self.sessions.move(agent, partition, must=must, moving=moving)

    def agent_draining(self, agent: AgentId) -> None:
        """An agent is to go: its sessions move away at once, before there is a plan without it."""
        self.availability.impair(agent, Impairment.DRAINING, why="it is to go")
        self.heed_availability()

    def heed_availability(self) -> None:
        """Has the dispatcher act on what changed of who can be given what."""
        if self.availability.version != self._heeded:
            self._heeded = self.availability.version
            self.feed(Tick(), now_ns())

    def cluster_changed(self) -> None:
        """Tells everyone who wants to know, if there is anything new."""
        now_s = time.monotonic()
        for agent_id, record in self.cluster.roster.items():
            if record.session is None:
                self.peers.left(agent_id, now_s)
        self.heed_availability()
        self._publish()
        now = now_ns()
        for event in self.waiting.release(self.is_ready):
            self.feed(event, now)

    def model_table(self) -> scheduler_pb2.ModelTable:
        """Returns the models as gateways are told."""
        active = self.cluster.active
        plan = active.plan if active is not None else None
        return model_table(self.deployments, self.cluster.reason, plan)

    def expire_waiting(self) -> None:
        """Refuses the requests that waited as long as they may."""
        now = now_ns()
        for event in self.waiting.expire(now):
            reason = self.cluster.reason(event.model) or "the deadline is over"
            text = f"model {event.model} is not ready: {reason}"
            retry = NANOSECONDS_PER_SECOND
            self._router.route(rejection(event.request, Unavailable.reason, text, retry), now)

    @property
    def unwritten(self) -> int:
        """Changes not yet in Redis."""
        return len(self._journal)

    # ---- what the autoscaler asks for ----

    def note(self, kind: str, facts: dict[str, str]) -> None:
        """Enters what happened into the event stream."""
        self._journal_event(kind, facts)
        self._persistence.changed()
        self.write_behind.touch()

    def reconcile(self) -> None:
        """Does what is missing between what should be and what is."""
        self.cluster.reconcile(time.monotonic())

    # ---- inside ----

    def _compare(self, event: StageReported, now: Nanoseconds) -> None:
        """Notes how a hop really ran beside what was booked for it."""
        booked = self.timelines.reported(event)
        if booked is not None:
            real_ns = event.compute_end_ns - event.compute_start_ns
            self.slowdowns.reported(booked.agent, real_ns, booked.duration_ns, now)
            rows = self.timelines.rows_of(event.batch)
            self.times.reported(booked.agent, booked.partition, rows, real_ns, now)
            self.slow_and_silent.reported(booked.agent, booked.partition, rows, real_ns)

    def _connected_agents(self) -> Iterator[tuple[AgentId, AgentSession]]:
        for agent, record in self.cluster.roster.items():
            if record.session is not None:
                yield agent, record.session

    def _welcome(self) -> scheduler_pb2.Welcome:
        return scheduler_pb2.Welcome(
            scheduler_id=self.settings.scheduler_id, epoch=self.epoch, leader=self._lease.token
        )

    def _everyone(self) -> scheduler_pb2.Directory:
        directory = self.peers.directory()
        directory.gateways = len(self.gateways.gateways)
        return directory

    def _stamp(self) -> Stamp:
        return Stamp(self.epoch, self.cluster.plan_id)

    def _measured_links(self) -> None:
        self._persistence.changed()
        self.write_behind.touch()

    def _epoch_raised(self, epoch: Epoch) -> None:
        self._around.metrics.epoch.set(epoch)

    def _journal_event(self, kind: str, facts: dict[str, str]) -> None:
        self._journal.event(kind, {"epoch": str(self.epoch), **facts})

    def _publish(self) -> None:
        directory, models = self._everyone(), self.model_table()
        as_bytes = (
            directory.SerializeToString(deterministic=True),
            models.SerializeToString(deterministic=True),
        )
        if as_bytes[0] != self._directory:
            self.gateways.broadcast(scheduler_pb2.SchedulerToGatewayMessage(directory=directory))
            self.agents.broadcast(
                scheduler_pb2.SchedulerToAgentMessage(epoch=self.epoch, directory=directory)
            )
        if as_bytes[1] != self._models:
            self.gateways.broadcast(scheduler_pb2.SchedulerToGatewayMessage(models=models))
        self._directory, self._models = as_bytes
        self._persistence.changed()
        self.write_behind.touch()
        self._changed.set()
        self._changed = asyncio.Event()
