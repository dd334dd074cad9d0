"""How large frames get until the rate of a link is known, and how near it comes."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from catenary_agent.links.echo_sizes import FIRST_BYTES, LARGEST_BYTES, EchoSizes

MOST_BYTES = 16 << 20
MS = 1_000_000
SECOND = 1_000_000_000
rates = st.integers(10_000, 2_000_000_000)


def frames(rate: int, round_trip_ns: int, most_bytes: int) -> tuple[EchoSizes, list[int]]:
    """Returns a measurement of a link that carries `rate` bytes a second, and its frames."""
    sizes, sent = EchoSizes(most_bytes, round_trip_ns), []
    while nbytes := sizes.next_bytes():
        sent.append(nbytes)
        sizes.took(nbytes, -(-nbytes * SECOND // rate) + round_trip_ns)
        assert len(sent) < 100
    return sizes, sent


@given(rates, st.integers(0, SECOND), st.integers(1, 64 << 20))
def test_no_more_is_sent_than_allowed_and_no_rate_is_too_high(
    rate: int, round_trip_ns: int, most_bytes: int
) -> None:
    sizes, sent = frames(rate, round_trip_ns, most_bytes)
    assert sum(sent) <= most_bytes
    assert sent == sorted(sent)
    assert max(sent) <= LARGEST_BYTES
    assert sizes.bytes_per_second <= rate + 1


@given(rates, st.integers(0, 5 * MS))
@example(6_250_000, 200_000)  # 50 Mbit/s
@example(1_250_000_000, 200_000)  # 10 Gbit/s
def test_a_rate_is_right_to_within_a_fifth_where_the_round_trip_is_short(
    rate: int, round_trip_ns: int
) -> None:
    sizes, sent = frames(rate, round_trip_ns, MOST_BYTES)
    seen = sent[-1] * SECOND // (-(-sent[-1] * SECOND // rate) + round_trip_ns)
    assert sizes.bytes_per_second >= min(int(0.8 * rate), seen)


def test_a_slow_link_carries_little_for_it() -> None:
    _, sent = frames(6_250_000, MS, MOST_BYTES)
    assert sum(sent) < 2 << 20
    _, sent = frames(125_000, 60 * MS, MOST_BYTES)
    assert sent == [FIRST_BYTES]


@given(st.lists(st.integers(-5, 10 * SECOND), max_size=40))
def test_whatever_the_clock_says_it_ends(durations: list[int]) -> None:
    sizes = EchoSizes(MOST_BYTES, MS)
    for duration_ns in [*durations, *[10 * SECOND]]:
        if not (nbytes := sizes.next_bytes()):
            break
        sizes.took(nbytes, duration_ns)
    assert sizes.next_bytes() == 0
    assert sizes.bytes_per_second >= 1
