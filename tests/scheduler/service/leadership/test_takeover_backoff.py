"""When a standby leaves a free lease alone, and when one that lasts is nobody's any more."""

from __future__ import annotations

from catenary_scheduler.leadership.takeover_backoff import StaleLeaseDetector, TakeoverBackoff


def test_without_an_outage_a_free_lease_is_for_whoever_comes_first() -> None:
    assert TakeoverBackoff(1.0).left_s(5.0) == 0


def test_after_an_outage_it_is_left_alone_from_the_first_contact_on() -> None:
    backoff = TakeoverBackoff(1.0)
    backoff.redis_lost()
    assert backoff.left_s(50.0) == 1.0
    backoff.redis_back(60.0)
    backoff.redis_back(60.5)
    assert backoff.left_s(60.75) == 0.25
    assert not backoff.has_waited(60.75)
    assert backoff.has_waited(61.0)


def test_another_outage_begins_it_anew() -> None:
    backoff = TakeoverBackoff(1.0)
    backoff.redis_lost()
    backoff.redis_back(60.0)
    backoff.redis_lost()
    assert backoff.left_s(99.0) == 1.0


def test_it_ends_when_somebody_holds_the_lease() -> None:
    backoff = TakeoverBackoff(1.0)
    backoff.redis_forgot(10.0)
    assert backoff.left_s(10.5) == 0.5
    backoff.is_settled()
    assert backoff.left_s(10.5) == 0
    assert not backoff.has_waited(99.0)


def test_a_lease_that_is_renewed_is_not_stale_however_long_it_lasts() -> None:
    detector = StaleLeaseDetector(2.0)
    assert not any(detector.saw(10.0 - at % 2.5, at) for at in (n / 4 for n in range(100)))


def test_a_lease_that_only_lasts_is_stale_after_three_times_that() -> None:
    detector = StaleLeaseDetector(2.0)
    seen = [detector.saw(3600.0 - at, at) for at in (0.0, 2.0, 4.0, 5.9, 6.0)]
    assert seen == [False, False, False, False, True]


def test_a_lease_about_to_end_is_not_broken() -> None:
    detector = StaleLeaseDetector(2.0)
    assert not any(detector.saw(4.0 - at, at) for at in (0.0, 1.0, 2.0, 3.0))
