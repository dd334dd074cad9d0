"""The choice of a scheduler group for each request.

A new request goes to the group whose turn it is. Every later message about it goes to the same
group, also after a change of that group's leader. If that group has no room, or no leader for long,
the request goes to another group, at most once.
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
"""Reasons for which another group may accept a request, if the scheduler says when to try again."""
AWAY = "GROUP_AWAY"
"""Reason in the metric of reroutes: the request's group had no leader for long."""


class RoutedLink(Protocol):
    """The part of `SchedulerLink` that the router uses."""

    @property
    def is_connected(self) -> bool:
        """True while a scheduler leads the group, as far as this gateway knows."""
        ...

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message for the scheduler; drops it while no scheduler leads."""
        ...

    def send_soon(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message that may wait a moment, because nobody waits for its effect."""
        ...


class ResubmittingPlane(Protocol):
    """The part of the data plane and the session plane that the router uses."""

    def resubmission(self, number: int) -> scheduler_pb2.GatewayMessage | None:
        """Returns the message that submits a request to another scheduler.

        None if the request has ended or was begun.
        """
        ...


class GroupRouter:
    """The outbox of the planes to all groups; implements `catenary_gateway.data_plane.Outbox`.

    Invariant: `_group_of` has a request only between its submission and its end.
    """

    def __init__(
        self, links: Sequence[RoutedLink], tables: ModelTables, rerouted: Callable[[str], None]
    ) -> None:
        """Creates a router for `links`, of which link N belongs to group N.

        `rerouted` is called with the reason whenever a request goes to another group.
        """
        self._links = tuple(links)
        self._tables = tables
        self._rerouted = rerouted
        self._rotation = WeightedRotation()
        self._planes: tuple[ResubmittingPlane, ...] = ()
        self._group_of: dict[int, int] = {}
        self._moved: set[int] = set()
        self._left_behind: defaultdict[int, set[int]] = defaultdict(set)
        self._senders: dict[str, Callable[[scheduler_pb2.GatewayMessage], None]] = {
            "submit": self._submit,
            "submit_session": self._submit,
            "finished": lambda said: self._send_end(said.finished.request_id, said),
            "cancel": lambda said: self._send_end(said.cancel.request_id, said),
            "window_report": lambda said: self._send_by_id(said.window_report.window_id, said),
            "delivery_failed": lambda said: self._send_by_id(said.delivery_failed.batch_id, said),
            "session_failed": lambda said: self._send_by_id(said.session_failed.session_id, said),
            "sessions_progressed": self._send_progress,
        }

    def serve(self, *planes: ResubmittingPlane) -> None:
        """Sets the planes whose requests are routed; they are made after this router."""
        self._planes = planes

    def group_of(self, number: int) -> int | None:
        return self._group_of.get(number)

    # ---- the outbox of the planes ----

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message for the group it concerns; drops it while that group has no leader.

        Raises:
            Overloaded: No scheduler that it could go to reads fast enough.
        """
        send = self._senders.get(message.WhichOneof("kind") or "")
        if send is not None:
            send(message)

    def send_soon(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message that may wait a moment; only those of a request's end do."""
        if message.WhichOneof("kind") != "finished":
            self.send(message)
            return
        group = self._ended(message.finished.request_id)
        if group is not None:
            self._links[group].send_soon(message)

    # ---- changes of groups ----

    def is_due(self, group: int) -> Callable[[int], bool]:
        """Returns a test, by number, for requests that a new leader of `group` must be told of."""
        return lambda number: self._group_of.get(number, group) == group

    def connected(self, group: int) -> None:
        """Cancels, at a group's new scheduler, the requests that went to other groups."""
        for number in self._left_behind.pop(group, ()):
            self._cancel(number, group)

    def away(self, group: int) -> None:
        """Moves the requests that a group without a leader did not begin to other groups."""
        for number in [each for each, its in self._group_of.items() if its == group]:
            if self._move(number, group, AWAY):
                self._left_behind[group].add(number)

    def refused(self, order: scheduler_pb2.RejectRequest, group: int) -> bool:
        """Handles a group's refusal; returns True if the request goes on, or is not that group's.

        If it returns False, the caller must end the request.
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
        """Returns True, and cancels the request at `group`, if another group has it."""
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
        if group is None and message.submit.in_flight:  # it went by a window of that group
            its = group_of_id(message.submit.in_flight[0].batch_id, len(self._links))
            if its < len(self._links):
                group = self._group_of[number] = its
        if group is not None:
            self._links[group].send(message)
            return
        among = self._connected
        while among:
            group = self._choose(name, version, among)
            try:
                self._links[group].send(message)
            except Overloaded as error:
                # Another group may read fast enough; the error of the last one is raised.
                among.remove(group)
                if not among:
                    raise
                self._rerouted(error.reason)
                continue
            self._group_of[number] = group
            return

    def _choose(self, name: str, version: str, among: Sequence[int]) -> int:
        weights = self._tables.weights(name, version, among)
        if not weights:  # the request waits there until the model is ready
            weights = dict.fromkeys(self._tables.knowing(name, version, among) or among, 1)
        if len(weights) == 1:
            return next(iter(weights))
        return self._rotation.next(f"{name}:{version}", weights)

    def _move(self, number: int, group: int, reason: str) -> bool:
        """Submits a request that was not begun to another group; returns False if it cannot."""
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
        with suppress(Overloaded):  # such a scheduler is about to be lost
            cancel = scheduler_pb2.CancelRequest(request_id=number)
            self._links[group].send(_Message(cancel=cancel))

    def _send_end(self, number: int, message: scheduler_pb2.GatewayMessage) -> None:
        group = self._ended(number)
        if group is not None:
            self._links[group].send(message)

    def _send_by_id(self, number: int, message: scheduler_pb2.GatewayMessage) -> None:
        group = group_of_id(number, len(self._links))
        if group < len(self._links):
            self._links[group].send(message)

    def _send_progress(self, message: scheduler_pb2.GatewayMessage) -> None:
        by_group: defaultdict[int, list[scheduler_pb2.SessionProgress]] = defaultdict(list)
        for each in message.sessions_progressed.sessions:
            group = self._group_of.get(each.request_id)
            if group is not None:
                by_group[group].append(each)
        for group, sessions in by_group.items():
            part = scheduler_pb2.SessionsProgressed(sessions=sessions)
            self._links[group].send(_Message(sessions_progressed=part))


def _what(message: scheduler_pb2.GatewayMessage) -> tuple[int, str, str]:
    """Returns the number, model name and version of a submission."""
    is_session = message.WhichOneof("kind") == "submit_session"
    asked = message.submit_session if is_session else message.submit
    return asked.request_id, asked.model, asked.model_version
