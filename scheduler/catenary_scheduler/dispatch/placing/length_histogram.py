"""A bounded histogram of answer lengths that forgets (Aladdin, sections 2.3 and 4.3).

Answers of up to 31 tokens have a cell each; longer ones share eight cells per power of two. A cell
keeps how many answers it holds and their tokens, so means over whole cells are exact. Where a query
cuts a cell, its answers count as spread evenly around their mean.
"""

from __future__ import annotations

from typing import Final

from catenary_services.errors import InvalidInput

_EXACT: Final = 32
_PER_OCTAVE: Final = 8
_LONGEST: Final = (1 << 20) - 1
_CELLS: Final = _EXACT + 15 * _PER_OCTAVE
_LARGEST_WEIGHT: Final = 1e9
"""A newer answer weighs more than an older one; beyond this all weights are scaled down."""
_LEAST_COUNT: Final = 0.01
"""Cells that weigh less than this part of a new answer are not written down."""


def _cell_of(tokens: int) -> int:
    if tokens < _EXACT:
        return tokens
    octave = tokens.bit_length() - 1
    return _EXACT + (octave - 5) * _PER_OCTAVE + ((tokens >> (octave - 3)) & 7)


def _least_of(cell: int) -> int:
    if cell < _EXACT:
        return cell
    octave, part = divmod(cell - _EXACT, _PER_OCTAVE)
    return (_PER_OCTAVE + part) << (octave + 2)


class LengthHistogram:
    """Counts answers by their length; every answer makes the earlier ones count a little less.

    Attributes:
        weight: Weight of all answers; `weight / newest` is the number of new ones they are worth.
        tokens: Weighted sum of their tokens.
        newest: Weight of the latest answer.
    """

    def __init__(self, half_life: int) -> None:
        """Makes an empty histogram.

        Args:
            half_life: Number of later answers after which an answer counts half.
        """
        self.weight = 0.0
        self.tokens = 0.0
        self.newest = 1.0
        self._growth = 2.0 ** (1.0 / half_life)
        # Fenwick trees: entry i sums the cells (i - lowest bit of i, i], counted from 1.
        self._weights: list[float] = [0.0] * (_CELLS + 1)
        self._tokens: list[float] = [0.0] * (_CELLS + 1)

    @property
    def count(self) -> float:
        """The number of new answers that the remembered ones are worth."""
        return self.weight / self.newest

    @property
    def mean(self) -> float:
        """Mean length in tokens; 0 if nothing was learned."""
        return self.tokens / self.weight if self.weight > 0.0 else 0.0

    def learn(self, tokens: int) -> None:
        self.newest *= self._growth
        self._add(tokens, self.newest)
        if self.newest > _LARGEST_WEIGHT:
            self._scale(1.0 / self.newest)

    def above(self, tokens: float) -> tuple[float, float]:
        """Returns the weight, and the weighted tokens, of the answers longer than `tokens`."""
        whole = int(tokens)
        if whole < 1:
            return self.weight, self.tokens
        if whole >= _LONGEST:
            return 0.0, 0.0
        cell = _cell_of(whole)
        weight, total = self._up_to(cell + 1)
        over, over_tokens = max(0.0, self.weight - weight), max(0.0, self.tokens - total)
        least, most = _least_of(cell), _least_of(cell + 1) - 1
        if whole >= most:
            return over, over_tokens
        before, before_total = self._up_to(cell)
        here = weight - before
        if here <= 1e-12 * self.newest:
            return over, over_tokens
        share, mean = _part_above(whole, least, most, (total - before_total) / here)
        return over + here * share, over_tokens + here * share * mean

    def as_record(self) -> list[list[float]]:
        """Returns [mean tokens, count] of every cell that holds something."""
        weights, tokens = _cells_of(self._weights), _cells_of(self._tokens)
        return [
            [round(total / weight, 1), round(weight / self.newest, 2)]
            for weight, total in zip(weights, tokens, strict=True)
            if weight >= _LEAST_COUNT * self.newest
        ]

    def restore(self, record: object, field: str) -> None:
        """Adds what `as_record` returned, in cells of its own.

        Raises:
            InvalidInput: It is no such record; the error names `field`.
        """
        if not isinstance(record, list) or len(record) > _CELLS:
            raise InvalidInput(field, "must be a list of [mean tokens, count]")
        for entry in record:
            if not isinstance(entry, list) or len(entry) != 2:
                raise InvalidInput(field, "must hold pairs of numbers")
            mean, count = _number(entry[0], field), _number(entry[1], field)
            self._add(mean, count * self.newest)

    def _add(self, tokens: float, weight: float) -> None:
        tokens = min(max(tokens, 0.0), float(_LONGEST))
        weighted = weight * tokens
        self.weight += weight
        self.tokens += weighted
        place = _cell_of(int(tokens)) + 1
        while place <= _CELLS:
            self._weights[place] += weight
            self._tokens[place] += weighted
            place += place & -place

    def _up_to(self, place: int) -> tuple[float, float]:
        """Returns weight and tokens of the cells before the given one."""
        weight = tokens = 0.0
        while place > 0:
            weight += self._weights[place]
            tokens += self._tokens[place]
            place -= place & -place
        return weight, tokens

    def _scale(self, factor: float) -> None:
        self.weight *= factor
        self.tokens *= factor
        self.newest *= factor
        self._weights = [each * factor for each in self._weights]
        self._tokens = [each * factor for each in self._tokens]


def _cells_of(tree: list[float]) -> list[float]:
    """Returns the entry of every cell by inverting a Fenwick tree from its end."""
    cells = list(tree)
    for place in range(_CELLS, 0, -1):
        above = place + (place & -place)
        if above <= _CELLS:
            cells[above] -= cells[place]
    return cells[1:]


def _number(value: object, field: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise InvalidInput(field, "must hold numbers that are not negative")
    return float(value)


def _part_above(tokens: int, least: int, most: int, mean: float) -> tuple[float, float]:
    """Returns the part of a cell that is longer than `tokens`, and the mean of that part.

    Its answers count as spread evenly over the widest range around their mean that lies in the
    cell: answers cut at one length, as by a limit, stay where they are.
    """
    reach = min(mean - least, most - mean)
    low, high = mean - reach, mean + reach
    if tokens >= high or reach <= 0.5:
        return (1.0, mean) if mean > tokens else (0.0, mean)
    if tokens < low:
        return 1.0, mean
    return (high - tokens) / (high - low), (tokens + high) / 2
