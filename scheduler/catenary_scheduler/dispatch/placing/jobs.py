"""The inputs of placement: sessions and the limits of workers."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_services.domain.ids import Nanoseconds


@dataclass(slots=True)
class Job:
    """One session on a worker, or one to be placed.

    Attributes:
        prompt_tokens: l_in.
        predicted_tokens: l_pred, predicted length of its whole answer.
        generated_tokens: l_out so far, the first token included; 0 until it has run its prompt.
        decode_ns: t_dec, time from its first token to its latest.
        is_new: True if its prompt has not been run yet, so that it counts in constraints c and d.
    """

    prompt_tokens: int
    predicted_tokens: float
    generated_tokens: int = 0
    decode_ns: float = 0.0
    is_new: bool = True

    @property
    def final_tokens(self) -> float:
        """The length of its answer as placement counts it (reading R1)."""
        return max(self.predicted_tokens, self.generated_tokens)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits that a worker must keep.

    Attributes:
        first_token_ns: T_pre; 0: no limit.
        per_token_ns: T_dec; 0: no limit.
        cache_capacity: M, in units of the lines' cache; infinity: slots are the only limit.
        gamma: Part of an answer that counts in constraint b. With 0 only the first step meets the
            objective, with 1 the last one does; 0.5 is the mean over time, which ATGT measures.
        theta: Share of b and d that may be used.
        split_decode: True if the worker runs no prompts (split phase): only b and e apply.
    """

    first_token_ns: Nanoseconds
    per_token_ns: Nanoseconds
    cache_capacity: float
    gamma: float = 0.5
    theta: float = 0.9
    split_decode: bool = False
