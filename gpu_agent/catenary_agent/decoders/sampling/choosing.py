"""Choice of the next token of every session of a step, from logits that stay on their device.

One algorithm serves NumPy and PyTorch; operations that they spell differently are in an
`ArrayBackend`. Vocabularies are sorted only if necessary: top-k and top-p are lower bounds of the
scaled logits, found among the few largest ones. All logits are examined only where those few do not
have the required share. Tokens exactly at the bound stay, so a row has one result whatever the
order.

Probabilities are summed as integers. Their sum does not depend on the order in which a device adds,
and a row's token does not depend on the other rows of the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.array_backend import (
    ArrayBackend,
    Asked,
)
from catenary_agent.decoders.sampling.gumbel import (
    counters,
    exact_noise,
    random_bits,
    random_bits_of,
    rough_noise,
)
from catenary_agent.decoders.sampling.sampling import NOT_FINITE, NOTHING_ALLOWED, SessionSampler
from catenary_agent.decoders.sampling.scoring import logprobs_of
from catenary_services.domain.logprobs import TokenLogprobs
from catenary_services.domain.sampler_sizes import rows_at_a_time

_UNDECIDED = -9
"""A placeholder for a token: the few likeliest tokens were too few to decide."""
_SPARE = 64
"""Number of candidates beyond top-k, since others may be as likely as the last one."""
_UNIT = 2.0**40
"""The weight of the likeliest token; the sum of 2^22 such weights fits into 63 bits."""


class _Finalists(NamedTuple):
    """Two tokens of each row, one of which is chosen; every array is [rows, 2]."""

    ids: Any
    """int64 token ids, or twice the placeholder that stands for a token."""
    scaled: Any
    """float32 scaled logits; negative infinity for a token that must not be chosen."""
    bits: Any
    """int64 random bits of the tokens' noise."""


Way = Callable[[Any, Any, Sequence[SessionSampler]], _Finalists]
"""Function that scales the logits of a block, [rows, vocabulary], which it may change, by their
maximum, [rows, 1], and returns the finalists."""


class TokenSampler:
    """Chooses tokens from the logits of one executor."""

    def __init__(self, arrays: ArrayBackend, vocabulary: int) -> None:
        """Begins without any session's token counts, which some backends keep between steps.

        Args:
            arrays: The operations of the library the logits come in.
            vocabulary: Number of columns of the logits.
        """
        self._arrays = arrays
        self._vocabulary = vocabulary
        self._counted: Any = None
        self._never = arrays.put(np.array(-math.inf, np.float32))

    def forget(self, session: int) -> None:
        """Frees what is kept of a session that is closed."""
        self._arrays.forget(session)

    def host(self, array: Any) -> NDArray[Any]:
        return self._arrays.host(array)

    def choose(self, logits: Any, asked: Sequence[Asked], rows: Sequence[int]) -> list[int]:
        """Returns the next token of each session, without accepting it.

        The token of a row does not depend on the other rows of the call.

        Args:
            logits: float32 [n, vocabulary]; not changed, and never copied as a whole.
            asked: The sessions with their samplers.
            rows: The row of each session, ascending.

        Returns:
            One token id per session, or `NOT_FINITE` or `NOTHING_ALLOWED`.
        """
        numbers = self._arrays.block_numbers
        with np.errstate(all="ignore"):  # warnings about rows that are not finite
            ids = self._chosen(logits, rows, asked, self._few, numbers)
            again = [at for at, token in enumerate(ids) if token == _UNDECIDED]
            if again:
                numbers = self._arrays.sorted_numbers
                these = [rows[at] for at in again]
                some = self._chosen(logits, these, [asked[at] for at in again], self._all, numbers)
                for at, token in zip(again, some, strict=True):
                    ids[at] = token
        return ids

    def score(
        self, logits: Any, rows: Sequence[int], tokens: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        """Returns the log probabilities of a token of each row; see `scoring`.

        Args:
            logits: float32 [n, vocabulary]; not changed, and never copied as a whole.
            rows: The row of each token, ascending.
            tokens: A token of each row.
            top: How many of the likeliest tokens to name with each.
        """
        scored: list[TokenLogprobs] = []
        size = rows_at_a_time(self._arrays.block_numbers, self._vocabulary)
        with np.errstate(all="ignore"):
            for at in range(0, len(rows), size):
                values = logits[self._arrays.put(np.array(rows[at : at + size], np.int64))]
                scored += logprobs_of(self._arrays, values, tokens[at : at + size], top)
        return scored

    def _chosen(
        self, logits: Any, rows: Sequence[int], asked: Sequence[Asked], narrow: Way, numbers: int
    ) -> list[int]:
        """Chooses the tokens of these rows, block by block, with at least one row in a block."""
        xp = self._arrays.xp
        size = rows_at_a_time(numbers, self._vocabulary)
        parts = [
            self._finalists(logits, rows[at : at + size], asked[at : at + size], narrow)
            for at in range(0, len(asked), size)
        ]
        ids, scaled, bits = (xp.concatenate(each) for each in zip(*parts, strict=True))
        best = ids[:, 0]
        if any(not sampler.parameters.greedy for _, sampler in asked):
            keys = exact_noise(xp, bits) + xp.asarray(scaled, dtype=xp.float64)
            leads = (keys[:, 0] > keys[:, 1]) | ((keys[:, 0] == keys[:, 1]) & (best < ids[:, 1]))
            best = xp.where(leads, best, ids[:, 1])
        chosen: list[int] = self._arrays.host(best).tolist()
        return chosen

    def _finalists(
        self, logits: Any, rows: Sequence[int], asked: Sequence[Asked], narrow: Way
    ) -> _Finalists:
        """Returns the two candidates of each session of a block."""
        xp, put = self._arrays.xp, self._arrays.put
        best, highest = self._best(logits, rows)
        finite = xp.isfinite(highest)
        ids = xp.concatenate((best, best), 1)
        scaled = xp.concatenate((highest, highest), 1)
        made = _Finalists(ids, xp.zeros_like(scaled), xp.zeros_like(ids))
        ways: dict[Way, list[int]] = {self._likeliest: [], self._any: [], narrow: []}
        for at, (_, sampler) in enumerate(asked):
            p = sampler.parameters
            is_narrow = p.top_p < 1 or 0 < p.top_k < self._vocabulary
            if not sampler.takes_best:
                way = self._likeliest if p.greedy else narrow if is_narrow else self._any
                ways[way].append(at)
        for way, places in ways.items():
            if not places:
                continue
            these = put(np.array(places, np.int64))
            values = logits[put(np.array([rows[at] for at in places], np.int64))]  # a copy
            block = [asked[at] for at in places]
            self._edit(values, block)
            highest = xp.amax(values, 1)[:, None]
            found = way(values, highest, [sampler for _, sampler in block])
            made.ids[these] = xp.where(xp.isfinite(highest), found.ids, NOTHING_ALLOWED)
            made.scaled[these] = found.scaled
            made.bits[these] = found.bits
            del values, found  # freed before the next way allocates as much
        return made._replace(ids=xp.where(finite, made.ids, NOT_FINITE))

    def _best(self, logits: Any, rows: Sequence[int]) -> tuple[Any, Any]:
        """Returns the likeliest token of each of these rows and its logit, [rows, 1] each."""
        first, end = rows[0], rows[-1] + 1
        if end - first == len(rows):
            some = logits[first:end]
        else:
            some = logits[self._arrays.put(np.array(rows, np.int64))]
        # argmax finds a NaN if there is one, and an infinity if it is the largest.
        best = self._arrays.xp.argmax(some, 1)[:, None]
        return best, self._arrays.take(some, best)

    def _edit(self, values: Any, asked: Sequence[Asked]) -> None:
        """Applies everything that changes logits before the temperature does."""
        put, xp = self._arrays.put, self._arrays.xp
        samplers = [sampler for _, sampler in asked]
        biased = _places([sampler.biased for sampler in samplers])
        if biased is not None:
            where = (put(biased[0]), put(biased[1]))
            values[where] += put(np.concatenate([sampler.bias for sampler in samplers]))
        penalised = [row for row, sampler in enumerate(samplers) if sampler.said is not None]
        if penalised:
            rows = np.array(penalised, np.int64)
            self._arrays.penalise(values, rows, [asked[row] for row in penalised])
        banned = _places([sampler.banned for sampler in samplers])
        if banned is not None:
            values[put(banned[0]), put(banned[1])] = self._never
        for row, sampler in enumerate(samplers):
            if len(sampler.only):
                only = put(sampler.only)
                kept = values[row, only]
                values[row] = self._never
                values[row, only] = kept
        masks = {row: each.allowed for row, each in enumerate(samplers) if each.allowed is not None}
        if masks:
            these = put(np.array(list(masks), np.int64))
            allowed = put(np.stack(list(masks.values())))
            values[these] = xp.where(allowed, values[these], self._never)

    # Ways to choose. Each may change the block of rows that it is given.

    def _likeliest(
        self, values: Any, highest: Any, samplers: Sequence[SessionSampler]
    ) -> _Finalists:
        xp = self._arrays.xp
        best = xp.argmax(values, 1)[:, None]
        return _Finalists(best, xp.zeros_like(highest), xp.zeros_like(best))

    def _any(self, values: Any, highest: Any, samplers: Sequence[SessionSampler]) -> _Finalists:
        """Draws from all tokens, or from those that min-p leaves."""
        self._scale(values, highest, samplers)
        return self._drawn(values, self._least(samplers), samplers)

    def _few(self, values: Any, highest: Any, samplers: Sequence[SessionSampler]) -> _Finalists:
        """Draws from what top-k and top-p leave, if that is among the likeliest few."""
        xp = self._arrays.xp
        self._scale(values, highest, samplers)
        limits = [sampler.parameters.top_k for sampler in samplers]
        most = max([limit for limit in limits if limit < self._vocabulary], default=0)
        wanted = min(self._vocabulary, most + _SPARE) if most else 0
        few = self._arrays.likeliest(values, wanted)
        bound, is_sure = self._bound(values, few.ordered, few.floor, samplers)
        bits = random_bits_of(self._streams(samplers), few.ids)
        found = self._best_two(few.values, bits, bound)
        ids = xp.where(is_sure, self._arrays.take(few.ids, found.ids), _UNDECIDED)
        return found._replace(ids=ids)

    def _all(self, values: Any, highest: Any, samplers: Sequence[SessionSampler]) -> _Finalists:
        """Draws from the tokens that top-k and top-p leave, searched for among all tokens."""
        self._scale(values, highest, samplers)
        bound, _ = self._bound(None, self._arrays.descending(values), None, samplers)
        return self._drawn(values, bound, samplers)

    # Parts of these ways.

    def _scale(self, values: Any, highest: Any, samplers: Sequence[SessionSampler]) -> None:
        """Scales logits to the input of softmax: 0 at the likeliest token."""
        values -= highest
        values /= self._column([each.parameters.temperature for each in samplers], np.float32)

    def _least(self, samplers: Sequence[SessionSampler]) -> Any:
        """Returns the lowest scaled logit that min-p leaves in each row; None if it leaves all."""
        shares = [sampler.parameters.min_p for sampler in samplers]
        if not any(shares):
            return None
        return self._column([math.log(each) if each else -math.inf for each in shares], np.float32)

    def _bound(
        self, values: Any, ordered: Any, floor: Any, samplers: Sequence[SessionSampler]
    ) -> tuple[Any, Any]:
        """Returns the lowest scaled logit that all filters leave, and whether it is certain.

        Args:
            values: float32 [rows, vocabulary], scaled; None if `ordered` contains all of them.
            ordered: The largest of them in descending order, including all that are above `floor`.
            floor: [rows, 1]; None if no value is missing from `ordered`.
            samplers: The samplers of the rows.
        """
        xp, take = self._arrays.xp, self._arrays.take
        floor = -math.inf if floor is None else floor
        count = ordered.shape[1]
        top_k = np.array([each.parameters.top_k for each in samplers], np.int64)
        is_limited = (top_k > 0) & (top_k < self._vocabulary)
        limited = self._column(is_limited, np.bool_)
        last = take(ordered, self._column(np.clip(top_k, 1, count) - 1, np.int64))
        bound = last = xp.where(limited, last, self._never)
        least = self._least(samplers)
        if least is not None:
            bound = xp.maximum(bound, least)
        # Below the floor others may be as likely, and count for the share of those top-k leaves.
        is_sure = (last > floor) | ~limited
        shares = np.array([each.parameters.top_p for each in samplers], np.float64)
        if (shares < 1).any():
            passed = xp.cumsum(self._weights(ordered, last), 1)
            whole = passed[:, -1:]
            if values is not None and not is_limited[shares < 1].all():
                whole = xp.where(limited, whole, xp.sum(self._weights(values), 1)[:, None])
            target = self._column(shares, np.float64) * xp.asarray(whole, dtype=xp.float64)
            # Integers are compared, since that needs no further array of this size.
            target = xp.asarray(xp.ceil(target), dtype=xp.int64)
            # A token stays as long as the more likely ones have less than the share.
            in_front = xp.count_nonzero(passed[:, :-1] < target, 1)[:, None]
            edge = take(ordered, in_front)
            edge = xp.where(self._column(shares < 1, np.bool_), edge, self._never)
            bound = xp.maximum(bound, edge)
            is_sure = is_sure & (passed[:, -1:] >= target)
        return bound, is_sure & (bound > floor)

    def _weights(self, scaled: Any, least: Any = None) -> Any:
        """Returns int64 weights proportional to the probabilities; 0 for logits below `least`."""
        xp = self._arrays.xp
        weights = xp.exp(scaled)
        weights *= _UNIT
        if least is not None:
            weights = xp.where(scaled >= least, weights, xp.zeros_like(least))
        return xp.asarray(weights, dtype=xp.int64)

    def _drawn(self, values: Any, bound: Any, samplers: Sequence[SessionSampler]) -> _Finalists:
        """Returns the finalists among all tokens that are not below their row's bound."""
        if self._counted is None:
            self._counted = self._arrays.put(counters(np, self._vocabulary))
        bits = random_bits(self._arrays.xp, self._streams(samplers), self._counted)
        return self._best_two(values, bits[:, : self._vocabulary], bound)

    def _best_two(self, values: Any, bits: Any, bound: Any) -> _Finalists:
        """Returns the two columns in which value plus rough noise is largest.

        Args:
            values: float32 [rows, columns], scaled logits.
            bits: The random bits of each.
            bound: [rows, 1]; columns with lower values do not count. None if all do.
        """
        xp, take = self._arrays.xp, self._arrays.take
        keys = rough_noise(xp, bits)
        keys += values
        if bound is not None:
            keys = xp.where(values >= bound, keys, self._never)
        two = self._arrays.best_two(keys)
        scaled = take(values, two)
        if bound is not None:
            scaled = xp.where(scaled >= bound, scaled, self._never)
        return _Finalists(two, scaled, xp.asarray(take(bits, two), dtype=xp.int64))

    def _streams(self, samplers: Sequence[SessionSampler]) -> Any:
        return self._arrays.put(np.array([each.stream for each in samplers], np.int64))

    def _column(self, numbers: Any, dtype: Any) -> Any:
        return self._arrays.put(np.array(numbers, dtype)[:, None])


def _places(
    columns: Sequence[NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns rows and columns of the entries to be changed; None if there are none."""
    lengths = [len(each) for each in columns]
    if not any(lengths):
        return None
    return np.repeat(np.arange(len(columns)), lengths), np.concatenate(columns)
