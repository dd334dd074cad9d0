"""The constant properties of a session at one agent, and what its work arrives with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2

Hidden = NDArray[np.float32]
"""Hidden states, `[tokens, hidden]`."""
Side = Literal["mixed", "prefill", "decode"]
"""The work of a ring for a session: everything, only its prompt, or only the tokens after it."""


class Drafts(NamedTuple):
    """The guessed tokens that the last rows of a step belong to."""

    tokens: tuple[int, ...] = ()
    are_taken: bool = False
    """True if all agents that the rows have passed can take some."""


NO_DRAFTS = Drafts()


@dataclass(frozen=True, slots=True)
class ArrivalTime:
    """The arrival of work on this process's monotonic clock, in nanoseconds."""

    received_ns: int
    transfer_ns: int = 0
    """Nanoseconds since the sender's push; 0 if the clocks differ, or if nothing was sent."""
    timings: Sequence[common_pb2.HopTiming] = ()
    """Timings of the previous hops of this step, if the session is timed."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The properties of a session that are constant while it is here."""

    session_id: int
    opening: frame_pb2.SessionOpening
    hop: int
    """Index of this agent's hop in its ring."""
    deadline_ns: int
    """The deadline on this process's monotonic clock."""
    side: Side = "mixed"
    is_first: bool = field(init=False)
    """True if this agent embeds the session's tokens."""
    is_last: bool = field(init=False)
    """True if this agent samples the session's tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_first", self.hop == 0)
        object.__setattr__(self, "is_last", self.hop == len(self.ring) - 1)

    @property
    def ring(self) -> Sequence[common_pb2.Hop]:
        """The ring of this agent; in the split phase a session has two."""
        return self.opening.decode_route if self.side == "decode" else self.opening.route

    @property
    def history(self) -> int:
        """Number of tokens in the opening: the prompt, and what was generated elsewhere."""
        return len(self.opening.token_ids)

    @property
    def own_hop(self) -> common_pb2.Hop:
        """The blocks that this agent computes for the session."""
        return self.ring[self.hop]

    @property
    def first_agent(self) -> str:
        """The agent that takes the sampled tokens for the next step."""
        return self.ring[0].agent_id

    @property
    def next_agent(self) -> str:
        """The agent that takes the hidden states; undefined for the last hop."""
        return self.ring[self.hop + 1].agent_id
