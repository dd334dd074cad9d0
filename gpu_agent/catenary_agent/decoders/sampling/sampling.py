"""A session's sampler: its parameters and the tokens of the sequence so far.

Penalties and filters have the meaning and the order of the logits processors of `transformers`:
bias, repetition penalty, frequency and presence penalty (as vLLM defines them), minimum length,
bad words, allowed tokens, the grammar, temperature, top-k, top-p, min-p. `choosing` applies them to
the logits of a whole step on their device.

Randomness is a function of seed, position and token id alone (`gumbel`). A session that continues
elsewhere after a loss chooses the same tokens, as far as the logits there are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.gumbel import mixed_seed, stream_at
from catenary_agent.decoders.triton_kernels.row_table import row_constants
from catenary_services.domain.sampler_sizes import SAID_TOKENS
from catenary_services.domain.sampling import SamplingParameters

if TYPE_CHECKING:
    from catenary_agent.decoders.sampling.grammar_masks import AnswerMask

STOP = "stop"
LENGTH = "length"
_NONE = np.empty(0, np.int64)

NOT_FINITE = -1
"""A placeholder for a token: the largest logit is NaN or infinite."""
NOTHING_ALLOWED = -2
"""A placeholder for a token: no allowed token has a finite logit."""
NOT_CHOSEN = -3
"""A placeholder for a token: choosing failed, and the error is in the log."""
NO_MASK = -4
"""A placeholder for a token: it is not known which tokens match the grammar."""
NO_TOKEN = {
    NOT_FINITE: "the model's output is not finite",
    NOTHING_ALLOWED: "leaves no token that the answer could go on with",
    NOT_CHOSEN: "no token could be chosen",
    NO_MASK: "it is not known which tokens match the grammar",
}


class SessionSampler:
    """The sampler of one session: its parameters and the tokens so far."""

    def __init__(
        self,
        parameters: SamplingParameters,
        token_ids: Sequence[int],
        prompt_tokens: int,
        end_token_ids: Sequence[int],
    ) -> None:
        """Begins a session, or continues one that was elsewhere.

        Args:
            parameters: The sampling parameters; a missing seed counts as 0.
            token_ids: The prompt, and the tokens that were generated already.
            prompt_tokens: Number of prompt tokens among them.
            end_token_ids: The tokens that end a text.
        """
        self.parameters = parameters
        self.position = len(token_ids)
        """Index of the next token in the whole sequence."""
        self.said: TokenOccurrences | None = None
        """Counts of the tokens that occurred; None unless a penalty needs them."""
        if parameters.penalised:
            self.said = TokenOccurrences(token_ids[:prompt_tokens], token_ids[prompt_tokens:])
        self._stops = frozenset(parameters.stop_token_ids)
        self._end_set = frozenset(end_token_ids)
        self._ends = np.array(sorted(self._end_set | self._stops), np.int64)
        self._bad_words: BadWords | None = None
        if parameters.bad_token_ids:
            self._bad_words = BadWords(parameters.bad_token_ids, token_ids[prompt_tokens:])
        self.biased = np.array([token for token, _ in parameters.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in parameters.logit_bias], np.float32)
        self.only = np.array(sorted(set(parameters.allowed_token_ids)), np.int64)
        """The only tokens that may ever be chosen; empty if all may."""
        self.allowed: NDArray[np.bool_] | None = None
        """The tokens that may be chosen next, [vocabulary]; None if all may."""
        self.mask: AnswerMask | None = None
        """The mask that finds these tokens; None without a grammar."""
        self.constants = row_constants(parameters)
        """The columns of this session's rows in the table for kernels."""
        self._mixed_seed = mixed_seed(parameters.seed or 0)
        self._prompt_tokens = prompt_tokens

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return self.position - self._prompt_tokens

    @property
    def is_early(self) -> bool:
        """True while no token may end the answer.

        A grammar decides that by itself: an answer that is complete cannot go on.
        """
        return self.mask is None and self.generated < self.parameters.min_tokens

    @property
    def banned(self) -> NDArray[np.int64]:
        """The tokens that must not be chosen next: ends that come too early, and bad words."""
        ends = self._ends if self.is_early else _NONE
        if self._bad_words is None:
            return ends
        return np.concatenate((ends, self._bad_words.banned))

    @property
    def narrowest(self) -> str:
        """The name of the parameter that leaves the fewest tokens, for an error if none is left."""
        if self.parameters.allowed_token_ids:
            return "allowed_token_ids"
        return "grammar" if self._bad_words is None else "bad_words"

    @property
    def takes_best(self) -> bool:
        """True if the token with the largest unchanged logit is chosen."""
        return self.parameters.greedy and self.is_plain

    @property
    def is_plain(self) -> bool:
        """True if nothing changes logits before the temperature does."""
        return not (
            self.said is not None
            or self.is_early
            or len(self.biased)
            or self.allowed is not None
            or len(self.only)
            or self._bad_words is not None
        )

    @property
    def stream(self) -> int:
        """The signed 64-bit number from which the noise of the next token derives."""
        return stream_at(self._mixed_seed, self.position)

    def take_mask(self) -> bool:
        """Waits for the tokens that match the grammar, if there is one.

        Returns:
            False if they cannot be found; `mask.problem` says why.
        """
        if self.mask is not None:
            self.allowed = self.mask.take()
        return self.mask is None or self.allowed is not None

    def ahead(self, tokens: int) -> SessionSampler:
        """Returns a sampler that chooses as this one will after so many more tokens.

        There is one only for parameters that say `takes_drafts`.
        """
        assert self.parameters.takes_drafts
        later = copy.copy(self)
        later.position += tokens
        return later

    def accept(self, token_id: int) -> str:
        """Appends a token; returns the finish reason, empty while the session goes on.

        An end-of-text token ends every answer with a grammar, which allows it only at its end.
        """
        self.position += 1
        if self.said is not None:
            self.said.add(token_id)
        if self._bad_words is not None:
            self._bad_words.add(token_id)
        if token_id in self._end_set and (self.mask is not None or not self.parameters.ignore_eos):
            return STOP
        if token_id in self._stops:
            return STOP
        if self.mask is not None:
            self.mask.accept(token_id)
        return LENGTH if self.generated == self.parameters.max_tokens else ""


class BadWords:
    """Sequences of tokens of which none may become part of an answer."""

    def __init__(self, sequences: Sequence[Sequence[int]], answer: Sequence[int]) -> None:
        """Begins behind the tokens of an answer that were generated already."""
        self._sequences = [tuple(each) for each in sequences]
        self._longest = max(map(len, self._sequences)) - 1
        self._tail = tuple(answer[-self._longest :]) if self._longest else ()

    @property
    def banned(self) -> NDArray[np.int64]:
        """The last token of every sequence of which all others were just generated."""
        tail = self._tail
        last = {
            each[-1]
            for each in self._sequences
            if len(each) == 1 or tail[-(len(each) - 1) :] == each[:-1]
        }
        return np.array(sorted(last), np.int64)

    def add(self, token_id: int) -> None:
        """Notes one more token of the answer."""
        if self._longest:
            self._tail = (*self._tail, token_id)[-self._longest :]


class TokenOccurrences:
    """The tokens that occurred in prompt and answer, and their counts in the answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.answer = list(answer)
        """The tokens of the answer in their order."""
        self._ids, places = np.unique(np.asarray([*prompt, *answer], np.int64), return_inverse=True)
        said = np.bincount(places[len(prompt) :], minlength=len(self._ids))
        self._counts = said.astype(np.float32)
        self._used = len(self._ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Every token that occurred, once."""
        return self._ids[: self._used]

    @property
    def counts(self) -> NDArray[np.float32]:
        """The count in the answer of each of `ids`; 0 for those of the prompt only."""
        return self._counts[: self._used]

    @property
    def memory_bytes(self) -> int:
        """Size of the arrays in bytes; the list of the answer is not included."""
        return self._ids.nbytes + self._counts.nbytes

    def add(self, token_id: int) -> None:
        """Counts one more token of the answer."""
        self.answer.append(token_id)
        found = np.flatnonzero(self.ids == token_id)
        if len(found):
            self._counts[found] += 1
            return
        if self._used == len(self._ids):
            # Growth by a constant: doubling would take twice what a long session needs.
            self._ids = np.concatenate((self._ids, np.zeros(SAID_TOKENS, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(SAID_TOKENS, np.float32)))
        self._ids[self._used], self._counts[self._used] = token_id, 1
        self._used += 1
