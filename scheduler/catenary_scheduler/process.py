"""The scheduler process: its ports, one Redis client, and a leader for each group it leads."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from catenary_scheduler.admin.imports import ModelImporter
from catenary_scheduler.admin.service import AdminService
from catenary_scheduler.leadership.group_election import GroupElection
from catenary_scheduler.leadership.group_leader import REDIS_FAILURES, GroupLeader
from catenary_scheduler.leadership.leader import LeaderContext, LeaderRuntime
from catenary_scheduler.leadership.takeover_failures import TakeoverFailures
from catenary_scheduler.rpc.service import SchedulerService
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.groups import chosen_group, share_of
from catenary_services.errors import CatenaryError, InvalidInput, Unavailable
from catenary_services.grpc.grpc_kit import (
    HealthSwitch,
    bind,
    create_server,
    enable_health_and_reflection,
)
from catenary_services.grpc.probes import LEADER, Probes
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.log import get_logger
from catenary_services.redis.redis_client import connect
from catenary_services.security.identity import Role
from catenary_services.security.keys import ApiKeys
from catenary_services.security.own_certificate import OwnCertificate
from catenary_services.security.roles import RoleAuthorizer
from catenary_services.security.tls import ServerSecurity
from catenary_services.telemetry.grouped import grouped
from catenary_services.telemetry.metrics import Metrics, start_metrics_server
from catenary_services.telemetry.tracing import Tracer

_log = get_logger(__name__)
_REDIS_TIMEOUT_S = 1.0
_FIRST_CONTACT_S = 30.0
_LONGEST_MESSAGE_BYTES = 16 * 1024 * 1024
"""Limit for messages of peers and operators; the longest are plans and the work that peers hold."""
_SERVICES = (
    scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)


class SchedulerProcess:
    """Implements `catenary_services.lifecycle.Process`: leads groups, or stands by until it can.

    Attributes:
        port: The gRPC port; 0 before `start`.
        metrics_port: The port of the metrics page; 0 before `start`, and without such a page.
        health_port: The port of the health probes; None before `start`, and without probes.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        importer: ModelImporter | None = None,
    ) -> None:
        """Prepares the process.

        Args:
            settings: Its settings.
            metrics: Its metrics; new ones if None.
            tracer: Its tracer; one by the settings if None.
            importer: What operators can have models imported by; None if by nothing.
        """
        self._settings = settings
        self._importer = importer
        self._started_s = time.time()
        self._metrics = metrics or Metrics()
        self._tracer = tracer or Tracer(
            "catenary-scheduler",
            settings.scheduler_id,
            otlp_endpoint=settings.otlp_endpoint,
            sample_ratio=settings.trace_sample_ratio,
        )
        self._security = ServerSecurity.from_settings(settings)
        self._certificate = OwnCertificate(settings, Role.SCHEDULER, settings.scheduler_id)
        self._keys = ApiKeys.load(settings.api_keys_file)
        self._authorizer = RoleAuthorizer(settings.cluster, self._keys, insecure=settings.insecure)
        self._key_watch: asyncio.Task[None] | None = None
        self._redis = connect(settings.redis_address(), timeout_s=_REDIS_TIMEOUT_S, retries=1)
        self._group_leaders = self._make_group_leaders()
        self._service = SchedulerService(self, self._authorizer, self._security)
        self._server: GrpcServer | None = None
        self._health: HealthSwitch | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._draining = False
        self._probes = Probes(LEADER)
        self.port = 0
        self.metrics_port = 0
        self.health_port: int | None = None

    @property
    def name(self) -> str:
        """The scheduler's id, for log lines and messages to people."""
        return self._settings.scheduler_id

    @property
    def control_port(self) -> int:
        """The port of control streams; 0 before `start`."""
        return self._service.port

    @property
    def leads(self) -> bool:
        """True while this process leads a group and serves it."""
        return any(group_leader.leader is not None for group_leader in self._group_leaders)

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that this process leads, lowest first."""
        return tuple(
            group_leader.group
            for group_leader in self._group_leaders
            if group_leader.leader is not None
        )

    def leader(self, group: int | None = None) -> LeaderRuntime:
        """Returns the present leader of a group; of the lowest group led here if `group` is None.

        Raises:
            InvalidInput: There is no such group.
            Unavailable: This process does not lead the group.
        """
        if group is None:
            group = next(iter(self.groups), 0)
        if not 0 <= group < len(self._group_leaders):
            raise InvalidInput(
                "group", f"this cluster has {len(self._group_leaders)} scheduler groups"
            )
        leader = self._group_leaders[group].leader
        if leader is None:
            what = f"lead group {group}" if len(self._group_leaders) > 1 else "lead"
            takeover_failures = self.takeover_failures(group).in_words()
            why = f"{takeover_failures}; " if takeover_failures else ""
            raise Unavailable(f"{self.name} does not {what}; {why}ask another scheduler")
        return leader

    def takeover_failures(self, group: int | None = None) -> TakeoverFailures:
        """Returns the failed attempts of this process to lead a group, of group 0 if it is None."""
        return self._group_leaders[group or 0].takeover_failures

    async def start(self) -> None:
        """Returns once the process listens and leads or stands by.

        Raises:
            Unavailable: The port is taken, or Redis does not answer within `_FIRST_CONTACT_S`.
            InvalidInput: The plan file is wrong.
        """
        settings = self._settings
        server = self._server = create_server(
            self._security, authorizer=self._authorizer, max_message_bytes=_LONGEST_MESSAGE_BYTES
        )
        admin = AdminService(self, self._importer)
        server.add(self._service, scheduler_pb2_grpc.add_SchedulerServicer_to_server)
        server.add(admin, admin_pb2_grpc.add_AdminServicer_to_server)
        self._health = enable_health_and_reflection(server, _SERVICES)
        self.port = bind(server, settings.host, settings.port, self._security)
        await self._service.start(settings.host, settings.port_of_control)
        await server.start()
        self._certificate.start(self._group_metrics[0])
        self._key_watch = asyncio.create_task(self._keys.watch(), name="watch-keys")
        if settings.health_port is not None:
            self.health_port = await self._probes.start(settings.health_host, settings.health_port)
        if settings.metrics_port is not None:
            self.metrics_port, self._stop_metrics = start_metrics_server(
                settings.metrics_host, settings.metrics_port, self._registry
            )
        await self._stand_for_election()
        # A standby is ready, too: Kubernetes replaces the next pod only when this one is ready.
        self._probes.set_ready(True)

    async def _stand_for_election(self) -> None:
        """Returns once every group is led here, or is known to be led elsewhere or to be free.

        Raises:
            Unavailable: Redis does not answer within `_FIRST_CONTACT_S`.
        """
        for group_leader in self._group_leaders:
            group_leader.start()
        contact = asyncio.create_task(self._contacted())
        watched: set[asyncio.Task[None]] = {
            contact,
            *(group_leader.task for group_leader in self._group_leaders),
        }
        try:
            await asyncio.wait(
                watched, timeout=_FIRST_CONTACT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            contact.cancel()
        for group_leader in self._group_leaders:
            if group_leader.task.done():
                group_leader.task.result()
        if not all(group_leader.contacted.is_set() for group_leader in self._group_leaders):
            raise Unavailable(f"Redis did not answer within {_FIRST_CONTACT_S:.0f} s")

    async def _contacted(self) -> None:
        for group_leader in self._group_leaders:
            await group_leader.contacted.wait()

    async def failed(self) -> None:
        """Waits until the process can neither lead nor stand by for a group; raises the error."""
        tasks = {group_leader.task for group_leader in self._group_leaders}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self, timeout_s: float) -> None:
        """Writes all state to Redis and gives leases back, so that a standby takes over at once.

        After `timeout_s` it gives up; then a standby waits until the lease expires.
        """
        self._draining = True
        self._probes.set_ready(False)
        self._switch_health()
        await asyncio.gather(
            *(self._resign(group_leader, timeout_s) for group_leader in self._group_leaders)
        )

    async def stop(self) -> None:
        """Ends leading and closes all servers and connections. Idempotent."""
        await asyncio.gather(*(group_leader.end() for group_leader in self._group_leaders))
        self._service.close()
        await self._probes.stop()
        if self._health is not None:
            await self._health.shutdown()
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
            self._stop_metrics = None
        if self._key_watch is not None:
            self._key_watch.cancel()
            await asyncio.wait({self._key_watch})
        await self._certificate.close()
        await asyncio.to_thread(self._tracer.shutdown)
        await self._redis.aclose()

    # ---- inside ----

    def _make_group_leaders(self) -> tuple[GroupLeader, ...]:
        settings = self._settings
        groups = settings.scheduler_groups
        token = f"{self.name}/{secrets.token_hex(8)}"
        preferred = chosen_group(settings.scheduler_group, self.name, groups)
        election = GroupElection(token, preferred, groups, settings.takeover_grace_s)
        own = settings.model_copy(update=_shares(settings))
        # Gauges of two groups must not overwrite each other.
        self._group_metrics = [self._metrics] if groups == 1 else [Metrics() for _ in range(groups)]
        return tuple(
            GroupLeader(
                LeaderContext(own, metrics, self._tracer, group, self._started_s),
                self._redis,
                election,
                self._switch_health,
            )
            for group, metrics in enumerate(self._group_metrics)
        )

    @property
    def _registry(self) -> CollectorRegistry:
        if len(self._group_metrics) == 1:
            return self._metrics.registry
        registries = {str(g): each.registry for g, each in enumerate(self._group_metrics)}
        return grouped("group", registries)

    def _switch_health(self) -> None:
        if self._health is not None:
            self._health.set_serving(self.leads and not self._draining)
        self._probes.set(LEADER, self.leads and not self._draining)

    async def _resign(self, group_leader: GroupLeader, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await group_leader.resign()
        except (TimeoutError, CatenaryError, *REDIS_FAILURES) as error:
            _log.warning("drain_unfinished", error=repr(error), group=group_leader.group)


def _shares(settings: SchedulerSettings) -> dict[str, int]:
    """Returns the settings that count agents of the whole cluster, divided among its groups."""
    groups = settings.scheduler_groups
    return {
        "expected_agents": share_of(settings.expected_agents, groups),
        "min_agents": share_of(settings.min_agents, groups),
        "max_agents": share_of(settings.max_agents, groups) if settings.max_agents else 0,
    }
