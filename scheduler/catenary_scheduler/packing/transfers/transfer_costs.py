"""Costs of a move: bytes per link as caches, tokens to read again, and the time of either way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from catenary_scheduler.packing.transfers.transfers import TransferKind, TransferMove
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds, ServerId
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import ChainHop

_MOST_TOKENS = 1 << 40
"""Largest number of tokens that is ever returned. Latency lines may be flat, and then any number
would fit."""


def pair_link(source: AgentId, target: AgentId) -> str:
    """Returns the name of the link from one agent to another, whatever lies between them."""
    return f"{source}>{target}"


def uplink(server: ServerId) -> str:
    """Returns the name of the link through which a server's agents send to other servers."""
    return f"{server}:up"


def downlink(server: ServerId) -> str:
    """Returns the name of the link through which a server's agents receive from other servers."""
    return f"{server}:down"


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Amounts that the move of one session takes.

    Attributes:
        link_bytes: Bytes on every link that its caches pass if it moves as caches.
        cache_bytes: Bytes of caches that travel, each counted once.
        tokens: Tokens that are read again if it moves as tokens.
    """

    link_bytes: Mapping[str, int]
    cache_bytes: int
    tokens: int

    def move(self, number: int, source: Hashable, target: Hashable) -> TransferMove:
        """Returns a move of this cost in the form that `divide` takes."""
        return TransferMove(
            number,
            source,
            target,
            self.cache_bytes,
            self.tokens,
            tuple(self.link_bytes),
            tuple(self.link_bytes.values()),
        )


@dataclass(frozen=True, slots=True)
class ChainActivity:
    """Load on a chain at the present moment.

    Attributes:
        lines: Latency lines of the chain; None if they are unknown, and then it reads no tokens
            again.
        sessions: Number of sessions that generate there.
        context_tokens: Tokens cached for all of them together.
        per_token_ns: Longest time a step may take, by the tightest objective there; 0 for no limit.
        sharing: Number of chains that have an agent in common with it, itself included.
    """

    lines: LatencyLines | None
    sessions: int = 0
    context_tokens: int = 0
    per_token_ns: Nanoseconds = 0
    sharing: int = 1


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """Times of the two ways of a move, in nanoseconds from its start to its hand-over.

    A field is None if that way is not possible.
    """

    kv_ns: Nanoseconds | None
    tokens_ns: Nanoseconds | None

    def kinds(self) -> list[TransferKind]:
        """Returns the possible kinds of transfer, the faster first; of equally fast ones caches."""
        times: list[tuple[TransferKind, Nanoseconds | None]] = [
            ("kv", self.kv_ns),
            ("tokens", self.tokens_ns),
        ]
        possible = [(time_ns, kind) for kind, time_ns in times if time_ns is not None]
        return [kind for _, kind in sorted(possible)]


def move_cost(
    source: Sequence[ChainHop],
    target: Sequence[ChainHop],
    tokens: int,
    cache_bytes_per_token: int | Mapping[AgentId, int],
    servers: Mapping[AgentId, ServerId],
) -> MoveCost:
    """Returns the cost of moving a session between two chains of one model.

    The caches of a block go from the agent that processes it in `source` to the one that does in
    `target`. Caches that stay on an agent pass no link, and those that stay within a server pass
    neither its uplink nor its downlink.

    Args:
        source: Hops of the chain where it is.
        target: Hops of the chain where it goes. They cover the same blocks, however these are cut.
        tokens: Number of tokens that are cached.
        cache_bytes_per_token: Bytes of key and value of one token in one block, from the decoder
            table. Rows travel as their sender keeps them, so the number may differ between source
            agents.
        servers: Server of each agent. An agent that is missing is alone on its server.
    """
    link_bytes: dict[str, int] = {}
    cache_bytes = 0
    for old in source:
        for new in target:
            blocks = min(old.last_block, new.last_block) - max(old.first_block, new.first_block)
            if blocks <= 0 or old.agent == new.agent:
                continue
            given = cache_bytes_per_token
            size = blocks * tokens * (given if isinstance(given, int) else given[old.agent])
            cache_bytes += size
            for link in _links(old.agent, new.agent, servers):
                link_bytes[link] = link_bytes.get(link, 0) + size
    return MoveCost(link_bytes, cache_bytes, tokens)


def move_times(move: TransferMove, rate: Callable[[str], int], load: ChainActivity) -> MoveTimes:
    """Returns how long a move takes as caches and as tokens.

    Args:
        move: The move.
        rate: Returns the bytes per second of a link; 0 if nothing is known about it.
        load: Load on the chain it goes to.
    """
    return MoveTimes(_sending_ns(move, rate), _reading_ns(move.tokens, load))


def tokens_per_epoch(load: ChainActivity, epoch_ns: Nanoseconds, slowdown: float) -> int:
    """Returns the computation boundary: how many tokens a chain reads again in one epoch.

    The number is such that the sessions there get their tokens at most `slowdown` more slowly, and
    that none misses its objective because of it. With a slowdown s, decode steps have epoch / (1 +
    s) and reading has the rest. A chain that generates nothing has the whole epoch.

    Source: Mell, computation boundary "at its batch size"; from fitted lines (Aladdin, eq. 2-3)
    instead of a profile made beforehand, so that it follows load and device.
    """
    if load.lines is None:
        return 0
    share_ns = float(epoch_ns)
    if load.sessions:
        step_ns = load.lines.decode(load.sessions, load.context_tokens)
        if load.per_token_ns and step_ns > 0:
            slowdown = min(slowdown, load.per_token_ns / step_ns - 1)
        share_ns = epoch_ns * max(0.0, slowdown) / (1 + max(0.0, slowdown))
    return _tokens_within(load.lines, share_ns / max(1, load.sharing))


def _links(source: AgentId, target: AgentId, servers: Mapping[AgentId, ServerId]) -> list[str]:
    links = [pair_link(source, target)]
    here = servers.get(source, ServerId(source))
    there = servers.get(target, ServerId(target))
    return links if here == there else [uplink(here), *links, downlink(there)]


def _sending_ns(move: TransferMove, rate: Callable[[str], int]) -> Nanoseconds | None:
    """Returns the nanoseconds that sending takes; None if the rate of a link is unknown.

    Links are passed at the same time, so the slowest one determines the time.
    """
    longest = 0
    for link, size in move.link_claims():
        bytes_per_second = rate(link)
        if bytes_per_second <= 0:
            return None
        longest = max(longest, -(-size * NANOSECONDS_PER_SECOND // bytes_per_second))
    return longest


def _reading_ns(tokens: int, load: ChainActivity) -> Nanoseconds | None:
    """Returns the nanoseconds that reading the tokens again takes; None without latency lines.

    Each chunk is followed by one step of the sessions that generate.
    """
    lines = load.lines
    if lines is None:
        return None
    steps_ns = 0.0
    if load.sessions and lines.prefill_chunk_tokens:
        chunks = -(-tokens // lines.prefill_chunk_tokens)
        steps_ns = chunks * lines.decode(load.sessions, load.context_tokens)
    return round(lines.prefill(tokens) + steps_ns)


def _tokens_within(lines: LatencyLines, share_ns: float) -> int:
    """Returns the largest number of tokens whose `lines.prefill` is within the time.

    The search is correct because `lines.prefill` never falls.
    """
    if lines.prefill(1) > share_ns:
        return 0
    low, high = 1, 2
    while lines.prefill(high) <= share_ns:
        if high >= _MOST_TOKENS:
            return _MOST_TOKENS
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lines.prefill(middle) <= share_ns else (low, middle)
    return low
