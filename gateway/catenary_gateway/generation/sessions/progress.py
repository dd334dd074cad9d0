"""Progress reports to the scheduler: one message, some times a second, for all sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_protos.catenary.v1 import scheduler_pb2

Tell = Callable[[scheduler_pb2.GatewayMessage], None]


class ProgressReporter:
    """A reporter of the sessions that got tokens since the last report.

    Its timer runs only while there is such a session.
    """

    def __init__(self, tell: Tell, interval_ns: int) -> None:
        self._tell = tell
        self._interval_s = interval_ns / 1e9
        self._progressed: dict[int, PendingSession] = {}
        self._timer: asyncio.TimerHandle | None = None

    def took(self, session: PendingSession) -> None:
        """Notes that a session has a new token; called for each one."""
        self._progressed[session.number] = session
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._report)

    def ended(self, session: PendingSession) -> None:
        """Forgets a session that has ended, because the message of its end says how far it came."""
        self._progressed.pop(session.number, None)

    def close(self) -> None:
        """Cancels the next report."""
        self._progressed.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        self._timer = None
        if not self._progressed:
            return
        sessions = [session.progress() for session in self._progressed.values()]
        self._progressed.clear()
        report = scheduler_pb2.SessionsProgressed(sessions=sessions)
        self._tell(scheduler_pb2.GatewayMessage(sessions_progressed=report))
