"""Latency lines of a chain: its hops added up, with the ways between them.

A token passes all hops one after the other. A step of the ring therefore takes the sum of the times
of each hop for the batch, plus one way per hop, since the last hop hands the token back to the
first. That is exact for sessions that go round together. If they go round in several groups, each
hop computes smaller batches, and the sum is an upper bound.

A prompt runs in chunks of C tokens, and while the second hop computes a chunk the first computes
the next one. The first chunk takes the sum over the hops; every token after it takes as long as at
the slowest hop, where chunks of C follow each other:

    prefill(n) = sum_i(c1_i + k1_i * min(n, C)) + max(0, n - C) * max_i(p_i(C)) / C + ways

where p_i(C) is the time of a whole chunk. For one hop that is the time of its chunks one by one,
without the empty part of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catenary_scheduler.planning.live.generation import GenerationCost
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.latency import LatencyLines

HOP_NS = 500_000.0
"""Nanoseconds that one frame takes from agent to agent, all included, if they are in one place."""


@dataclass(frozen=True, slots=True)
class HopCost:
    """Cost of one hop of a chain.

    Attributes:
        cost: Cost of a pass through all blocks of its partition.
        share: Share of the partition that the chain uses; less than 1 if it enters behind the first
            block.
        row_ns: Nanoseconds that one token's hidden state travels to it; 0 if its link is unknown.
        longer_ns: Nanoseconds by which a frame takes longer to it than is usual, from the hop
            before it; to the first hop, from the last one.
    """

    cost: GenerationCost
    share: float = 1.0
    row_ns: float = 0.0
    longer_ns: float = 0.0


def chain_lines(hops: Sequence[HopCost], hop_ns: float = HOP_NS) -> LatencyLines:
    """Returns the latency lines of a chain, with caches counted in tokens.

    Args:
        hops: The hops in order; at least one.
        hop_ns: Nanoseconds that one way from agent to agent usually takes.
    """
    several = len(hops) > 1
    # A prompt goes from the gateway, between agents, and back to the gateway. A step passes no
    # gateway.
    prompt_ways_ns = (len(hops) + 1) * hop_ns + sum(hop.longer_ns for hop in hops[1:])
    ring_ways_ns = len(hops) * hop_ns + sum(hop.longer_ns for hop in hops)
    step_ways_ns = ring_ways_ns if several else 0.0
    # Token ids enter at the first hop; rows of hidden states travel to the others.
    row_ns = sum(hop.row_ns for hop in hops[1:])
    lone = [hop.share * _lone_ns(hop.cost) for hop in hops]
    ring_ns = sum(lone) + row_ns + step_ways_ns
    floor = sum(hop.share * hop.cost.prefill_floor_ns for hop in hops)
    return LatencyLines(
        prefill_token_ns=sum(hop.share * hop.cost.prefill_token_ns for hop in hops) + row_ns,
        prefill_ns=sum(hop.share * hop.cost.prefill_ns for hop in hops) + prompt_ways_ns,
        decode_context_token_ns=sum(h.share * h.cost.decode_context_token_ns for h in hops),
        decode_session_ns=sum(hop.share * hop.cost.decode_session_ns for hop in hops) + row_ns,
        decode_ns=sum(hop.share * hop.cost.decode_ns for hop in hops) + step_ways_ns,
        decode_lone_ns=ring_ns if all(lone) else 0.0,
        prefill_floor_ns=floor + prompt_ways_ns if floor else 0.0,
        prefill_chunk_tokens=max(hop.cost.prefill_chunk_tokens for hop in hops),
        prefill_later_token_ns=_later_token_ns(hops),
        hop_shares=tuple([each / ring_ns for each in lone]) if several and ring_ns else (),
    )


def cache_line(decoder: DecoderTable) -> tuple[float, float]:
    """Returns h and j of eq. 1 in bytes: for a token in all blocks, and for a session beside that.

    Executors keep keys and values and nothing else per session, so j is 0. Plans count caches in
    tokens (h = 1): a session has the same tokens in every block it passes, on whatever agent.
    """
    return float(decoder.blocks * decoder.cache_bytes_per_token), 0.0


def _lone_ns(cost: GenerationCost) -> float:
    return cost.decode_lone_ns or cost.decode_ns + cost.decode_session_ns


def _later_token_ns(hops: Sequence[HopCost]) -> float:
    """Returns the nanoseconds of a token behind the first chunk; 0 if prompts are not divided."""
    chunk = max(hop.cost.prefill_chunk_tokens for hop in hops)
    if not chunk:
        return 0.0
    return max(
        hop.share
        * hop.cost.prefill(hop.cost.prefill_chunk_tokens or chunk)
        / (hop.cost.prefill_chunk_tokens or chunk)
        + hop.row_ns
        for hop in hops
    )
