"""Drafts of a session's next tokens, looked up in its own text (prompt lookup decoding).

An answer often repeats what stands in the prompt or was said before: code that is edited, names,
quotations, lists. The drafter looks up where the latest tokens occurred before and guesses that the
text goes on as it did there. It follows every text, whether or not its guesses are computed, so it
knows how often they come true, by the number of tokens that agreed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from catenary_agent.decoders.base import DecoderCost
    from catenary_services.domain.ids import Nanoseconds

LONGEST_MATCH = 8
"""The most tokens by which two places are compared."""
_MOST_PLACES = 16
_SHORTEST_MATCH = 2
_WEIGHT = 0.08
_FIRST_CHANCES = (0.0, 0.0, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8)
"""The chance that a guess is right, by the number of tokens that agree before it, until the session
shows its own."""
_LEAST_GAIN = 0.1
"""Tokens by which a step must gain, in the mean, for guesses to be computed."""
_SLOWER_WEIGHT, _FASTER_WEIGHT = 0.02, 0.5
"""The weights of the latest trip in the average. Guesses of other sessions make trips longer, which
must not make guesses of this one look cheap."""


class TextIndex:
    """An index of the pairs of tokens in a growing text.

    It takes some 150 bytes a token: the latest place of each pair, and of each place the one before
    it with the same pair.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._before: list[int] = []
        """The previous place with the same pair, of each place; -1 if there is none."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in the tokens behind those that it has; `tokens` is the whole text."""
        latest, before = self._latest, self._before
        for place in range(len(before), len(tokens)):
            pair = (tokens[place - 1], tokens[place]) if place else (-1, tokens[0])
            before.append(latest.get(pair, -1))
            latest[pair] = place

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns where the end of a text occurred before, and how many tokens agree there.

        The longest of the latest places is chosen, the later one of two equally long.

        Args:
            tokens: The whole text, which `extend` has taken in.

        Returns:
            The index of the token behind the place, and 2 to `LONGEST_MATCH`; (0, 0) if there is
            none.
        """
        best, longest = 0, _SHORTEST_MATCH - 1
        end = len(tokens) - 1
        place = self._before[end] if self._before else -1
        for _ in range(_MOST_PLACES):
            if place < 1 or longest >= LONGEST_MATCH:
                break
            length = _SHORTEST_MATCH
            while (
                length < LONGEST_MATCH
                and place >= length
                and tokens[place - length] == tokens[end - length]
            ):
                length += 1
            if length > longest:
                best, longest = place + 1, length
            place = self._before[place]
        return (best, longest) if best else (0, 0)


class StepTimes(NamedTuple):
    """The time that guesses add to a step, for the sessions that wait for it."""

    sessions: int
    """Number of sessions that wait for the same step."""
    token_ns: Nanoseconds
    """The time of the ring for one token."""
    row_ns: float
    """The time that one more row adds to it."""
    first_row_ns: float = 0.0
    """The time that the first of these rows adds besides, because it makes a step of the session
    of its own."""


def times_of(
    cost: DecoderCost, sessions: int, blocks_share: float, away_ns: Nanoseconds
) -> StepTimes:
    """Returns the times of steps with guesses, by the measured cost of one agent of a ring.

    Args:
        cost: The cost of its blocks.
        sessions: Number of sessions that wait for the same step.
        blocks_share: The share of the model's blocks that are its own; the others are taken to
            cost as much for each block.
        away_ns: The time that a token is elsewhere on the ring; 0 if that is not known yet.
    """
    alone_ns = cost.decode(sessions, 0)
    less_ns = cost.decode(sessions - 1, 0) if sessions > 1 else 0.0
    # A session with guesses is computed as a chunk of a prompt is, beside the rows of the others.
    chunk_ns = max(cost.prefill_floor_ns, cost.prefill_ns + cost.prefill_token_ns)
    first_ns = max(0.0, chunk_ns - (alone_ns - less_ns))
    whole_ns = round(max(away_ns + alone_ns, alone_ns / blocks_share))
    return StepTimes(
        sessions, whole_ns, cost.prefill_token_ns / blocks_share, first_ns / blocks_share
    )


class Drafter:
    """The drafts of one session, on the first agent of its ring."""

    def __init__(self) -> None:
        self._index = TextIndex()
        self._seen = 0
        """Number of tokens of the text that it has taken in."""
        self._next = 0
        """Index of the token that is guessed to come next; 0 if none is."""
        self._agreed = 0
        """Number of tokens that agreed before it."""
        self._chances = list(_FIRST_CHANCES)
        self.away_ns: Nanoseconds = 0
        """The average time between a step and its token; 0 if it is not known."""

    def note_trip(self, away_ns: Nanoseconds) -> None:
        """Notes how long a token without guesses was elsewhere on the ring."""
        before = self.away_ns or away_ns
        weight = _SLOWER_WEIGHT if away_ns > before else _FASTER_WEIGHT
        self.away_ns = round(before + weight * (away_ns - before))

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes in what was added to a text, and compares it with the guesses."""
        if not self._seen:
            self._index.extend(tokens)
            self._seen = len(tokens)
            self._look_up(tokens)
            return
        for at in range(self._seen, len(tokens)):
            if not self._next:
                break
            self._compare(tokens, at)
        self._index.extend(tokens)
        self._seen = len(tokens)
        if not self._next:
            self._look_up(tokens)

    def propose(self, tokens: Sequence[int], most: int, times: StepTimes | None) -> list[int]:
        """Returns the guesses that are worth computing: the tokens that come next, perhaps none.

        Args:
            tokens: The whole text.
            most: The most guesses.
            times: What they cost; None if that is not known, and taken for nothing.
        """
        self.follow(tokens)
        if not self._next:
            return []
        count = self._best_count(most, times)
        # The place may be so near to the end that the guesses repeat themselves.
        text, start = tokens, self._next
        period = len(text) - start
        return [text[start + at % period] for at in range(count)]

    def _best_count(self, most: int, times: StepTimes | None) -> int:
        """Returns the number of guesses with the largest gain in tokens per time of all sessions.

        k guesses bring the sum of the chances that the first 1, 2, .. k of them are right; what
        they add to the step is lost by every session that waits for it.
        """
        best, most_gain = 0, _LEAST_GAIN
        brought, chance = 0.0, 1.0
        for count in range(1, most + 1):
            chance *= self._chances[min(self._agreed + count - 1, LONGEST_MATCH)]
            brought += chance
            lost = 0.0
            if times is not None:
                longer_ns = times.first_row_ns + count * times.row_ns
                # The session itself gains its tokens at the longer time, the others only lose.
                lost = (times.sessions + brought) * longer_ns / (times.token_ns + longer_ns)
            if brought - lost > most_gain:
                best, most_gain = count, brought - lost
        return best

    def _compare(self, tokens: Sequence[int], at: int) -> None:
        """Compares the guess of one token with what came."""
        is_right = tokens[at] == tokens[self._next]
        chances, agreed = self._chances, self._agreed
        chances[agreed] += _WEIGHT * (is_right - chances[agreed])
        if is_right:
            self._next += 1
            self._agreed = min(agreed + 1, LONGEST_MATCH)
        else:
            self._next = 0

    def _look_up(self, tokens: Sequence[int]) -> None:
        self._next, self._agreed = self._index.match(tokens)
