"""What a door holds of a generation while it reads it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from catenary_gateway.generation.chain_changes import chain_changes
from catenary_gateway.generation.objectives import objectives_report
from catenary_gateway.generation.request import Piece
from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.observability.generations import ChainChange, ObjectivesReport


class Generation:
    """One answer as its door sees it; leaving it early gives the answer up.

    Used as a context manager around the loop that reads it.
    """

    def __init__(self, session: PendingSession, give_up: Callable[[PendingSession], None]) -> None:
        self._session = session
        self._give_up = give_up

    async def next(self) -> Piece | None:
        """Returns what is ready, waiting for something; None after the last piece.

        Raises:
            CatenaryError: whatever kept the answer from being completed, at the latest when one of
                its limits has passed, and behind everything that came before.
        """
        return await self._session.read()

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._session.request.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, an end-of-text token included."""
        return len(self._session.generated)

    @property
    def objectives(self) -> ObjectivesReport:
        """How it does beside what it is held to and what was promised, so far."""
        return objectives_report(self._session)

    @property
    def chain_changes(self) -> tuple[ChainChange, ...]:
        """Where it went from one chain to another, so far."""
        return chain_changes(self._session)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_up(self._session)
