"""The links of a gateway to its schedulers: one, or one per group and the parts that join them."""

from __future__ import annotations

import asyncio

from catenary_gateway.data_plane import DataPlane, Outbox
from catenary_gateway.endpoints.admin import SchedulerAdmin
from catenary_gateway.generation.plane import SessionPlane
from catenary_gateway.groups.admin import GroupsAdmin
from catenary_gateway.groups.listener import GroupListener, ListenerContext
from catenary_gateway.groups.router import GroupRouter
from catenary_gateway.groups.tables import ModelTables, PeerDirectories
from catenary_gateway.scheduler_link import SchedulerLink, SchedulerListener
from catenary_gateway.scheduler_listener import AuditingListener, MessageRouter
from catenary_gateway.settings import GatewaySettings
from catenary_services.domain.groups import metadata_of_group
from catenary_services.security.tls import ClientSecurity
from catenary_services.telemetry.metrics import Metrics


class SchedulerLinks:
    """The links of one gateway to its schedulers.

    Attributes:
        links: The link to the scheduler of each group.
        outbox: The outbox for messages of the planes; with one group it is the link itself.
        admin: The Admin service of the scheduler, or of all groups.
    """

    def __init__(
        self, settings: GatewaySettings, security: ClientSecurity, metrics: Metrics
    ) -> None:
        """Creates the links; they connect after `start`."""
        groups = settings.scheduler_groups
        self._grace_s = settings.unavailable_grace_s
        self.links = [
            SchedulerLink(settings.scheduler_addresses, security, metadata_of_group(group, groups))
            for group in range(groups)
        ]
        for link in self.links:
            link.invalid = metrics.invalid_messages.labels("scheduler").inc
        self._models = ModelTables()
        self._router = GroupRouter(
            self.links, self._models, lambda reason: metrics.reroutes.labels(reason).inc()
        )
        self.outbox: Outbox = self._router if groups > 1 else self.links[0]
        self.admin = GroupsAdmin(self.links) if groups > 1 else SchedulerAdmin(self.links[0])
        self._listeners: list[GroupListener] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, listener: MessageRouter, planes: tuple[DataPlane, SessionPlane]) -> None:
        """Starts the links; each looks for its leader, and passes messages on to `listener`."""
        self._tasks = [
            asyncio.create_task(link.run(each), name="scheduler-link")
            for link, each in zip(self.links, self._ears(listener, planes), strict=True)
        ]

    def _ears(
        self, listener: MessageRouter, planes: tuple[DataPlane, SessionPlane]
    ) -> list[SchedulerListener]:
        if len(self.links) == 1:
            return [AuditingListener(listener, self.links[0], planes)]
        self._router.serve(*planes)
        together = ListenerContext(
            listener, self._router, self._models, PeerDirectories(), self._grace_s
        )
        self._listeners = [GroupListener(group, together) for group in range(len(self.links))]
        return [
            AuditingListener(each, self.links[group], planes, self._router.is_due(group))
            for group, each in enumerate(self._listeners)
        ]

    async def failed(self) -> None:
        """Waits for the links, and raises if one of them ends with an error, which none should."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Closes every link. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for listener in self._listeners:
            listener.close()
