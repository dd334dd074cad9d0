"""Announces to gateways and agents who leads, which peers there are, and which models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.directory import PeerDirectory
from catenary_scheduler.agents.registry import AgentSender, AgentState
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.cluster.drain_marks import DrainMarks
from catenary_scheduler.rpc.gateway_registry import GatewayRegistry, GatewayStream
from catenary_scheduler.rpc.model_table import model_table
from catenary_scheduler.storage.lease import Lease
from catenary_services.domain.ids import ModelKey, Nanoseconds

ToAgent = scheduler_pb2.SchedulerToAgentMessage
ToGateway = scheduler_pb2.SchedulerToGatewayMessage


@dataclass(frozen=True, slots=True)
class AnnouncerDeps:
    """The sources of announcements, and the peers that receive them."""

    scheduler_id: str
    lease: Lease
    peers: PeerDirectory
    cluster: ClusterController
    deployments: Deployments
    marks: DrainMarks
    gateways: GatewayRegistry
    agents: AgentSender
    heed: Callable[[], None]
    """Has the dispatcher act on changes of availability."""
    release: Callable[[], None]
    """Passes on the requests whose models are ready now."""
    keep: Callable[[], None]
    """Called when records may have changed and are to be written to Redis."""


class Announcer:
    """Greets peers that connect, sends heartbeats, and publishes changes."""

    def __init__(self, deps: AnnouncerDeps) -> None:
        self._deps = deps
        self._directory: scheduler_pb2.Directory | None = None
        """The last published directory; None before the first."""
        self._models = b""
        """The last published model table, in bytes."""
        self._changed = asyncio.Event()

    # ---- greetings ----

    def greet_gateway(self, session: GatewayStream) -> None:
        """Sends a gateway the welcome, the directory and the model table."""
        session.send(ToGateway(welcome=self._welcome()))
        session.send(ToGateway(directory=self._everyone()))
        session.send(ToGateway(models=self._model_table()))

    def greet_agent(self, record: AgentState, hello: scheduler_pb2.AgentHello) -> None:
        """Enters an agent into the directory, and sends it the welcome and the directory."""
        assert record.session is not None
        deps = self._deps
        deps.peers.joined(record.agent.agent_id, record.peer)
        deps.marks.arrived(record, says_so=hello.draining)
        record.session.send(self.agent_welcome())
        record.session.send(ToAgent(epoch=deps.lease.epoch, directory=self._everyone()))

    def agent_welcome(self) -> ToAgent:
        """Returns the first message to an agent: the leader and its epoch."""
        return ToAgent(epoch=self._deps.lease.epoch, welcome=self._welcome())

    # ---- news ----

    def tick(self, now: Nanoseconds) -> None:
        """Sends a heartbeat to all gateways and agents."""
        beat = scheduler_pb2.Heartbeat(clock_ns=now)
        self._deps.gateways.broadcast(ToGateway(heartbeat=beat))
        self._deps.agents.broadcast(ToAgent(epoch=self._deps.lease.epoch, heartbeat=beat))

    def gateways_changed(self) -> None:
        """Enters connected and lost gateways into the directory, and publishes it."""
        now_s, peers = time.monotonic(), self._deps.peers
        for gateway in self._deps.gateways.gateways.values():
            if gateway.session is not None:
                peers.joined(gateway.gateway_id, gateway.peer)
            else:
                peers.left(gateway.gateway_id, now_s)
        self.cluster_changed()

    def cluster_changed(self) -> None:
        """Publishes directory and model table if they changed, and releases waiting requests."""
        deps, now_s = self._deps, time.monotonic()
        for agent_id, record in deps.cluster.registry.items():
            if record.session is None:
                deps.peers.left(agent_id, now_s)
        deps.heed()
        self._publish()
        deps.release()

    async def changed(self, timeout_s: float) -> None:
        """Returns when anything about the cluster has changed, or after `timeout_s`."""
        waiter = self._changed
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await waiter.wait()
        except TimeoutError:
            return

    # ---- inside ----

    def _publish(self) -> None:
        deps, directory, models = self._deps, self._everyone(), self._model_table()
        if directory is not self._directory and directory != self._directory:
            deps.gateways.broadcast(ToGateway(directory=directory))
            deps.agents.broadcast(ToAgent(epoch=deps.lease.epoch, directory=directory))
        as_bytes = models.SerializeToString(deterministic=True)
        if as_bytes != self._models:
            deps.gateways.broadcast(ToGateway(models=models))
        self._directory, self._models = directory, as_bytes
        deps.keep()
        self._changed.set()
        self._changed = asyncio.Event()

    def _welcome(self) -> scheduler_pb2.Welcome:
        lease = self._deps.lease
        return scheduler_pb2.Welcome(
            scheduler_id=self._deps.scheduler_id, epoch=lease.epoch, leader=lease.token
        )

    def _everyone(self) -> scheduler_pb2.Directory:
        return self._deps.peers.directory(len(self._deps.gateways.gateways))

    def _model_table(self) -> scheduler_pb2.ModelTable:
        active = self._deps.cluster.active
        plan = active.plan if active is not None else None
        table = model_table(self._deps.deployments, self._deps.cluster.reason, plan)
        for served in table.models:
            model = ModelKey(served.name, served.version)
            served.sources.extend(self._deps.cluster.sources.of(model))
        return table
