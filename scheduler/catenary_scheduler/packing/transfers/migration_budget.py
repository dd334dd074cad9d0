"""Budget of moves per epoch: bytes on every link, and tokens that every chain reads again.

Source: Mell, communication and computation boundaries. Both start from what agents report when they
join and follow measurements: link rates follow the caches that were sent, latency lines follow
reports.

Departure from the paper: a session may be larger than what a link takes in one epoch, and by the
paper it would never move as caches. Here a boundary for which nothing is owed lets one such session
pass, and then nothing until that is made up for (see `EpochBudgets`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from catenary_scheduler.packing.transfers.epoch_budgets import EpochBudgets
from catenary_scheduler.packing.transfers.transfer_costs import (
    ChainActivity,
    MoveCost,
    MoveTimes,
    downlink,
    move_cost,
    move_times,
    pair_link,
    tokens_per_epoch,
    uplink,
)
from catenary_scheduler.packing.transfers.transfers import (
    KINDS,
    TransferDivision,
    TransferKind,
    TransferMove,
    divide,
)
from catenary_services.domain.decoder import serves_whole
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, Nanoseconds
from catenary_services.domain.plan import Agent, ChainHop

Name = TypeVar("Name")
Value = TypeVar("Value")
_KEPT = 10_000
"""Largest number of agents, and of links, that are remembered."""


@dataclass(frozen=True, slots=True)
class MigrationBudgetConfig:
    """Parameters of the migration budget."""

    epoch_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    link_share: float = 0.5
    """Share of a link's rate that moves may use. The rest is for the tokens of running sessions."""
    slowdown: float = 0.1
    """Share by which running sessions may slow down while tokens are read again beside them."""


class MigrationBudget:
    """Known rates of links, and what recent moves took of links and chains."""

    def __init__(self, config: MigrationBudgetConfig | None = None) -> None:
        self.config = config or MigrationBudgetConfig()
        self._agents: dict[AgentId, Agent] = {}
        self._pairs: dict[str, int] = {}
        """Measured bytes per second by pair of agents."""
        self._said: dict[str, int] = {}
        """Bytes per second of uplinks and downlinks as agents reported them."""
        self._seen: dict[str, int] = {}
        """Highest bytes per second that a pair of agents reached, by uplink and downlink."""
        self._cache_bytes: dict[tuple[ModelKey, str], int] = {}
        """Cache bytes per token and block by model and runtime of the sender. The empty runtime
        stands for a sender whose runtime has no entry."""
        self._sent: EpochBudgets[str] = EpochBudgets(self.config.epoch_ns)
        self._read: EpochBudgets[Hashable] = EpochBudgets(self.config.epoch_ns)

    # What is known

    def agent_joined(self, agent: Agent) -> None:
        """Records an agent's server and the speed of that server's network card."""
        self._agents[agent.agent_id] = agent
        _forget_oldest(self._agents)
        _forget_oldest(self._said)
        there = [each for each in self._agents.values() if each.server == agent.server]
        for link in (uplink(agent.server), downlink(agent.server)):
            self._said[link] = max(each.link_bytes_per_second for each in there)

    def measured(self, source: AgentId, target: AgentId, bytes_per_second: int) -> None:
        """Records the measured rate from one agent to another.

        If they are on different servers, the links of these are at least as fast.
        """
        self._pairs[pair_link(source, target)] = bytes_per_second
        _forget_oldest(self._pairs)
        sender, receiver = self._agents.get(source), self._agents.get(target)
        if sender is not None and receiver is not None and sender.server != receiver.server:
            for link in (uplink(sender.server), downlink(receiver.server)):
                self._seen[link] = max(self._seen.get(link, 0), bytes_per_second)
                _forget_oldest(self._seen)

    def model_has(self, model: ModelKey, cache_bytes_per_token: int, runtime: str = "") -> None:
        """Records the bytes that key and value of one token take in one block, in a runtime."""
        self._cache_bytes[model, runtime] = cache_bytes_per_token

    def rate(self, link: str) -> int:
        """Returns the bytes per second of a link; 0 if nothing is known about it.

        A pair that was never measured counts as fast as the slower of its two network cards.
        """
        known = self._pairs.get(link) or max(self._said.get(link, 0), self._seen.get(link, 0))
        if known:
            return known
        sender, _, receiver = link.partition(">")
        ends = self._agents.get(AgentId(sender)), self._agents.get(AgentId(receiver))
        return min(end.link_bytes_per_second if end is not None else 0 for end in ends)

    def cost(
        self, source: Sequence[ChainHop], target: Sequence[ChainHop], tokens: int
    ) -> MoveCost | None:
        """Returns the cost of a move; None if the size of the model's caches is unknown."""
        model = source[0].partition.model
        plain = self._cache_bytes.get((model, ""))
        if plain is None:
            return None
        row_bytes = {}
        for hop in source:
            agent = self._agents.get(hop.agent)
            runtime = agent.runtime if agent is not None else ""
            row_bytes[hop.agent] = self._cache_bytes.get((model, runtime), plain)
        hops = (*source, *target)
        servers = {
            hop.agent: self._agents[hop.agent].server for hop in hops if hop.agent in self._agents
        }
        return move_cost(source, target, tokens, row_bytes, servers)

    def must_read_again(self, source: Sequence[ChainHop], target: Sequence[ChainHop]) -> bool:
        """Returns True if a move can go as tokens only: an engine hands out no caches."""
        agents = (self._agents.get(hop.agent) for hop in (*source, *target))
        return any(agent is not None and serves_whole(agent.runtime) for agent in agents)

    def per_epoch(self, link: str) -> int:
        """Returns the communication boundary of a link, in bytes per epoch."""
        share = self.config.link_share * self.config.epoch_ns / NANOSECONDS_PER_SECOND
        return int(self.rate(link) * share)

    def tokens_per_epoch(self, load: ChainActivity) -> int:
        """Returns the computation boundary of a chain, in tokens per epoch."""
        return tokens_per_epoch(load, self.config.epoch_ns, self.config.slowdown)

    # What moves may take

    def divide(
        self,
        now: Nanoseconds,
        moves: Sequence[TransferMove],
        loads: Mapping[Hashable, ChainActivity],
    ) -> TransferDivision:
        """Divides the moves of one epoch by how they travel, and counts what they take.

        Args:
            now: The present moment.
            moves: Moves of this epoch, including those deferred before that are still wanted.
            loads: Activity of the chains they go to, by `TransferMove.target`. A chain that is
                missing reads no tokens again.
        """
        reads = {target: self.tokens_per_epoch(load) for target, load in loads.items()}
        chosen: dict[int, TransferKind | None] = {}
        usual: list[TransferMove] = []
        for move in sorted(moves, key=lambda move: (-move.kv, move.id)):
            if self._is_usual(move, reads.get(move.target, 0)):
                usual.append(move)
            else:  # otherwise small moves would keep it waiting for ever
                chosen[move.id] = self._begin(move, reads.get(move.target, 0), now)
        division = divide(
            usual,
            {
                link: self._sent.room(link, self.per_epoch(link), now)
                for link in {link for move in usual for link in move.links}
            },
            {target: self._read.room(target, tokens, now) for target, tokens in reads.items()},
        )
        kinds = division.kinds()
        for move in usual:
            kind = chosen[move.id] = kinds.get(move.id)
            if kind is not None:
                self._take(move, kind, reads.get(move.target, 0), now)
        return TransferDivision.of(chosen)

    def times(self, move: TransferMove, load: ChainActivity) -> MoveTimes:
        """Returns how long a move to a chain takes as caches and as tokens."""
        return move_times(move, self.rate, load)

    def choose_mode(
        self, now: Nanoseconds, move: TransferMove, load: ChainActivity, *, must: bool = False
    ) -> TransferKind | None:
        """Returns how a single move travels: the faster kind of those within the boundaries.

        Args:
            now: The present moment.
            move: The move.
            load: Activity of the chain it goes to.
            must: Whether it goes at once, even beyond the boundaries, because its agent is about to
                go.

        Returns:
            The kind, or None if the move should wait. A move that must go and about which nothing
            is known goes as caches.
        """
        kinds = self.times(move, load).kinds()
        reads = self.tokens_per_epoch(load)
        kind = self._begin(move, reads, now, kinds)
        if kind is None and must:
            kind = kinds[0] if kinds else "kv"
            self._take(move, kind, reads, now)
        return kind

    # Helpers. `reads` is the number of tokens per epoch that the target chain of a move can read
    # again.

    def _is_usual(self, move: TransferMove, reads: int) -> bool:
        """Returns True unless a move is larger than everything that passes in one epoch."""
        if move.tokens <= reads:
            return True
        return all(size <= self.per_epoch(link) for link, size in move.link_claims())

    def _begin(
        self,
        move: TransferMove,
        reads: int,
        now: Nanoseconds,
        kinds: Sequence[TransferKind] = KINDS,
    ) -> TransferKind | None:
        """Starts a single move by the first kind that has room, even beyond an epoch's budget.

        Returns None if no kind has room.
        """
        for kind in kinds:
            if self._fits(move, kind, reads, now):
                self._take(move, kind, reads, now)
                return kind
        return None

    def _fits(self, move: TransferMove, kind: TransferKind, reads: int, now: Nanoseconds) -> bool:
        if kind == "tokens":
            return move.tokens <= self._read.room(move.target, reads, now, move.tokens)
        return all(
            size <= self._sent.room(link, self.per_epoch(link), now, size)
            for link, size in move.link_claims()
        )

    def _take(self, move: TransferMove, kind: TransferKind, reads: int, now: Nanoseconds) -> None:
        if kind == "tokens":
            self._read.take(move.target, move.tokens, reads, now)
            return
        for link, size in move.link_claims():
            self._sent.take(link, size, self.per_epoch(link), now)


def _forget_oldest(known: dict[Name, Value]) -> None:
    while len(known) > _KEPT:
        del known[next(iter(known))]
