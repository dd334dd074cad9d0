"""Which scheduler group has which request.

A new request goes to the group whose turn it is; everything said of it later to the group that has
it, also over changes of that group's leader. A group that has no room for it, or is away for long,
loses it to another one, at most once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from catenary_gateway.groups.rotation import WeightedRotation
from catenary_gateway.groups.tables import ModelTables
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.groups import group_of_id
from catenary_services.errors import (
    ModelNotFound,
    NoActivePlan,
    Overloaded,
    QuotaExceeded,
    SloUnattainable,
    Unavailable,
)

_Message = scheduler_pb2.GatewayMessage
_NO_ROOM = frozenset(
    {
        Overloaded.reason,
        SloUnattainable.reason,
        QuotaExceeded.reason,
        Unavailable.reason,
        NoActivePlan.reason,
    }
)
"""Reasons another group may not have, if the scheduler says that trying again may help."""
AWAY = "GROUP_AWAY"
"""Reason in the metric: nobody led the request's group for long."""


class RoutedLink(Protocol):
    """What is needed of `SchedulerLink`."""

    @property
    def is_connected(self) -> bool:
        """True while a scheduler leads the group as far as we know."""
        ...

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message; dropped while there is no scheduler."""
        ...

    def send_soon(self, message: scheduler_pb2.GatewayMessage) -> None:
        """The same for a message nobody waits for."""
        ...


class ResubmittingPlane(Protocol):
    """What is needed of the planes."""

    def resubmission(self, number: int) -> scheduler_pb2.GatewayMessage | None:
        """Returns what another scheduler is told of a request that was not begun yet."""
        ...


class GroupRouter:
    """The planes' way out to all groups; implements `catenary_gateway.data_plane.Outbox`.

    Invariant: `_group_of` has a request only between its submission and its end.
    """

    def __init__(
        self, links: Sequence[RoutedLink], tables: ModelTables, rerouted: Callable[[str], None]
    ) -> None:
        """Link N is that of group N; `rerouted` is told why a request went to another group."""
        self._links = tuple(links)
        self._tables = tables
        self._rerouted = rerouted
        self._rotation = WeightedRotation()
        self._planes: tuple[ResubmittingPlane, ...] = ()
        self._group_of: dict[int, int] = {}
        self._moved: set[int] = set()
        self._left_behind: defaultdict[int, set[int]] = defaultdict(set)

    def serve(self, *planes: ResubmittingPlane) -> None:
        """Says whose requests these are; they need us first."""
        self._planes = planes

    def group_of(self, number: int) -> int | None:
        """Returns the group that has a request; None if none has."""
        return self._group_of.get(number)

    # ---- the planes' way out ----

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message for the group it concerns; dropped while nobody leads that.

        Raises:
            Overloaded: no scheduler that it could go to keeps up.
        """
        kind = message.WhichOneof("kind")
        if kind in ("submit", "submit_session"):
            self._submit(message)
        elif kind in ("finished", "cancel"):
            group = self._ended(getattr(message, kind).request_id)
            if group is not None:
                self._links[group].send(message)
        elif kind == "delivery_failed":
            self._send_by_id(message.delivery_failed.batch_id, message)
        elif kind == "session_failed":
            self._send_by_id(message.session_failed.session_id, message)
        elif kind == "sessions_progressed":
            self._send_progress(message.sessions_progressed)

    def send_soon(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message that nobody waits for: of the end of a request."""
        if message.WhichOneof("kind") != "finished":
            self.send(message)
            return
        group = self._ended(message.finished.request_id)
        if group is not None:
            self._links[group].send_soon(message)

    # ---- what becomes of groups ----

    def is_due(self, group: int) -> Callable[[int], bool]:
        """Returns which requests a scheduler that leads a group from now on must be told of."""
        return lambda number: self._group_of.get(number, group) == group

    def connected(self, group: int) -> None:
        """Tells a group's scheduler which requests went elsewhere while it was away."""
        for number in self._left_behind.pop(group, ()):
            self._cancel(number, group)

    def away(self, group: int) -> None:
        """Nobody has led a group for long: what it did not begin goes to others that serve it."""
        for number in [each for each, its in self._group_of.items() if its == group]:
            if self._move(number, group, AWAY):
                self._left_behind[group].add(number)

    def refused(self, order: scheduler_pb2.RejectRequest, group: int) -> bool:
        """Takes a group's refusal; True if the request goes on elsewhere, or is not that group's.

        A caller who is told False must end the request.
        """
        number = order.request_id
        if self._group_of.get(number, group) != group:
            return True
        reason = order.failure.reason
        hopeful = reason == ModelNotFound.reason or (reason in _NO_ROOM and order.retry_after_ns)
        if hopeful and self._move(number, group, reason):
            return True
        self._ended(number)
        return False

    def is_elsewhere(self, number: int, group: int) -> bool:
        """True if another group has a request that this one begins; this one is told so."""
        elsewhere = self._group_of.get(number, group) != group
        if elsewhere:
            self._cancel(number, group)
        return elsewhere

    # ---- inside ----

    @property
    def _connected(self) -> list[int]:
        return [group for group, link in enumerate(self._links) if link.is_connected]

    def _submit(self, message: scheduler_pb2.GatewayMessage) -> None:
        number, name, version = _what(message)
        group = self._group_of.get(number)
        if group is not None:
            self._links[group].send(message)
            return
        among = self._connected
        while among:
            group = self._choose(name, version, among)
            try:
                self._links[group].send(message)
            except Overloaded as error:
                # One more that keeps up will do; the last one's refusal is the answer.
                among.remove(group)
                if not among:
                    raise
                self._rerouted(error.reason)
                continue
            self._group_of[number] = group
            return

    def _choose(self, name: str, version: str, among: Sequence[int]) -> int:
        weights = self._tables.weights(name, version, among)
        if not weights:  # it waits there until it is ready
            weights = dict.fromkeys(self._tables.knowing(name, version, among) or among, 1)
        if len(weights) == 1:
            return next(iter(weights))
        return self._rotation.next(f"{name}:{version}", weights)

    def _move(self, number: int, group: int, reason: str) -> bool:
        """Gives a request that was not begun to another group; False if that cannot be."""
        if number in self._moved:
            return False
        message = next(filter(None, (plane.resubmission(number) for plane in self._planes)), None)
        if message is None:
            return False
        _, name, version = _what(message)
        others = [each for each in self._connected if each != group]
        weights = self._tables.weights(name, version, others)
        if not weights:
            return False
        target = self._rotation.next(f"{name}:{version}", weights)
        try:
            self._links[target].send(message)
        except Overloaded:
            return False
        self._group_of[number] = target
        self._moved.add(number)
        self._rerouted(reason)
        return True

    def _ended(self, number: int) -> int | None:
        self._moved.discard(number)
        return self._group_of.pop(number, None)

    def _cancel(self, number: int, group: int) -> None:
        with suppress(Overloaded):  # then its scheduler is about to be lost
            cancel = scheduler_pb2.CancelRequest(request_id=number)
            self._links[group].send(_Message(cancel=cancel))

    def _send_by_id(self, number: int, message: scheduler_pb2.GatewayMessage) -> None:
        group = group_of_id(number, len(self._links))
        if group < len(self._links):
            self._links[group].send(message)

    def _send_progress(self, report: scheduler_pb2.SessionsProgressed) -> None:
        by_group: defaultdict[int, list[scheduler_pb2.SessionProgress]] = defaultdict(list)
        for each in report.sessions:
            group = self._group_of.get(each.request_id)
            if group is not None:
                by_group[group].append(each)
        for group, sessions in by_group.items():
            part = scheduler_pb2.SessionsProgressed(sessions=sessions)
            self._links[group].send(_Message(sessions_progressed=part))


def _what(message: scheduler_pb2.GatewayMessage) -> tuple[int, str, str]:
    """Returns number, model and version of a submission."""
    is_session = message.WhichOneof("kind") == "submit_session"
    asked = message.submit_session if is_session else message.submit
    return asked.request_id, asked.model, asked.model_version
