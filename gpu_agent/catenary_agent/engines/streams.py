"""The answer of an engine to one session until it is taken, and the place where it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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


_LEAST_ALIKE = 32
"""The fewest tokens at the beginning of a sequence for which the place is chosen that has them."""


class EnginePlaces:
    """The numbered places for sequences of an engine that lets the agent choose them.

    llama-server computes sequences in one go where their places follow each other, and reads all
    weights again for each that stands alone. A place keeps what its last sequence had cached. So a
    session gets the place of one that began alike, else one beside those in use, and of several
    the one that was left first.
    """

    def __init__(self, count: int) -> None:
        """Begins with as many free places; with none, the engine itself chooses."""
        self._free: dict[int, Sequence[int]] = dict.fromkeys(range(count), ())
        """The tokens that free places still have; what was left first comes first."""
        self._used: dict[int, tuple[int, Sequence[int]]] = {}
        """The place of each session, and the tokens with which it was asked for."""

    def take(self, session: int, tokens: Sequence[int]) -> int | None:
        """Returns the place of a session, which it keeps until it leaves; None if it has none."""
        if session in self._used:
            return self._used[session][0]
        if not self._free:
            return None
        used = {place for place, _ in self._used.values()}

        def badness(place: int) -> tuple[int, int]:
            alike = _alike(self._free[place], tokens)
            gaps = (place - 1 not in used) + (place + 1 not in used)
            return (-alike if alike >= _LEAST_ALIKE else 0, gaps)

        place = min(self._free, key=badness)
        del self._free[place]
        self._used[session] = (place, tokens)
        return place

    def leave(self, session: int) -> None:
        """Frees the place of a session, if it has one."""
        place, tokens = self._used.pop(session, (None, ()))
        if place is not None:
            self._free[place] = tokens


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of tokens at the beginning that are the same."""
    alike, most = 0, min(len(one), len(other))
    while alike < most:  # slices are compared many times as fast as tokens
        middle = (alike + most + 1) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            most = middle - 1
    return alike
