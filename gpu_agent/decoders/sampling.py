"""Choosing the next token of many sessions from their logits, on a CPU without PyTorch.

Penalties and filters mean what the logits processors of `transformers` mean, in its order:
repetition penalty, (frequency and presence penalty, as vLLM defines them,) minimum length,
temperature, top-k, top-p (`token_filters`).

Randomness is a function of seed and position alone (Philox, Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011, a counter-based generator): a session that goes on elsewhere
after a loss chooses the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_agent.decoders.token_filters import Logits, draw
from services.domain.sampling import SamplingParameters

STOP = "stop"
LENGTH = "length"


class Choice(NamedTuple):
    """What became of one row."""

    token_id: int
    """-1 if there is an error."""
    finish_reason: str
    """"stop", "length", or empty while the session goes on."""
    error: str = ""
    """Why no token could be chosen: the logits are not finite."""


class Sampler:
    """One session's way of choosing: its parameters and the tokens there are so far."""

    def __init__(
        self,
        parameters: SamplingParameters,
        token_ids: Sequence[int],
        prompt_tokens: int,
        end_token_ids: Sequence[int],
    ) -> None:
        """Starts, or goes on where a session was elsewhere.

        Args:
            parameters: How to choose; a missing seed counts as 0.
            token_ids: The prompt, and whatever was generated already.
            prompt_tokens: How many of them are the prompt's.
            end_token_ids: Any of them ends the text.
        """
        self.parameters = parameters
        self.position = len(token_ids)
        """Index in the whole sequence of the token chosen next."""
        self._prompt_tokens = prompt_tokens
        self._ends = np.array(sorted(set(end_token_ids)), np.int64)
        self._end_set = frozenset(end_token_ids)
        self._prompt = _TokenCounts(token_ids[:prompt_tokens])
        self._generated = _TokenCounts(token_ids[prompt_tokens:])

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.position - self._prompt_tokens

    @property
    def may_take_best(self) -> bool:
        """True if the largest logit as it is decides."""
        p = self.parameters
        return p.greedy and not p.penalised and self.generated >= p.min_tokens

    def choose(self, logits: Logits) -> int:
        """Returns the next token for the logits of one row, without accepting it.

        Args:
            logits: float32 `[vocabulary]`, finite at its largest; not changed.
        """
        adjusted = self._adjusted(logits)
        if self.parameters.greedy:
            return int(adjusted.argmax())
        return draw(adjusted, self.parameters, _uniform(self.parameters.seed or 0, self.position))

    def accept(self, token_id: int) -> str:
        """Appends a token; returns the finish reason, empty while the session goes on."""
        self.position += 1
        if self.parameters.penalised:
            self._generated.add(token_id)
        if token_id in self._end_set and not self.parameters.ignore_eos:
            return STOP
        return LENGTH if self.generated == self.parameters.max_tokens else ""

    def _adjusted(self, logits: Logits) -> Logits:
        p = self.parameters
        too_early = self.generated < p.min_tokens
        if not too_early and not p.penalised:
            return logits
        logits = logits.copy()
        if p.repetition_penalty != 1:
            seen = np.union1d(self._prompt.ids, self._generated.ids)
            values = logits[seen]
            factor = np.float32(p.repetition_penalty)
            logits[seen] = np.where(values < 0, values * factor, values / factor)
        if p.frequency_penalty or p.presence_penalty:
            counts = self._generated.counts
            logits[self._generated.ids] -= (
                p.frequency_penalty * counts + np.float32(p.presence_penalty)
            ).astype(np.float32)
        if too_early:
            logits[self._ends] = -np.inf
        return logits


class _TokenCounts:
    """Which tokens occurred, and how often: arrays that grow by doubling."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        unique, counts = np.unique(np.asarray(token_ids, np.int64), return_counts=True)
        self._ids = unique
        self._counts = counts.astype(np.float32)
        self._used = len(unique)
        self._index = {int(token): i for i, token in enumerate(unique)}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._used]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._used]

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, self._used)
        if index == self._used:
            if index == len(self._ids):
                self._ids = np.resize(self._ids, max(16, 2 * index))
                self._counts = np.resize(self._counts, max(16, 2 * index))
            self._ids[index], self._counts[index] = token_id, 0
            self._used += 1
        self._counts[index] += 1


def choose(logits: Logits | Sequence[Logits], samplers: Sequence[Sampler]) -> list[Choice]:
    """Chooses and accepts one token for each session.

    A row does not depend on the other rows of the call.

    Args:
        logits: float32 `[rows, vocabulary]`, or one `[vocabulary]` per row; not changed.
        samplers: The session of each row.

    Returns:
        One choice per row, in order.
    """
    choices = []
    for row, sampler in zip(logits, samplers, strict=True):
        best = int(row.argmax())
        # argmax finds a NaN if there is one, and an infinity if it is the largest.
        if not np.isfinite(row[best]):
            choices.append(Choice(-1, "", "the model's output is not finite"))
            continue
        token_id = best if sampler.may_take_best else sampler.choose(row)
        choices.append(Choice(token_id, sampler.accept(token_id)))
    return choices


def _uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) that depends on nothing but seed and position."""
    raw = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(raw) >> 11) * 2.0**-53
