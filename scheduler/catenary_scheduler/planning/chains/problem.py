"""Task and answer of the planner of server chains.

Memory may be in any single unit (GB in the paper, bytes in a cluster). It is divided and rounded
down, so it is kept exact. Times are in seconds, rates in sessions per second. Blocks are numbered
from 0 and ranges are half-open, as everywhere in the platform (the paper counts 1..L).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from catenary_services.errors import InvalidInput

Number = int | float | Fraction
"""A number of the task. A float stands for the shortest decimal that prints the same (0.1 is one
tenth)."""
StopRule = Literal["rate", "all"]
"""Stop of GBP-CR: at the rate it needs (Algorithm 1), or when all servers are used."""
Links = Mapping[tuple[str | None, str | None], float]
"""Seconds per session from one server to the next; None is the orchestrator. `(None, j)` enters a
chain, `(i, j)` continues it, and `(i, None)` returns. A return that is missing takes no time; any
other pair that is missing is not connected."""

MOST_SLOTS = 10**12
"""Number of caches on a server above which sizes are assumed to be in different units."""


def exact(value: Number) -> Fraction:
    """Returns a number as a fraction, where a float is its shortest decimal."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


@dataclass(frozen=True, slots=True)
class Server:
    """One server of the task, which is an agent of the platform."""

    name: str
    memory: Number
    """Memory M_j for weights and caches together."""
    communication_s: Number
    """Time tau_c that a session spends on the way to this server, for all its tokens together."""
    block_s: Number
    """Time tau_p that a session computes in one block here, for all its tokens together."""
    block_memory: Number | None = None
    """Memory s_m of a block here; None if it is the task's. A model takes less memory on a server
    that keeps it in smaller numbers. (The paper has one s_m and one s_c; its sums and floors hold
    server by server.)"""
    cache_memory: Number | None = None
    """Memory s_c of a session's cache per block here; None if it is the task's."""


@dataclass(frozen=True)
class ChainTask:
    """Servers, a model of equal blocks, and the load that it must serve.

    Raises:
        InvalidInput: A size, time or rate is out of range; the error names the field.
    """

    servers: tuple[Server, ...]
    blocks: int
    """Number L of blocks of the model."""
    block_memory: Number
    """Memory s_m of the weights of one block, where a server does not say otherwise."""
    cache_memory: Number
    """Memory s_c of the cache of one session in one block, where a server does not say
    otherwise."""
    rate_per_s: Number
    """Sessions lambda that arrive per second."""
    load: Number = 0.7
    """Load rho_bar to plan for, above 0 and below 1."""
    stop: StopRule = "all"
    links: Links | None = None
    """Peer-to-peer times (footnote 4 of the paper), which replace every server's `communication_s`.
    GBP-CR still orders servers by `communication_s`, which should be the mean of a server's
    links."""

    def __post_init__(self) -> None:
        _check_task(self)

    @cached_property
    def number_of(self) -> Mapping[str, int]:
        """Position of every server in the task, by its name."""
        return {server.name: number for number, server in enumerate(self.servers)}

    @property
    def largest_c(self) -> int:
        """Largest c worth trying: with more, no server has room for a block (section 3.1.4)."""
        most = 0
        for server in self.servers:
            block, cache = self.memory_at(server)
            most = max(most, math.floor((exact(server.memory) - block) / cache))
        return most

    def memory_at(self, server: Server) -> tuple[Fraction, Fraction]:
        """Returns the memory s_m of a block and s_c of a cache on a server."""
        block, cache = server.block_memory, server.cache_memory
        return (
            exact(self.block_memory if block is None else block),
            exact(self.cache_memory if cache is None else cache),
        )

    def among(self, servers: Sequence[Server]) -> ChainTask:
        """Returns the same task for some of its servers, with the links between them."""
        names = {None, *(server.name for server in servers)}
        links = self.links
        if links is not None:
            links = {pair: seconds for pair, seconds in links.items() if names.issuperset(pair)}
        return replace(self, servers=tuple(servers), links=links)

    def at_rate(self, rate_per_s: Number) -> ChainTask:
        """Returns the same task with another arrival rate."""
        return replace(self, rate_per_s=rate_per_s)


@dataclass(frozen=True, slots=True)
class HostedBlocks:
    """Blocks `[first_block, first_block + blocks)` on a server, and its cache slots."""

    server: str
    first_block: int
    blocks: int
    slots: int
    """Number of caches of one session in one block that fit beside the weights (eq. 3)."""

    @property
    def last_block(self) -> int:
        """Exclusive end of the range of blocks."""
        return self.first_block + self.blocks


@dataclass(frozen=True, slots=True)
class ComposedHop:
    """Blocks `[first_block, last_block)` that a server of a chain really processes."""

    server: str
    first_block: int
    last_block: int

    @property
    def blocks(self) -> int:
        """Block slots m_ij that a session takes on this hop."""
        return self.last_block - self.first_block


@dataclass(frozen=True, slots=True)
class ComposedChain:
    """A path through all blocks that has slots of its own."""

    hops: tuple[ComposedHop, ...]
    capacity: int
    """Number c_k of sessions at a time."""
    service_s: float
    """Time T_k of a session of mean size."""

    @property
    def rate_per_s(self) -> float:
        """Rate mu_k: sessions per second of one of its `capacity` job servers."""
        return 1.0 / self.service_s


@dataclass(frozen=True, slots=True)
class Composition:
    """A placement of blocks, and the chains over it."""

    c: int
    """Number of sessions at a time for which every block had room when it was placed."""
    hosted: tuple[HostedBlocks, ...]
    """Hosted blocks of the servers that host any, in the order of the task."""
    chains: tuple[ComposedChain, ...]
    """Chains in the order of construction, the fastest first."""
    arrivals_per_s: float
    """Arrival rate lambda for which the composition was made."""
    groups: int = 0
    """Number of disjoint chains that GBP-CR placed."""
    requirement_reached: bool = False
    """True if these groups alone have the rate lambda / rho_bar. The chains may have it without
    them."""
    moved_blocks: int = 0
    """Number of blocks that servers which were present before have to load (`recompose`)."""
    loaded_blocks: int = 0
    """Number of blocks that all servers have to load, newcomers included."""

    @property
    def capacity(self) -> int:
        """Number C of sessions at a time over all chains."""
        return sum(chain.capacity for chain in self.chains)

    @property
    def total_rate_per_s(self) -> float:
        """Rate nu: sessions per second that all chains finish when all are full."""
        return math.fsum(chain.capacity * chain.rate_per_s for chain in self.chains)

    @property
    def feasible(self) -> bool:
        """True if there is any chain at all."""
        return bool(self.chains)

    @property
    def stable(self) -> bool:
        """True if the chains finish more sessions per second than arrive."""
        return self.arrivals_per_s < self.total_rate_per_s


@dataclass(frozen=True, slots=True)
class PeakRate:
    """Tuning of c by the lower bound at this rate instead of the mean one, for bursty load."""

    rate_per_s: Number


Evaluator = Callable[[Composition], float]
"""Returns a composition's mean response time in seconds, e.g. by replaying a trace; infinity if
none."""
Tuning = Literal["lower", "upper", "surrogate"] | PeakRate | Evaluator
"""Measure by which c is chosen; see `catenary_scheduler.planning.chains.tuning`."""


def _check_task(task: ChainTask) -> None:
    _require(task.blocks >= 1, "blocks", "at least one block is needed")
    _require(_positive(task.block_memory), "block_memory", "must be above 0")
    _require(_positive(task.cache_memory), "cache_memory", "must be above 0")
    _require(_positive(task.rate_per_s), "rate_per_s", "must be above 0")
    _require(_positive(task.load) and task.load < 1, "load", "must lie between 0 and 1")
    _require(task.stop in ("rate", "all"), "stop", "is neither 'rate' nor 'all'")
    names = set()
    for number, server in enumerate(task.servers):
        field = f"servers[{number}]"
        _require(server.name not in names, f"{field}.name", f"{server.name!r} is there twice")
        names.add(server.name)
        _require(_not_negative(server.memory), f"{field}.memory", "must not be below 0")
        for name, given in (
            ("block_memory", server.block_memory),
            ("cache_memory", server.cache_memory),
        ):
            _require(given is None or _positive(given), f"{field}.{name}", "must be above 0")
        most = task.memory_at(server)[1] * MOST_SLOTS
        _require(exact(server.memory) <= most, "cache_memory", f"is too little beside {field}")
        _require(
            _not_negative(server.communication_s), f"{field}.communication_s", "must not be below 0"
        )
        _require(_positive(server.block_s), f"{field}.block_s", "must be above 0")
    for (before, after), seconds in (task.links or {}).items():
        field = f"links[{before}, {after}]"
        known = {before, after} - {None} <= names
        _require(known and (before, after) != (None, None), field, "no such servers")
        _require(_not_negative(seconds), field, "must not be below 0")


def _not_negative(value: Number) -> bool:
    return _finite(value) and value >= 0


def _positive(value: Number) -> bool:
    return _finite(value) and value > 0


def _finite(value: Number) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidInput(field, message)
