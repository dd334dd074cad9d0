"""What a move takes: bytes on which links as caches, tokens to read again, and time either way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from catenary_scheduler.packing.transfers.transfers import TransferKind, TransferMove
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds, ServerId
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import ChainHop

_MOST_TOKENS = 1 << 40
"""Where reading costs nothing by the lines, which are straight and may be flat."""


def pair_link(source: AgentId, target: AgentId) -> str:
    """Returns the link from one agent to another, whatever lies between them."""
    return f"{source}>{target}"


def uplink(server: ServerId) -> str:
    """Returns what all agents of a server send to other servers through."""
    return f"{server}:up"


def downlink(server: ServerId) -> str:
    """Returns what all agents of a server hear from other servers through."""
    return f"{server}:down"


@dataclass(frozen=True, slots=True)
class MoveCost:
    """What a session's move takes.

    Attributes:
        link_bytes: If its caches travel: bytes on every link they pass.
        cache_bytes: Bytes that travel at all, each counted once.
        tokens: If its tokens travel: so many are read again.
    """

    link_bytes: Mapping[str, int]
    cache_bytes: int
    tokens: int

    def move(self, number: int, source: Hashable, target: Hashable) -> TransferMove:
        """Returns the move as `divide` wants it."""
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
    """What a chain computes at the moment.

    Attributes:
        lines: Its latency lines; None if nothing is known, and then it reads no tokens again.
        sessions: Sessions that generate there.
        context_tokens: Tokens cached of them all.
        per_token_ns: Most time a step may take, by the tightest objective there; 0: any.
        sharing: So many chains, this one among them, have an agent in common with it.
    """

    lines: LatencyLines | None
    sessions: int = 0
    context_tokens: int = 0
    per_token_ns: Nanoseconds = 0
    sharing: int = 1


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """How long a move takes before it hands over; None where that way is not possible."""

    kv_ns: Nanoseconds | None
    tokens_ns: Nanoseconds | None

    def ways(self) -> list[TransferKind]:
        """Returns the ways that are possible, the faster first; as caches if both are as fast."""
        times: list[tuple[TransferKind, Nanoseconds | None]] = [
            ("kv", self.kv_ns),
            ("tokens", self.tokens_ns),
        ]
        possible = [(time_ns, way) for way, time_ns in times if time_ns is not None]
        return [way for _, way in sorted(possible)]


def move_cost(
    source: Sequence[ChainHop],
    target: Sequence[ChainHop],
    tokens: int,
    cache_bytes_per_token: int | Mapping[AgentId, int],
    servers: Mapping[AgentId, ServerId],
) -> MoveCost:
    """Returns what it takes to move a session between two chains of one model.

    The caches of a block go from the agent that processes it here to the one that does there; what
    stays on an agent passes no link, and what stays within a server neither its uplink nor its
    downlink.

    Args:
        source: Where it is.
        target: Where it goes; the same blocks, however they are cut.
        tokens: That are cached.
        cache_bytes_per_token: Key and value of one token in one block, by the decoder table: rows
            travel as their sender keeps them, so it may be another number for every source.
        servers: Of the agents; one that is not named is alone on its server.
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
    """Returns how long a move takes either way.

    Args:
        move: It.
        rate: Bytes per second of a link; 0: nothing is known of it.
        load: Of the chain it goes to.
    """
    return MoveTimes(_sending_ns(move, rate), _reading_ns(move.tokens, load))


def tokens_per_epoch(load: ChainActivity, epoch_ns: Nanoseconds, slowdown: float) -> int:
    """Returns the computation boundary: how many tokens a chain reads again in one epoch.

    So many that the sessions there get their tokens at most `slowdown` more slowly, and none
    misses its objective for it: with a share s, decode steps have epoch / (1 + s) and reading the
    rest. A chain that generates nothing has the whole epoch.

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
    """Links are passed at the same time, so the slowest is what counts."""
    longest = 0
    for link, size in move.link_claims():
        bytes_per_second = rate(link)
        if bytes_per_second <= 0:
            return None
        longest = max(longest, -(-size * NANOSECONDS_PER_SECOND // bytes_per_second))
    return longest


def _reading_ns(tokens: int, load: ChainActivity) -> Nanoseconds | None:
    """A chunk at a time, with a step of those who generate behind each."""
    lines = load.lines
    if lines is None:
        return None
    steps_ns = 0.0
    if load.sessions and lines.prefill_chunk_tokens:
        chunks = -(-tokens // lines.prefill_chunk_tokens)
        steps_ns = chunks * lines.decode(load.sessions, load.context_tokens)
    return round(lines.prefill(tokens) + steps_ns)


def _tokens_within(lines: LatencyLines, share_ns: float) -> int:
    """Returns the most tokens whose `lines.prefill` is within the time; that never falls."""
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
