"""Figures of live migration on real processes: answers, moves and drained agents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from catenary_lab.scenarios.packing.live_schema import LayoutSpec

RESTART = "restart"
_AROUND = 10
"""Number of tokens before and behind a token over which the pace of its stream is measured."""


@dataclass(frozen=True, slots=True)
class Change:
    """A point at which an answer went from one chain to another."""

    how: str
    """Way of the change: "kv", "tokens" or "restart"."""
    token: int
    """Index of the first token of the new chain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as its client received it."""

    prompt: int
    tokens: tuple[int, ...]
    problem: str = ""
    """Reason why it broke off; empty if it did not."""
    gaps_ns: tuple[int, ...] = ()
    """Gap before each token, at the gateway; the first counts from the request."""
    changes: tuple[Change, ...] = ()

    def steps(self) -> Iterator[tuple[int, float]]:
        """Yields each token but the first with the gap before it, in its stream's steps."""
        moved = {change.token for change in self.changes}
        for at in range(1, len(self.gaps_ns)):
            around = [
                self.gaps_ns[near]
                for near in range(max(1, at - _AROUND), min(len(self.gaps_ns), at + _AROUND + 1))
                if near != at and near not in moved
            ]
            if around and (pace := median(around)) > 0:
                yield at, self.gaps_ns[at] / pace

    def stalls(self) -> list[tuple[str, float]]:
        """Returns how each move went, and how long the stream stood, in its own decode steps."""
        how = {change.token: change.how for change in self.changes if change.how != RESTART}
        return [(how[at], steps) for at, steps in self.steps() if at in how]


@dataclass(frozen=True, slots=True)
class Moved:
    """The outcome of an attempt to move a session."""

    mode: str
    outcome: str
    """"moved", "failed", or "none": it could not begin, or the answer ended first."""
    problem: str = ""
    tokens: int = 0
    rounds: int = 0
    duration_ms: float = 0.0
    held_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Drained:
    """The fate of an agent's sessions when the agent was drained."""

    sessions: int
    """Number of sessions that the agent had when draining began."""
    seconds: float
    is_drained: bool
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class LayoutMeasured:
    """The chains of a layout, the answers they gave, and the moves that were made on them."""

    layout: LayoutSpec
    chains: tuple[str, ...]
    """The chains in words."""
    reference: tuple[Answer, ...]
    """Undisturbed answers, one to each prompt."""
    answers: tuple[Answer, ...]
    """Answers that were generated while sessions moved."""
    moves: tuple[Moved, ...]
    cache_bytes: int
    """Bytes of caches that left agents for others."""
    drained: Drained | None
    seconds: float

    def is_equal(self, answer: Answer) -> bool:
        """Returns True if an answer did not break off and begins the undisturbed one."""
        wanted = self.reference[answer.prompt].tokens
        return not answer.problem and answer.tokens == wanted[: len(answer.tokens)]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns median, 99th percentile (nearest rank), largest value and count, or None."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-99 * len(ordered) // 100)
    return {
        "p50": float(median(ordered)),
        "p99": float(ordered[rank - 1]),
        "max": float(ordered[-1]),
        "count": len(ordered),
    }
