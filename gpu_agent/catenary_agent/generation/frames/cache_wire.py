"""The frame that carries a part of a session's key-value cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.generation.frames.peers import Priority, SessionFrame
from catenary_agent.kv import datatype_of
from catenary_protos.catenary.v1 import frame_pb2

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import CacheOut
    from catenary_agent.generation.state.session import SessionSpec


@dataclass(slots=True)
class CacheFrame(SessionFrame):
    """Keys and values of one session, addressed to one agent. Copying 1 MiB takes 0.1 ms."""

    KIND = frame_pb2.FRAME_KIND_SESSION_CACHE
    CARRIES_CACHE = True
    out: CacheOut
    settled: Callable[[CacheOut], None]
    """Called exactly once, when the frame has left or was given up."""

    @property
    def nbytes(self) -> int:
        return self.out.rows.nbytes

    @property
    def session_ids(self) -> tuple[int, ...]:
        return (self.out.cache_send.session_id,)

    @property
    def priority(self) -> Priority:
        return Priority.RINGS if self.out.is_urgent else Priority.CACHES

    def settle(self) -> None:
        self.settled(self.out)

    def fill(self, view: memoryview) -> None:
        rows = self.out.rows
        np.frombuffer(view, rows.dtype).reshape(rows.shape)[:] = rows

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        span, cache = self.out.span, header.cache
        cache.session_id = self.out.cache_send.session_id
        cache.first_block, cache.last_block = span.first_block, span.last_block
        cache.first_token, cache.last_token = span.first_token, span.last_token
        cache.datatype = datatype_of(self.out.rows)
        if self.out.opens:
            put_opening(cache.opening, self.out.session.spec, header.sent_monotonic_ns)


def put_opening(target: frame_pb2.SessionOpening, spec: SessionSpec, now_ns: int) -> None:
    """Writes a session's opening for the next agent, with the time left until its deadline."""
    target.CopyFrom(spec.opening)
    target.budget_ns = spec.deadline_ns - now_ns
