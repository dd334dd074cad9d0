"""Changes of an answer's chain: live moves, and restarts after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.observability.generations import RESTART, ChainChange
from catenary_protos.catenary.v1 import common_pb2


def chain_changes(session: PendingSession) -> tuple[ChainChange, ...]:
    """Returns the chain changes of an answer, in order.

    Only chains count that have brought a token to the client.
    """
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
