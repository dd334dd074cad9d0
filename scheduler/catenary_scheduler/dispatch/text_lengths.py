"""Lengths of the texts of a request, which say how much room each of its rows takes in a batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from catenary_services.domain.model import TokenUnits


@dataclass(frozen=True, slots=True)
class TextLengths:
    """Lengths of a request's rows in tokens, as runs of rows of one length that follow each other.

    A gateway puts the rows of a request in the order of their lengths, so there are few runs.
    """

    ends: tuple[int, ...]
    """The row behind each run, ascending; the last one is the number of rows."""
    tokens: tuple[int, ...]
    """The tokens that each row of a run counts as."""
    full_texts: float
    """The number of texts of full length that have as many tokens."""

    @staticmethod
    def of(runs: Iterable[tuple[int, int]], units: TokenUnits) -> TextLengths:
        """Returns the lengths of rows that are given as runs of (rows, tokens)."""
        counted = [(rows, units.counted(tokens)) for rows, tokens in runs]
        total = sum([rows * tokens for rows, tokens in counted])
        return TextLengths(
            tuple(accumulate([rows for rows, _ in counted])),
            tuple([tokens for _, tokens in counted]),
            total / units.text_tokens,
        )

    def run_at(self, row: int) -> int:
        """Returns the index of the run that a row is in."""
        return bisect_right(self.ends, row)
