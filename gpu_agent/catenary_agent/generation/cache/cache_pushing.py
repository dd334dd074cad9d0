"""Caches leave for other agents: for the ring that generates, or for the one a session moves to.

Whatever a step has cached is exported between two steps and sent in frames, so caches travel while
more is computed, and little is left to be sent when a session stops here. At most a window of
copies waits for a peer; what does not fit stays in its slots. A session holds them until nothing
more is computed and all its frames have left. Where both sessions are on this agent, rows go from
slot to slot.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from catenary_agent.generation.state.events import CacheOut
from catenary_agent.generation.state.incidents import incident
from catenary_agent.kv import CacheSendProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.state.events import CachePushed
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv import CacheSpan
    from catenary_agent.kv.arrays import CacheArray
    from catenary_protos.catenary.v1 import common_pb2
    from catenary_services.errors import CatenaryError

    Take = Callable[[int, CacheSpan, CacheArray], None]
    """Takes rows into a session of this agent."""
    Failed = Callable[[Session, int, CatenaryError], None]
    """A session's rows cannot be read; with what it is called where they go."""

_MOST_URGENT_BYTES = 1 << 18


def outlets_of(
    session_id: int, own: common_pb2.Hop, ring: Sequence[common_pb2.Hop]
) -> tuple[CacheSendProgress, ...]:
    """Returns who gets which of the blocks of a hop.

    Two rings may be cut at different blocks: there is one send per overlap.

    Args:
        session_id: What the session is called on `ring`.
        own: The hop.
        ring: Where its caches go.
    """
    return tuple(
        CacheSendProgress(
            session_id,
            hop.agent_id,
            max(own.first_block, hop.first_block),
            min(own.last_block, hop.last_block),
        )
        for hop in ring
        if hop.first_block < own.last_block and own.first_block < hop.last_block
    )


class CachePusher:
    """Exports what was cached, and ends sessions that have nothing left to do here.

    Invariants: frames of one session and peer leave in order; of a closed session none leaves;
    between two `renew`s no more than a step's worth of bytes is exported beside what was cached.
    """

    def __init__(
        self, sessions: SessionTable, limits: CacheLimits, take: Take, failed: Failed
    ) -> None:
        """Sends nothing yet."""
        self._sessions = sessions
        self._limits = limits
        self._take = take
        self._failed = failed
        self._lines: dict[str, _Line] = {}
        self._left_bytes = 0

    def begin(self, session: Session) -> None:
        """A session that was computed before has got sends."""
        for cache_send in session.cache_sends:
            cache_send.extend(session.cached)
            self._list(session, cache_send)

    def advanced(self, session: Session) -> None:
        """A step has cached more of a session with sends, or it begins to leave."""
        row_bytes = session.batcher.executor.sizes.cache_bytes_per_token
        for cache_send in session.cache_sends:
            is_listed, added = cache_send.has_more, cache_send.extend(session.cached)
            self._left_bytes += added * (cache_send.last_block - cache_send.first_block) * row_bytes
            if not is_listed:
                self._list(session, cache_send)
        self.end_if_done(session)

    def renew(self) -> None:
        """Another step may have passed: as many bytes as between any two may be exported."""
        self._left_bytes = self._limits.step_bytes
        for peer, line in list(self._lines.items()):
            self._pump(peer, line)

    @property
    def is_waiting(self) -> bool:
        """True if `renew` would export something."""
        window = self._limits.window_bytes
        return any(line.queue and line.nbytes < window for line in self._lines.values())

    def on_pushed(self, event: CachePushed) -> None:
        """A frame has left: others may follow."""
        cache = event.cache
        line = self._lines[cache.cache_send.peer]
        line.nbytes -= cache.rows.nbytes
        cache.cache_send.unsettled -= 1
        self.end_if_done(cache.session)
        self._pump(cache.cache_send.peer, line)

    def end_if_done(self, session: Session) -> None:
        """Frees the slots of a session that has nothing left to do here."""
        if session.leaves and not session.closed and all(o.is_empty for o in session.cache_sends):
            self._sessions.finish(session)

    def _list(self, session: Session, cache_send: CacheSendProgress) -> None:
        """Puts what a cache send has into the line of its peer."""
        if cache_send.has_more:
            line = self._lines.setdefault(cache_send.peer, _Line())
            # Who has begun goes on first: then it is handed over, and its slots are free.
            add = line.queue.appendleft if cache_send.has_begun else line.queue.append
            add((session, cache_send))
            self._pump(cache_send.peer, line)

    def _pump(self, peer: str, line: _Line) -> None:
        """Exports as much as the window allows, the sessions in their order."""
        window = self._limits.window_bytes
        while line.queue and line.nbytes < window and self._left_bytes > 0:
            session, cache_send = line.queue[0]
            if not session.closed and cache_send.has_more:
                self._export(session, cache_send, line)
            if session.closed or not cache_send.has_more:
                line.queue.popleft()
                self.end_if_done(session)
        if not line.queue and not line.nbytes:
            self._lines.pop(peer, None)

    def _export(self, session: Session, cache_send: CacheSendProgress, line: _Line) -> None:
        executor = session.batcher.executor
        span = cache_send.take(executor.sizes.cache_bytes_per_token, self._limits.frame_bytes)
        try:
            rows = executor.export_cache(session.spec.session_id, span)
        except Exception:
            error = incident("its cache could not be read", str(session.batcher.key))
            self._failed(session, cache_send.session_id, error)
            return
        self._left_bytes -= rows.nbytes
        opens, cache_send.introduced = not cache_send.introduced, True
        if cache_send.peer == self._sessions.agent_id:
            self._take(cache_send.session_id, span, rows)
            return
        is_urgent = rows.nbytes <= _MOST_URGENT_BYTES and not cache_send.unsettled
        cache_send.unsettled += 1
        line.nbytes += rows.nbytes
        cache = CacheOut(session, cache_send, span, rows, opens, is_urgent)
        self._sessions.out.caches.append(cache)


class _Line:
    """What waits to be exported for one peer, and the bytes that wait to leave."""

    __slots__ = ("nbytes", "queue")

    def __init__(self) -> None:
        self.queue: deque[tuple[Session, CacheSendProgress]] = deque()
        self.nbytes = 0
