"""Which frames have arrived, and when a connection carries nothing any more."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.errors import PartitionLost
from catenary_services.transport.acknowledgements import Acknowledgements, Outgoing
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.tcp import tcp_stream
from catenary_services.transport.tcp.tcp import TcpEndpoint
from tests.services.transport.peers import MIB, Inbox, Kit, Spawn

SILENT = 4_000
ALL = Outgoing(500, 0, unanswered=False, handed_over=True)


def waiting(acknowledged: int, queued: int = 100, *, unanswered: bool = True) -> Outgoing:
    return Outgoing(acknowledged, queued, unanswered, handed_over=True)


def nobody(_: PartitionLost) -> None:
    """Whom nothing was lost for."""


def test_a_connection_is_lost_when_nothing_was_acknowledged_for_the_whole_time() -> None:
    watch = Acknowledgements(SILENT)
    assert not watch.look(1_000, waiting(500))
    assert not watch.look(4_999, waiting(500))
    assert watch.look(5_000, waiting(500))


def test_whatever_is_acknowledged_begins_the_time_anew() -> None:
    watch = Acknowledgements(SILENT)
    for moment in range(0, 100_000, 3_000):
        assert not watch.look(moment, waiting(500 + moment // 3_000))


def test_a_pause_in_which_all_had_arrived_does_not_count() -> None:
    watch = Acknowledgements(SILENT)
    assert not watch.look(0, waiting(500))
    assert not watch.look(3_000, ALL)
    assert not watch.look(6_000, waiting(500))
    assert not watch.look(9_999, waiting(500))
    assert watch.look(10_000, waiting(500))


def test_a_receiver_without_room_is_slow_and_not_lost() -> None:
    watch = Acknowledgements(SILENT)
    for moment in range(0, 100_000, 1_000):
        assert not watch.look(moment, waiting(500, unanswered=False))


def test_a_loop_that_was_held_up_takes_nobody_for_lost() -> None:
    watch = Acknowledgements(SILENT)
    assert not watch.look(0, ALL)
    assert not watch.look(60_000, waiting(500))  # sent a moment ago


def test_frames_are_told_of_until_they_are_acknowledged() -> None:
    told: list[str] = []
    watch = Acknowledgements(SILENT)
    for name in ("arrived", "behind"):
        watch.sent(lambda _, name=name: told.append(name))
        watch.look(0, waiting(100 if name == "arrived" else 150))
    watch.look(1, waiting(200, 50))
    watch.sent(lambda _: told.append("new"))
    for lost in watch.take():
        lost(PartitionLost("cut"))
    assert told == ["behind", "new"]
    assert watch.take() == []


def test_a_frame_that_the_kernel_has_not_yet_is_not_taken_for_arrived() -> None:
    watch = Acknowledgements(SILENT)
    watch.sent(nobody)
    unwritten = Outgoing(500, 0, unanswered=False, handed_over=False)
    watch.look(0, unwritten)
    assert not watch.is_settled(unwritten)
    assert watch.take() == [nobody]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), max_size=60))
def test_exactly_what_was_not_acknowledged_at_a_look_is_in_doubt(
    steps: list[tuple[int, int]],
) -> None:
    """Frames of a hundred bytes each; every step sends some, has some acknowledged, and looks."""
    watch = Acknowledgements(1 << 62)
    sent = acknowledged = known = 0
    for frames, more in steps:
        for _ in range(frames):
            sent += 1
            watch.sent(nobody)
        acknowledged = min(100 * sent, acknowledged + more)
        seen = Outgoing(acknowledged, 100 * sent - acknowledged, acknowledged < 100 * sent, True)
        watch.look(0, seen)
        if acknowledged == 100 * sent:
            known = sent
        assert watch.is_settled(seen) == (acknowledged == 100 * sent)
    doubted = len(watch.take())
    assert sent - acknowledged // 100 <= doubted <= sent - known


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_stream, "SILENT_S", 0.3)
    monkeypatch.setattr(tcp_stream, "LOOK_S", 0.05)


@pytest.mark.usefixtures("quickly")
async def test_a_process_that_stands_still_is_not_taken_for_a_cut_link(
    tmp_path: Path, spawn: Spawn
) -> None:
    peer = await spawn("tcp", tmp_path)
    endpoint = TcpEndpoint("a", TransportSettings(runtime_dir=tmp_path))
    await endpoint.start(Inbox())
    link = await endpoint.connect(peer.address, 5)
    peer.process.send_signal(signal.SIGSTOP)
    told: list[PartitionLost] = []
    try:
        # The first ones its kernel takes; then it has no room for more.
        for _ in range(3):
            await link.push(await link.export(0, 1), b"small", 1, told.append)
        slot = await link.export(32 * MIB, 1)
        large = asyncio.create_task(link.push(slot, b"large", 60, told.append))
        await asyncio.sleep(1.5)
        assert not link.closed
        assert not large.done()
        assert told == []
    finally:
        peer.process.send_signal(signal.SIGCONT)
    await asyncio.wait_for(large, 60)
    await endpoint.close()


@pytest.mark.parametrize("kit", ["tcp", "tcp+tls"], indirect=True)
async def test_a_frame_in_doubt_is_told_of_when_its_link_ends_and_one_that_arrived_is_not(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_stream, "LOOK_S", 0.02)
    inbox = Inbox()
    a, b = await kit.endpoint("a"), await kit.endpoint("b", inbox)
    link = await a.connect(b.address, 5, "b")
    told: list[str] = []
    await link.push(await link.export(0, 1), b"1", 1, lambda _: told.append("arrived"))
    await inbox.next()
    async with asyncio.timeout(20):
        while link.stream._look is not None:  # until it is known
            await asyncio.sleep(0.01)
    await link.push(await link.export(0, 1), b"2", 1, lambda _: told.append("in doubt"))
    await link.close()
    assert told == ["in doubt"]
