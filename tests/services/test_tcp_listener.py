"""Whom a listener gives up while others wait for a place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.tcp_listener import OPEN_S, ListenerLimits, TcpListener, too_slow

SOURCES = st.sampled_from(["a", "b", "c", "d"])


class TestTooSlow:
    def test_a_flood_is_given_up_early_and_a_slow_peer_beside_it_is_not(self) -> None:
        flood = [("flood", 0.0)] * 31
        assert too_slow([*flood, ("peer", 0.0)], ["flood"] * 400, 32, 0.2) == list(range(31))

    def test_a_peer_that_takes_very_long_makes_room_too(self) -> None:
        assert too_slow([("flood", 0.9), ("peer", 0.0)], ["flood"], 2, 1.0) == [1]
        assert too_slow([("x", 0.0), ("y", 0.9)], ["z"], 2, 1.0) == [0]

    def test_young_handshakes_of_anybody_stay(self) -> None:
        assert too_slow([("flood", 1.0)] * 32, ["peer"], 32, 1.01) == []

    def test_one_source_alone_gives_up_early(self) -> None:
        assert too_slow([("only", 0.0)] * 4, ["only"], 4, 0.1) == [0, 1, 2, 3]
        assert too_slow([("only", 0.0)] * 4, ["only", "other"], 4, 0.1) == [0, 1, 2, 3]

    @given(
        st.lists(st.tuples(SOURCES, st.floats(0, OPEN_S)), min_size=1, max_size=40),
        st.lists(SOURCES, max_size=40),
        st.integers(1, 40),
    )
    def test_nobody_is_worse_off_than_who_has_more_places(
        self, opening: list[tuple[str, float]], waiting: list[str], places: int
    ) -> None:
        given_up = set(too_slow(opening, waiting, places, OPEN_S))
        counts = {source: [each for each, _ in opening].count(source) for source, _ in opening}
        for at, (source, since_s) in enumerate(opening):
            for other, (other_source, other_since_s) in enumerate(opening):
                older = other_since_s <= since_s
                if at in given_up and older and counts[other_source] >= counts[source]:
                    assert other in given_up


async def test_a_connection_that_says_nothing_is_dropped_even_if_no_other_follows() -> None:
    listener = TcpListener(_nobody, None, limits=ListenerLimits(wait_s=0.2))
    port = await listener.start("127.0.0.1", 0)
    reader, _ = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    listener.close()


class Slow(asyncio.Protocol):
    """Blocks the loop until the time for opening it is over."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            pass

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_who_is_given_up_while_it_is_handed_over_is_told(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catenary_services.tcp_listener.OPEN_S", 0.05)

    async def scene() -> None:
        ended = asyncio.Event()
        listener = TcpListener(lambda _: Slow(ended), None)
        port = await listener.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
            await ended.wait()
        writer.close()
        listener.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene())


def _nobody(settled: Callable[[], None]) -> asyncio.BaseProtocol:
    raise AssertionError("a silent connection has no protocol")
