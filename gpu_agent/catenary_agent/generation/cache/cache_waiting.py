"""Sessions whose caches come from other agents wait for them, then go on as any other.

In the split phase the agents that run the prompt send them; in a live migration those of the ring
the session is on. Caches come as frames and go straight into the slots the session holds, between
two steps, a bounded part at a time. Steps of the ring that come earlier are kept in the session.
Beside the caches it needs a word: the first token, which another agent sampled, where tokens are
embedded or sampled; or that it is handed over (`arriving`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.generation.cache.cache_budget import relieve
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_agent.kv import array_of_payload
from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost

if TYPE_CHECKING:
    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.state.events import CacheArrived, TokenArrived
    from catenary_agent.generation.state.session import PendingCache, Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv import CacheSpan
    from catenary_agent.kv.arrays import CacheArray
    from catenary_services.domain.ids import Nanoseconds


class PendingCaches:
    """The sessions whose caches have not come yet.

    Invariant: each of them has our stall timeout until it goes on (one that was not handed over
    yet: that of `MigrationTarget`); closed ones are dropped when their time is over. Frames are
    taken in in the order of their arrival.
    """

    def __init__(
        self,
        sessions: SessionTable,
        limits: CacheLimits,
        clock: Callable[[], Nanoseconds],
        came: Callable[[Session], None],
    ) -> None:
        """Gives sessions up for which nothing came for too long.

        Args:
            sessions: Of this agent.
            limits: How long that is, and how much is taken in between two steps.
            clock: Monotonic.
            came: Told a session that has got a part of its caches and still waits.
        """
        self._sessions = sessions
        self._step_bytes = limits.step_bytes
        self._clock = clock
        self._came = came
        self._stall_timer = StallTimer(limits.stall_timeout_ns)
        self._arrived: deque[CacheArrived] = deque()
        self._left_bytes = limits.step_bytes
        self.ignored = 0
        """Parts of caches that nobody waits for."""

    def begin(self, session: Session) -> None:
        """Only caches and a token keep a session waiting from now on."""
        self._stall_timer.touch(session.spec.session_id, self._clock())

    def on_cache(self, event: CacheArrived) -> None:
        """Takes a part of a cache in, now or between later steps."""
        self._arrived.append(event)
        self._take_in()

    def renew(self) -> None:
        """Another step may have passed: as many bytes as between any two may be taken in."""
        self._left_bytes = self._step_bytes
        self._take_in()

    @property
    def is_waiting(self) -> bool:
        """True if `renew` would take something in."""
        return bool(self._arrived)

    def take(self, session_id: int, span: CacheSpan, rows: CacheArray) -> None:
        """Takes rows in that another session of this agent has cached."""
        session = self._sessions.get(session_id)
        if session is not None and session.pending_cache is not None:
            self._keep(session, session.pending_cache, span, lambda: rows)

    def on_token(self, session: Session, pending_cache: PendingCache, event: TokenArrived) -> None:
        """Takes the first token in, which the other ring sampled."""
        spec, table = session.spec, session.batcher.executor.table
        if event.position != spec.history or event.token_id >= table.vocabulary_size:
            text = f"token {event.token_id} at {event.position}; the one at {spec.history} is next"
            self._sessions.fail(spec.session_id, InvalidInput("position", text))
            return
        session.arrived = event.arrived
        session.learn([event.token_id])
        pending_cache.word = False
        self.advanced(session, pending_cache)

    def advanced(self, session: Session, pending_cache: PendingCache) -> None:
        """Lets a session go on if nothing is missing any more."""
        session_id, now = session.spec.session_id, self._clock()
        if not pending_cache.is_over:
            if session_id in self._stall_timer:
                self._stall_timer.touch(session_id, now)
            self._came(session)
            return
        self._stall_timer.drop(session_id)
        session.pending_cache = None
        session.cached = pending_cache.caches.tokens
        if session.spec.is_first:
            sent_ns = session.arrived.received_ns - session.arrived.transfer_ns
            model = session.batcher.key.model.name
            out = self._sessions.out
            if session.spec.side == "decode":
                out.handed_over.append((model, max(0, now - sent_ns)))
            else:
                out.taken_over.append((model, "kv", max(0, now - sent_ns)))
        if session.pending:
            session.batcher.queue_first(session, now)

    def expire(self, now: Nanoseconds) -> None:
        """Gives up sessions for which nothing came for too long."""
        for session_id in self._stall_timer.lost(now):
            session = self._sessions.get(session_id)
            if session is not None and session.pending_cache is not None:
                text = f"nothing of its caches came for {self._stall_timer}"
                blamed = _source(session, session.pending_cache)
                self._sessions.fail(session_id, PartitionLost(text), blamed)

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns when `expire` has something to do; None if never."""
        return self._stall_timer.next_wakeup_ns()

    def _take_in(self) -> None:
        out = self._sessions.out
        while self._arrived and self._left_bytes > 0:
            event = self._arrived.popleft()
            out.consumed_bytes += event.nbytes
            out.consumed.append(event.frame)
            session = self._sessions.get(event.session_id)
            if session is None or session.pending_cache is None:
                self.ignored += 1
                continue
            self._left_bytes -= event.nbytes
            table = session.batcher.executor.table
            row = (table.key_value_heads, table.head_size)
            payload, datatype, span = event.frame.payload, event.datatype, event.span
            read = partial(array_of_payload, payload, datatype, span, row)
            self._keep(session, session.pending_cache, span, read)

    def _keep(
        self,
        session: Session,
        pending_cache: PendingCache,
        span: CacheSpan,
        read: Callable[[], CacheArray],
    ) -> None:
        """Writes rows into a session's slots; what is wrong with them fails the session."""
        session_id, executor = session.spec.session_id, session.batcher.executor
        try:
            rows = read()
            pending_cache.caches.check(span)
            relieve(self._sessions, session.batcher, {session_id: span.last_token})
            if session.closed:
                return
            executor.import_cache(session_id, span, rows)
            pending_cache.caches.add(span)
        except CatenaryError as error:
            error.__traceback__ = None  # its frames hold views of the payload
            self._sessions.fail(session_id, error)
        except Exception:
            what = "its cache could not be written"
            self._sessions.fail(session_id, incident(what, str(session.batcher.key)))
        else:
            self.advanced(session, pending_cache)


def _source(session: Session, pending_cache: PendingCache) -> str:
    """Returns the agent that should have sent what is missing."""
    if pending_cache.leader:
        return pending_cache.leader
    route = session.spec.opening.route
    block = pending_cache.caches.missing_block
    for hop in route:
        if block is not None and hop.first_block <= block < hop.last_block:
            return hop.agent_id
    return route[-1].agent_id
