"""The frame that carries a part of a session's key-value cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.kv import datatype_of
from catenary_protos.catenary.v1 import frame_pb2

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import CacheOut
    from catenary_agent.generation.state.session import SessionSpec


@dataclass(slots=True)
class CacheFrame:
    """Keys and values of one session, addressed to one agent."""

    out: CacheOut
    settled: Callable[[CacheOut], None]
    """Called exactly once, when the frame has left or was given up."""

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return self.out.rows.nbytes

    @property
    def session_ids(self) -> tuple[int, ...]:
        """The session, by its id at the receiver, that fails if this cannot be delivered."""
        return (self.out.cache_send.session_id,)

    def fill(self, view: memoryview) -> None:
        """Writes the payload.

        This runs on the event loop, so frames are small (1 MiB takes 0.1 ms).
        """
        rows = self.out.rows
        np.frombuffer(view, rows.dtype).reshape(rows.shape)[:] = rows

    def header(self, epoch: int, agent_id: str) -> bytes:
        """Returns the encoded header, with the current time as the time of sending."""
        now, span = time.monotonic_ns(), self.out.span
        cache = frame_pb2.SessionCache(
            session_id=self.out.cache_send.session_id,
            first_block=span.first_block,
            last_block=span.last_block,
            first_token=span.first_token,
            last_token=span.last_token,
            datatype=datatype_of(self.out.rows),
        )
        if self.out.opens:
            put_opening(cache.opening, self.out.session.spec, now)
        return frame_pb2.FrameHeader(
            kind=frame_pb2.FRAME_KIND_SESSION_CACHE,
            epoch=epoch,
            sent_monotonic_ns=now,
            cache=cache,
        ).SerializeToString()


def put_opening(target: frame_pb2.SessionOpening, spec: SessionSpec, now_ns: int) -> None:
    """Writes a session's opening for the next agent, with the time left until its deadline."""
    target.CopyFrom(spec.opening)
    target.budget_ns = spec.deadline_ns - now_ns
