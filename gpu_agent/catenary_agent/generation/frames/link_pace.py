"""The rate of a link, and how many bytes of frames that may wait are sent over it at a time.

What was handed to a slow link cannot be overtaken any more. So prompts and caches go in frames that
occupy it for a bounded time, and the next one is handed over only when what is under way does no
more than fill the link: as many bytes as are delivered in one round trip, as BBR bounds them
(Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 2016). A row that a stream
waits for then finds at most one such frame before it.

The rate is found by the way. Two figures are trusted:

* the kernel's rate of delivery, upwards only: it is too low where too little was there to send;
* the bytes that were acknowledged between two moments between which frames always waited for the
  link. One frame more than fills the link is under way then, so a link that has become faster shows
  it, and so does one that has become slower.

Pure: what the kernel says and the time are arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

if TYPE_CHECKING:
    from catenary_services.transport.acknowledgements import LinkState

FRAME_NS = 25_000_000
"""The time for which one frame may occupy a link: less than one step of ten streams of a model of
8B parameters occupies 20 Mbit/s for (33 ms as bfloat16)."""
_FIRST_BYTES_PER_SECOND = 2_500_000
"""The rate that is assumed before anything was delivered: 20 Mbit/s. A faster link shows its rate
with the first frame; of a slower one the first frames hold up others for longer than intended."""
FIRST_FRAME_BYTES = _FIRST_BYTES_PER_SECOND * FRAME_NS // NANOSECONDS_PER_SECOND
"""The most bytes of a frame that others should not have to wait for, on a link just opened."""
_LEAST_BYTES_PER_SECOND = 64_000
_SHORTEST_SAMPLE_NS = 40_000_000
_WEIGHT = 0.5
"""The weight of the latest sample."""
_SPARE_NS = 2_000_000
"""The time that further bytes under way may take, so that a fast link is not idle until its sender
is woken."""
_SHORTEST_WAIT_NS = 1_000_000
_LONGEST_WAIT_NS = 10_000_000
"""The time after which the link is looked at again: little beside `FRAME_NS`, so that it never
becomes idle for want of a look."""


class LinkPace:
    """The known rate of one link, and the frames that it bounds.

    Invariant: `_since` is set only while frames have waited for the link without interruption since
    then.
    """

    def __init__(self) -> None:
        self.bytes_per_second = _FIRST_BYTES_PER_SECOND
        self._delivered_per_second = 0
        """The rate that the kernel said last."""
        self._is_refuted = False
        """Whether a sample has shown since then that the link carries less."""
        self._since: tuple[Nanoseconds, int] | None = None
        """A moment at which bytes were acknowledged, and the number of them until then."""
        self._acknowledged = -1
        """The number at the last look while frames waited; negative if none did."""
        self._progress_ns = 0
        """The moment at which that number was last seen to grow, or at which the wait began."""

    @property
    def frame_bytes(self) -> int:
        """The most bytes of a frame that others should not have to wait for."""
        return self.bytes_per_second * FRAME_NS // NANOSECONDS_PER_SECOND

    def wait_ns(self, now_ns: Nanoseconds, transit: LinkState) -> Nanoseconds:
        """Returns for how long a frame that may wait should not be sent; 0 if it may leave.

        Args:
            now_ns: The present moment.
            transit: What is under way now.
        """
        if transit.delivered_per_second != self._delivered_per_second:
            self._delivered_per_second = transit.delivered_per_second
            self._is_refuted = False
        if not self._is_refuted:
            self.bytes_per_second = max(self.bytes_per_second, self._delivered_per_second)
        full_ns = transit.round_trip_ns + _SPARE_NS
        room = self.bytes_per_second * full_ns // NANOSECONDS_PER_SECOND
        if transit.outstanding <= room:
            if not transit.outstanding:
                self.rest()  # the link was idle
            return 0
        self._look(now_ns, transit.acknowledged)
        left = transit.outstanding - room
        wait_ns = left * NANOSECONDS_PER_SECOND // self.bytes_per_second
        return min(max(wait_ns, _SHORTEST_WAIT_NS), _LONGEST_WAIT_NS)

    def is_stalled(self, now_ns: Nanoseconds, timeout_ns: Nanoseconds) -> bool:
        """Returns True if frames have waited for so long and nothing was acknowledged."""
        return self._acknowledged >= 0 and now_ns - self._progress_ns >= timeout_ns

    def rest(self) -> None:
        """Notes that no frame waits for the link any more."""
        self._since, self._acknowledged = None, -1

    def _look(self, now_ns: Nanoseconds, acknowledged: int) -> None:
        """Takes a sample if enough time has passed, from progress to progress."""
        before, self._acknowledged = self._acknowledged, acknowledged
        if acknowledged != before:
            self._progress_ns = now_ns
        if before < 0 or acknowledged == before:
            return
        if self._since is None:
            self._since = (now_ns, acknowledged)
            return
        since_ns, since_bytes = self._since
        if now_ns - since_ns < _SHORTEST_SAMPLE_NS:
            return
        sample = (acknowledged - since_bytes) * NANOSECONDS_PER_SECOND // (now_ns - since_ns)
        self._is_refuted |= sample < self._delivered_per_second
        rate = self.bytes_per_second + _WEIGHT * (sample - self.bytes_per_second)
        self.bytes_per_second = max(_LEAST_BYTES_PER_SECOND, round(rate))
        self._since = (now_ns, acknowledged)
