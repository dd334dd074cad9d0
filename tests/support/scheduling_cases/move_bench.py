"""A bench of the chained dispatcher for sessions that move."""

from __future__ import annotations

from typing import Any

from catenary_scheduler.dispatch.events import (
    Command,
    MoveMode,
    MoveRequested,
    SessionFailed,
    SessionMoved,
    SessionProgress,
    SessionsProgressed,
    StartSession,
)
from catenary_services.domain.ids import AgentId, SessionId
from scheduling_cases.chain_bench import MS, ChainBench, only


class MoveBench(ChainBench):
    """Adds what moves need."""

    def running(
        self, at_ms: float = 0, tokens: int = 1, budget_ms: float = 100_000
    ) -> StartSession:
        """Returns a session that has got tokens."""
        session = self.start(at_ms, budget_ms)
        self.progress(at_ms, session, tokens)
        return session

    def progress(self, at_ms: float, session: StartSession, tokens: int) -> list[Command]:
        progress = SessionProgress(session.request, tokens, MS, 0)
        return self.tell(at_ms, SessionsProgressed((progress,)))

    def want(
        self, at_ms: float, session: StartSession, where: str = "", mode: MoveMode | None = "kv"
    ) -> list[Command]:
        return self.tell(at_ms, MoveRequested(session.session, where, mode))

    def move(self, at_ms: float, session: StartSession, where: str = "") -> StartSession:
        """Returns what the session is to become."""
        return only(self.want(at_ms, session, where), StartSession)

    def moved(self, at_ms: float, new: StartSession, cached_tokens: int = 0) -> list[Command]:
        assert new.moves is not None
        return self.tell(at_ms, SessionMoved(new.session, new.moves, cached_tokens))

    def fail(
        self, at_ms: float, session: StartSession, agent: str | None = None, **changes: Any
    ) -> list[Command]:
        values = {"reason": "INTERNAL", "message": "no", "retryable": True, **changes}
        blamed = AgentId(agent) if agent is not None else None
        return self.tell(at_ms, SessionFailed(session.session, blamed, **values))

    def current(self, session: StartSession) -> SessionId | None:
        view = self.dispatcher.session_of(session.request)
        return view.session if view is not None else None
