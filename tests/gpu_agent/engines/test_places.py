"""The places of an engine's sequences: side by side, kept by sessions, and of who began alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_agent.engines.streams import EnginePlaces


def prompt(seed: int, tokens: int = 100) -> list[int]:
    return [seed * 1_000 + at for at in range(tokens)]


def test_sessions_that_run_together_are_side_by_side() -> None:
    places = EnginePlaces(16)
    for session in range(16):
        places.take(session, prompt(session))
    for session in (3, 9, 1, 12, 6, 0, 14, 5, 2, 4, 7, 8, 10, 11, 13, 15):
        places.leave(session)
    taken = [places.take(100 + each, prompt(100 + each)) for each in range(8)]
    assert taken[0] == 3  # which was left first
    assert max(taken) - min(taken) == 7


def test_a_session_keeps_its_place_until_it_leaves() -> None:
    places = EnginePlaces(2)
    first = places.take(1, prompt(1))
    assert places.take(2, prompt(2)) != first
    assert places.take(1, prompt(1, 120)) == first
    assert places.take(3, prompt(3)) is None
    places.leave(1)
    places.leave(1)
    assert places.take(3, prompt(3)) == first


def test_who_begins_like_a_session_before_gets_its_place() -> None:
    places = EnginePlaces(8)
    taken = {session: places.take(session, prompt(session)) for session in range(8)}
    for session in range(8):
        places.leave(session)
    places.take(100, prompt(0)[:20] + prompt(100))  # a beginning as all have it counts for nothing
    assert places.take(101, [*prompt(5), *prompt(101)]) == taken[5]


def test_where_the_engine_chooses_nobody_has_a_place() -> None:
    places = EnginePlaces(0)
    assert places.take(1, prompt(1)) is None
    places.leave(1)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_no_place_is_of_two_sessions(orders: list[tuple[int, bool]]) -> None:
    places, held = EnginePlaces(4), dict[int, int]()
    for session, takes in orders:
        if takes:
            place = places.take(session, prompt(session))
            assert (place is None) == (session not in held and len(held) == 4)
            if place is not None:
                held[session] = place
        else:
            places.leave(session)
            held.pop(session, None)
        assert len(set(held.values())) == len(held)
