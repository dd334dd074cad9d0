"""A listener to one group's scheduler, which lets all groups together look like one scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from catenary_gateway.groups.router import GroupRouter
from catenary_gateway.groups.tables import ModelTables, PeerDirectories
from catenary_gateway.scheduler_link import MessageHandlers
from catenary_gateway.scheduler_listener import MessageRouter
from catenary_protos.catenary.v1 import scheduler_pb2


@dataclass(slots=True)
class ListenerContext:
    """State that the listeners of all groups share."""

    listener: MessageRouter
    router: GroupRouter
    models: ModelTables
    directories: PeerDirectories
    grace_s: float
    """Seconds without a leader after which a group counts as serving nothing."""
    connected: set[int] = field(default_factory=set)
    """Groups that are led by a scheduler, as far as this gateway knows."""
    gone: set[int] = field(default_factory=set)
    """Groups that have had no leader for longer than `grace_s`."""

    def forget_gone(self) -> None:
        """Drops the models of groups that are gone, unless no group is connected."""
        if self.gone and self.connected:
            for group in self.gone:
                self.models.drop(group)
            self.gone.clear()
            self.listener.told_models(self.models.merged())


class GroupListener:
    """The `SchedulerListener` of one group."""

    def __init__(self, group: int, context: ListenerContext) -> None:
        self._group = group
        self._context = context
        self._timer: asyncio.TimerHandle | None = None
        # Tables of all groups are merged, and a request belongs to one group.
        self.handlers: MessageHandlers = {
            **context.listener.handlers,
            "reject": self._rejected,
            "start_session": self._start_session,
            "directory": self._told_directory,
            "models": self._told_models,
        }

    def hello(self) -> scheduler_pb2.GatewayHello:
        """Returns this gateway's identity, which is the same for every group."""
        return self._context.listener.hello()

    def connected(self, epoch: int) -> None:
        """Submits this group's unfinished requests, and those that no group has."""
        self._stop_timer()
        context = self._context
        context.connected.add(self._group)
        context.gone.discard(self._group)
        context.forget_gone()
        context.router.connected(self._group)
        context.listener.connected(epoch, context.router.is_due(self._group))

    def disconnected(self) -> None:
        """Notes the loss of the group's scheduler.

        The group is given up after `grace_s`; the gateway is told only if no group is connected.
        """
        context = self._context
        context.connected.discard(self._group)
        if not context.connected:
            context.listener.disconnected()
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(context.grace_s, self._give_up)

    def _rejected(self, order: scheduler_pb2.RejectRequest) -> None:
        if not self._context.router.refused(order, self._group):
            self._context.listener.rejected(order)

    def _start_session(self, order: scheduler_pb2.StartSession) -> None:
        if not self._context.router.is_elsewhere(order.request_id, self._group):
            self._context.listener.start_session(order)

    def _told_directory(self, directory: scheduler_pb2.Directory) -> None:
        self._context.directories.update(self._group, directory)
        self._context.listener.told_directory(self._context.directories.merged())

    def _told_models(self, table: scheduler_pb2.ModelTable) -> None:
        self._context.models.update(self._group, table)
        self._context.listener.told_models(self._context.models.merged())

    def close(self) -> None:
        """Cancels the timer that would give the group up."""
        self._stop_timer()

    def _give_up(self) -> None:
        self._timer = None
        context = self._context
        context.router.away(self._group)
        context.gone.add(self._group)
        context.forget_gone()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
