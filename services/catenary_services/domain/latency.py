"""Latency lines of a worker that generates text, and what sessions are held to (Aladdin, 3.1-3.2).

A *worker* is a chain; one agent that holds the whole model is the plain case. Times are
nanoseconds as floats, because coefficients are: a context token may cost less than one.
"""

from __future__ import annotations

from dataclasses import dataclass

from catenary_services.domain.ids import Nanoseconds

OBJECTIVE_KEYS = ("time_to_first_token_slo_ms", "time_per_output_token_slo_ms")
"""What files call the two objectives, in milliseconds, in the order of `TokenObjectives`."""


@dataclass(frozen=True, slots=True)
class TokenObjectives:
    """A session meets its objectives if it meets both.

    Attributes:
        first_token_ns: Most time from its arrival to its first token (TTFT); 0: any.
        per_token_ns: Most mean time per token after the first (ATGT): the time from the first to
            the last token over the number of tokens less one; 0: any.
    """

    first_token_ns: Nanoseconds = 0
    per_token_ns: Nanoseconds = 0

    def named(self) -> dict[str, Nanoseconds]:
        """Returns those that are set, by the keys that manifests and plans have for them."""
        both = zip(OBJECTIVE_KEYS, (self.first_token_ns, self.per_token_ns), strict=True)
        return {key: slo_ns for key, slo_ns in both if slo_ns}


@dataclass(frozen=True, slots=True)
class LatencyLines:
    """Fitted times of one worker (eq. 1-3). No coefficient is negative.

    Attributes:
        prefill_token_ns: k1.
        prefill_ns: c1.
        decode_context_token_ns: k2, per token of context of the whole batch.
        decode_session_ns: c2, per session of the batch.
        decode_ns: c3.
        decode_lone_ns: t1, a step of one session; 0: as the line says.
        prefill_floor_ns: A prefill takes at least this, however short the prompt.
        prefill_chunk_tokens: Prompts are run so many tokens at a time, with a step of the sessions
            that generate in between; 0: whole prompts, which hold everybody up.
        cache_token: h, what a token of a session takes of its cache, in units of the capacity.
        cache_session: j, what a session takes beside that.
        prefill_later_token_ns: With chunks: what a token behind the first chunk takes instead of
            k1, because chunks follow each other and agents of a chain compute different ones at
            the same time; 0: k1.
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

    def prefill(self, tokens: float) -> float:
        """Returns the time of one pass over prompts of so many tokens in all (eq. 2)."""
        later_ns, chunk = self.prefill_later_token_ns, self.prefill_chunk_tokens
        if later_ns and 0 < chunk < tokens:
            return self.prefill(chunk) + later_ns * (tokens - chunk)
        return max(self.prefill_floor_ns, self.prefill_token_ns * tokens + self.prefill_ns)

    def decode(self, sessions: int, context_tokens: float) -> float:
        """Returns the time of one step of so many sessions with so much context in all (eq. 3)."""
        if sessions == 1 and self.decode_lone_ns:
            return self.decode_lone_ns
        return (
            self.decode_context_token_ns * context_tokens
            + self.decode_session_ns * sessions
            + self.decode_ns
        )

    def cache(self, tokens: float) -> float:
        """Returns what a session of so many tokens takes of the capacity (eq. 1)."""
        return self.cache_token * tokens + self.cache_session
