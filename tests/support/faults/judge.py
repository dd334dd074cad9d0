"""What was promised and what was measured: every request, and every fault (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

IMAGE, TEXT = "image", "text"
KINDS = (IMAGE, TEXT)
IN_A_ROW = 3
"""So many good answers of each kind, one after the other, are a recovery."""


class Verdict(StrEnum):
    """What one request came to."""

    RIGHT = "right"
    REFUSED = "refused"  # with a stated error
    CANCELLED = "cancelled"  # by us
    WRONG = "wrong"
    HUNG = "hung"
    UNTYPED = "untyped"
    NOT_RETRYABLE = "not retryable"


BAD = (Verdict.WRONG, Verdict.HUNG, Verdict.UNTYPED, Verdict.NOT_RETRYABLE)

STATED = {
    "UNAVAILABLE",
    "PARTITION_LOST",
    "OVERLOADED",
    "CACHE_FULL",
    "DEADLINE_EXCEEDED",
    "SLO_UNATTAINABLE",
    "NO_ACTIVE_PLAN",
    "STALE_EPOCH",
}
"""Reasons that a request without a fault of its own may be refused for, while something fails."""
RETRYABLE = {"UNAVAILABLE", "PARTITION_LOST", "OVERLOADED", "CACHE_FULL"}
_BROKEN = "Connection reset"
"""What gRPC says of a connection whose other end was killed: there is nobody to say more."""
_BARE = (
    "Stream removed",
    "Internal error from Core",
    "Exception calling application",
    "Unexpected <",
)


@dataclass(slots=True)
class Outcome:
    """One request; moments in seconds since the run began."""

    kind: str
    sent_s: float
    ended_s: float = 0.0
    reason: str = ""
    message: str = ""
    retryable: bool = False
    right: bool = False
    hung: bool = False
    cancelled: bool = False
    foreign: bool = False
    """Something that is none of the SDK's errors was raised."""
    gateway: str = ""
    pieces: int = 0
    longest_pause_s: float = 0.0

    @property
    def took_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def verdict(self) -> Verdict:
        if self.hung:
            return Verdict.HUNG
        if self.reason or self.foreign:
            return self._of_error()
        if not self.right:
            return Verdict.WRONG
        return Verdict.CANCELLED if self.cancelled else Verdict.RIGHT

    def _of_error(self) -> Verdict:
        if not self.right:  # what had come of a stream by then
            return Verdict.WRONG
        if self.foreign or self.reason not in STATED:
            return Verdict.UNTYPED
        if _BROKEN not in self.message and any(text in self.message for text in _BARE):
            return Verdict.UNTYPED
        if self.reason in RETRYABLE and not self.retryable:
            return Verdict.NOT_RETRYABLE
        return Verdict.REFUSED


@dataclass(slots=True)
class Spell:
    """One step of the schedule as it went.

    Attributes:
        faults: Their names; `what` with everything that was drawn.
        began_s: When the first began; `undone_s`: when the last was over.
        recovered_s: Time from there until everything was answered as usual; None: never.
        whole_s: Time from there until every process served again; None: never.
        promised_s: What the first may be at most.
        served_s: See `Promise`; None for pairs.
        findings: What went wrong beside requests.
        reset_s: When we started everything anew, as it did not recover; None: it did.
    """

    number: int
    faults: tuple[str, ...]
    what: str
    promised_s: float
    served_s: float | None
    began_s: float = 0.0
    undone_s: float = 0.0
    recovered_s: float | None = None
    whole_s: float | None = None
    findings: list[str] = field(default_factory=list)
    reset_s: float | None = None

    @property
    def ended_s(self) -> float:
        """When it was over with all its consequences; never: infinity."""
        waits = (self.recovered_s, self.whole_s)
        if None in waits:
            return float("inf")
        return self.undone_s + max(wait for wait in waits if wait is not None)

    @property
    def is_late(self) -> bool:
        return self.recovered_s is None or self.recovered_s > self.promised_s

    def overlaps(self, outcome: Outcome) -> bool:
        return outcome.sent_s <= self.ended_s and outcome.ended_s >= self.began_s

    def was_ended_by_us(self, outcome: Outcome) -> bool:
        """Whether a request was under way when we started everything anew."""
        return (
            self.reset_s is not None and outcome.ended_s >= self.reset_s and self.overlaps(outcome)
        )

    def refused_against_promise(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Returns the requests that should have been answered although the fault was in force."""
        if self.served_s is None:
            return []
        from_s = self.began_s + self.served_s
        return [
            each
            for each in outcomes
            if from_s <= each.sent_s <= self.undone_s and each.verdict is Verdict.REFUSED
        ]


def recovery_s(
    outcomes: Iterable[Outcome], undone_s: float, normal_s: dict[str, float]
) -> float | None:
    """Returns how long after `undone_s` requests were answered as usual; None: not yet.

    It is the moment of the first of `IN_A_ROW` good answers in a row, of the kind that was later.
    Only requests that were sent after the fault was over count.

    Args:
        outcomes: That have ended.
        undone_s: When the fault was over.
        normal_s: The longest answer that counts as usual, by kind.
    """
    moments = []
    sent_after = [each for each in outcomes if each.sent_s >= undone_s and not each.cancelled]
    for kind, longest_s in normal_s.items():
        run: list[float] = []
        ended = (each for each in sent_after if each.kind == kind)
        for each in sorted(ended, key=lambda one: one.ended_s):
            good = each.verdict is Verdict.RIGHT and each.took_s <= longest_s
            run = [*run, each.ended_s] if good else []
            if len(run) == IN_A_ROW:
                break
        if len(run) < IN_A_ROW:
            return None
        moments.append(run[0])
    return max(moments) - undone_s


def lost_in_calm(outcomes: Iterable[Outcome], spells: Sequence[Spell]) -> list[Outcome]:
    """Returns requests that were refused although nothing was broken."""
    return [
        each
        for each in outcomes
        if each.verdict is Verdict.REFUSED and not any(spell.overlaps(each) for spell in spells)
    ]
