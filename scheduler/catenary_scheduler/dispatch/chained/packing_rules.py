"""When packing looks at the sessions of a model, and which moves are worth their while."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds


@dataclass(frozen=True, slots=True)
class PackingRules:
    """Everything that can be set."""

    epoch_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    """Sessions are looked at so often."""
    ahead: int = 2
    """Sizes are those so many epochs from now (G14): a chain that would overflow in the one after
    the coming one has the coming one to have somebody leave."""
    rest_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    """A session that moved is not moved again for so long, and for twice as long after every
    further move: in a life of T it moves log2(T / rest) times or so, whatever is wanted."""
    longest_rest_ns: Nanoseconds = 600 * NANOSECONDS_PER_SECOND
    least_left_ns: Nanoseconds = 3 * NANOSECONDS_PER_SECOND
    """A session that is expected to end before is not moved: it frees its place by itself."""
    worth: float = 4.0
    """It must be expected to go on for so many times what its move takes."""
    balance_threshold: float = 0.1
    """Goal "balance": loads that differ by more than this share of a chain are never even enough.
    """
    most_moves: int = 32
    """Of a model, begun in one epoch."""
    similar: float = 0.8
    """Chains of one kind share a pool if the smallest holds at least this share of the largest."""

    def rest_after(self, moves: int) -> Nanoseconds:
        """Returns how long a session stays where it is that has moved so often."""
        return min(self.longest_rest_ns, self.rest_ns << min(moves - 1, 16)) if moves > 0 else 0
