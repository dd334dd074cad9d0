"""How much may move per epoch: over every link, and by being read again on every chain.

Source: Mell, communication and computation boundaries. Both start from what agents say when they
join and follow what is measured: link rates by the caches that were sent, latency lines by reports.

Departure: a session may be larger than what a link takes in one epoch; by the paper it would never
move as caches. Here a boundary of which nothing is owed lets one such session pass, and then
nothing until that is made up for (see `EpochBudgets`).
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
    WAYS,
    TransferDivision,
    TransferKind,
    TransferMove,
    divide,
)
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, Nanoseconds
from catenary_services.domain.plan import Agent, ChainHop

Name = TypeVar("Name")
Value = TypeVar("Value")
_KEPT = 10_000
"""Agents, and links, at most."""


@dataclass(frozen=True, slots=True)
class MigrationBudgetConfig:
    """Everything that can be set."""

    epoch_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    link_share: float = 0.5
    """Of a link's rate, so much for moves; the rest is for the tokens that go around."""
    slowdown: float = 0.1
    """Sessions may get their tokens so much more slowly while others are read again."""


class MigrationBudget:
    """What is known of links, and what moves took of them and of chains lately."""

    def __init__(self, config: MigrationBudgetConfig | None = None) -> None:
        self.config = config or MigrationBudgetConfig()
        self._agents: dict[AgentId, Agent] = {}
        self._pairs: dict[str, int] = {}
        """Measured."""
        self._said: dict[str, int] = {}
        """Of uplinks and downlinks, by their agents."""
        self._seen: dict[str, int] = {}
        """Of uplinks and downlinks, the most that one pair was measured with."""
        self._cache_bytes: dict[tuple[ModelKey, str], int] = {}
        """By runtime of who sends them; of the empty one: of who has said none."""
        self._sent: EpochBudgets[str] = EpochBudgets(self.config.epoch_ns)
        self._read: EpochBudgets[Hashable] = EpochBudgets(self.config.epoch_ns)

    # What is known

    def agent_joined(self, agent: Agent) -> None:
        """An agent says where it is and how fast its server's network card is."""
        self._agents[agent.agent_id] = agent
        _forget_oldest(self._agents)
        _forget_oldest(self._said)
        there = [each for each in self._agents.values() if each.server == agent.server]
        for link in (uplink(agent.server), downlink(agent.server)):
            self._said[link] = max(each.link_bytes_per_second for each in there)

    def measured(self, source: AgentId, target: AgentId, bytes_per_second: int) -> None:
        """Caches travel from one agent to another so fast; what a server can do is no less."""
        self._pairs[pair_link(source, target)] = bytes_per_second
        _forget_oldest(self._pairs)
        sender, receiver = self._agents.get(source), self._agents.get(target)
        if sender is not None and receiver is not None and sender.server != receiver.server:
            for link in (uplink(sender.server), downlink(receiver.server)):
                self._seen[link] = max(self._seen.get(link, 0), bytes_per_second)
                _forget_oldest(self._seen)

    def model_has(self, model: ModelKey, cache_bytes_per_token: int, runtime: str = "") -> None:
        """Key and value of one token take so many bytes in one block where a runtime has them."""
        self._cache_bytes[model, runtime] = cache_bytes_per_token

    def rate(self, link: str) -> int:
        """Returns bytes per second of a link; 0: nothing is known of it.

        A pair that was never measured is as fast as the slower of its two network cards.
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
        """Returns what a move takes; None if it is not known how large the model's caches are."""
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
        """Divides the moves of one epoch, and counts what they take.

        Args:
            now: The moment.
            moves: Of this epoch; those deferred before are among them if they are still wanted.
            loads: Of the chains they go to, by `TransferMove.target`; one that is not named reads
                no tokens again.
        """
        reads = {target: self.tokens_per_epoch(load) for target, load in loads.items()}
        chosen: dict[int, TransferKind | None] = {}
        usual: list[TransferMove] = []
        for move in sorted(moves, key=lambda move: (-move.kv, move.id)):
            if self._is_usual(move, reads.get(move.target, 0)):
                usual.append(move)
            else:  # else the small would keep it waiting for ever
                chosen[move.id] = self._begin(move, reads.get(move.target, 0), now)
        division = divide(
            usual,
            {
                link: self._sent.room(link, self.per_epoch(link), now)
                for link in {link for move in usual for link in move.links}
            },
            {target: self._read.room(target, tokens, now) for target, tokens in reads.items()},
        )
        ways = division.ways()
        for move in usual:
            way = chosen[move.id] = ways.get(move.id)
            if way is not None:
                self._take(move, way, reads.get(move.target, 0), now)
        return TransferDivision.of(chosen)

    def times(self, move: TransferMove, load: ChainActivity) -> MoveTimes:
        """Returns how long a move to a chain takes either way."""
        return move_times(move, self.rate, load)

    def choose_mode(
        self, now: Nanoseconds, move: TransferMove, load: ChainActivity, *, must: bool = False
    ) -> TransferKind | None:
        """Returns how a single move goes, the faster way of those within the boundaries.

        Args:
            now: The moment.
            move: It.
            load: Of the chain it goes to.
            must: Whether it goes at once, boundaries or not, because its agent has to go.

        Returns:
            None if it should wait. One that must go and of which nothing is known goes as caches.
        """
        ways = self.times(move, load).ways()
        reads = self.tokens_per_epoch(load)
        way = self._begin(move, reads, now, ways)
        if way is None and must:
            way = ways[0] if ways else "kv"
            self._take(move, way, reads, now)
        return way

    # Inside. `reads`: tokens per epoch that the chain reads again which a move goes to.

    def _is_usual(self, move: TransferMove, reads: int) -> bool:
        """True unless it is larger than anything that passes in one epoch."""
        if move.tokens <= reads:
            return True
        return all(size <= self.per_epoch(link) for link, size in move.link_claims())

    def _begin(
        self, move: TransferMove, reads: int, now: Nanoseconds, ways: Sequence[TransferKind] = WAYS
    ) -> TransferKind | None:
        """Has a single move go the first way that has room, even if it is larger than that."""
        for way in ways:
            if self._fits(move, way, reads, now):
                self._take(move, way, reads, now)
                return way
        return None

    def _fits(self, move: TransferMove, way: TransferKind, reads: int, now: Nanoseconds) -> bool:
        if way == "tokens":
            return move.tokens <= self._read.room(move.target, reads, now, move.tokens)
        return all(
            size <= self._sent.room(link, self.per_epoch(link), now, size)
            for link, size in move.link_claims()
        )

    def _take(self, move: TransferMove, way: TransferKind, reads: int, now: Nanoseconds) -> None:
        if way == "tokens":
            self._read.take(move.target, move.tokens, reads, now)
            return
        for link, size in move.link_claims():
            self._sent.take(link, size, self.per_epoch(link), now)


def _forget_oldest(known: dict[Name, Value]) -> None:
    while len(known) > _KEPT:
        del known[next(iter(known))]
