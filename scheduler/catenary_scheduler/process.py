"""The scheduler process: one gRPC port, one Redis, and a term for each group it leads."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import grpc.aio
from prometheus_client import CollectorRegistry

from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from catenary_scheduler.admin.service import AdminService
from catenary_scheduler.leadership.group_election import Campaign
from catenary_scheduler.leadership.group_leader import REDIS_FAILURES, Shard
from catenary_scheduler.leadership.leader import LeaderContext, LeaderRuntime
from catenary_scheduler.leadership.takeover_trouble import TakeoverTrouble
from catenary_scheduler.rpc.service import SchedulerService
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.groups import chosen_group, share_of
from catenary_services.errors import CatenaryError, InvalidInput, Unavailable
from catenary_services.grpc_kit import (
    HealthSwitch,
    bind,
    create_server,
    enable_health_and_reflection,
)
from catenary_services.log import get_logger
from catenary_services.probes import LEADER, Probes
from catenary_services.redis_client import connect
from catenary_services.security.identity import Role
from catenary_services.security.keys import ApiKeys
from catenary_services.security.own_certificate import OwnCertificate
from catenary_services.security.roles import Guard
from catenary_services.security.tls import ServerSecurity
from catenary_services.telemetry.grouped import grouped
from catenary_services.telemetry.metrics import Metrics, start_metrics_server
from catenary_services.telemetry.tracing import Tracer

_log = get_logger(__name__)
_REDIS_TIMEOUT_S = 1.0
_FIRST_CONTACT_S = 30.0
_LONGEST_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of peers and operators: plans, and what a peer has in work."""
_SERVICES = (
    scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)


class SchedulerProcess:
    """Implements `catenary_services.lifecycle.Process`; leads, or stands by until it can.

    Attributes:
        port: Where it listens; known after `start`.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
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
        self._guard = Guard(settings.cluster, self._keys, insecure=settings.insecure)
        self._key_watch: asyncio.Task[None] | None = None
        self._redis = connect(settings.redis_address(), timeout_s=_REDIS_TIMEOUT_S, retries=1)
        self._shards = self._make_shards()
        self._server: grpc.aio.Server | None = None
        self._health: HealthSwitch | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._draining = False
        self._probes = Probes(LEADER)
        self.port = 0
        self.metrics_port = 0
        self.health_port: int | None = None

    @property
    def name(self) -> str:
        """For log lines."""
        return self._settings.scheduler_id

    @property
    def leads(self) -> bool:
        """True while this process leads a group and serves it."""
        return any(shard.term is not None for shard in self._shards)

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups it leads, lowest first."""
        return tuple(shard.group for shard in self._shards if shard.term is not None)

    def term(self, group: int | None = None) -> LeaderRuntime:
        """Returns the present term of a group; without one, of the lowest that is led here.

        Raises:
            InvalidInput: there is no such group.
            Unavailable: this process does not lead it.
        """
        if group is None:
            group = next(iter(self.groups), 0)
        if not 0 <= group < len(self._shards):
            raise InvalidInput("group", f"this cluster has {len(self._shards)} scheduler groups")
        term = self._shards[group].term
        if term is None:
            what = f"lead group {group}" if len(self._shards) > 1 else "lead"
            trouble = self.trouble(group).in_words()
            why = f"{trouble}; " if trouble else ""
            raise Unavailable(f"{self.name} does not {what}; {why}ask another scheduler")
        return term

    def trouble(self, group: int | None = None) -> TakeoverTrouble:
        """Returns what keeps this process from leading a group; without one, the lowest."""
        return self._shards[group or 0].trouble

    async def start(self) -> None:
        """Returns once it listens and either leads or stands by.

        Raises:
            Unavailable: the port is taken, or Redis does not answer for half a minute.
            InvalidInput: the plan file is wrong.
        """
        settings = self._settings
        server = self._server = create_server(
            self._security, guard=self._guard, max_message_bytes=_LONGEST_MESSAGE_BYTES
        )
        service = SchedulerService(self, self._guard)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(service, server)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(self), server)
        self._health = enable_health_and_reflection(server, _SERVICES)
        self.port = bind(server, settings.host, settings.port, self._security)
        await server.start()
        self._certificate.start(self._group_metrics[0])
        self._key_watch = asyncio.create_task(self._keys.watch(), name="watch-keys")
        if settings.health_port is not None:
            self.health_port = await self._probes.start(settings.health_host, settings.health_port)
        if settings.metrics_port is not None:
            self.metrics_port, self._stop_metrics = start_metrics_server(
                settings.metrics_host, settings.metrics_port, self._registry
            )
        await self._begin_to_campaign()
        self._probes.set_ready(True)  # also to stand by: pods are replaced one by one by this

    async def _begin_to_campaign(self) -> None:
        """Returns once every group is led here, or known to be led elsewhere or to be free."""
        for shard in self._shards:
            shard.start()
        contact = asyncio.create_task(self._contacted())
        watched: set[asyncio.Task[None]] = {contact, *(shard.task for shard in self._shards)}
        try:
            await asyncio.wait(
                watched, timeout=_FIRST_CONTACT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            contact.cancel()
        for shard in self._shards:
            if shard.task.done():
                shard.task.result()
        if not all(shard.contacted.is_set() for shard in self._shards):
            raise Unavailable(f"Redis did not answer within {_FIRST_CONTACT_S:.0f} s")

    async def _contacted(self) -> None:
        for shard in self._shards:
            await shard.contacted.wait()

    async def failed(self) -> None:
        """Raises when this process can neither lead nor stand by any more."""
        tasks = {shard.task for shard in self._shards}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self, timeout_s: float) -> None:
        """Gives the leases back with everything written, so that a standby goes on at once."""
        self._draining = True
        self._probes.set_ready(False)
        self._switch_health()
        await asyncio.gather(*(self._resign(shard, timeout_s) for shard in self._shards))

    async def stop(self) -> None:
        """Frees everything. Idempotent."""
        await asyncio.gather(*(shard.end() for shard in self._shards))
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

    def _make_shards(self) -> tuple[Shard, ...]:
        settings = self._settings
        groups = settings.scheduler_groups
        token = f"{self.name}/{secrets.token_hex(8)}"
        preferred = chosen_group(settings.scheduler_group, self.name, groups)
        campaign = Campaign(token, preferred, groups, settings.takeover_grace_s)
        own = settings.model_copy(update=_shares(settings))
        # Gauges of two groups must not overwrite each other.
        self._group_metrics = [self._metrics] if groups == 1 else [Metrics() for _ in range(groups)]
        return tuple(
            Shard(
                LeaderContext(own, metrics, self._tracer, group),
                self._redis,
                campaign,
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

    async def _resign(self, shard: Shard, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await shard.resign()
        except (TimeoutError, CatenaryError, *REDIS_FAILURES) as error:
            _log.warning("drain_unfinished", error=repr(error), group=shard.group)


def _shares(settings: SchedulerSettings) -> dict[str, int]:
    """Returns what of the whole cluster's numbers of agents is each group's."""
    groups = settings.scheduler_groups
    return {
        "expected_agents": share_of(settings.expected_agents, groups),
        "min_agents": share_of(settings.min_agents, groups),
        "max_agents": share_of(settings.max_agents, groups) if settings.max_agents else 0,
    }
