"""The slots of a ring, and the words in which a receiver describes it."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.errors import InvalidInput
from catenary_services.transport.nixl.ring import RingDescription, SlotRuns

RING = RingDescription(
    address=1 << 40,
    slots=512,
    slot_bytes=65536,
    name="agent-1",
    version="1.5.1",
    metadata=b"nixl" * 100,
)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2500), st.integers(0, 2**64 - 1))))
def test_both_sides_agree_and_no_two_frames_share_a_slot(
    steps: list[tuple[bool, int, int]],
) -> None:
    """The sender chooses and the receiver checks, whatever is released in between."""
    sender, receiver = SlotRuns(20, 100), SlotRuns(20, 100)
    taken: dict[int, int] = {}
    for is_frame, nbytes, pick in steps:
        if is_frame and nbytes:
            first = sender.take_any(nbytes)
            if first is None:
                continue
            receiver.take(first, nbytes)
            mine = set(range(first, first + -(-nbytes // 100)))
            assert max(mine) < 20
            for other, length in taken.items():
                assert mine.isdisjoint(range(other, other + length))
            taken[first] = len(mine)
        elif taken:
            first = sorted(taken)[pick % len(taken)]
            del taken[first]
            sender.give_back(first)
            receiver.give_back(first)
    assert sender.is_unused == receiver.is_unused == (not taken)


def test_a_frame_that_fits_finds_room_wherever_it_is() -> None:
    runs = SlotRuns(4, 100)
    firsts = [runs.take_any(100) for _ in range(4)]
    assert firsts == [0, 1, 2, 3]
    assert runs.take_any(1) is None
    runs.give_back(1)
    runs.give_back(2)
    assert runs.take_any(201) is None
    assert runs.take_any(200) == 1


@pytest.mark.parametrize(
    ("first", "nbytes"), [(0, 0), (0, 401), (4, 1), (2**63, 1), (3, 101), (1, 100), (0, 101)]
)
def test_slots_that_are_none_or_not_free_are_refused(first: int, nbytes: int) -> None:
    runs = SlotRuns(4, 100)
    runs.take(1, 100)
    with pytest.raises(InvalidInput):
        runs.take(first, nbytes)


@pytest.mark.parametrize("first", [0, 2, 4, 2**64 - 1])
def test_only_what_was_taken_can_be_given_back(first: int) -> None:
    runs = SlotRuns(4, 100)
    runs.take(1, 200)
    with pytest.raises(InvalidInput):
        runs.give_back(first)


def test_a_description_is_read_as_it_was_written() -> None:
    assert RingDescription.decode(RING.encode()) == RING


@given(st.binary(max_size=400))
def test_any_bytes_are_no_description(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        RingDescription.decode(data)


@given(st.integers(0, 600), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(RING.encode())
    data[at % len(data)] ^= change
    with pytest.raises(InvalidInput, match="damaged"):
        RingDescription.decode(bytes(data))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_rings_that_no_memory_holds_are_refused(address: int, slots: int, slot_bytes: int) -> None:
    """With a right digest, as a peer that lies has it."""
    lie = replace(RING, address=address, slots=slots, slot_bytes=slot_bytes)
    with contextlib.suppress(InvalidInput):
        read = RingDescription.decode(lie.encode())
        assert 0 < read.slots * read.slot_bytes <= 1 << 30
        assert 0 < read.address <= (1 << 64) - read.slots * read.slot_bytes


@pytest.mark.parametrize(
    "lie",
    [
        {"name": ""},
        {"name": "a\n"},
        {"name": "a" * 300},
        {"version": ""},
        {"metadata": b""},
        {"metadata": bytes(1 << 17)},
        {"address": 0},
    ],
    ids=str,
)
def test_descriptions_without_a_name_or_of_odd_sizes_are_refused(lie: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        RingDescription.decode(replace(RING, **lie).encode())  # type: ignore[arg-type]
