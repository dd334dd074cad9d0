"""The prefill side of the split phase: caches leave for the ring that generates.

Whatever a step has cached is cut into frames and exported between two steps, so caches travel while
the rest of the prompt is computed, and little is left to be sent when it ends. At most a window of
copies waits for a peer; what does not fit stays in its slots. A session holds them until its prompt
is computed and all its frames have left.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from gpu_agent.generation.events import CacheOut
from gpu_agent.generation.incidents import incident
from gpu_agent.kv import CacheOutlet

if TYPE_CHECKING:
    from gpu_agent.generation.events import CachePushed
    from gpu_agent.generation.session import Facts, Session
    from gpu_agent.generation.sessions import Sessions
    from gpu_agent.generation.surroundings import CacheLimits


def outlets_of(facts: Facts, limit: int) -> tuple[CacheOutlet, ...]:
    """Returns who gets which of the blocks of this hop.

    The two rings may be cut at different blocks: there is one outlet per overlap.

    Args:
        facts: Of a session on its prefill side.
        limit: Most tokens it may have; with room for one more there is nothing to hand over.
    """
    if limit <= facts.history + 1:
        return ()
    own = facts.own_hop
    return tuple(
        CacheOutlet(
            hop.agent_id,
            max(own.first_block, hop.first_block),
            min(own.last_block, hop.last_block),
        )
        for hop in facts.opening.decode_route
        if hop.first_block < own.last_block and own.first_block < hop.last_block
    )


class CachePushing:
    """Exports what was cached, and ends sessions that are handed over.

    Invariants: frames of one session and peer leave in order; of a closed session none leaves.
    """

    def __init__(self, sessions: Sessions, limits: CacheLimits) -> None:
        """Sends nothing yet."""
        self._sessions = sessions
        self._limits = limits
        self._lines: dict[str, _Line] = {}

    def advanced(self, session: Session) -> None:
        """A step has cached more of a prompt."""
        row_bytes = session.lane.executor.table.cache_bytes_per_token
        for outlet in session.outlets:
            is_listed = outlet.has_more
            outlet.extend(session.cached, row_bytes, self._limits.frame_bytes)
            line = self._lines.setdefault(outlet.peer, _Line())
            if outlet.has_more and not is_listed:
                line.queue.append((session, outlet))
            self._pump(outlet.peer, line)
        self._end_if_done(session)

    def on_pushed(self, event: CachePushed) -> None:
        """A frame has left: others may follow."""
        line = self._lines[event.peer]
        line.nbytes -= event.nbytes
        session = self._sessions.get(event.session_id)
        if session is not None:
            for outlet in session.outlets:
                outlet.unsettled -= outlet.peer == event.peer
            self._end_if_done(session)
        self._pump(event.peer, line)

    def _pump(self, peer: str, line: _Line) -> None:
        """Exports as much as the window allows, the sessions in their order."""
        while line.queue and line.nbytes < self._limits.window_bytes:
            session, outlet = line.queue[0]
            if not session.closed:
                self._export(session, outlet, line)
            if session.closed or not outlet.has_more:
                line.queue.popleft()
        if not line.queue and not line.nbytes:
            del self._lines[peer]

    def _export(self, session: Session, outlet: CacheOutlet, line: _Line) -> None:
        span, facts = outlet.take(), session.facts
        try:
            rows = session.lane.executor.export_cache(facts.session_id, span)
        except Exception:
            error = incident("its cache could not be read", str(session.lane.key))
            self._sessions.fail(facts.session_id, error)
            return
        opens, outlet.introduced = not outlet.introduced, True
        outlet.unsettled += 1
        line.nbytes += rows.nbytes
        self._sessions.out.caches.append(CacheOut(facts, outlet.peer, span, rows, opens))

    def _end_if_done(self, session: Session) -> None:
        """Frees the slots of a session that has nothing left to do here."""
        is_computed = session.cached >= session.facts.history
        if not session.closed and is_computed and all(each.is_empty for each in session.outlets):
            self._sessions.finish(session)


class _Line:
    """What waits to be exported for one peer, and the bytes that wait to leave."""

    __slots__ = ("nbytes", "queue")

    def __init__(self) -> None:
        self.queue: deque[tuple[Session, CacheOutlet]] = deque()
        self.nbytes = 0
