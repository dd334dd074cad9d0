"""Choice of the GPUs that become neighbours, that is share the uplink and downlink of a server.

The planner grants each GPU an even part of its server's links, whatever the neighbours are. The
wait of a transfer for its turn depends on them:

* It queues behind others: with load = sum of rate x length and second moment = sum of
  rate x length^2 over all that use the link, the mean wait of a queue served in order of arrival
  (M/G/1) is second moment / (2 x (1 - load)).
* It must find a gap as long as itself between transfers that were booked before it. Those are the
  ones that come late in long pipelines: at random moments, from its point of view, `r` of them a
  second, between which a gap of length `l` comes after (e^(r l) - 1) / r on average. So frequent
  short transfers of one model can shut out long ones of another at a small load.

The cost of a link is the sum of these waits, each relative to the slack of the model that waits.
GPUs are placed so that all links together cost little: greedily in a few orders, then by swaps
until none helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations_with_replacement
from math import ceil, expm1
from typing import NamedTuple

from catenary_scheduler.planning.pooled.layout.physical import PhysicalGpu
from catenary_scheduler.planning.pooled.problem import GpuClass

_FULL = 0.95
"""Load above which the cost of a link grows linearly, so that overbooked links can be compared
too."""
_HOPELESS = 20.0
"""Number of obstacles per transfer above which their exact number makes no difference."""
_MOST_SWAPS = 200
_WORTH = 1e-9
"""Relative gain below which a difference counts as a rounding error."""

_Kind = int
"""Number of a kind of GPUs that host the same pools; 0 is a GPU that hosts nothing."""
_Server = tuple[_Kind, ...]
"""Kinds of the GPUs of a server, in ascending order."""


class _Flow(NamedTuple):
    """Transfers of one pool in one direction of a link."""

    rate: float
    """Number of transfers per second."""
    length: float
    """Duration of one transfer, in seconds."""
    slack: float
    lead: float
    """Least time between the booking of such a transfer and its begin, in seconds."""


def servers_of(gpu_class: GpuClass, gpus: Sequence[PhysicalGpu]) -> list[int]:
    """Returns the number of the server on which each GPU is placed."""
    kinds: dict[PhysicalGpu, _Kind] = {}
    kind_of = [kinds.setdefault(gpu, len(kinds) + 1) for gpu in gpus]
    members: list[list[int]] = [[] for _ in range(len(kinds) + 1)]
    for index in reversed(range(len(gpus))):
        members[kind_of[index]].append(index)
    chosen = [0] * len(gpus)
    servers = _Racks(gpu_class, list(kinds), [len(alike) for alike in members]).fill()
    for number, server in enumerate(servers):
        for kind in server:
            if kind:
                chosen[members[kind].pop()] = number
    return chosen


class _Racks:
    """Search for the best servers.

    Servers with the same kinds of GPUs are alike, so size hardly matters.
    """

    def __init__(
        self, gpu_class: GpuClass, kinds: Sequence[PhysicalGpu], counts: list[int]
    ) -> None:
        self._gpu_class = gpu_class
        self._counts = counts
        self._sends = [[], *(_flows(kind, sends=True) for kind in kinds)]
        self._receives = [[], *(_flows(kind, sends=False) for kind in kinds)]
        self._costs: dict[_Server, float] = {}

    def fill(self) -> list[_Server]:
        """Returns the kinds of the GPUs in every server: the best result of a few orders."""
        costliest_first = sorted(range(1, len(self._counts)), key=lambda kind: -self._cost((kind,)))
        orders = [costliest_first]
        if self._gpu_class.gpus_per_server > 1:
            orders += [costliest_first[::-1], costliest_first[1::2] + costliest_first[::2]]
        return min((self._improved(self._greedy(order)) for order in orders), key=self._total)

    def _improved(self, servers: list[_Server]) -> list[_Server]:
        if self._gpu_class.gpus_per_server > 1:
            for _ in range(_MOST_SWAPS):
                if not self._swap(servers):
                    break
        return servers

    def _total(self, servers: list[_Server]) -> float:
        return sum(self._cost(server) for server in servers)

    def _greedy(self, order: list[_Kind]) -> list[_Server]:
        """Places one kind after another, each GPU where it adds the least cost."""
        size = max(1, self._gpu_class.gpus_per_server)
        count = self._gpu_class.count
        servers: list[_Server] = [()] * ceil(count / size)
        room = [min(size, count - number * size) for number in range(len(servers))]
        for kind in order:
            heap = [
                (self._added(server, kind), len(server), number)
                for number, server in enumerate(servers)
                if len(server) < room[number]
            ]
            heapify(heap)
            for _ in range(self._counts[kind]):
                number = heap[0][2]
                servers[number] = tuple(sorted((*servers[number], kind)))
                if len(servers[number]) < room[number]:
                    server = servers[number]
                    heapreplace(heap, (self._added(server, kind), len(server), number))
                else:
                    heappop(heap)
        return [
            (0,) * (room[number] - len(server)) + server for number, server in enumerate(servers)
        ]

    def _swap(self, servers: list[_Server]) -> bool:
        """Performs the best exchange of two GPUs wherever possible; False if none helps."""
        alike: dict[_Server, list[int]] = {}
        for number, server in enumerate(servers):
            alike.setdefault(server, []).append(number)
        best, found = 0.0, None
        for one, other in combinations_with_replacement(alike, 2):
            if one == other and len(alike[one]) < 2:
                continue
            now = self._cost(one) + self._cost(other)
            for new_one, new_other in _exchanges(one, other):
                gain = now - self._cost(new_one) - self._cost(new_other)
                if gain > best and gain > _WORTH * now:
                    best, found = gain, (one, other, new_one, new_other)
        if found is None:
            return False
        one, other, new_one, new_other = found
        if one == other:
            half = len(alike[one]) // 2
            pairs = zip(alike[one][:half], alike[one][half : 2 * half], strict=True)
        else:
            pairs = zip(alike[one], alike[other], strict=False)
        for first, second in pairs:
            servers[first], servers[second] = new_one, new_other
        return True

    def _added(self, server: _Server, kind: _Kind) -> float:
        return self._cost(tuple(sorted((*server, kind)))) - self._cost(server)

    def _cost(self, server: _Server) -> float:
        cost = self._costs.get(server)
        if cost is None:
            cost = self._costs[server] = sum(
                _cost([flow for kind in server for flow in flows[kind]])
                for flows in (self._sends, self._receives)
            )
        return cost


def _flows(gpu: PhysicalGpu, *, sends: bool) -> list[_Flow]:
    """Returns the transfers of a GPU on a link. Its virtual GPUs of one pool are taken together."""
    flows = []
    for pool, count in Counter(gpu.hosted).items():
        length = pool.send_s if sends else pool.receive_s
        lead = pool.sent_after_s if sends else pool.received_after_s
        if length > 0:
            flows.append(_Flow(pool.batches_per_second * count, length, pool.slack_s, lead))
    return flows


def _cost(flows: Sequence[_Flow]) -> float:
    load = sum(flow.rate * flow.length for flow in flows)
    second_moment = sum(flow.rate * flow.length**2 for flow in flows)
    full = min(load, _FULL)
    crowding = 1.0 / (1.0 - full) + (load - full) / (1.0 - _FULL) ** 2
    cost = 0.0
    for flow in flows:
        before = sum(other.rate for other in flows if other.lead > flow.lead)
        wait = second_moment / 2.0
        if before > 0:
            wait += expm1(min(before * flow.length, _HOPELESS)) / before - flow.length
        cost += flow.rate * wait * crowding / flow.slack
    return cost


def _exchanges(one: _Server, other: _Server) -> Iterator[tuple[_Server, _Server]]:
    for a in set(one):
        for b in set(other):
            if a != b:
                yield _replaced(one, a, b), _replaced(other, b, a)


def _replaced(server: _Server, old: _Kind, new: _Kind) -> _Server:
    kinds = list(server)
    kinds[kinds.index(old)] = new
    return tuple(sorted(kinds))
