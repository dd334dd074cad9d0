"""The token bucket beside a literal twin that counts in fractions."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_services.security.key_limits import RateLimit
from catenary_services.security.token_bucket import TokenBucket

SECOND = 1_000_000_000


class Twin:
    """Fills up nanosecond by nanosecond, in one step and exactly."""

    def __init__(self, per_s: int, burst: int) -> None:
        self.per_ns, self.burst = Fraction(per_s, SECOND), Fraction(burst)
        self.level, self.now = self.burst, 0

    def take(self, amount: int, now: int) -> bool:
        self.level = min(self.burst, self.level + (now - self.now) * self.per_ns)
        self.now = now
        if self.level < min(Fraction(amount), self.burst):
            return False
        self.level -= amount
        return True


events = st.lists(
    st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 40)), min_size=1, max_size=60
)


@settings(max_examples=50)
@given(per_s=st.integers(1, 50), burst=st.integers(1, 30), steps=events)
def test_takes_what_the_twin_takes(per_s: int, burst: int, steps: list[tuple[int, int]]) -> None:
    bucket, twin, now = TokenBucket(RateLimit(per_s, burst), 0), Twin(per_s, burst), 0
    for wait, amount in steps:
        now += wait
        missing = min(amount, burst) - bucket.level(now)
        taken = bucket.take(amount, now) == 0
        if abs(missing) > 1e-5:  # else it hangs by the rounding of floats
            assert taken == twin.take(amount, now)
        elif taken:
            twin.level = min(twin.burst, twin.level + (now - twin.now) * twin.per_ns) - amount
            twin.now = now
        assert (
            abs(
                bucket.level(now)
                - float(min(twin.burst, twin.level + (now - twin.now) * twin.per_ns))
            )
            < 1e-4
        )


@settings(max_examples=50)
@given(per_s=st.integers(1, 50), burst=st.integers(1, 30), steps=events)
def test_no_stretch_of_time_gets_more_than_rate_and_burst_and_one_large_piece(
    per_s: int, burst: int, steps: list[tuple[int, int]]
) -> None:
    bucket, now, taken = TokenBucket(RateLimit(per_s, burst), 0), 0, []
    for wait, amount in steps:
        now += wait
        if bucket.take(amount, now) == 0:
            taken.append((now, amount))
    for first, (start, _) in enumerate(taken):
        inside = taken[first:]
        for last, (end, _) in enumerate(inside):
            total = sum(amount for _, amount in inside[: last + 1])
            largest = max(amount for _, amount in inside[: last + 1])
            assert total <= per_s * (end - start) / SECOND + burst + max(0, largest - burst) + 1e-3


@settings(max_examples=50)
@given(per_s=st.floats(0.01, 1e6), burst=st.floats(1, 1e6), amounts=st.lists(st.floats(0.1, 1e6)))
def test_after_the_wait_it_names_an_amount_is_there(
    per_s: float, burst: float, amounts: list[float]
) -> None:
    bucket, now = TokenBucket(RateLimit(per_s, burst), 0), 0
    for amount in amounts[:20]:
        wait = bucket.take(amount, now)
        if wait:
            assert bucket.take(amount, now + wait) == 0
            now += wait


@given(st.floats(0, 500), st.floats(0, 500))
def test_what_is_given_back_can_be_taken_and_never_more_than_the_burst(
    taken: float, back: float
) -> None:
    bucket = TokenBucket(RateLimit(1, 100), 0)
    bucket.take(taken, 0)
    bucket.give_back(back, 0)
    assert bucket.level(0) <= 100
    assert abs(bucket.level(0) - min(100.0, 100 - taken + back)) < 1e-9


def test_another_rate_leaves_it_as_full_as_it_was() -> None:
    bucket = TokenBucket(RateLimit(10, 100), 0)
    bucket.take(50, 0)
    bucket.reshape(RateLimit(5, 40), 0)
    assert bucket.level(0) == 20
    assert bucket.wait_ns(21, 0) == SECOND // 5


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(RateLimit(10, 10), 5 * SECOND)
    assert bucket.take(10, 5 * SECOND) == 0
    assert bucket.level(4 * SECOND) == 0
    assert bucket.level(6 * SECOND) == 10
