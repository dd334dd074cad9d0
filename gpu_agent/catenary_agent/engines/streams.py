"""The answer of an engine to one session, until the generation loop takes its tokens."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from catenary_services.errors import CatenaryError

if TYPE_CHECKING:
    from catenary_agent.engines.requests import EngineRequest
    from catenary_services.domain.logprobs import TokenLogprobs


class EngineStream:
    """The tokens that an engine generates for one session.

    The client's thread appends, the generation thread takes: each access is a single operation of
    a deque. There are never more tokens than were asked for.
    """

    __slots__ = ("asked_ns", "error", "is_closed", "is_over", "request", "session", "tokens")

    def __init__(self, session: int, request: EngineRequest) -> None:
        self.session = session
        self.request = request
        self.tokens: deque[tuple[int, TokenLogprobs | None]] = deque()
        self.asked_ns = 0
        """The moment when the engine was asked, in monotonic nanoseconds."""
        self.error: CatenaryError | None = None
        """The reason why no further token comes; None if the answer is going on or complete."""
        self.is_over = False
        """True once no further token comes."""
        self.is_closed = False
        """True once nobody takes tokens any more."""
