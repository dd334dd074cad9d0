"""The places of a session's tokens: where its latest tokens occurred before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH = 8
"""The most tokens by which two places are compared."""
_MOST_PLACES = 16
_SHORTEST_MATCH = 2


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
