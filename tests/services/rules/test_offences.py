from __future__ import annotations

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND as S
from catenary_services.rules.offences import ALLOWED, FIRST_HOLD_NS, LONGEST_HOLD_NS, OffenceLog


def offend(offences: OffenceLog, now: int, times: int = ALLOWED) -> int:
    return [offences.add("a", now) for _ in range(times)][-1]


def test_a_few_offences_are_not_held_against_anybody() -> None:
    offences = OffenceLog()
    assert offend(offences, 0, ALLOWED - 1) == 0
    assert offences.held_ns("a", 0) == 0


def test_offences_long_apart_do_not_add_up() -> None:
    offences = OffenceLog()
    assert [offences.add("a", minute * 61 * S) for minute in range(10)] == [0] * 10


def test_every_hold_is_twice_as_long_as_the_one_before() -> None:
    offences, now = OffenceLog(), 0
    holds = []
    for _ in range(12):
        until = offend(offences, now)
        holds.append(until - now)
        now = until
    assert holds[:3] == [FIRST_HOLD_NS, 2 * FIRST_HOLD_NS, 4 * FIRST_HOLD_NS]
    assert holds[-1] == LONGEST_HOLD_NS


def test_a_hold_ends_and_is_of_one_peer() -> None:
    offences = OffenceLog()
    until = offend(offences, 0)
    assert offences.held_ns("a", until - 1) == 1
    assert offences.held_ns("a", until) == 0
    assert offences.held_ns("b", 0) == 0


def test_who_was_good_for_long_begins_anew() -> None:
    offences = OffenceLog()
    until = offend(offences, 0) + 2 * LONGEST_HOLD_NS
    assert offend(offences, until) - until == FIRST_HOLD_NS


def test_names_are_bounded() -> None:
    offences = OffenceLog()
    for number in range(10_000):
        offences.add(str(number), number)
    assert len(offences._records) <= 4_096
