"""Predicts the length of answers from prompts of similar length (Aladdin, sections 2.3, 4.3).

The paper's predictor is the mean answer of past prompts of like length, and, once an answer has
outgrown its prediction, the mean of those that were longer still. It is crude but without bias, so
over a batch its errors partly cancel. Departures, because the paper's is trained offline:

* It is learned online and forgets, so that it follows a change of traffic.
* Where a bucket holds few answers, those of its neighbours, of all prompts and in the end a prior
  count as a few more, so that the first answers of a model do not dominate what follows.
* A request with a limit of tokens is predicted the mean of answers cut there, and an answer that
  was cut is learned with the length it would have been expected to reach.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

from catenary_scheduler.dispatch.placing.length_histogram import LengthHistogram
from catenary_services.errors import InvalidInput

PRIOR_TOKENS: Final = 256.0
"""Mean answer of a model of which nothing is known, in tokens."""
HALF_LIFE: Final = 1000
"""Number of answers of a bucket after which an earlier one counts half."""
_NEIGHBOURS: Final = 10.0
"""The answers of the two neighbours together count as at most this many of a bucket's own."""
_EVERYWHERE: Final = 10.0
"""All answers of the model, and the prior among them, count as at most this many."""
_PRIOR: Final = 1.0
"""The prior counts as this many answers: of lengths that end at every token with the same
probability, so that there always is a longer one."""
_EDGES: Final = tuple(round(2 ** (half / 2)) for half in range(5, 35))
"""Shortest prompts of the buckets after the first: two buckets per power of two, from 6 tokens."""


class LengthPredictor:
    """Predictor of the lengths of one model's answers.

    Attributes:
        learned: Number of answers learned since it was made, by which a change is noticed.
    """

    def __init__(self, prior_tokens: float = PRIOR_TOKENS, half_life: int = HALF_LIFE) -> None:
        """Makes a predictor that has learned nothing.

        Args:
            prior_tokens: Mean answer to assume until some were seen.
            half_life: Number of later answers to prompts of like length after which an answer
                counts half.
        """
        self.learned = 0
        self._prior_tokens = prior_tokens
        self._half_life = half_life
        self._everywhere = LengthHistogram(4 * half_life)
        self._buckets: list[LengthHistogram | None] = [None] * (len(_EDGES) + 1)

    @property
    def mean(self) -> float:
        """Mean answer over all prompts, in tokens."""
        known = self._everywhere
        count = known.count
        return (count * known.mean + _PRIOR * self._prior_tokens) / (count + _PRIOR)

    def learn(self, prompt_tokens: int, answer_tokens: int, max_tokens: int = 0) -> None:
        """Learns from a finished answer.

        Args:
            prompt_tokens: Length of the prompt.
            answer_tokens: Length of the answer.
            max_tokens: Limit of the request; 0: none. An answer of this length was cut, and counts
                as long as it would have been expected to become; otherwise a few requests with low
                limits would make all others look short.
        """
        if answer_tokens < 1:
            return
        if 0 < max_tokens <= answer_tokens:
            answer_tokens = round(self.repredict(prompt_tokens, answer_tokens))
        number = bisect_right(_EDGES, prompt_tokens)
        bucket = self._buckets[number]
        if bucket is None:
            bucket = self._buckets[number] = LengthHistogram(self._half_life)
        bucket.learn(answer_tokens)
        self._everywhere.learn(answer_tokens)
        self.learned += 1

    def predict(self, prompt_tokens: int, max_tokens: int = 0) -> float:
        """Returns the expected answer in tokens, at least 1.

        Args:
            prompt_tokens: Length of the prompt.
            max_tokens: Length at which the answer is cut; 0: it is not.
        """
        weight, tokens = self._above(prompt_tokens, 0.0)
        if max_tokens < 1:
            return max(1.0, tokens / weight)
        over, over_tokens = self._above(prompt_tokens, max_tokens)
        return max(1.0, (tokens - over_tokens + over * max_tokens) / weight)

    def repredict(self, prompt_tokens: int, generated: int, max_tokens: int = 0) -> float:
        """Returns the expected answer of a session that has generated a part and goes on.

        Args:
            prompt_tokens: Length of the prompt.
            generated: Tokens it has generated so far.
            max_tokens: Length at which the answer is cut; 0: it is not.
        """
        weight, tokens = self._above(prompt_tokens, generated)
        expected = generated + self.mean
        if weight > 0.0:
            if max_tokens > generated:
                over, over_tokens = self._above(prompt_tokens, max_tokens)
                tokens += over * max_tokens - over_tokens
            expected = tokens / weight
        if max_tokens > 0:
            expected = min(expected, float(max_tokens))
        return max(expected, generated + 1.0)

    def to_record(self) -> dict[str, object]:
        """Returns all it knows as JSON values: [mean tokens, count] of cells by shortest prompt."""
        buckets = {
            str(_EDGES[number - 1] if number else 0): bucket.as_record()
            for number, bucket in enumerate(self._buckets)
            if bucket is not None
        }
        return {"everywhere": self._everywhere.as_record(), "buckets": buckets}

    @staticmethod
    def from_record(record: object) -> LengthPredictor:
        """Returns a predictor with the knowledge that `to_record` wrote, up to rounding.

        Raises:
            InvalidInput: It is no such record.
        """
        if not isinstance(record, Mapping):
            raise InvalidInput("lengths", "must be an object")
        buckets = record.get("buckets")
        if not isinstance(buckets, Mapping):
            raise InvalidInput("lengths.buckets", "must be an object")
        made = LengthPredictor()
        made._everywhere.restore(record.get("everywhere"), "lengths.everywhere")
        for name, cells in buckets.items():
            field = f"lengths.buckets.{name}"
            if not (isinstance(name, str) and name.isdecimal() and len(name) < 10):
                raise InvalidInput(field, "is no prompt length")
            bucket = LengthHistogram(made._half_life)
            bucket.restore(cells, field)
            made._buckets[bisect_right(_EDGES, int(name))] = bucket
        return made

    def _above(self, prompt_tokens: int, tokens: float) -> tuple[float, float]:
        """Returns the number of answers longer than `tokens` and their tokens, from all sources."""
        # If an answer ends at every token with the same probability, its rest is expected to be as
        # long at any moment as the whole was at the beginning.
        mean = self.mean
        count = _PRIOR * math.exp(-tokens / max(mean, 1.0))
        total = count * (tokens + mean)
        everywhere = self._everywhere
        weight, weighted = everywhere.above(tokens)
        count += weight / everywhere.newest
        total += weighted / everywhere.newest
        scale = min(1.0, _EVERYWHERE / (everywhere.count + _PRIOR))
        count, total = count * scale, total * scale
        number = bisect_right(_EDGES, prompt_tokens)
        around = self._buckets[max(0, number - 1) : number + 2]
        own = self._buckets[number]
        near = sum(each.count for each in around if each is not None and each is not own)
        for each in around:
            if each is not None:
                scale = 1.0 if each is own else min(1.0, _NEIGHBOURS / max(near, 1.0))
                weight, weighted = each.above(tokens)
                count += scale * weight / each.newest
                total += scale * weighted / each.newest
        return count, total
