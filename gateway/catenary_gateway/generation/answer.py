"""The stream through which an endpoint reads one generated answer."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from catenary_gateway.generation.chain_changes import chain_changes
from catenary_gateway.generation.objectives import objectives_report
from catenary_gateway.generation.request import AnswerChunk
from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.observability.generations import ChainChange, ObjectivesReport


class GenerationStream:
    """One generated answer as its endpoint reads it; leaving it early gives the answer up.

    It is a context manager around the loop that reads the answer.
    """

    def __init__(self, session: PendingSession, give_up: Callable[[PendingSession], None]) -> None:
        self._session = session
        self._give_up = give_up

    async def next(self) -> AnswerChunk | None:
        """Returns all text that is ready, after waiting for some; None after the last piece.

        Raises:
            CatenaryError: The reason why the answer is incomplete. All text that was generated
                before is returned first.
        """
        return await self._session.read()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return len(self._session.request.prompt)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens generated so far, an end-of-text token included."""
        return len(self._session.generated)

    @property
    def objectives(self) -> ObjectivesReport:
        """Times of the answer so far, beside its objectives and predictions."""
        return objectives_report(self._session)

    @property
    def chain_changes(self) -> tuple[ChainChange, ...]:
        """The changes from one chain to another so far, in order."""
        return chain_changes(self._session)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_up(self._session)
