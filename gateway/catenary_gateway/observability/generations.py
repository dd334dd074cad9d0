"""The record that is kept of a finished generation: token counts and times, no text, no tokens."""

from __future__ import annotations

from dataclasses import dataclass

RESTART = "restart"


@dataclass(frozen=True, slots=True)
class WaterfallSpan:
    """One bar of a waterfall; its times are on the gateway's monotonic clock."""

    name: str
    process: str
    start_ns: int
    end_ns: int
    batch_id: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ObjectivesReport:
    """Times and objectives of one generation, in nanoseconds.

    Attributes:
        first_token_slo_ns: The objective for the time from arrival to the first token; 0: none.
        per_token_slo_ns: The objective for the mean time per token after the first; 0: none.
        first_token_ns: Time from arrival to the first token; 0 before the first token.
        per_token_ns: Mean time per token after the first; 0 before the second token.
        predicted_first_token_ns: The scheduler's prediction of `first_token_ns` when it started
            the generation; 0: none.
        predicted_per_token_ns: The scheduler's prediction of `per_token_ns`; 0: none.
        complete: Whether the answer was generated to its end.
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
        """True if the first token came in time, or has no objective."""
        if not self.first_token_slo_ns:
            return True
        return 0 < self.first_token_ns <= self.first_token_slo_ns

    @property
    def met_per_token(self) -> bool:
        """True if the later tokens came fast enough, or have no objective.

        An answer of one token meets this objective, and one that broke off does not.
        """
        if not self.per_token_slo_ns:
            return True
        return self.complete and self.per_token_ns <= self.per_token_slo_ns

    @property
    def met(self) -> bool:
        """True if both objectives were met."""
        return self.met_first_token and self.met_per_token

    def is_overdue(self, waited_ns: int) -> bool:
        """Returns whether an answer that was given up had missed an objective by then.

        Args:
            waited_ns: Time from its arrival until it was given up.
        """
        first_ns, slo_ns = self.first_token_ns or waited_ns, self.first_token_slo_ns
        if slo_ns and first_ns > slo_ns:
            return True
        return 0 < self.per_token_slo_ns < self.per_token_ns


@dataclass(frozen=True, slots=True)
class ChainChange:
    """The change of an answer from one chain to another.

    Attributes:
        how: "restart", or for a live move what was sent: "kv" or "tokens".
        generated_tokens: Number of tokens generated before the change.
        after_ns: Time from the request's arrival to the first token of the new chain.
        stall_ns: Time from the last token of the old chain to the first of the new one.
        from_agents: Agents of the old ring, in the order of their blocks.
        to_agents: Agents of the new ring, in the order of their blocks.
    """

    how: str
    generated_tokens: int
    after_ns: int
    stall_ns: int
    from_agents: tuple[str, ...]
    to_agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The part of a request's record that only generations have."""

    operation: str
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    finish_reason: str
    """"stop" or "length"; empty if the generation failed."""
    first_token_ns: int
    """Time of the first token on the monotonic clock, as `last_token_ns`; 0 if there was none."""
    last_token_ns: int
    objectives: ObjectivesReport
    bars: tuple[WaterfallSpan, ...]
    """The waterfall of the generation, after the request was received."""
    chain_changes: tuple[ChainChange, ...]

    @property
    def moves(self) -> int:
        """Number of live moves to another chain; restarts do not count."""
        return sum(change.how != RESTART for change in self.chain_changes)
