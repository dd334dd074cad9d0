"""A session's way of choosing tokens: its parameters and what was said so far.

Penalties and filters mean what the logits processors of `transformers` mean, in its order: bias,
repetition penalty, (frequency and presence penalty, as vLLM defines them,) minimum length, allowed
tokens, temperature, top-k, top-p, min-p. `choosing` applies them to the logits of a whole step,
where these are.

Randomness is a function of seed, position and token id alone (`gumbel`): a session that goes on
elsewhere after a loss chooses the same tokens, as far as the logits there are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.gumbel import stream_of
from catenary_services.domain.sampler_sizes import SAID_TOKENS
from catenary_services.domain.sampling import SamplingParameters

STOP = "stop"
LENGTH = "length"

NOT_FINITE = -1
"""In place of a token: the largest logit is no number, or infinite."""
NOTHING_ALLOWED = -2
"""In place of a token: no allowed token has a logit."""
NOT_CHOSEN = -3
"""In place of a token: choosing failed; the log says how."""
NO_TOKEN = {
    NOT_FINITE: "the model's output is not finite",
    NOTHING_ALLOWED: "no token is allowed here",
    NOT_CHOSEN: "no token could be chosen",
}


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
        self.said: TokensSaid | None = None
        """Only where it matters what was said."""
        if parameters.penalised:
            self.said = TokensSaid(token_ids[:prompt_tokens], token_ids[prompt_tokens:])
        self.ends = np.array(sorted(set(end_token_ids)), np.int64)
        self.biased = np.array([token for token, _ in parameters.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in parameters.logit_bias], np.float32)
        self.allowed: NDArray[np.bool_] | None = None
        """[vocabulary]: tokens that may be chosen next; None: any."""
        self._prompt_tokens = prompt_tokens
        self._end_set = frozenset(end_token_ids)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.position - self._prompt_tokens

    @property
    def is_early(self) -> bool:
        """True while no token may end the answer."""
        return self.generated < self.parameters.min_tokens

    @property
    def takes_best(self) -> bool:
        """True if the largest logit as it is decides."""
        return self.parameters.greedy and not (
            self.said is not None or self.is_early or len(self.biased) or self.allowed is not None
        )

    @property
    def stream(self) -> int:
        """Where the noise of the next token begins, a signed 64-bit number."""
        return stream_of(self.parameters.seed or 0, self.position)

    def accept(self, token_id: int) -> str:
        """Appends a token; returns the finish reason, empty while the session goes on."""
        self.position += 1
        if self.said is not None:
            self.said.add(token_id)
        if token_id in self._end_set and not self.parameters.ignore_eos:
            return STOP
        return LENGTH if self.generated == self.parameters.max_tokens else ""


class TokensSaid:
    """Which tokens occurred in prompt and answer, and how often in the answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Counts the tokens there are."""
        self.answer = list(answer)
        """In the order they came."""
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
        """How often the answer has each of `ids`; 0 for those of the prompt alone."""
        return self._counts[: self._used]

    @property
    def memory_bytes(self) -> int:
        """Of the arrays; the list of the answer is left out."""
        return self._ids.nbytes + self._counts.nbytes

    def add(self, token_id: int) -> None:
        """Counts one more token of the answer."""
        self.answer.append(token_id)
        found = np.flatnonzero(self.ids == token_id)
        if len(found):
            self._counts[found] += 1
            return
        if self._used == len(self._ids):
            # As many again would be twice what a long session needs.
            self._ids = np.concatenate((self._ids, np.zeros(SAID_TOKENS, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(SAID_TOKENS, np.float32)))
        self._ids[self._used], self._counts[self._used] = token_id, 1
        self._used += 1
