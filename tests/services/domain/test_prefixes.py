"""Texts that begin alike have digests in common, as far as whole blocks go."""

from __future__ import annotations

import random

import pytest

from catenary_services.domain.prefixes import (
    MOST_PREFIX_HASHES,
    PREFIX_BLOCK_TOKENS,
    KeptBlocks,
    extend_digests,
    prefix_hashes,
)

BLOCK = PREFIX_BLOCK_TOKENS
TEXT = [n * n % 1009 for n in range(5 * BLOCK + 7)]


def test_there_is_one_number_for_each_whole_block() -> None:
    for tokens in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7):
        assert len(prefix_hashes(TEXT[:tokens])) == tokens // BLOCK
    assert all(0 <= number < 1 << 64 for number in prefix_hashes(TEXT))
    assert len(prefix_hashes([1] * (BLOCK * (MOST_PREFIX_HASHES + 9)))) == MOST_PREFIX_HASHES


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 5 * BLOCK + 6])
def test_a_number_stands_for_everything_up_to_the_end_of_its_block(at: int) -> None:
    other = list(TEXT)
    other[at] += 1
    one, two = prefix_hashes(TEXT), prefix_hashes(other)
    same = at // BLOCK
    assert one[:same] == two[:same]
    assert not set(one[same:]) & set(two[same:])


def test_equal_tokens_under_different_roots_have_nothing_in_common() -> None:
    assert not set(prefix_hashes(TEXT)) & set(prefix_hashes(TEXT, "polite"))


def test_digests_may_be_extended_piece_by_piece() -> None:
    whole: list[bytes] = []
    extend_digests(whole, TEXT, 5, b"root")
    parts: list[bytes] = []
    for blocks in (1, 1, 3, 5):
        extend_digests(parts, TEXT[: blocks * BLOCK], blocks, b"root")
    assert parts == whole
    assert len({len(each) for each in whole}) == 1


def test_blocks_that_were_not_used_for_longest_go_first() -> None:
    kept: KeptBlocks[str] = KeptBlocks()
    for number in range(4):
        kept.keep(number, str(number), 10)
    assert kept.use([0, 1]) == ["0", "1"]
    assert kept.shrink(25) == 2
    assert [number in kept for number in range(4)] == [True, True, False, False]
    assert kept.shrink(10) == 1  # the later block of the two, which is of no use alone
    assert 0 in kept


def test_a_text_is_known_up_to_the_first_gap() -> None:
    kept: KeptBlocks[None] = KeptBlocks()
    for number in (1, 2, 4):
        kept.keep(number, None, 1)
    assert kept.known([1, 2, 3, 4]) == 2
    assert kept.known([4, 1]) == 2
    assert kept.known([3]) == kept.known([]) == 0


@pytest.mark.parametrize("seed", range(4))
def test_sizes_add_up_whatever_is_kept_used_and_dropped(seed: int) -> None:
    draw = random.Random(seed)
    kept: KeptBlocks[int] = KeptBlocks()
    for _ in range(500):
        number = draw.randrange(40)
        if number not in kept:
            kept.keep(number, number, draw.randrange(1, 9))
        elif draw.random() < 0.5:
            assert kept.use([number]) == [number]
        if draw.random() < 0.1:
            most = draw.randrange(60)
            kept.shrink(most)
            assert kept.size <= most
        kept.validate()
    kept.clear()
    assert kept.size == len(kept) == 0
