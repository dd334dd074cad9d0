"""Frames to one peer: at once where nothing is to be waited for, and in order in any case."""

from __future__ import annotations

from catenary_agent.generation.frames.peers import PeerSender, SessionFrame
from catenary_services.errors import CatenaryError, PartitionLost
from catenary_services.transport.interface import Capabilities
from shared_helpers.waiting import until


class Frame(SessionFrame):
    """A frame without a payload, of one session."""

    def __init__(self, session: int) -> None:
        self.session = session
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
        self.took.append(header)


class Peer:
    """A sender to one peer, the link to it, and what failed."""

    def __init__(self, *, same_host: bool = True) -> None:
        self.link = Link(same_host=same_host)
        self.failed: list[tuple[tuple[int, ...], CatenaryError, str]] = []
        self.sender = PeerSender(
            self,
            (1.0, 1 << 20),
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
