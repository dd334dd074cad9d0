"""Latency lines of a worker that generates text, and objectives of sessions (Aladdin, 3.1-3.2).

A *worker* is a chain; one agent that holds the whole model is the plain case. Times are
nanoseconds as floats, because coefficients are: a context token may cost less than one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from catenary_services.domain.ids import Nanoseconds

OBJECTIVE_KEYS = ("time_to_first_token_slo_ms", "time_per_output_token_slo_ms")
"""Keys of the two objectives in files, in milliseconds, in the order of `TokenObjectives`."""


@dataclass(frozen=True, slots=True)
class TokenObjectives:
    """Latency objectives of a session, which meets them if it meets both.

    Attributes:
        first_token_ns: The longest time from its arrival to its first token (TTFT); 0 for any.
        per_token_ns: The longest mean time per token after the first (ATGT): the time from the
            first to the last token over the number of tokens less one; 0 for any.
    """

    first_token_ns: Nanoseconds = 0
    per_token_ns: Nanoseconds = 0

    def named(self) -> dict[str, Nanoseconds]:
        """Returns the objectives that are set, by their keys in manifests and plans."""
        both = zip(OBJECTIVE_KEYS, (self.first_token_ns, self.per_token_ns), strict=True)
        return {key: slo_ns for key, slo_ns in both if slo_ns}


@dataclass(frozen=True, slots=True)
class LatencyLines:
    """Fitted times of one worker (eq. 1-3), in nanoseconds; no coefficient is negative.

    Attributes:
        prefill_token_ns: k1, per token of the prompts.
        prefill_ns: c1, per pass over prompts.
        decode_context_token_ns: k2, per token of context of the whole batch.
        decode_session_ns: c2, per session of the batch.
        decode_ns: c3, per decode step.
        decode_lone_ns: t1, for a step of one session; 0 if the line holds for it, too.
        prefill_floor_ns: The least time of a prefill, however short the prompt.
        prefill_chunk_tokens: Number of tokens that a prompt is run in at a time, with a step of the
            generating sessions in between; 0 for whole prompts, during which all others wait.
        cache_token: h, the cache of one token of a session, in units of the capacity.
        cache_session: j, the further cache of a session, in units of the capacity.
        prefill_later_token_ns: With chunks, the time per token behind the first chunk. It is less
            than k1, because chunks follow each other and agents of a chain compute different ones
            at the same time; 0 for k1.
        hop_shares: Share of each agent of the chain in the time of a step; empty if all of it is
            spent at one.
    """

    prefill_token_ns: float
    prefill_ns: float
    decode_context_token_ns: float
    decode_session_ns: float
    decode_ns: float
    decode_lone_ns: float = 0.0
    prefill_floor_ns: float = 0.0
    prefill_chunk_tokens: int = 0
    cache_token: float = 1.0
    cache_session: float = 0.0
    prefill_later_token_ns: float = 0.0
    hop_shares: tuple[float, ...] = ()

    def prefill(self, tokens: float) -> float:
        """Returns the nanoseconds of one pass over prompts of `tokens` tokens in all (eq. 2)."""
        later_ns, chunk = self.prefill_later_token_ns, self.prefill_chunk_tokens
        if later_ns and 0 < chunk < tokens:
            return self.prefill(chunk) + later_ns * (tokens - chunk)
        return max(self.prefill_floor_ns, self.prefill_token_ns * tokens + self.prefill_ns)

    def decode(self, sessions: int, context_tokens: float) -> float:
        """Returns the time of one step of `sessions` with `context_tokens` in all (eq. 3)."""
        if sessions == 1 and self.decode_lone_ns:
            return self.decode_lone_ns
        return (
            self.decode_context_token_ns * context_tokens
            + self.decode_session_ns * sessions
            + self.decode_ns
        )

    def delayed(self, wait_ns: float) -> LatencyLines:
        """Returns the lines of a worker whose every pass waits that long for its devices."""
        chunk = self.prefill_chunk_tokens
        later_ns = self.prefill_later_token_ns
        return replace(
            self,
            prefill_ns=self.prefill_ns + wait_ns,
            prefill_floor_ns=self.prefill_floor_ns + wait_ns if self.prefill_floor_ns else 0.0,
            prefill_later_token_ns=later_ns + wait_ns / chunk if later_ns and chunk else later_ns,
            decode_ns=self.decode_ns + wait_ns,
            decode_lone_ns=self.decode_lone_ns + wait_ns if self.decode_lone_ns else 0.0,
        )

    def cache(self, tokens: float) -> float:
        """Returns what a session of `tokens` tokens takes of the cache capacity (eq. 1)."""
        return self.cache_token * tokens + self.cache_session
