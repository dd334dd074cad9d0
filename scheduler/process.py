"""The scheduler process: one gRPC port, one Redis, and a term each time it leads."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable

import grpc.aio
from redis.exceptions import RedisError

from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from scheduler.admin import AdminService
from scheduler.service import SchedulerService
from scheduler.settings import SchedulerSettings
from scheduler.state.keys import Keys
from scheduler.state.lease import Lease
from scheduler.state.script import pass_cancellation
from scheduler.state.store import Store
from scheduler.term import Surroundings, Term
from services.errors import CatenaryError, StaleEpoch, Unavailable
from services.grpc_kit import HealthSwitch, bind, create_server, enable_health_and_reflection
from services.log import get_logger
from services.redis_client import connect
from services.security.tls import ServerSecurity
from services.telemetry.metrics import Metrics, start_metrics_server
from services.telemetry.tracing import Tracer

_log = get_logger(__name__)
_REDIS_TIMEOUT_S = 1.0
_FIRST_CONTACT_S = 30.0
_PAUSE_S = 0.2
_REDIS_FAILURES = (RedisError, OSError, TimeoutError)
_SERVICES = (
    scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)


class SchedulerProcess:
    """Implements `services.lifecycle.Process`; leads, or stands by until it can.

    Attributes:
        port: Where it listens; known after `start`.
    """

    def __init__(
        self, settings: SchedulerSettings, *, metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._metrics = metrics or Metrics()
        self._tracer = tracer or Tracer(
            "catenary-scheduler",
            settings.scheduler_id,
            otlp_endpoint=settings.otlp_endpoint,
            sample_ratio=settings.trace_sample_ratio,
        )
        self._security = ServerSecurity.from_settings(settings)
        self._redis = connect(settings.redis_url, timeout_s=_REDIS_TIMEOUT_S, retries=1)
        keys = Keys(settings.cluster)
        token = f"{settings.scheduler_id}/{secrets.token_hex(8)}"
        self._lease = Lease(self._redis, keys, token, settings.lease_s)
        self._store = Store(self._redis, keys)
        self._server: grpc.aio.Server | None = None
        self._health: HealthSwitch | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._leading: asyncio.Task[None] | None = None
        self._first_contact = asyncio.Event()
        self._term: Term | None = None
        self.port = 0
        self.metrics_port = 0

    @property
    def name(self) -> str:
        """For log lines."""
        return self._settings.scheduler_id

    @property
    def leads(self) -> bool:
        """True while this process holds the lease and serves."""
        return self._term is not None

    def term(self) -> Term:
        """Returns the present term.

        Raises:
            Unavailable: this process does not lead.
        """
        if self._term is None:
            raise Unavailable(f"{self.name} does not lead; ask another scheduler")
        return self._term

    async def start(self) -> None:
        """Returns once it listens and either leads or stands by.

        Raises:
            Unavailable: the port is taken, or Redis does not answer for half a minute.
            InvalidInput: the plan file is wrong.
        """
        settings = self._settings
        server = self._server = create_server(self._security)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(SchedulerService(self), server)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(self), server)
        self._health = enable_health_and_reflection(server, _SERVICES)
        self.port = bind(server, settings.host, settings.port, self._security)
        await server.start()
        if settings.metrics_port is not None:
            self.metrics_port, self._stop_metrics = start_metrics_server(
                settings.metrics_host, settings.metrics_port, self._metrics.registry
            )
        self._metrics.leader.set(0)
        self._leading = asyncio.create_task(self._lead_for_ever(), name="lead")
        contact = asyncio.create_task(self._first_contact.wait())
        try:
            await asyncio.wait(
                {contact, self._leading},
                timeout=_FIRST_CONTACT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            contact.cancel()
        if self._leading.done():
            self._leading.result()
        if not self._first_contact.is_set():
            raise Unavailable(f"Redis did not answer within {_FIRST_CONTACT_S:.0f} s")

    async def failed(self) -> None:
        """Raises when this process can neither lead nor stand by any more."""
        if self._leading is not None:
            await asyncio.shield(self._leading)

    async def drain(self, timeout_s: float) -> None:
        """Gives the lease back with everything written, so that a standby goes on at once."""
        if self._health is not None:
            self._health.set_serving(False)
        try:
            async with asyncio.timeout(timeout_s):
                await self._resign()
        except (TimeoutError, CatenaryError, *_REDIS_FAILURES) as error:
            _log.warning("drain_unfinished", error=repr(error))

    async def stop(self) -> None:
        """Frees everything. Idempotent."""
        await self._end_leading()
        if self._health is not None:
            await self._health.shutdown()
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
            self._stop_metrics = None
        await asyncio.to_thread(self._tracer.shutdown)
        await self._redis.aclose()

    # ---- leading ----

    async def _lead_for_ever(self) -> None:
        while True:
            try:
                acquired = await self._lease.try_acquire()
                if acquired:
                    await self._lead()
                else:
                    self._first_contact.set()
                    await asyncio.sleep(self._settings.lease_s / 4 * random.uniform(0.5, 1.0))
            except _REDIS_FAILURES as failure:
                pass_cancellation()
                _log.warning("redis_lost", error=repr(failure))
                await asyncio.sleep(_PAUSE_S)

    async def _lead(self) -> None:
        around = Surroundings(self._settings, self._metrics, self._tracer)
        term = Term(around, self._lease, self._store)
        try:
            await self._begin(term)
            _log.info("leading", epoch=self._lease.epoch)
            self._takes_office(term)
            await term.run()
        except StaleEpoch as error:
            _log.warning("leadership_lost", error=error.message)
        finally:
            self._leaves_office(term)

    async def _begin(self, term: Term) -> None:
        """Lets a term take over; the lease is kept meanwhile."""

        async def keep_lease() -> None:
            while True:
                await asyncio.sleep(self._settings.lease_s / 4)
                await self._lease.renew()

        keeper = asyncio.create_task(keep_lease())
        try:
            await term.begin()
        except CatenaryError:
            await self._lease.release()  # a wrong plan file: nobody else must wait for us
            raise
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    def _takes_office(self, term: Term) -> None:
        self._term = term
        self._metrics.leader.set(1)
        self._metrics.epoch.set(self._lease.epoch)
        if self._health is not None:
            self._health.set_serving(True)
        self._first_contact.set()

    def _leaves_office(self, term: Term) -> None:
        self._term = None
        self._metrics.leader.set(0)
        if self._health is not None:
            self._health.set_serving(False)
        term.close(Unavailable(f"{self.name} does not lead any more"))

    async def _resign(self) -> None:
        term = self._term
        await self._end_leading()
        if term is not None:
            await term.write_behind.flush()
            await self._lease.release()

    async def _end_leading(self) -> None:
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
            self._leading = None
