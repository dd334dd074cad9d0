"""PPipe's probe (Algorithm 2), the hot loop of a dispatch decision.

The rule is the paper's, but fewer GPUs are examined. A stage cannot finish before its data can be
there plus its compute time, so the search walks the pool downwards from the GPU that becomes free
latest and stops at the first that reaches this bound. Only if none does, it examines every GPU.
`tests/scheduler/book` holds the literal version, which gives the same paths.

If that path waits anywhere behind its first stage, another GPU of an earlier stage may be better,
one whose uplink is free. Then `label_search` looks for the earliest finish over all of them, which
the paper's stage by stage choice misses. Mostly it is spared: where a path waits for GPUs that are
all busy, it ends when a batch would that never waits for a link, and no path ends before that.
A size whose batch would miss its deadline even so is not probed either.

Among GPUs with the same finish this takes the one that has been free for the shortest time (best
fit), where the paper takes the first: long gaps stay whole, and small batches wait 2 to 7 ms less.

A GPU that computes steps of language models between batches takes longer for a batch than others
(`steps`). In a pool with such a GPU every member is examined, and the earliest finish is taken.
The compiled twin is `_native.pyx`; `core` takes whichever is there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from catenary_scheduler.book.label_search import Label, earliest_label
from catenary_scheduler.book.pool import Pool, PoolMember
from catenary_scheduler.book.timeline import BookedInterval, Timeline, earliest_on
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, BatchId, Nanoseconds

_LAST = 1 << 62
"""Index greater than that of any member, for bisection."""


class ProbeStage(NamedTuple):
    """One stage of a pipeline, with what a probe needs of it."""

    pool: Pool
    compute_ns: tuple[Nanoseconds, ...]
    """Compute time by batch size in nanoseconds; index 0 is batch 1."""
    row_bytes: int
    """Bytes that enter the stage per row; 0 if nothing is transferred."""


@dataclass(frozen=True, slots=True)
class PathHop:
    """One hop of a path: its compute, and the transfer into it (none if `transfer_ns` is 0)."""

    member: PoolMember
    transfer_start: Nanoseconds
    transfer_ns: Nanoseconds
    start: Nanoseconds
    compute_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class Path:
    """Result of a probe: the hops a batch would take, and when it would finish."""

    rows: int
    finish_ns: Nanoseconds
    wait_ns: Nanoseconds
    """Sum of the waits for each resource, in nanoseconds (Algorithm 1, waitTime)."""
    steps: list[PathHop]


_Rank = tuple[int, Nanoseconds, int]
"""Order among GPUs that finish first: (1 if it fills a gap, -busy_until, -index). The smallest is
taken."""


class PoolChain:
    """Pools that a batch passes one after the other, prepared for probing.

    Attributes:
        legs: The stages.
        max_rows: Largest batch for which all stages have a compute time.
        least_work_ns: Nanoseconds of compute and transfers of a batch that never waits; index 0 is
            batch 1. No path takes less.
    """

    __slots__ = ("_rest_ns", "least_work_ns", "legs", "max_rows")

    def __init__(self, legs: Sequence[ProbeStage]) -> None:
        self.legs = tuple(legs)
        self.max_rows = min(len(leg.compute_ns) for leg in legs)
        sizes = range(1, self.max_rows + 1)
        self.least_work_ns = tuple(_least_work(self.legs, 0, rows) for rows in sizes)
        self._rest_ns = tuple(
            tuple(_least_work(self.legs, at, rows) for at in range(1, len(self.legs) + 1))
            for rows in sizes
        )
        """Least work behind each stage, by rows."""

    def probe(self, rows: int, now: Nanoseconds) -> Path:
        """Returns the path with the earliest finish; of equals that of the stage by stage choice.

        Raises:
            IndexError: `rows` is not within 1 to `max_rows`.
        """
        if not 1 <= rows <= self.max_rows:
            raise IndexError(f"{rows} rows; planned are 1 to {self.max_rows}")
        moment = now
        work = 0
        steps: list[PathHop] = []
        sender: PoolMember | None = None
        for pool, compute, row_bytes in self.legs:
            duration = compute[rows - 1]
            if pool.sharing:
                sent_bytes = row_bytes * rows if sender is not None else 0
                step = _beside_steps(pool, sender, moment, duration, sent_bytes)
            elif sender is None or row_bytes == 0:
                step = _without_transfer(pool, moment, duration)
            else:
                step = _with_transfer(pool, sender, moment, duration, row_bytes * rows)
            steps.append(step)
            sender = step.member
            work += step.transfer_ns + step.compute_ns
            moment = step.start + step.compute_ns
        rest = self._rest_ns[rows - 1]
        no_wait = steps[0].start + steps[0].compute_ns + rest[0]
        if moment > no_wait and moment > self._no_earlier(rows, now):
            label = earliest_label(self.legs, rows, now, rest, moment)
            if label is not None:
                return _path_to(label, rows, now)
        return Path(rows, moment, moment - now - work, steps)

    def largest(self, most: int, deadline: Nanoseconds, now: Nanoseconds) -> Path | None:
        """Returns the path of the largest batch up to `most` rows that meets the deadline.

        Algorithm 1, lines 10 to 14. Sizes that surely end too late are not probed. Returns None if
        no size meets the deadline.
        """
        for rows in range(min(most, self.max_rows), 0, -1):
            if (
                now + self.least_work_ns[rows - 1] <= deadline
                and self._no_earlier(rows, now) <= deadline
            ):
                path = self.probe(rows, now)
                if path.finish_ns <= deadline:
                    return path
        return None

    def _no_earlier(self, rows: int, now: Nanoseconds) -> Nanoseconds:
        """Returns when a batch would end that waits for GPUs, but never for a link.

        No path ends before that: at every stage, data is nowhere earlier than the first GPU of the
        stage before could have sent it, and no transfer is faster than the fastest.
        """
        rest = self._rest_ns[rows - 1]
        moment = now
        behind = self.least_work_ns[rows - 1]
        for (pool, compute, _), less in zip(self.legs, rest, strict=True):
            duration = compute[rows - 1]
            ready = moment + behind - less - duration
            moment = pool.earliest_start(ready, duration) + duration
            behind = less
        return moment


def uses_of(batch: BatchId, steps: Sequence[PathHop]) -> list[BookedInterval]:
    """Returns the intervals that a batch on this path occupies, in order of time."""
    uses: list[BookedInterval] = []
    sender: PoolMember | None = None
    for position, step in enumerate(steps):
        member = step.member
        if step.transfer_ns and sender is not None:
            links = (sender.uplink, member.downlink)
            sent = step.transfer_start
            uses.append(BookedInterval(batch, position, links, sent, sent + step.transfer_ns))
        uses.append(
            BookedInterval(batch, position, (member.gpu,), step.start, step.start + step.compute_ns)
        )
        sender = member
    return uses


def _path_to(last: Label, rows: int, now: Nanoseconds) -> Path:
    steps: list[PathHop] = []
    work = 0
    label: Label | None = last
    while label is not None:
        sent, length, sender = label.arrival
        spent = label.finish - label.start
        steps.append(PathHop(label.member, sent, length, label.start, spent))
        work += length + spent
        label = sender
    steps.reverse()
    return Path(rows, last.finish, last.finish - now - work, steps)


def _least_work(legs: tuple[ProbeStage, ...], first: int, rows: int) -> Nanoseconds:
    """Returns the least work from the transfer into stage `first` on."""
    total = 0
    before: Pool | None = legs[first - 1].pool if first else None
    for leg in legs[first:]:
        total += leg.compute_ns[rows - 1]
        if before is not None and not before.index_of.keys() & leg.pool.index_of.keys():
            speed = min(before.fastest, leg.pool.fastest)
            total += -(-leg.row_bytes * rows * NANOSECONDS_PER_SECOND // speed)
        before = leg.pool
    return total


def _without_transfer(pool: Pool, moment: Nanoseconds, duration: Nanoseconds) -> PathHop:
    order, members = pool.order, pool.members
    at = bisect_right(order, (moment, _LAST)) - 1
    if at >= 0:
        return PathHop(members[order[at][1]], moment, 0, moment, duration)
    best = -1
    best_start: Nanoseconds = _LAST
    best_rank: _Rank = (2, 0, 0)
    for index, member in enumerate(members):
        gpu = member.gpu
        start = earliest_on(gpu, moment, duration)
        if start <= best_start:
            rank = (1 if gpu.busy_until > start else 0, -gpu.busy_until, -index)
            if start < best_start or rank < best_rank:
                best, best_start, best_rank = index, start, rank
    return PathHop(members[best], moment, 0, best_start, duration)


def _with_transfer(
    pool: Pool, sender: PoolMember, moment: Nanoseconds, duration: Nanoseconds, nbytes: int
) -> PathHop:
    """Returns the hop that reaches the lower bound, if a member does.

    That is a transfer as soon as the uplink is free, and compute at once. Otherwise every member is
    examined.
    """
    members, order = pool.members, pool.order
    speed, fastest = sender.bytes_per_second, pool.fastest
    itself = pool.index_of.get(sender.agent)
    if itself is not None:  # the data may stay where it is, so the bound below does not hold
        return _look_at_all(pool, sender, moment, duration, nbytes)
    slowest = speed if speed < fastest else fastest
    length = -(-nbytes * NANOSECONDS_PER_SECOND // slowest)
    ends = sender.uplink.ends
    sent = moment if not ends or ends[-1] <= moment else earliest_on(sender.uplink, moment, length)
    arrival = sent + length
    at = bisect_right(order, (arrival, _LAST))
    while at:
        at -= 1
        member = members[order[at][1]]
        port = member.bytes_per_second
        # A slower port may still take as long, because durations are whole nanoseconds.
        if port >= slowest or -(-nbytes * NANOSECONDS_PER_SECOND // port) == length:
            ends = member.downlink.ends
            if not ends or ends[-1] <= sent or earliest_on(member.downlink, sent, length) == sent:
                return PathHop(member, sent, length, arrival, duration)
    return _look_at_all(pool, sender, moment, duration, nbytes)


def _look_at_all(
    pool: Pool, sender: PoolMember, moment: Nanoseconds, duration: Nanoseconds, nbytes: int
) -> PathHop:
    """Returns the hop by Algorithm 2, lines 10 to 19, after an examination of every GPU.

    There is one search per downlink instead of one per GPU.
    """
    members, uplink, speed = pool.members, sender.uplink, sender.bytes_per_second
    best, best_sent, best_length = -1, moment, 0
    best_start: Nanoseconds = _LAST
    best_rank: _Rank = (2, 0, 0)
    for downlink, port_speed, indices in pool.ports:
        length = -(-nbytes * NANOSECONDS_PER_SECOND // min(speed, port_speed))
        sent = _both_free(uplink, downlink, moment, length)
        for index in indices:
            member = members[index]
            gpu = member.gpu
            at_home = member.agent == sender.agent
            ready = moment if at_home else sent + length
            if ready > best_start:
                continue
            busy_until = gpu.busy_until
            start = ready if busy_until <= ready else earliest_on(gpu, ready, duration)
            if start > best_start:
                continue
            rank = (1 if busy_until > start else 0, -busy_until, -index)
            if start < best_start or rank < best_rank:
                best, best_start, best_rank = index, start, rank
                best_sent, best_length = (moment, 0) if at_home else (sent, length)
    return PathHop(members[best], best_sent, best_length, best_start, duration)


def _beside_steps(
    pool: Pool,
    sender: PoolMember | None,
    moment: Nanoseconds,
    duration: Nanoseconds,
    nbytes: int,
) -> PathHop:
    """Returns the hop that ends first, where GPUs take different times for the same batch."""
    best: PathHop | None = None
    best_rank: tuple[Nanoseconds, int, Nanoseconds, int] = (0, 0, 0, 0)
    for downlink, port_speed, indices in pool.ports:
        sent, length = moment, 0
        if sender is not None and nbytes:
            speed = min(sender.bytes_per_second, port_speed)
            length = -(-nbytes * NANOSECONDS_PER_SECOND // speed)
            sent = _both_free(sender.uplink, downlink, moment, length)
        for index in indices:
            member = pool.members[index]
            gpu = member.gpu
            at_home = sender is not None and member.agent == sender.agent
            ready = moment if at_home else sent + length
            spent = gpu.with_steps(ready, duration)
            start = earliest_on(gpu, ready, spent)
            busy_until = gpu.busy_until
            rank = (start + spent, 1 if busy_until > start else 0, -busy_until, -index)
            if best is None or rank < best_rank:
                best_rank = rank
                if at_home:
                    best = PathHop(member, moment, 0, start, spent)
                else:
                    best = PathHop(member, sent, length, start, spent)
    assert best is not None
    return best


def _both_free(
    uplink: Timeline, downlink: Timeline, moment: Nanoseconds, length: Nanoseconds
) -> Nanoseconds:
    while True:
        sends = earliest_on(uplink, moment, length)
        moment = earliest_on(downlink, sends, length)
        if moment == sends:
            return moment
