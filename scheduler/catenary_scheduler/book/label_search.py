"""Label setting: the earliest finish of a batch over all members of all its pools.

The probe decides stage by stage, so it may take a GPU whose uplink is busy when the next stage
wants the data. Here every member of a stage has a *label*: the earliest moment at which it could
have computed the batch, over all senders of the stage before. Data that is there earlier is never
somewhere else later, and a GPU that has it earlier never ends later, so the earliest label of the
last stage is the earliest finish there is.

Senders with the same uplink differ in nothing but the moment, so one of them, the first, stands for
all: a stage takes as many searches as there are pairs of an uplink and a downlink, and far fewer
with the bound: labels from which even a batch that never waits would end no earlier than a path
that is known already are dropped.

The compiled twin is in `_native.pyx`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from catenary_scheduler.book.pool import Pool, PoolMember
from catenary_scheduler.book.timeline import Timeline, earliest_on
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds

_NEVER = 1 << 62

Leg = tuple[Pool, tuple[Nanoseconds, ...], int]
"""Pool, compute times by rows, and bytes that enter per row."""


class Arrival(NamedTuple):
    """The moment at which data is behind a downlink, and where it comes from."""

    sent: Nanoseconds
    """Start of the transfer; `_NEVER` if none comes in time."""
    length: Nanoseconds
    """Duration of the transfer; 0 if nothing is sent."""
    sender: Label | None
    """The label that the data is from; None at the first stage."""


class Label:
    """The earliest computation of a batch on one member, and the label it follows."""

    __slots__ = ("arrival", "fills", "finish", "index", "member", "start")

    def __init__(
        self,
        index: int,
        member: PoolMember,
        start: Nanoseconds,
        finish: Nanoseconds,
        arrival: Arrival,
    ) -> None:
        self.index = index
        self.member = member
        self.start = start
        self.finish = finish
        self.arrival = arrival
        self.fills = member.gpu.busy_until > start

    def is_before(self, other: Label) -> bool:
        """Returns whether it is taken in place of another: of equals the best fit, the last."""
        if self.finish != other.finish:
            return self.finish < other.finish
        if self.fills != other.fills:
            return other.fills
        busy, others = self.member.gpu.busy_until, other.member.gpu.busy_until
        return busy > others or (busy == others and self.index > other.index)


def earliest_label(
    legs: Sequence[Leg],
    rows: int,
    now: Nanoseconds,
    rest_ns: Sequence[Nanoseconds],
    known: Nanoseconds,
) -> Label | None:
    """Returns the label of the last stage that ends first, if it ends before `known`.

    Args:
        legs: The stages.
        rows: Size of the batch.
        now: The moment from which the batch may start.
        rest_ns: Least work of the batch behind each stage.
        known: Finish of a path that is known already.
    """
    labels: list[Label] = []
    for at, (pool, compute, row_bytes) in enumerate(legs):
        latest = known - rest_ns[at]
        if at == 0:
            arrivals = [Arrival(now, 0, None)] * len(pool.ports)
        elif row_bytes == 0:
            first = _first(labels)
            arrivals = [Arrival(first.finish, 0, first)] * len(pool.ports)
        else:
            senders = _senders(labels)
            least = latest - compute[rows - 1]
            arrivals = [
                _arrival(senders, downlink, speed, row_bytes * rows, least)
                for downlink, speed, _ in pool.ports
            ]
        at_home = {label.member.agent: label for label in labels}
        labels = _stage(pool, compute[rows - 1], arrivals, at_home, latest)
        if not labels:
            return None
    return _first(labels)


def _stage(
    pool: Pool,
    duration: Nanoseconds,
    arrivals: Sequence[Arrival],
    at_home: Mapping[AgentId, Label],
    latest: Nanoseconds,
) -> list[Label]:
    """Returns the labels of a pool's members that end before `latest`, by index of the member."""
    found: list[Label] = []
    for (_, _, indices), over_links in zip(pool.ports, arrivals, strict=True):
        for index in indices:
            member = pool.members[index]
            arrival, ready = over_links, over_links.sent + over_links.length
            home = at_home.get(member.agent)
            if home is not None and home.finish <= ready:
                arrival, ready = Arrival(home.finish, 0, home), home.finish
            spent = member.gpu.with_steps(ready, duration) if pool.sharing else duration
            if ready + spent >= latest:
                continue
            start = earliest_on(member.gpu, ready, spent)
            if start + spent < latest:
                found.append(Label(index, member, start, start + spent, arrival))
    found.sort(key=_index)
    return found


def _index(label: Label) -> int:
    return label.index


def _first(labels: Sequence[Label]) -> Label:
    first = labels[0]
    for label in labels:
        if label.is_before(first):
            first = label
    return first


def _senders(labels: Sequence[Label]) -> list[Label]:
    """Returns the first label of every uplink (and speed), those that end first before others."""
    first: dict[tuple[int, int], Label] = {}
    for label in labels:
        key = (id(label.member.uplink), label.member.bytes_per_second)
        if key not in first or label.is_before(first[key]):
            first[key] = label
    return sorted(first.values(), key=_order)


def _order(label: Label) -> tuple[Nanoseconds, int]:
    return label.finish, label.index


def _arrival(
    senders: Sequence[Label], downlink: Timeline, speed: int, nbytes: int, latest: Nanoseconds
) -> Arrival:
    """Returns the earliest arrival behind a downlink; `_NEVER` if it is not before `latest`."""
    best, found = latest, Arrival(_NEVER, 0, None)
    for sender in senders:
        member = sender.member
        length = -(-nbytes * NANOSECONDS_PER_SECOND // min(speed, member.bytes_per_second))
        moment = sender.finish
        while moment + length < best:
            sent = earliest_on(member.uplink, moment, length)
            moment = earliest_on(downlink, sent, length)
            if moment == sent:
                break
        if moment + length < best:
            best, found = moment + length, Arrival(moment, length, sender)
    return found
