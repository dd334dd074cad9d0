"""The rate of a link, and how many bytes of frames that may wait are sent over it at a time.

What was handed to a slow link cannot be overtaken any more. So prompts and caches go in frames that
occupy it for a bounded time, and the next one is handed over only when what is under way does no
more than fill the link: as many bytes as are delivered in one round trip, as BBR bounds them
(Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 2016). A row that a stream
waits for then finds at most one such frame before it.

The rate is found by the way. Two figures are trusted for it:

* the kernel's rate of delivery, upwards only: it is too low where too little was there to send. It
  may also be minutes old, so it counts no more once a frame is acknowledged later than it lets
  expect;
* the bytes that were acknowledged between two moments between which frames always waited for the
  link. One frame more than fills the link is under way then, so a link that has become faster shows
  it, and so does one that has become slower.

The round trip is the shortest one that the kernel remembers, for some minutes. If the way has
become longer since then, too little is under way, and the rate seems to fall with every sample. So
every ten seconds a frame leaves only when no other is under way (BBR does so, too): its first byte
is acknowledged one round trip later, without a queue. However wrong all figures are, a frame leaves
as soon as no other is under way.

Where a link is empty, frames that fill it would be a queue at its beginning. They leave one after
the other, a little faster than the link carries them.

Pure: what the kernel says and the time are arguments.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

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
_WEIGHT_UP, _WEIGHT_DOWN = 0.5, 0.1
"""The weight of a sample that is higher than the rate, and of one that is lower. Where times vary,
many are too low: less than the link holds was under way."""
_MOST_ABOVE = 2
"""The rate after a sample is at most so many times the sample."""
_GAIN_PERCENT = 125
"""The pace at which an empty link is filled, in percent of its rate."""
_SPARE_NS = 2_000_000
"""The time that further bytes under way may take, so that a fast link is not idle until its sender
is woken."""
_SHORTEST_WAIT_NS = 1_000_000
_LONGEST_WAIT_NS = 5_000_000
"""The time after which the link is looked at again: little beside `FRAME_NS`, so that it never
becomes idle for want of a look."""
_MEASURE_NS = 10_000_000_000
"""The time after which the round trip is measured again, while frames wait."""
_LONGER_NS = 10_000_000
"""The time by which a measured round trip is longer than the kernel's if that cannot be right."""
_MEASURED = 3
"""The number of latest round trips of which the middle one counts. Rows may be before a frame, and
the shortest one would be too short where times vary."""
_LONGEST_PAUSE_NS = 4 * _LONGEST_WAIT_NS
"""After a longer time without a look, nobody knows when something was acknowledged."""
_LATE_NS = 20_000_000
"""The time by which an acknowledgement may be later than twice what the kernel's figures say."""
_MOST_MARKS = 64


class _Mark(NamedTuple):
    """The bytes under way on a link when a frame left."""

    at_ns: Nanoseconds
    pushed: int
    """The bytes that had been pushed before it since the connection began."""
    outstanding: int
    """The bytes among them that were not acknowledged."""
    measures: bool
    """Whether no other frame was under way, so that it shows the round trip."""


class _KernelRate:
    """The rate that the kernel said last, until something shows that the link carries less."""

    __slots__ = ("_doubted_ns", "_is_refuted", "_said")

    def __init__(self) -> None:
        self._said = 0
        self._is_refuted = False
        self._doubted_ns: Nanoseconds | None = None
        """The latest moment at which a frame was late. That may have had another cause."""

    def hear(self, said: int) -> None:
        """Takes what the kernel says now; another figure is a new one."""
        if said != self._said:
            self._said, self._is_refuted, self._doubted_ns = said, False, None

    def trusted(self, now_ns: Nanoseconds) -> int:
        """Returns the rate, or 0 if the link carries less or may do so."""
        if self._doubted_ns is not None and now_ns - self._doubted_ns > _MEASURE_NS:
            self._doubted_ns = None
        return 0 if self._is_refuted or self._doubted_ns is not None else self._said

    def compare(self, sample: int) -> None:
        """Compares it with the rate at which bytes were acknowledged."""
        self._is_refuted |= sample < self._said

    def check(self, now_ns: Nanoseconds, mark: _Mark, round_trip_ns: Nanoseconds) -> None:
        """Compares it with a frame of which no byte is acknowledged.

        Args:
            now_ns: The present moment.
            mark: The frame.
            round_trip_ns: The round trip that the kernel says.
        """
        if self._said:
            queue_ns = mark.outstanding * NANOSECONDS_PER_SECOND // self._said
            if now_ns - mark.at_ns > 2 * (round_trip_ns + queue_ns) + _LATE_NS:
                self._doubted_ns = now_ns


class LinkPace:
    """The known rate of one link, and the frames that it bounds.

    Invariants: `_since` is set only while frames have waited for the link without interruption
    since then. The marks are in the order of time.
    """

    def __init__(self) -> None:
        self.bytes_per_second = _FIRST_BYTES_PER_SECOND
        """The rate of the link, as far as it is known."""
        self._sampled_per_second = _FIRST_BYTES_PER_SECOND
        self._kernel = _KernelRate()
        self._since: tuple[Nanoseconds, int] | None = None
        """A moment at which bytes were acknowledged, and the number of them until then."""
        self._acknowledged = -1
        """The number at the last look while frames waited; negative if none did."""
        self._progress_ns = 0
        """The moment at which that number was last seen to grow, or at which the wait began."""
        self._looked_ns = 0
        self._pushed = -1
        """The bytes that had been pushed at the last look; negative before the first."""
        self._free_ns = 0
        """The moment at which all of them have entered the link, if it carries them so fast."""
        self._has_left = True
        """Whether a frame left since the last look."""
        self._frames_end = 0
        """The bytes that had been pushed at the first look after a frame left: with it."""
        self._marks: deque[_Mark] = deque(maxlen=_MOST_MARKS)
        """One for each frame that left and of which nothing is acknowledged."""
        self._round_trips_ns: deque[Nanoseconds] = deque(maxlen=_MEASURED)
        self._measured_ns = 0
        """The moment at which the latest frame left that measures the round trip, or of the first
        look: the kernel has just seen the first ones."""

    @property
    def frame_bytes(self) -> int:
        """The most bytes of a frame that others should not have to wait for."""
        return self._bytes_in(FRAME_NS)

    def wait_ns(self, now_ns: Nanoseconds, transit: LinkState) -> Nanoseconds:
        """Returns for how long a frame that may wait should not be sent; 0 if it may leave.

        Args:
            now_ns: The present moment.
            transit: What is under way now.
        """
        self._kernel.hear(transit.delivered_per_second)
        pushed = transit.acknowledged + transit.outstanding
        if self._pushed < 0:
            self._pushed, self._measured_ns = pushed, now_ns
        self._note_pushed(pushed)
        self._look_for_marks(now_ns, transit)
        self._settle_rate(now_ns)
        measures = now_ns - self._measured_ns >= _MEASURE_NS
        round_trip_ns = self._round_trip_ns(transit)
        room = self._bytes_in(round_trip_ns + _SPARE_NS)
        is_alone = transit.acknowledged >= self._frames_end
        early_ns = self._free_ns - _SPARE_NS - now_ns
        has_room = transit.outstanding <= room and early_ns <= 0 and not measures
        if is_alone or has_room:
            if not transit.outstanding:
                self.rest()  # the link was idle
            if measures:
                self._measured_ns = now_ns
            self._has_left = True
            self._marks.append(_Mark(now_ns, pushed, transit.outstanding, measures))
            return 0
        self._look(now_ns, transit.acknowledged, max(round_trip_ns, _SHORTEST_SAMPLE_NS))
        if measures or any(mark.measures for mark in self._marks):
            self._since = None  # the link may be idle
        left = transit.outstanding - room
        wait_ns = max(early_ns, left * NANOSECONDS_PER_SECOND // self.bytes_per_second)
        return min(max(wait_ns, _SHORTEST_WAIT_NS), _LONGEST_WAIT_NS)

    def is_stalled(self, now_ns: Nanoseconds, timeout_ns: Nanoseconds) -> bool:
        """Returns True if frames have waited for so long and nothing was acknowledged."""
        return self._acknowledged >= 0 and now_ns - self._progress_ns >= timeout_ns

    def rest(self) -> None:
        """Notes that no frame waits for the link any more."""
        self._since, self._acknowledged = None, -1

    def _bytes_in(self, time_ns: Nanoseconds) -> int:
        return self.bytes_per_second * time_ns // NANOSECONDS_PER_SECOND

    def _settle_rate(self, now_ns: Nanoseconds) -> None:
        self.bytes_per_second = max(self._sampled_per_second, self._kernel.trusted(now_ns))

    def _note_pushed(self, pushed: int) -> None:
        """Notes what was pushed since the last look, rows included."""
        if self._has_left:
            self._frames_end, self._has_left = pushed, False
        per_second = self.bytes_per_second * _GAIN_PERCENT // 100
        took_ns = (pushed - self._pushed) * NANOSECONDS_PER_SECOND // per_second
        self._free_ns = max(self._free_ns, self._looked_ns) + took_ns
        self._pushed = pushed

    def _round_trip_ns(self, transit: LinkState) -> Nanoseconds:
        """Returns the kernel's round trip, or the measured one if the kernel's cannot be right."""
        some_ns = sorted(self._round_trips_ns)
        measured_ns = some_ns[len(some_ns) // 2] if some_ns else 0
        is_refuted = measured_ns > transit.round_trip_ns + _LONGER_NS
        return measured_ns if is_refuted else transit.round_trip_ns

    def _look_for_marks(self, now_ns: Nanoseconds, transit: LinkState) -> None:
        """Notes which frames arrived, and whether one should have arrived that did not."""
        is_known_when = now_ns - self._looked_ns <= _LONGEST_PAUSE_NS
        self._looked_ns = now_ns
        while self._marks and transit.acknowledged > self._marks[0].pushed:
            mark = self._marks.popleft()
            if mark.measures and is_known_when:
                self._round_trips_ns.append(now_ns - mark.at_ns)
        if self._marks:
            self._kernel.check(now_ns, self._marks[0], transit.round_trip_ns)

    def _look(self, now_ns: Nanoseconds, acknowledged: int, span_ns: Nanoseconds) -> None:
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
        if now_ns - since_ns < span_ns:
            return
        sample = (acknowledged - since_bytes) * NANOSECONDS_PER_SECOND // (now_ns - since_ns)
        known = self.bytes_per_second
        weight = _WEIGHT_UP if sample > known else _WEIGHT_DOWN
        rate = min(known + weight * (sample - known), _MOST_ABOVE * sample)
        self._sampled_per_second = max(_LEAST_BYTES_PER_SECOND, round(rate))
        self._kernel.compare(sample)
        self._settle_rate(now_ns)
        self._since = (now_ns, acknowledged)
