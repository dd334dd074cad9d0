"""Guesses repeat the text where it repeats itself, and are made where they pay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_agent.decoders.base import DecoderCost
from catenary_agent.generation.drafts.drafter import (
    LONGEST_MATCH,
    Drafter,
    StepTimes,
    TextIndex,
    times_of,
)

FREE = None
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """What the index looks for, by comparing every place."""
    best, longest = 0, 1
    for place in range(len(tokens) - 2, 0, -1):
        length = 0
        while length < min(LONGEST_MATCH, place + 1) and (
            tokens[place - length] == tokens[-1 - length]
        ):
            length += 1
        if length > longest:
            best, longest = place + 1, length
    return (best, longest) if best else (0, 0)


@given(TEXT, st.integers(1, 7))
def test_the_longest_match_is_found_however_the_text_came(tokens: list[int], part: int) -> None:
    index = TextIndex()
    for end in range(part, len(tokens) + part, part):
        index.extend(tokens[:end])
    found = index.match(tokens)
    wanted = longest_match(tokens)
    if len(tokens) <= 16:  # no more places than are looked at
        assert found == wanted
    assert found[1] <= wanted[1]
    place, length = found
    assert all(tokens[place - 1 - at] == tokens[-1 - at] for at in range(length))


def test_a_repeating_text_is_guessed_and_goes_on_beyond_its_end() -> None:
    drafter, text = Drafter(), [1, 2, 3, 4, 5] * 3 + [1, 2]
    drafter.follow(text)
    guesses = drafter.propose(text, 8, FREE)
    assert guesses == [3, 4, 5, 1, 2, 3, 4, 5][: len(guesses)]
    assert len(guesses) >= 4


def test_nothing_is_guessed_where_nothing_was_said_before() -> None:
    drafter = Drafter()
    assert drafter.propose(list(range(50)), 8, FREE) == []


@given(TEXT, st.lists(st.integers(0, 3), max_size=40), st.integers(0, 8))
def test_guesses_continue_a_place_that_agrees_with_the_end(
    prompt: list[int], answer: list[int], most: int
) -> None:
    drafter, text = Drafter(), list(prompt)
    drafter.follow(text)
    for token in answer:
        text.append(token)
        guesses = drafter.propose(text, most, FREE)
        assert len(guesses) <= most
        if guesses:
            pairs = [
                place
                for place in range(1, len(text) - 1)
                if text[place - 1 : place + 1] == text[-2:]
            ]
            whole = text + guesses
            assert any(whole[place + 1 : place + 1 + len(guesses)] == guesses for place in pairs)


def test_wrong_guesses_are_made_less_and_right_ones_more() -> None:
    """In one text every pair was said before, and goes on otherwise each time."""
    wrong, right = Drafter(), Drafter()
    text: list[int] = []
    for first in range(40):
        for second in range(40):
            text += [1, 2, 100 + (first * 7 + second * 13) % 97]
    said = [5, 6, 7, 8, 9] * 200
    times = StepTimes(1, 1_000_000, 30_000)
    wrong.follow(text[:30])
    right.follow(said[:30])
    for end in range(30, 600):
        wrong.follow(text[:end])
        right.follow(said[:end])
    assert len(right.propose(said[:600], 16, times)) == 16
    behind_a_pair = next(end for end in range(600, 604) if text[end - 1] == 2)
    assert wrong.propose(text[:behind_a_pair], 16, times) == []


def test_fewer_guesses_are_made_the_more_others_wait_for_the_step() -> None:
    drafter, text = Drafter(), [1, 2, 3, 4, 5, 6] * 10
    drafter.follow(text)
    counts = [
        len(drafter.propose(text, 16, StepTimes(sessions, 1_000_000, 40_000)))
        for sessions in (1, 4, 16, 64)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 4
    assert counts[-1] == 0


def test_a_trip_that_takes_longer_pays_for_more_guesses() -> None:
    cost = DecoderCost(20_000_000, 2_000_000, 20_000_000, 2_000_000)
    drafter, text = Drafter(), [1, 2, 3, 4, 5, 6] * 10
    drafter.follow(text)
    near = drafter.propose(text, 16, times_of(cost, 1, 1.0, 0))
    far = drafter.propose(text, 16, times_of(cost, 1, 1.0, 200_000_000))
    assert 4 < len(near) < len(far)


def test_times_of_a_ring_count_the_blocks_of_others() -> None:
    cost = DecoderCost(1_000, 100, 1_000, 200, prefill_floor_ns=5_000)
    alone, part = times_of(cost, 1, 1.0, 0), times_of(cost, 1, 0.25, 0)
    assert part.token_ns == 4 * alone.token_ns == 4_800
    assert part.row_ns == 4 * alone.row_ns == 400
    assert alone.first_row_ns == 5_000 - 1_200
    assert times_of(cost, 3, 1.0, 0).first_row_ns == 5_000 - 200
