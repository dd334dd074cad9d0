"""An answer's ways between chains: live moves, and new starts after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from catenary_gateway.generation.session import PendingSession
from catenary_protos.catenary.v1 import common_pb2

RESTART = "restart"


@dataclass(frozen=True, slots=True)
class ChainChange:
    """An answer that was begun on one chain went on another.

    Attributes:
        how: "kv" or "tokens" for a live move, by what travelled; "restart".
        generated_tokens: So many were generated before.
        after_ns: From the request's arrival to the first token of the new chain.
        stall_ns: From the last token of the old chain to the first of the new one.
        from_agents: Agents of the ring that generated before, in the order of their blocks.
        to_agents: The same of the new one.
    """

    how: str
    generated_tokens: int
    after_ns: int
    stall_ns: int
    from_agents: tuple[str, ...]
    to_agents: tuple[str, ...]


def chain_changes(session: PendingSession) -> tuple[ChainChange, ...]:
    """Returns every change of the chain whose tokens the client has, in order."""
    fruitful = [start for start in session.starts if start.first_token_ns]
    return tuple(
        ChainChange(
            how=RESTART if start.moves is None else start.mode,
            generated_tokens=start.history_tokens,
            after_ns=start.first_token_ns - session.arrival.monotonic_ns,
            stall_ns=start.first_token_ns - before.last_token_ns,
            from_agents=_agents(before.ring),
            to_agents=_agents(start.ring),
        )
        for before, start in pairwise(fruitful)
    )


def _agents(ring: Sequence[common_pb2.Hop]) -> tuple[str, ...]:
    return tuple(hop.agent_id for hop in ring)
