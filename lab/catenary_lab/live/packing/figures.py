"""Live migration on real processes: what is asked of a run, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

RESTART = "restart"
_AROUND = 10
"""A stream's pace at a token is that of so many tokens before and behind it."""

Hops = tuple[tuple[int, int, int], ...]
"""Agent by its number, first block and end of the blocks it processes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which chains there are."""

    name: str
    chains: tuple[Hops, ...] = ()
    """Empty: the planner makes one of each agent, with the whole model."""
    moves: int = 200
    """Of running sessions, half by their caches, half by their tokens."""
    drained: int = 0
    """Running sessions of an agent that is drained then; 0: none is. Needs the planner's chains."""


@dataclass(frozen=True, slots=True)
class PackingRun:
    """What to do."""

    model: str
    agents: int
    layouts: tuple[Layout, ...]
    prompts: int
    """Different ones; each has an undisturbed answer to compare with."""
    answer_tokens: int
    drained_answer_tokens: int
    """Long enough that the sessions still run when their agent is drained."""
    streams: int
    """At a time."""
    abreast: int
    """Moves at a time."""
    session_tokens: int
    max_batch: int
    seed: int

    @property
    def longest_answer(self) -> int:
        """Of all answers."""
        return max(self.answer_tokens, self.drained_answer_tokens)


@dataclass(frozen=True, slots=True)
class Change:
    """Where an answer went from one chain to another."""

    how: str
    """"kv", "tokens" or "restart"."""
    token: int
    """Index of the first of the new chain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as its client has it."""

    prompt: int
    tokens: tuple[int, ...]
    problem: str = ""
    """Why it broke off."""
    gaps_ns: tuple[int, ...] = ()
    """Before each token, at the gateway; the first counts from the request."""
    changes: tuple[Change, ...] = ()

    def steps(self) -> Iterator[tuple[int, float]]:
        """Yields each token but the first with the gap before it, in steps of its stream then."""
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
    """What came of one wish to move a session."""

    mode: str
    outcome: str
    """"moved", "failed", or "none": it could not begin, or its answer ended first."""
    problem: str = ""
    tokens: int = 0
    rounds: int = 0
    duration_ms: float = 0.0
    held_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of an agent's sessions when it was drained."""

    sessions: int
    """It had when that began."""
    seconds: float
    is_drained: bool
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class LayoutMeasured:
    """What came of a layout."""

    layout: Layout
    chains: tuple[str, ...]
    """In words."""
    reference: tuple[Answer, ...]
    """Undisturbed, one of each prompt."""
    answers: tuple[Answer, ...]
    """While sessions moved."""
    moves: tuple[Moved, ...]
    cache_bytes: int
    """Of caches that left agents for others."""
    drained: Drained | None
    seconds: float

    def is_equal(self, answer: Answer) -> bool:
        """True if an answer is the beginning of the undisturbed one, and not broken off."""
        wanted = self.reference[answer.prompt].tokens
        return not answer.problem and answer.tokens == wanted[: len(answer.tokens)]


@dataclass(frozen=True, slots=True)
class PackingMeasured:
    """What came of a run."""

    layouts: tuple[LayoutMeasured, ...] = field(default_factory=tuple)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns median, 99th percentile (nearest rank), largest and how many; None for none."""
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
