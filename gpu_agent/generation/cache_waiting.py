"""The decode side of the split phase: a session waits for its caches, then goes on as any other.

Caches come as frames from the agents that run the prompt, and go straight into the slots the
session holds. Steps of the ring that come earlier are kept in the session. Where tokens are
embedded or sampled the first token, which another agent sampled, must have come, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_agent.generation.incidents import incident
from gpu_agent.generation.session import Awaited
from gpu_agent.kv import CacheIntake, array_of_payload
from services.errors import CatenaryError, InvalidInput, PartitionLost

if TYPE_CHECKING:
    from gpu_agent.generation.events import CacheArrived, TokenArrived
    from gpu_agent.generation.session import Facts, Session
    from gpu_agent.generation.sessions import Sessions
    from services.domain.ids import Nanoseconds


def awaited_of(facts: Facts) -> Awaited:
    """Returns what a session on its decode side waits for."""
    own = facts.own_hop
    intake = CacheIntake(own.first_block, own.last_block, facts.history)
    return Awaited(intake, facts.is_first or facts.is_last)


class CacheWaiting:
    """The sessions whose caches have not come yet.

    Invariant: each of them is in `_since` until it goes on; closed ones are dropped when their time
    is over.
    """

    def __init__(
        self, sessions: Sessions, patience_ns: Nanoseconds, clock: Callable[[], Nanoseconds]
    ) -> None:
        """Gives sessions up for which nothing came for `patience_ns`."""
        self._sessions = sessions
        self._patience_ns = patience_ns
        self._clock = clock
        self._since: OrderedDict[int, Nanoseconds] = OrderedDict()

    def begin(self, session: Session) -> None:
        """A session was opened that has to wait."""
        self._since[session.facts.session_id] = self._clock()

    def on_cache(self, event: CacheArrived) -> bool:
        """Takes a part of a cache in; False if nobody waits for it."""
        out = self._sessions.out
        out.consumed_bytes += event.nbytes
        out.consumed.append(event.frame)
        session = self._sessions.get(event.session_id)
        if session is None or session.awaited is None:
            return False
        try:
            self._keep(session, session.awaited, event)
        except CatenaryError as error:
            error.__traceback__ = None  # its frames hold views of the payload
            self._sessions.fail(event.session_id, error)
        except Exception:
            what = "its cache could not be written"
            self._sessions.fail(event.session_id, incident(what, str(session.lane.key)))
        else:
            self._advanced(session, session.awaited)
        return True

    def on_token(self, session: Session, awaited: Awaited, event: TokenArrived) -> None:
        """Takes the first token in, which the other ring sampled."""
        facts, table = session.facts, session.lane.executor.table
        if event.position != facts.history or event.token_id >= table.vocabulary_size:
            text = f"token {event.token_id} at {event.position}; the one at {facts.history} is next"
            self._sessions.fail(facts.session_id, InvalidInput("position", text))
            return
        session.arrived = event.arrived
        if facts.is_first:
            session.tokens.append(event.token_id)
        if session.sampler is not None:
            session.sampler.accept(event.token_id)
        awaited.token = False
        self._advanced(session, awaited)

    def expire(self, now: Nanoseconds) -> None:
        """Gives up sessions for which nothing came for too long."""
        while (wakeup := self.next_wakeup_ns()) is not None and wakeup <= now:
            session_id = self._since.popitem(last=False)[0]
            session = self._sessions.get(session_id)
            if session is not None and session.awaited is not None:
                text = f"nothing of its caches came for {self._patience_ns * 1e-9:g} s"
                blamed = _source(session.facts, session.awaited)
                self._sessions.fail(session_id, PartitionLost(text), blamed)

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns when `expire` has something to do; None if never."""
        first = next(iter(self._since.values()), None)
        return None if first is None else first + self._patience_ns

    def _keep(self, session: Session, awaited: Awaited, event: CacheArrived) -> None:
        executor, span = session.lane.executor, event.span
        row = (executor.table.key_value_heads, executor.table.head_size)
        rows = array_of_payload(event.frame.payload, event.datatype, span, row)
        awaited.caches.check(span)
        executor.import_cache(event.session_id, span, rows)
        awaited.caches.add(span)

    def _advanced(self, session: Session, awaited: Awaited) -> None:
        """Lets a session go on if nothing is missing any more."""
        session_id, now = session.facts.session_id, self._clock()
        if not awaited.is_over:
            self._since[session_id] = now
            self._since.move_to_end(session_id)
            return
        self._since.pop(session_id, None)
        session.awaited = None
        session.cached = session.facts.history
        if session.facts.is_first:
            sent_ns = session.arrived.received_ns - session.arrived.transfer_ns
            model = session.lane.key.model.name
            self._sessions.out.handed_over.append((model, max(0, now - sent_ns)))
        if session.pending:
            session.lane.queue(session, now)


def _source(facts: Facts, awaited: Awaited) -> str:
    """Returns the agent that should have sent what is missing."""
    block = awaited.caches.missing_block
    for hop in facts.opening.route:
        if block is not None and hop.first_block <= block < hop.last_block:
            return hop.agent_id
    return facts.opening.route[-1].agent_id
