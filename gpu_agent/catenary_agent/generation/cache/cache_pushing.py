"""Sending caches to other agents: to the decode ring, or to the ring a session moves to.

The rows that a step has cached are exported between two steps and sent in frames. Caches thus
travel while more is computed, and little is left to send when a session stops here. At most a
window of copied bytes waits for each peer; all other rows stay in their slots. A session holds its
slots until nothing more is computed and all its frames have left. Where both sessions are on this
agent, rows are copied from slot to slot; agents of one host are lent them (`cache_lending`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from catenary_agent.generation.cache.cache_lending import PieceEnd
from catenary_agent.generation.state.events import CacheOut
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.states import CLOSED, LEAVING
from catenary_agent.kv import CacheSendProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from catenary_agent.generation.cache.cache_lending import CacheLender, Piece
    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.state.events import CachePushed
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv import CacheSpan
    from catenary_agent.kv.arrays import CacheArray
    from catenary_protos.catenary.v1 import common_pb2
    from catenary_services.errors import CatenaryError

    Take = Callable[[int, CacheSpan, CacheArray], None]
    """Writes rows into the cache of another session of this agent, given by its id."""
    Failed = Callable[[Session, int, CatenaryError], None]
    """Told that a session's rows cannot be read: the session, its id at the receiver, and the
    error."""

_MOST_URGENT_BYTES = 1 << 18


def outlets_of(
    session_id: int, own: common_pb2.Hop, ring: Sequence[common_pb2.Hop]
) -> tuple[CacheSendProgress, ...]:
    """Returns one cache send for each hop of a ring that shares blocks with the given hop.

    Two rings may be cut at different blocks, so a hop may send to several others.

    Args:
        session_id: The id of the session on `ring`.
        own: The hop whose caches are sent.
        ring: The hops that receive them.
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
    """Exports cached rows to peers, and ends sessions that have nothing left to do here.

    Invariants: frames of one session to one peer leave in order; none leaves of a closed session;
    between two calls of `renew`, at most the bytes that steps cached plus `CacheLimits.step_bytes`
    are exported.
    """

    def __init__(
        self,
        sessions: SessionTable,
        limits: CacheLimits,
        lender: CacheLender,
        take: Take,
        failed: Failed,
    ) -> None:
        self._sessions = sessions
        self._limits = limits
        self._lender = lender
        self._take = take
        self._failed = failed
        self.lines: dict[str, _Line] = {}
        """The sends that are queued for each peer; lines that are done with are removed."""
        self._left_bytes = 0

    def begin(self, session: Session) -> None:
        """Begins to export a session that was computed before it got cache sends."""
        for cache_send in session.cache_sends:
            cache_send.extend(session.cached)
            self._list(session, cache_send)

    def advanced(self, session: Session) -> None:
        """Extends the sends of a session after a step, or when it begins to leave."""
        row_bytes = session.batcher.executor.sizes.cache_bytes_per_token
        for cache_send in session.cache_sends:
            is_listed, added = cache_send.has_more, cache_send.extend(session.cached)
            self._left_bytes += added * (cache_send.last_block - cache_send.first_block) * row_bytes
            if not is_listed:
                self._list(session, cache_send)
        self.end_if_done(session)

    def renew(self) -> None:
        """Grants another `CacheLimits.step_bytes` of exports; to be called between steps."""
        self._left_bytes = self._limits.step_bytes
        for peer, line in list(self.lines.items()):
            self._pump(peer, line)

    @property
    def is_waiting(self) -> bool:
        """True if `renew` would export something."""
        return any(
            line.queue and line.nbytes < self._window(peer) and not line.is_lent
            for peer, line in self.lines.items()
        )

    def on_pushed(self, event: CachePushed) -> None:
        """Makes room in the window of a peer after a frame has left, and exports what fits."""
        cache = event.cache
        line = self.lines[cache.cache_send.peer]
        line.nbytes -= cache.rows.nbytes
        cache.cache_send.unsettled -= 1
        self.end_if_done(cache.session)
        self._pump(cache.cache_send.peer, line)

    def on_piece_ended(self, piece: Piece, end: PieceEnd) -> None:
        """Goes on after a piece was read, or sends its rows otherwise if it could not be."""
        session, cache_send = piece.session, piece.cache_send
        line = self.lines[cache_send.peer]
        line.is_lent = False
        cache_send.unsettled -= 1
        is_listed = cache_send.has_more
        if end is PieceEnd.REJECTED:
            cache_send.take_back(piece.spans)
        if not is_listed:
            self._list(session, cache_send)
        self.end_if_done(session)
        self._pump(cache_send.peer, line)

    def end_if_done(self, session: Session) -> None:
        """Frees the slots of a session that has nothing left to do here."""
        if session.state is LEAVING and all(each.is_empty for each in session.cache_sends):
            self._sessions.finish(session)

    def _list(self, session: Session, cache_send: CacheSendProgress) -> None:
        """Queues a cache send at its peer, if it has rows to export."""
        if cache_send.has_more:
            line = self.lines.setdefault(cache_send.peer, _Line())
            # A send that has begun goes first, so its session is handed over and frees its slots.
            add = line.queue.appendleft if cache_send.has_begun else line.queue.append
            add((session, cache_send))
            self._pump(cache_send.peer, line)

    def _pump(self, peer: str, line: _Line) -> None:
        """Exports queued rows in order, as far as the peer's window and the step's bytes allow."""
        while self._can_export(peer, line):
            session, cache_send = line.queue[0]
            if session.state is not CLOSED and cache_send.has_more:
                self._export(session, cache_send, line)
            if session.state is CLOSED or not cache_send.has_more:
                line.queue.popleft()
                self.end_if_done(session)
        if not line.queue and not line.nbytes and not line.is_lent:
            self.lines.pop(peer, None)

    def _can_export(self, peer: str, line: _Line) -> bool:
        has_room = line.nbytes < self._window(peer) and self._left_bytes > 0
        return bool(line.queue) and has_room and not line.is_lent

    def _window(self, peer: str) -> int:
        """Returns the most bytes that may wait for a peer: a frame until it answers an offer."""
        is_asked = self._lender.is_asked(peer)
        return self._limits.frame_bytes if is_asked else self._limits.window_bytes

    def _export(self, session: Session, cache_send: CacheSendProgress, line: _Line) -> None:
        """Exports the next frames together, as many as could be exported one after the other."""
        executor, limits = session.batcher.executor, self._limits
        row_bytes, peer = executor.sizes.cache_bytes_per_token, cache_send.peer
        blocks = cache_send.last_block - cache_send.first_block
        if cache_send.introduced and session.cached * blocks * row_bytes >= limits.least_lent_bytes:
            self._lender.offer(peer, cache_send.session_id, executor.lending)
        # The first frame of a session opens it at the peer, which lent memory cannot.
        lent_bytes = self._lender.room_for(peer, executor.lending) if cache_send.introduced else 0
        room = min(limits.export_bytes, self._window(peer) - line.nbytes, self._left_bytes)
        if lent_bytes:  # the last part of a run may take it beyond its size
            room = min(lent_bytes - limits.frame_bytes, self._left_bytes)
        frame_bytes = limits.frame_bytes_to(peer)
        if lent_bytes or self._lender.is_asked(peer):  # it is on this host, where no link is slow
            frame_bytes = limits.frame_bytes
        spans = cache_send.take(row_bytes, frame_bytes, room)
        whole = replace(spans[0], last_block=spans[-1].last_block)
        nbytes = whole.blocks * whole.tokens * row_bytes
        if limits.least_lent_bytes <= nbytes <= lent_bytes and self._lender.lend(
            session, cache_send, spans, whole, nbytes
        ):
            self._left_bytes -= nbytes
            cache_send.unsettled += 1
            line.is_lent = True
            return
        try:
            rows = executor.export_cache(session.spec.session_id, whole)
        except Exception:
            error = incident("its cache could not be read", str(session.batcher.key))
            self._failed(session, cache_send.session_id, error)
            return
        self._left_bytes -= rows.nbytes
        if cache_send.peer == self._sessions.agent_id:
            cache_send.introduced = True
            self._take(cache_send.session_id, whole, rows)
            return
        for span in spans:
            first = span.first_block - whole.first_block
            self._send(session, cache_send, line, span, rows[first : first + span.blocks])

    def _send(
        self,
        session: Session,
        cache_send: CacheSendProgress,
        line: _Line,
        span: CacheSpan,
        rows: CacheArray,
    ) -> None:
        opens, cache_send.introduced = not cache_send.introduced, True
        is_urgent = rows.nbytes <= _MOST_URGENT_BYTES and not cache_send.unsettled
        cache_send.unsettled += 1
        line.nbytes += rows.nbytes
        cache = CacheOut(session, cache_send, span, rows, opens, is_urgent)
        self._sessions.out.caches.append(cache)


class _Line:
    """The exports queued for one peer, and the bytes exported to it that have not left yet.

    Nothing is exported while a piece is lent to the peer: it may come back, and go first.
    """

    __slots__ = ("is_lent", "nbytes", "queue")

    def __init__(self) -> None:
        self.queue: deque[tuple[Session, CacheSendProgress]] = deque()
        self.nbytes = 0
        self.is_lent = False
