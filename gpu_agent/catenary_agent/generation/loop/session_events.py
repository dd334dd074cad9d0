"""Events of the ring: openings, rows and tokens of sessions, and links that broke."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_agent.generation import admission
from catenary_agent.generation.state.session import HiddenChunk
from catenary_agent.generation.state.states import (
    AWAITING_TOKEN,
    MIGRATING_IN,
    QUEUED,
    WAITING,
)
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from catenary_services.errors import CatenaryError

if TYPE_CHECKING:
    from catenary_agent.generation.cache.prefix_cache import PrefixCache
    from catenary_agent.generation.migration.migrations import Migrations
    from catenary_agent.generation.state.events import (
        EngineAnswered,
        GrammarCompiled,
        RowsArrived,
        RowsPushed,
        SessionOpened,
        SessionsBroken,
        TokenArrived,
    )
    from catenary_agent.generation.state.sessions import SessionTable


class SessionEvents:
    """Opens sessions and takes in their rows and tokens."""

    def __init__(
        self, sessions: SessionTable, migrations: Migrations, prefixes: PrefixCache
    ) -> None:
        self._sessions = sessions
        self._migrations = migrations
        self._prefixes = prefixes
        self.ignored = 0
        """Number of openings, rows and tokens that came late or twice."""

    def on_opened(self, event: SessionOpened) -> None:
        session_id = event.spec.session_id
        is_over = self._sessions.is_over(session_id)
        if is_over or self._sessions.get(session_id) is not None:
            # Several agents introduce a session on its decode side, each unaware of the others.
            self.ignored += is_over or event.spec.side != "decode"
            if is_over:
                self._sessions.out.gone.append(session_id)
            return
        shared, source = self._migrations.shared, None
        if event.spec.opening.shares_prompt_of:
            try:
                source = shared.source_of(event.spec)
            except CatenaryError as error:
                self._sessions.fail(session_id, error)
                return
        batchers = self._sessions.batchers
        session = admission.try_admit(event, batchers, shares=source is not None)
        if isinstance(session, CatenaryError):
            self._sessions.fail(session_id, session)
            return
        self._sessions.add(session)
        if session.pending_cache is not None:
            self._migrations.waiting.begin(session)
        if source is not None:
            shared.begin(session, source)
        elif event.spec.side == "mixed" and event.spec.history > PREFIX_BLOCK_TOKENS:
            self._prefixes.begin(session)
        self._sessions.resume(session)

    def on_rows(self, event: RowsArrived) -> None:
        session = self._sessions.get(event.session_id)
        if session is None or session.spec.is_first:
            self.ignored += 1
            self._sessions.out.consumed_bytes += event.rows.nbytes
            return
        incoming = session.incoming
        if incoming is not None and incoming.by_tokens and session.state is MIGRATING_IN:
            self._sessions.go(session, WAITING)  # the hop before reads them already
        elif incoming is not None and session.pending_cache is not None and not session.chunks:
            session.expected = event.position  # verified when the session is handed over
        if session.may_rewind:
            session.may_rewind = False
            session.rewind(event.position)
            session.expected = session.cached
        try:
            admission.check_rows(session, event)
        except CatenaryError as error:
            self._sessions.out.consumed_bytes += event.rows.nbytes
            self._sessions.fail(event.session_id, error)
            return
        if session.drafted:
            right = session.drafted[: event.position - session.expected]
            session.hear(right, event.position)
            session.keep(len(right))
        session.expected = event.position + len(event.rows) - len(event.drafts.tokens)
        if event.token_ids:
            session.hear(event.token_ids, session.expected)
        session.hold(HiddenChunk(event.rows, event.sample, event.arrived, event.drafts))
        self._sessions.resume(session)

    def on_left(self, event: RowsPushed) -> None:
        """Goes on with a session whose rows had to wait for the link."""
        session = self._sessions.get(event.session_id)
        if session is not None and session.unsent:
            session.unsent -= 1
            self._sessions.resume(session)

    def on_token(self, event: TokenArrived) -> None:
        session = self._sessions.get(event.session_id)
        if session is not None and session.state is AWAITING_TOKEN:
            self._migrations.waiting.on_token(session, event)
            return
        if session is None or not session.spec.is_first or session.spec.is_last:
            self.ignored += 1
            return
        if event.is_last:
            self._sessions.finish(session)
            return
        session.arrived = event.arrived
        session.ring_takes_drafts = event.takes_drafts
        try:
            for position, token_id in enumerate((event.token_id, *event.following), event.position):
                admission.check_token(session, position, token_id)
                session.take(token_id)
        except CatenaryError as error:
            self._sessions.fail(event.session_id, error)
            return
        session.settle(event.arrived.received_ns)
        self._migrations.go_on(session)

    def on_compiled(self, event: GrammarCompiled) -> None:
        session = self._sessions.get(event.session_id)
        if session is None or not session.is_held:
            return
        if event.problem is not None:
            self._sessions.fail(event.session_id, event.problem)
            return
        session.is_held = False
        self._sessions.resume(session)

    def on_answered(self, event: EngineAnswered) -> None:
        for session_id in event.session_ids:
            session = self._sessions.get(session_id)
            if session is None:
                continue
            if event.problem is not None:
                self._sessions.fail(session_id, event.problem)
            elif session.state is QUEUED:
                session.batcher.wake(session)

    def on_broken(self, event: SessionsBroken) -> None:
        for session_id in event.session_ids:
            if self._migrations.broken(session_id, event.error, event.blamed):
                continue
            if self._sessions.is_over(session_id) and event.blamed == self._sessions.agent_id:
                self.ignored += 1  # a wrong frame of a session that is over
            else:  # also one that is over: its last token did not reach the gateway
                self._sessions.fail(session_id, event.error, event.blamed)
