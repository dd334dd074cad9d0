"""A part of a session's caches as a frame."""

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
    """Keys and values of one session for one agent."""

    out: CacheOut
    settled: Callable[[CacheOut], None]
    """Called exactly once, when it has left or will not."""

    @property
    def nbytes(self) -> int:
        """Of the payload."""
        return self.out.rows.nbytes

    @property
    def session_ids(self) -> tuple[int, ...]:
        """The session that fails if this cannot be delivered."""
        return (self.out.cache_send.session_id,)

    def fill(self, view: memoryview) -> None:
        """Writes the payload: on the event loop, so frames are small (1 MiB in 0.1 ms)."""
        rows = self.out.rows
        np.frombuffer(view, rows.dtype).reshape(rows.shape)[:] = rows

    def header(self, epoch: int, agent_id: str) -> bytes:
        """Returns the header, with times as of now."""
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
    """Writes what the next agent is told of a session, with what is left of its time."""
    target.CopyFrom(spec.opening)
    target.budget_ns = spec.deadline_ns - now_ns
