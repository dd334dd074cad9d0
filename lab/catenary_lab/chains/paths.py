"""Routing without chains: the common part of the baselines PETALS and BPRR.

The servers are a graph: one can follow another if it hosts the block at which the other's range
ends. A request takes the path that is cheapest by the metric of a policy when it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey
from catenary_services.domain.plan import ChainHop


@dataclass(frozen=True, slots=True)
class PathServer:
    """A server that hosts blocks `[first_block, last_block)`."""

    agent: AgentId
    first_block: int
    last_block: int
    slots: int
    """Number of block slots; a block slot is the cache of one session in one block."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way into a server, with the blocks to process there."""

    before: int
    """Position of the server before; -1: the orchestrator."""
    blocks: int
    """Number of blocks processed at the server entered."""
    cost_ns: Nanoseconds


class Occupancy:
    """The block slots of one server in use, and the sessions that use them."""

    __slots__ = ("assigned", "free", "held", "running", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = slots
        """Number of slots that are granted to nobody."""
        self.held = 0
        """Number of slots that are granted, or that waiting requests ask for."""
        self.running = 0
        """Number of sessions that run here."""
        self.assigned = 0
        """Number of unfinished requests whose path leads here."""


class PathCosts(Protocol):
    """A policy's costs of a path."""

    def link_ns(self, before: int, server: int, blocks: int) -> Nanoseconds:
        """Returns the cost of going on to a server and processing `blocks` blocks there.

        The server before is -1 at the orchestrator.
        """
        ...

    def back_ns(self, server: int) -> Nanoseconds:
        """Returns the cost of the way from the last server back to the orchestrator."""
        ...

    def extra_ns(self, server: int, blocks: int, occupancy: Occupancy) -> int:
        """Returns the price, besides, of processing `blocks` blocks on a server."""
        ...


@dataclass(frozen=True, slots=True)
class Path:
    """A path: its servers in order, with the blocks processed at each."""

    chain_id: str
    servers: tuple[int, ...]
    hops: tuple[ChainHop, ...]


class PathFinder:
    """The servers as a graph: j follows i if j hosts the block that i's range ends at.

    Args:
        servers: The servers that host blocks.
        blocks: Number of blocks of the model.
        costs: The costs of the policy.
    """

    def __init__(self, servers: Sequence[PathServer], blocks: int, costs: PathCosts) -> None:
        # Ranges end later from server to server, so in this order every server comes after all that
        # may precede it.
        self._order = sorted(range(len(servers)), key=lambda each: servers[each].last_block)
        self._servers = servers
        self._blocks = blocks
        self._costs = costs
        # Ways that need more slots than a server has are left out.
        self._links = [
            [link for link in links if link.blocks <= server.slots]
            for server, links in zip(servers, _links_between(servers, blocks, costs), strict=True)
        ]
        self._paths: dict[tuple[int, ...], Path] = {}

    def shortest(self, occupancy: Sequence[Occupancy]) -> tuple[int, ...] | None:
        """Returns the cheapest path through all blocks; None if there is none.

        Of several cheapest paths, it is the one that is found first in the order of servers.
        """
        reached: list[Nanoseconds | None] = [None] * len(self._servers)
        before = [-1] * len(self._servers)
        best, last = None, -1
        for server in self._order:
            state, cheapest = occupancy[server], None
            for link in self._links[server]:
                base = 0 if link.before < 0 else reached[link.before]
                if base is None:
                    continue
                cost = base + link.cost_ns + self._costs.extra_ns(server, link.blocks, state)
                if cheapest is None or cost < cheapest:
                    cheapest, before[server] = cost, link.before
            reached[server] = cheapest
            ends = self._servers[server].last_block == self._blocks
            if ends and cheapest is not None and (best is None or cheapest < best):
                best, last = cheapest, server
        return None if best is None else self._walk(before, last)

    def path(self, servers: tuple[int, ...], model: ModelKey) -> Path:
        """Returns the path over these servers with its hops; always the same object."""
        found = self._paths.get(servers)
        if found is None:
            hops, at = [], 0
            for each in servers:
                server = self._servers[each]
                part = PartitionKey(model, server.first_block, server.last_block)
                hops.append(ChainHop(server.agent, part, at, server.last_block))
                at = server.last_block
            found = Path("-".join(map(str, servers)), servers, tuple(hops))
            self._paths[servers] = found
        return found

    def _walk(self, before: list[int], last: int) -> tuple[int, ...]:
        servers = []
        while last >= 0:
            servers.append(last)
            last = before[last]
        return tuple(reversed(servers))


def _links_between(
    servers: Sequence[PathServer], blocks: int, costs: PathCosts
) -> list[list[Link]]:
    """Returns all ways into every server; the way back from the last block is part of them."""
    ways: list[list[Link]] = []
    for number, server in enumerate(servers):
        entries = [(-1, 0)] if server.first_block == 0 else []
        entries += [
            (other, before.last_block)
            for other, before in enumerate(servers)
            if server.first_block <= before.last_block < server.last_block
        ]
        back = costs.back_ns(number) if server.last_block == blocks else 0
        ways.append(
            [
                Link(
                    before,
                    server.last_block - at,
                    costs.link_ns(before, number, server.last_block - at) + back,
                )
                for before, at in entries
            ]
        )
    return ways
