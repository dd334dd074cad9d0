"""What is kept of a generation after its end: token counts and times, no text, no tokens."""

from __future__ import annotations

from dataclasses import dataclass

RESTART = "restart"


@dataclass(frozen=True, slots=True)
class WaterfallSpan:
    """One stretch of time, on the gateway's monotonic clock."""

    name: str
    process: str
    start_ns: int
    end_ns: int
    batch_id: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ObjectivesReport:
    """Times of one generation, in nanoseconds.

    Attributes:
        first_token_slo_ns: Most time from its arrival to its first token; 0: any.
        per_token_slo_ns: Most mean time per token behind the first; 0: any.
        first_token_ns: What the first took; 0: there was none.
        per_token_ns: The mean time per token behind the first; 0: there was none.
        predicted_first_token_ns: What the scheduler expected when it started it; 0: nothing.
        predicted_per_token_ns: The same, per token behind the first.
        complete: It came to its end.
    """

    first_token_slo_ns: int
    per_token_slo_ns: int
    first_token_ns: int
    per_token_ns: int
    predicted_first_token_ns: int
    predicted_per_token_ns: int
    complete: bool

    @property
    def met_first_token(self) -> bool:
        """True if the first token came in time; also if it did not have to."""
        if not self.first_token_slo_ns:
            return True
        return 0 < self.first_token_ns <= self.first_token_slo_ns

    @property
    def met_per_token(self) -> bool:
        """True if the others came fast enough; also if they did not have to.

        An answer of one token has no others. One that broke off cannot have met this.
        """
        if not self.per_token_slo_ns:
            return True
        return self.complete and self.per_token_ns <= self.per_token_slo_ns

    @property
    def met(self) -> bool:
        """True if both objectives were met."""
        return self.met_first_token and self.met_per_token


@dataclass(frozen=True, slots=True)
class ChainChange:
    """An answer that was begun on one chain went on another.

    Attributes:
        how: "kv" or "tokens" for a live move, by what travelled; "restart".
        generated_tokens: So many were generated before.
        after_ns: From the request's arrival to the first token of the new chain.
        stall_ns: From the last token of the old chain to the first of the new one.
        from_agents: Agents of the ring that generated before, in the order of their blocks.
        to_agents: The same of the new one.
    """

    how: str
    generated_tokens: int
    after_ns: int
    stall_ns: int
    from_agents: tuple[str, ...]
    to_agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The facts of one generation that a request of any kind does not have."""

    operation: str
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    finish_reason: str
    """Empty if it failed."""
    first_token_ns: int
    """On the monotonic clock, as the next; 0: there was none."""
    last_token_ns: int
    objectives: ObjectivesReport
    bars: tuple[WaterfallSpan, ...]
    """Where the time went, behind the receiving of the request; see `_bars_of`."""
    chain_changes: tuple[ChainChange, ...]

    @property
    def moves(self) -> int:
        """How often it moved to another chain while it ran."""
        return sum(change.how != RESTART for change in self.chain_changes)
