"""The choice of the peer that is asked for a chunk; the module does no I/O and knows no clock.

A peer that did not answer, or sent other bytes than it should, is left alone for a while, which
doubles every time. One that does not have a chunk is not asked for this chunk for a while, since it
may be fetching it itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_PAUSE_NS = 1_000_000_000
_LONGEST_PAUSE_NS = 60_000_000_000
_LIE_PAUSE_NS = 60_000_000_000
_LONGEST_LIE_PAUSE_NS = 3_600_000_000_000
_ABSENT_NS = 500_000_000
_LONGEST_ABSENT_NS = 8_000_000_000
_RATE_WEIGHT = 0.3


@dataclass(slots=True)
class SourcePeer:
    """The experience with one peer as a source."""

    name: str
    until_ns: int = 0
    """The moment before which it is not asked."""
    failures: int = 0
    """Number of requests in a row that failed."""
    lies: int = 0
    """Number of chunks it sent whose digest was wrong."""
    bytes_per_s: float = 0.0
    """The rate of late; 0 while nothing has come from it."""
    problem: str = ""
    """The last that went wrong, in words; empty if nothing is wrong."""

    def is_usable(self, now_ns: int) -> bool:
        """True unless the peer is being left alone."""
        return now_ns >= self.until_ns

    def gave(self, nbytes: int, took_ns: int) -> None:
        """Notes a chunk that came and was right."""
        rate = nbytes * 1e9 / max(1, took_ns)
        old = self.bytes_per_s or rate
        self.bytes_per_s = old + _RATE_WEIGHT * (rate - old)
        self.failures, self.problem = 0, ""

    def failed(self, why: str, now_ns: int) -> None:
        """Notes that the peer did not answer, or cannot be reached."""
        pause = min(_LONGEST_PAUSE_NS, _FIRST_PAUSE_NS << min(self.failures, 16))
        self.failures += 1
        self.until_ns, self.problem = now_ns + pause, why

    def lied(self, why: str, now_ns: int) -> None:
        """Notes that bytes of the peer did not have the recorded digest."""
        pause = min(_LONGEST_LIE_PAUSE_NS, _LIE_PAUSE_NS << min(self.lies, 16))
        self.lies += 1
        self.until_ns, self.problem = now_ns + pause, why


@dataclass(slots=True)
class ChunkSources:
    """The peers that may have one chunk, and those that said they have not."""

    names: tuple[str, ...]
    """The peers, the best first."""
    absent: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The peers that have not got it: how many times each said so, and when it is asked again."""

    def said_absent(self, name: str, now_ns: int) -> None:
        """Notes that a peer does not have the chunk."""
        times = self.absent.get(name, (0, 0))[0]
        pause = min(_LONGEST_ABSENT_NS, _ABSENT_NS << min(times, 16))
        self.absent[name] = times + 1, now_ns + pause

    def may_be_asked(self, peer: SourcePeer, now_ns: int) -> bool:
        """True if the chunk may be asked of a peer now."""
        return (
            peer.name in self.names
            and peer.is_usable(now_ns)
            and now_ns >= self.absent.get(peer.name, (0, 0))[1]
        )

    def all_lack_it(self, times: int) -> bool:
        """True if every peer has said at least `times` times that it does not have the chunk."""
        return all(self.absent.get(name, (0, 0))[0] >= times for name in self.names)


def should_take_over(left_bytes: int, rate: float, whole_bytes: int, own_rate: float) -> bool:
    """True if a peer without work should fetch a chunk that another one is fetching.

    Args:
        left_bytes: Bytes that are missing from the chunk.
        rate: The rate at which they come, in bytes a second; 0 if none has come.
        whole_bytes: Size of the chunk.
        own_rate: The rate of the peer without work; 0 if it is unknown.
    """
    if own_rate <= 0:
        return False
    return rate <= 0 or left_bytes / rate > 2 * whole_bytes / own_rate
