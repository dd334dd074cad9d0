"""Sessions that wait for caches from other agents, and continue like any other once these are here.

In the split phase the agents that ran the prompt send them; in a live migration the agents of the
session's old ring do; those of a prompt that several sessions share are copied here
(`shared_prompts`). Caches come as frames or lie in memory of another agent, and are written into
the slots of the session between two steps, a bounded part at a time. Rows of the ring that arrive
earlier are kept in the session.
Beside its caches a session may need one more message: in the split phase the first token, which the
prefill ring sampled, on hops that embed or sample tokens; in a live migration the hand-over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.generation.cache.cache_borrowing import UnreadableError
from catenary_agent.generation.cache.cache_budget import relieve
from catenary_agent.generation.state.events import CacheLent
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_agent.generation.state.states import AWAITING_TOKEN, CLOSED, RECEIVING, WAITING
from catenary_agent.kv import array_of_payload
from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost

if TYPE_CHECKING:
    from catenary_agent.generation.cache.cache_borrowing import CacheBorrower
    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.state.events import CacheArrived, TokenArrived
    from catenary_agent.generation.state.session import PendingCache, Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv import CacheSpan
    from catenary_agent.kv.arrays import CacheArray
    from catenary_services.domain.ids import Nanoseconds

    Write = Callable[[], None]
    """Writes rows that were checked."""


class PendingCaches:
    """The sessions whose caches have not fully arrived.

    Invariants: each of them has the stall timeout until it continues (before it is handed over,
    that of `MigrationTarget` instead); closed sessions are dropped when their timeout ends. Frames
    are written in the order of their arrival.
    """

    def __init__(
        self,
        sessions: SessionTable,
        limits: CacheLimits,
        clock: Callable[[], Nanoseconds],
        came: Callable[[Session], None],
        borrower: CacheBorrower,
    ) -> None:
        """Watches the given sessions.

        Args:
            sessions: The sessions of this agent.
            limits: The stall timeout, and the bytes that may be written between two steps.
            clock: Returns monotonic nanoseconds.
            came: Called with a session that got a part of its caches and still waits.
            borrower: Reads parts in memory that other agents have lent.
        """
        self._sessions = sessions
        self._step_bytes = limits.step_bytes
        self._clock = clock
        self._came = came
        self._borrower = borrower
        self.stall_timer = StallTimer(limits.stall_timeout_ns)
        self.arrived: deque[CacheArrived | CacheLent] = deque()
        """Frames, and parts in lent memory, that are to be written."""
        self._left_bytes = limits.step_bytes
        self.ignored = 0
        """Number of cache parts that arrived for sessions that did not wait for them."""

    def begin(self, session: Session) -> None:
        """Starts the stall timeout of a session that waits for its caches."""
        self.stall_timer.touch(session.spec.session_id, self._clock())

    def on_cache(self, event: CacheArrived | CacheLent) -> None:
        """Queues a part of a cache, and writes as much as the current step allows."""
        self.arrived.append(event)
        self._take_in()

    def renew(self) -> None:
        """Grants another `CacheLimits.step_bytes` of writes; to be called between steps."""
        self._left_bytes = self._step_bytes
        self._take_in()

    def take(self, session_id: int, span: CacheSpan, rows: CacheArray) -> None:
        """Writes rows that another session of this agent has cached."""
        session = self._sessions.get(session_id)
        if session is not None and session.pending_cache is not None:
            write = partial(session.batcher.executor.import_cache, session_id, span, rows)
            self._keep(session, session.pending_cache, span, lambda: write)

    def on_token(self, session: Session, event: TokenArrived) -> None:
        """Accepts the first generated token, which the prefill ring sampled."""
        spec, table = session.spec, session.batcher.executor.table
        if event.position != spec.history or event.token_id >= table.vocabulary_size:
            text = f"token {event.token_id} at {event.position}; the one at {spec.history} is next"
            self._sessions.fail(spec.session_id, InvalidInput("position", text))
            return
        session.arrived = event.arrived
        session.learn([event.token_id])
        self._sessions.go(session, RECEIVING)
        self.advanced(session)

    def advanced(self, session: Session) -> None:
        """Lets a session continue if nothing is missing any more."""
        session_id, now = session.spec.session_id, self._clock()
        assert session.pending_cache is not None
        progress = session.pending_cache.progress
        if session.state is not RECEIVING or not progress.is_complete:
            if session_id in self.stall_timer:
                self.stall_timer.touch(session_id, now)
            self._came(session)
            return
        self.stall_timer.drop(session_id)
        is_moving = not session.pending_cache.shared
        session.pending_cache = None
        session.cached = progress.tokens
        self._sessions.go(session, WAITING)
        if session.spec.is_first and is_moving:
            sent_ns = session.arrived.received_ns - session.arrived.transfer_ns
            model = session.batcher.key.model.name
            out = self._sessions.out
            if session.spec.side == "decode":
                out.handed_over.append((model, max(0, now - sent_ns)))
            else:
                out.taken_over.append((model, "kv", max(0, now - sent_ns)))
        self._sessions.resume(session, is_awaited=is_moving)

    def validate(self) -> None:
        """Raises AssertionError unless the stall timeout of every session runs."""
        for session in self._sessions:
            if session.state in (AWAITING_TOKEN, RECEIVING):
                assert session.spec.session_id in self.stall_timer

    def expire(self, now: Nanoseconds) -> None:
        """Fails sessions of which no cache part came within the stall timeout."""
        for session_id in self.stall_timer.lost(now):
            session = self._sessions.get(session_id)
            if session is not None and session.pending_cache is not None:
                text = f"nothing of its caches came for {self.stall_timer}"
                blamed = _source(session, session.pending_cache)
                self._sessions.fail(session_id, PartitionLost(text), blamed)

    def _take_in(self) -> None:
        out = self._sessions.out
        while self.arrived and self._left_bytes > 0:
            event = self.arrived.popleft()
            if isinstance(event, CacheLent):
                self._take_lent(event)
                continue
            out.consumed_bytes += event.nbytes
            out.consumed.append(event.frame)
            session = self._sessions.get(event.session_id)
            if session is None or session.pending_cache is None:
                self.ignored += 1
                continue
            self._left_bytes -= event.nbytes
            self._keep(session, session.pending_cache, event.span, partial(_read, session, event))

    def _take_lent(self, event: CacheLent) -> None:
        """Writes a part that lies in lent memory, which is then free for the next one."""
        session, problem = self._sessions.get(event.session_id), ""
        if session is None or session.pending_cache is None:
            self.ignored += 1
        else:
            self._left_bytes -= event.nbytes
            check = partial(self._borrower.check, session, event)
            try:
                self._keep(session, session.pending_cache, event.span, check)
            except UnreadableError as error:
                problem = str(error)
        self._borrower.answer(event.piece, problem)

    def _keep(
        self,
        session: Session,
        pending_cache: PendingCache,
        span: CacheSpan,
        check: Callable[[], Write],
    ) -> None:
        """Writes rows into a session's slots; the session fails if they are invalid.

        Args:
            session: The session.
            pending_cache: What it waits for.
            span: The rows.
            check: Checks their form, and returns what writes them.

        Raises:
            UnreadableError: They lie in memory that cannot be read. They will come otherwise.
        """
        session_id = session.spec.session_id
        try:
            write = check()
            pending_cache.progress.check(span)
            relieve(self._sessions, session.batcher, {session_id: span.last_token})
            if session.state is CLOSED:
                return
            write()
            pending_cache.progress.add(span)
        except CatenaryError as error:
            error.__traceback__ = None  # its frames hold views of the payload
            self._sessions.fail(session_id, error)
        except UnreadableError:
            raise
        except Exception:
            what = "its cache could not be written"
            self._sessions.fail(session_id, incident(what, str(session.batcher.key)))
        else:
            self.advanced(session)


def _read(session: Session, event: CacheArrived) -> Write:
    """Returns what writes the rows of a frame into a session's slots.

    Raises:
        InvalidInput: The frame has another size than they.
    """
    executor = session.batcher.executor
    row = (executor.table.key_value_heads, executor.table.head_size)
    rows = array_of_payload(event.frame.payload, event.datatype, event.span, row)
    return partial(executor.import_cache, event.session_id, event.span, rows)


def _source(session: Session, pending_cache: PendingCache) -> str:
    """Returns the agent that should have sent the missing part."""
    if pending_cache.leader:
        return pending_cache.leader
    route = session.spec.opening.route
    block = pending_cache.progress.missing_block
    for hop in route:
        if block is not None and hop.first_block <= block < hop.last_block:
            return hop.agent_id
    return route[-1].agent_id
