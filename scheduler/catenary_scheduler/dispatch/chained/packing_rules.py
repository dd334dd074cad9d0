"""Rules of packing: when sessions are looked at, and which moves are worth making."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds


@dataclass(frozen=True, slots=True)
class PackingRules:
    """Parameters of the packing of sessions."""

    epoch_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    """Length of an epoch: sessions are looked at once in each."""
    ahead: int = 2
    """Sessions count with their size this many epochs from now (G14): if a chain would overflow in
    the epoch after the coming one, the coming one is there to move somebody away."""
    rest_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    """A session that moved rests for this long, and for twice as long after every further move: in
    a life of T it moves about log2(T / rest) times at most."""
    longest_rest_ns: Nanoseconds = 600 * NANOSECONDS_PER_SECOND
    least_left_ns: Nanoseconds = 3 * NANOSECONDS_PER_SECOND
    """A session that is expected to end within this time is not moved: it frees its place by
    itself."""
    worth: float = 4.0
    """A session is moved only if it is expected to go on for this many times the duration of its
    move."""
    balance_threshold: float = 0.1
    """Loads that differ by more than this share of a chain are never even enough (goal
    "balance")."""
    most_moves: int = 32
    """The most moves of one model that begin in one epoch."""
    similar: float = 0.8
    """Chains of one kind share a pool if the smallest holds at least this share of the largest."""

    def rest_after(self, moves: int) -> Nanoseconds:
        """Returns how long a session rests that has moved this many times."""
        return min(self.longest_rest_ns, self.rest_ns << min(moves - 1, 16)) if moves > 0 else 0
