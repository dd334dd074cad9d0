"""Who is asked for a chunk, and who is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_services.store.peers import ChunkSources, SourcePeer, should_take_over

SECOND = 1_000_000_000


@given(st.integers(1, 200))
def test_pauses_double_and_are_bounded(times: int) -> None:
    peer, now, before = SourcePeer("a"), 0, 0
    for _ in range(times):
        peer.failed("silent", now)
        pause = peer.until_ns - now
        assert before <= pause <= 60 * SECOND
        before, now = pause, peer.until_ns
        assert peer.is_usable(now)
        assert not peer.is_usable(now - 1)


@given(st.integers(1, 200))
def test_a_lie_costs_more_than_a_failure_and_is_never_forgotten(times: int) -> None:
    peer, now = SourcePeer("a"), 0
    for number in range(times):
        peer.lied("wrong", now)
        assert 60 * SECOND <= peer.until_ns - now <= 3600 * SECOND
        now = peer.until_ns
        peer.gave(1000, 1000)
        assert peer.lies == number + 1


def test_a_good_chunk_ends_the_row_of_failures() -> None:
    peer = SourcePeer("a")
    for _ in range(5):
        peer.failed("silent", 0)
    peer.gave(1_000_000, SECOND)
    peer.failed("silent", 0)
    assert peer.until_ns == SECOND
    assert peer.bytes_per_s == 1_000_000


def test_who_lacks_a_chunk_is_asked_for_another_meanwhile() -> None:
    peer, one, other = SourcePeer("a"), ChunkSources(("a",)), ChunkSources(("a", "b"))
    one.said_absent("a", 0)
    assert not one.may_be_asked(peer, 1)
    assert other.may_be_asked(peer, 1)
    assert one.may_be_asked(peer, 10 * SECOND)
    assert not ChunkSources(("b",)).may_be_asked(peer, 1)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 4))
def test_nobody_has_it_only_if_everybody_said_so_often(said: list[str], times: int) -> None:
    sources = ChunkSources(("a", "b", "c"))
    for now, name in enumerate(said):
        sources.said_absent(name, now)
    assert sources.all_lack_it(times) == all(said.count(name) >= times for name in "abc")


def test_without_sources_nobody_has_it() -> None:
    assert ChunkSources(()).all_lack_it(1)


@given(st.integers(0, 1 << 24), st.floats(0, 1e9), st.integers(1, 1 << 24), st.floats(1, 1e9))
def test_a_chunk_is_taken_over_only_if_that_is_twice_as_fast(
    left: int, rate: float, whole: int, own: float
) -> None:
    if should_take_over(left, rate, whole, own):
        assert rate <= 0 or left / rate > 2 * whole / own
    assert not should_take_over(left, rate, whole, 0.0)
