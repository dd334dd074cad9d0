"""The pace of frames that may wait, against a link whose rate is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from catenary_agent.generation.frames.link_pace import FRAME_NS, LinkPace
from catenary_services.transport.acknowledgements import LinkState

SECOND = 1_000_000_000
MS = 1_000_000
CHUNK_BYTES = 262_144
"""The rows that a device computes in one step."""


@dataclass
class SlowLink:
    """A link that carries byte after byte, and whose receiver acknowledges what has come."""

    bytes_per_second: int
    round_trip_ns: int
    now_ns: int = 0
    pushed: int = 0
    free_ns: int = 0
    """The moment at which everything pushed so far has entered the line."""
    acknowledged: int = 0
    coming: list[tuple[int, int]] = field(default_factory=list)
    """Acknowledgements: the moment, and the number of bytes until then."""
    kernel_rate: int = 0
    remembered_ns: int = 1 << 60
    """A shorter round trip that the kernel remembers."""
    uneven_ns: int = 0
    """How much longer than that the way takes at some moments."""

    def push(self, nbytes: int) -> int:
        """Returns the nanoseconds for which the first of the bytes waits for the line."""
        start_ns = max(self.now_ns, self.free_ns)
        for packet in range(0, nbytes, 1_500):
            size = min(1_500, nbytes - packet)
            self.pushed += size
            self.free_ns = max(self.now_ns, self.free_ns) + size * SECOND // self.bytes_per_second
            self.coming.append((self._arrives_ns(), self.pushed))
        return start_ns - self.now_ns

    def _arrives_ns(self) -> int:
        at_ns = self.free_ns + self.round_trip_ns
        if not self.uneven_ns:
            return at_ns
        part, into_ns = divmod(at_ns, self.uneven_ns)
        held_ns = (self.uneven_ns - into_ns) * (part * 7 % 11) // 10  # nothing, up to everything
        return max(at_ns + held_ns, self.coming[-1][0] if self.coming else 0)

    def wait(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds
        if self.coming and self.coming[0][0] <= self.now_ns:
            # The kernel counts what was under way by the time it took, and never less than before.
            flight = self.pushed - self.acknowledged
            took_ns = self.round_trip_ns + flight * SECOND // self.bytes_per_second
            self.kernel_rate = max(self.kernel_rate, flight * SECOND // took_ns)
        while self.coming and self.coming[0][0] <= self.now_ns:
            self.acknowledged = self.coming.pop(0)[1]

    def transit(self) -> LinkState:
        outstanding = self.pushed - self.acknowledged
        round_trip_ns = min(self.round_trip_ns, self.remembered_ns)
        return LinkState(self.acknowledged, outstanding, round_trip_ns, self.kernel_rate)


def run(
    link: SlowLink,
    pace: LinkPace,
    seconds: float,
    row_bytes: int = 1_000,
    every_ns: int = 100 * MS,
    most_bytes: int = 1 << 60,
) -> list[int]:
    """Pushes prompts as fast as the pace lets them, and rows now and then; returns their waits."""
    waits_ns: list[int] = []
    end_ns, row_ns = link.now_ns + round(seconds * SECOND), link.now_ns
    while link.now_ns < end_ns:
        if link.now_ns >= row_ns:
            waits_ns.append(link.push(row_bytes))
            row_ns += every_ns
        wait_ns = pace.wait_ns(link.now_ns, link.transit())
        if wait_ns:
            link.wait(min(wait_ns, max(1, row_ns - link.now_ns)))
        else:
            link.push(min(pace.frame_bytes, most_bytes))
    return waits_ns


@pytest.mark.parametrize("megabits", [5, 20, 50, 300])
@pytest.mark.parametrize("round_trip_ms", [1, 60])
def test_rows_wait_for_little_more_than_a_frame_and_the_link_is_used(megabits, round_trip_ms):
    link = SlowLink(megabits * 125_000, round_trip_ms * MS)
    pace = LinkPace()
    run(link, pace, 3.0)  # it learns the rate
    before = link.pushed
    waits_ns = run(link, pace, 5.0)
    assert max(waits_ns) <= 1.5 * FRAME_NS
    assert link.pushed - before >= 0.9 * 5 * link.bytes_per_second
    assert pace.bytes_per_second == pytest.approx(link.bytes_per_second, rel=0.25)


def test_a_link_that_becomes_slower_or_faster_is_noticed_within_a_second_of_prompts():
    link, pace = SlowLink(2_500_000, 60 * MS), LinkPace()
    run(link, pace, 3.0)
    for rate in (500_000, 5_000_000):
        link.bytes_per_second = rate
        run(link, pace, 1.5)
        waits_ns = run(link, pace, 3.0)
        assert pace.bytes_per_second == pytest.approx(rate, rel=0.3)
        assert max(waits_ns) <= 1.5 * FRAME_NS


def test_the_kernels_rate_counts_where_frames_never_wait():
    link, pace = SlowLink(1_250_000_000, MS // 10), LinkPace()
    link.kernel_rate = 1_000_000_000
    assert pace.wait_ns(0, link.transit()) == 0
    assert pace.bytes_per_second == 1_000_000_000
    assert sum(run(link, pace, 0.2)) <= 2 * FRAME_NS


def test_a_rate_that_the_kernel_remembers_does_not_hide_that_the_link_is_slow_by_now():
    link, pace = SlowLink(2_500_000, 60 * MS), LinkPace()
    link.kernel_rate = 200_000_000
    run(link, pace, 3.0)
    assert pace.bytes_per_second == pytest.approx(2_500_000, rel=0.25)
    for _ in range(3):  # also after all that has arrived, and the link was idle
        link.wait(20 * SECOND)
        waits_ns = run(link, pace, 1.0)
        assert max(waits_ns) <= 1.5 * FRAME_NS


def test_pauses_between_prompts_are_not_taken_for_a_slow_link():
    link, pace = SlowLink(2_500_000, 60 * MS), LinkPace()
    run(link, pace, 3.0)
    known = pace.bytes_per_second
    for _ in range(20):  # a frame, and then nothing for a second
        assert pace.wait_ns(link.now_ns, link.transit()) == 0 or link.coming
        link.push(20_000)
        pace.rest()
        link.wait(SECOND)
    assert pace.bytes_per_second == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize("kernel_rate", [0, 200_000_000])
def test_a_way_that_became_long_is_used_although_the_kernel_remembers_a_short_one(kernel_rate):
    link = SlowLink(1_250_000, 60 * MS, remembered_ns=100_000, kernel_rate=kernel_rate)
    pace = LinkPace()
    run(link, pace, 15.0, most_bytes=CHUNK_BYTES)
    before = link.pushed
    waits_ns = run(link, pace, 5.0, most_bytes=CHUNK_BYTES)
    assert link.pushed - before >= 0.9 * 5 * link.bytes_per_second
    assert max(waits_ns) <= 1.5 * FRAME_NS


def test_prompts_go_on_beside_rows_that_are_always_on_their_way():
    link = SlowLink(1_250_000, 60 * MS, remembered_ns=100_000)
    pace = LinkPace()
    run(link, pace, 15.0, row_bytes=20_000, every_ns=50 * MS)
    before = link.pushed
    waits_ns = run(link, pace, 5.0, row_bytes=20_000, every_ns=50 * MS)
    assert link.pushed - before >= 0.9 * 5 * link.bytes_per_second
    assert max(waits_ns) <= 1.5 * FRAME_NS


def test_a_queue_that_is_there_already_becomes_short():
    link, pace = SlowLink(1_250_000, 60 * MS), LinkPace()
    link.push(600_000)  # half a second
    run(link, pace, 10.0)
    assert max(run(link, pace, 3.0)) <= 1.5 * FRAME_NS


def test_a_frame_leaves_at_the_latest_when_no_other_is_under_way():
    pace, rows, frame = LinkPace(), 40_000, 60_000
    assert pace.wait_ns(0, LinkState(0, 0, MS // 10, 0)) == 0
    assert pace.wait_ns(MS, LinkState(0, rows + frame, MS // 10, 0)) > 0
    assert pace.wait_ns(9 * MS, LinkState(rows + frame - 1, rows, MS // 10, 0)) > 0
    assert pace.wait_ns(10 * MS, LinkState(rows + frame, rows, MS // 10, 0)) == 0
    assert pace.wait_ns(10 * MS, LinkState(rows + frame, rows + frame, MS // 10, 0)) > 0


@pytest.mark.parametrize("uneven_ms", [20, 50])
def test_a_link_whose_times_vary_is_used(uneven_ms):
    link, pace = SlowLink(1_250_000, 60 * MS, uneven_ns=uneven_ms * MS), LinkPace()
    run(link, pace, 15.0, row_bytes=20_000, every_ns=50 * MS)
    before = link.pushed
    waits_ns = run(link, pace, 20.0, row_bytes=20_000, every_ns=50 * MS)
    assert link.pushed - before >= 0.85 * 20 * link.bytes_per_second
    assert max(waits_ns) <= 2 * FRAME_NS + uneven_ms * MS


def test_an_empty_link_is_not_filled_at_once():
    link, pace = SlowLink(1_250_000, 150 * MS), LinkPace()
    run(link, pace, 5.0)
    for _ in range(3):
        link.wait(SECOND)
        assert max(run(link, pace, 2.0, row_bytes=1_000, every_ns=20 * MS)) <= 2.5 * FRAME_NS


def test_a_rate_that_the_kernel_remembers_counts_no_more_when_a_frame_is_late():
    pace, rate = LinkPace(), 200_000_000
    assert pace.wait_ns(0, LinkState(0, 0, MS // 10, rate)) == 0
    assert pace.bytes_per_second == rate
    pace.wait_ns(30 * MS, LinkState(0, 300_000, MS // 10, rate))
    assert pace.bytes_per_second < 10_000_000
    pace.wait_ns(31 * MS, LinkState(1, 300_000, MS // 10, rate // 2))
    assert pace.bytes_per_second == rate // 2  # the kernel knows better by now


def test_what_was_late_once_is_not_slow_for_ever():
    pace, rate = LinkPace(), 200_000_000
    pace.wait_ns(0, LinkState(0, 0, MS // 10, rate))
    pace.wait_ns(30 * MS, LinkState(0, 300_000, MS // 10, rate))
    pace.wait_ns(11 * SECOND, LinkState(300_000, 0, MS // 10, rate))
    assert pace.bytes_per_second == rate
