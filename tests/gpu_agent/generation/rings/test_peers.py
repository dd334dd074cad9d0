"""Frames to one peer: at once where nothing is to be waited for, and in order in any case."""

from __future__ import annotations

import asyncio

from catenary_agent.generation.frames.peers import PeerSender, Priority, SessionFrame
from catenary_services.errors import CatenaryError, PartitionLost
from catenary_services.transport.acknowledgements import LinkState
from catenary_services.transport.interface import Capabilities
from shared_helpers.waiting import until


class Frame(SessionFrame):
    """A frame without a payload, of one session."""

    priority = Priority.RINGS
    turn = (0, 0)

    def __init__(
        self,
        session: int,
        priority: Priority = Priority.RINGS,
        turn: tuple[int, int] = (0, 0),
    ) -> None:
        self.session = session
        self.priority = priority
        self.turn = turn
        self.is_settled = False

    @property
    def session_ids(self) -> tuple[int, ...]:
        return (self.session,)

    def settle(self) -> None:
        self.is_settled = True


class Slot:
    view = memoryview(b"")

    def release(self) -> None:
        """Has nothing to give back."""


class Link:
    """A link that takes frames at once, only from those who wait, or not at all."""

    closed = False

    def __init__(self, *, same_host: bool) -> None:
        self.capabilities = Capabilities("shm" if same_host else "tcp", same_host=same_host)
        self.is_full = False
        self.error: PartitionLost | None = None
        self.took: list[bytes] = []
        self.gate: asyncio.Event | None = None
        self.on_its_way: LinkState | None = None

    def transit(self) -> LinkState | None:
        return self.on_its_way

    async def close(self) -> None:
        self.closed = True

    def try_export(self, nbytes: int) -> Slot:
        return Slot()

    async def export(self, nbytes: int, timeout_s: float) -> Slot:
        return Slot()

    def try_push(self, slot: Slot, header: bytes) -> bool:
        if self.error is not None:
            raise self.error
        if self.is_full:
            return False
        self.took.append(header)
        return True

    async def push(self, slot: Slot, header: bytes, timeout_s: float, lost_frame: object) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.took.append(header)


class Peer:
    """A sender to one peer, the link to it, and what failed."""

    def __init__(self, *, same_host: bool = True, timeout_s: float = 60.0) -> None:
        self.link = Link(same_host=same_host)
        self.failed: list[tuple[tuple[int, ...], CatenaryError, str]] = []
        self.sender = PeerSender(
            self,
            (timeout_s, 1 << 20),
            lambda frame: b"%d" % frame.session,
            lambda *failed: self.failed.append(failed),
        )

    async def link_to(self, peer: str, timeout_s: float) -> Link:
        return self.link

    async def is_open(self) -> None:
        """Sends the first frame, for which the link is opened."""
        self.sender.send("peer", Frame(0))
        await until(lambda: self.link.took == [b"0"] and not self.sender._lines)


async def test_a_frame_leaves_at_once_to_a_process_of_this_machine() -> None:
    peer, frame = Peer(), Frame(1)
    await peer.is_open()
    peer.sender.send("peer", frame)
    assert peer.link.took == [b"0", b"1"]
    assert frame.is_settled
    assert not peer.sender._lines


async def test_a_frame_over_a_network_is_left_to_a_task() -> None:
    peer, frame = Peer(same_host=False), Frame(1)
    await peer.is_open()
    peer.sender.send("peer", frame)
    assert peer.link.took == [b"0"]
    await until(lambda: peer.link.took == [b"0", b"1"])


async def test_frames_behind_one_that_waits_keep_their_order() -> None:
    peer = Peer()
    await peer.is_open()
    peer.link.is_full = True
    peer.sender.send("peer", Frame(1))
    peer.link.is_full = False
    peer.sender.send("peer", Frame(2))
    assert peer.link.took == [b"0"]
    await until(lambda: peer.link.took == [b"0", b"1", b"2"])
    assert not peer.failed


async def test_the_sessions_of_a_frame_that_finds_its_peer_gone_fail() -> None:
    peer, frame = Peer(), Frame(1)
    await peer.is_open()
    peer.link.error = PartitionLost("the peer is gone")
    peer.sender.send("peer", frame)
    [(sessions, error, name)] = peer.failed
    assert (sessions, error.reason, name) == ((1,), "PARTITION_LOST", "peer")
    assert frame.is_settled


async def test_rows_of_streams_overtake_prompts_and_these_go_by_their_turns_before_caches() -> None:
    peer = Peer(same_host=False)
    await peer.is_open()
    peer.link.gate = asyncio.Event()
    peer.sender.send("peer", Frame(1, Priority.PROMPTS, (50, 1)))  # leaves, and is not overtaken
    await asyncio.sleep(0)
    peer.sender.send("peer", Frame(2, Priority.CACHES))
    peer.sender.send("peer", Frame(3, Priority.PROMPTS, (90, 1)))
    peer.sender.send("peer", Frame(4, Priority.PROMPTS, (70, 1)))
    peer.sender.send("peer", Frame(5, Priority.PROMPTS, (70, 1)))
    peer.sender.send("peer", Frame(6))
    peer.sender.send("peer", Frame(7))
    peer.link.gate.set()
    await until(lambda: len(peer.link.took) == 8)
    assert peer.link.took == [b"0", b"1", b"6", b"7", b"4", b"5", b"3", b"2"]


async def test_a_full_link_takes_rows_of_streams_but_no_prompts_until_there_is_room() -> None:
    peer = Peer(same_host=False)
    peer.link.on_its_way = LinkState(0, 0, 60_000_000, 2_500_000)
    await peer.is_open()
    # Twice of what the link holds is on its way, and none of it is acknowledged.
    peer.link.on_its_way = LinkState(0, 300_000, 60_000_000, 2_500_000)
    prompt = Frame(1, Priority.PROMPTS)
    peer.sender.send("peer", prompt)
    peer.sender.send("peer", Frame(2))
    await until(lambda: peer.link.took == [b"0", b"2"])
    peer.sender.send("peer", Frame(3))  # ends the wait for room, which goes on behind it
    await until(lambda: peer.link.took == [b"0", b"2", b"3"])
    assert not prompt.is_settled
    peer.link.on_its_way = LinkState(200_000, 100_000, 60_000_000, 2_500_000)
    await until(lambda: prompt.is_settled)
    assert peer.link.took == [b"0", b"2", b"3", b"1"]


async def test_the_frames_of_all_lines_fail_with_the_peer() -> None:
    peer = Peer(same_host=False)
    await peer.is_open()
    peer.link.gate = asyncio.Event()
    frames = [Frame(number + 1, each) for number, each in enumerate(Priority)]
    for frame in frames:
        peer.sender.send("peer", frame)
    await asyncio.sleep(0)
    peer.link.error = PartitionLost("the peer is gone")
    peer.link.gate.set()
    await until(lambda: bool(peer.failed))
    assert [sorted(ids) for ids, _, _ in peer.failed] == [[1, 2, 3]]
    assert all(frame.is_settled for frame in frames)


async def test_a_peer_over_a_network_bounds_prompts_and_one_on_this_machine_does_not() -> None:
    near, far = Peer(), Peer(same_host=False)
    far.link.on_its_way = LinkState(0, 0, 60_000_000, 5_000_000)
    for peer in (near, far):
        await peer.is_open()
        peer.sender.send("peer", Frame(1, Priority.PROMPTS))
        await until(lambda peer=peer: len(peer.link.took) == 2)
    assert near.sender.link_bytes == {"peer": 0}
    assert far.sender.link_bytes == {"peer": 5_000_000 // 40}


async def test_prompts_for_a_peer_that_takes_no_byte_fail_after_a_while() -> None:
    peer = Peer(same_host=False, timeout_s=0.05)
    peer.link.on_its_way = LinkState(0, 0, 60_000_000, 2_500_000)
    await peer.is_open()
    peer.link.on_its_way = LinkState(0, 300_000, 60_000_000, 2_500_000)
    frame = Frame(1, Priority.PROMPTS)
    peer.sender.send("peer", frame)
    await until(lambda: bool(peer.failed))
    [(sessions, error, name)] = peer.failed
    assert (sessions, error.reason, name) == ((1,), "PARTITION_LOST", "peer")
    assert frame.is_settled
    assert peer.link.closed
