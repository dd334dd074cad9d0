"""What every transport must do alike."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from dataclasses import replace

import numpy as np
import pytest

from catenary_services.errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    PartitionLost,
    PayloadTooLarge,
)
from catenary_services.transport.interface import Link
from machine_faults.slow_network import slow_network
from shared_helpers.waiting import until
from tests.services.transport.peers import MIB, Inbox, Kit, Spawn

SIZES = [0, 1, 4095, 8192, 8193, MIB, 33 * MIB]


async def send(link: Link, data: bytes, header: bytes = b"h") -> None:
    slot = await link.export(len(data), 10)
    slot.view[:] = data
    await link.push(slot, header, 20)


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def address_of(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("nbytes", SIZES)
async def test_data_arrives_equal_and_aligned(kit: Kit, nbytes: int) -> None:
    inbox = Inbox()
    receiver = await kit.endpoint("b", inbox)
    link = await (await kit.endpoint("a")).connect(receiver.address, 5)
    data = pattern(nbytes)
    slot = await link.export(nbytes, 5)
    assert len(slot.view) == nbytes
    if nbytes:
        assert address_of(slot.view) % 64 == 0
    slot.view[:] = data
    await link.push(slot, b"head", 20)
    frame = await inbox.next()
    assert frame.header == b"head"
    assert frame.payload == data
    assert frame.payload.readonly
    assert frame.capabilities.transport == link.capabilities.transport == kit.transport
    if nbytes:
        assert address_of(frame.payload) % 64 == 0
    frame.release()
    frame.release()


async def test_large_headers_travel(kit: Kit) -> None:
    inbox = Inbox()
    link = await (await kit.endpoint("a")).connect((await kit.endpoint("b", inbox)).address, 5)
    header = pattern(900_000)
    await send(link, b"xyz", header)
    frame = await inbox.next()
    assert (frame.header, bytes(frame.payload)) == (header, b"xyz")
    slot = await link.export(0, 1)
    with pytest.raises(InvalidInput, match="header"):
        await link.push(slot, bytes(2 * MIB), 1)


async def test_frames_of_mixed_sizes_keep_their_order(kit: Kit) -> None:
    inbox = Inbox()
    link = await (await kit.endpoint("a")).connect((await kit.endpoint("b", inbox)).address, 5)
    sizes = [int(n) for n in np.random.default_rng(1).choice([0, 10, 9000, 70_000, 2 * MIB], 60)]

    async def take() -> None:
        for index, nbytes in enumerate(sizes):
            frame = await inbox.next()
            assert frame.header == str(index).encode()
            assert frame.payload == pattern(nbytes, index)
            frame.release()

    async with asyncio.TaskGroup() as group:
        group.create_task(take())
        for index, nbytes in enumerate(sizes):
            await send(link, pattern(nbytes, index), str(index).encode())


async def test_pushes_of_many_tasks_do_not_mix_and_slots_are_reused(kit: Kit) -> None:
    inbox = Inbox()
    sender = await kit.endpoint("a", shm_bytes=8 * MIB, send_bytes=8 * MIB)
    receiver = await kit.endpoint("b", inbox, receive_bytes=8 * MIB)
    link = await sender.connect(receiver.address, 5)
    wanted = {str(i).encode(): pattern(200_000, i) for i in range(64)}

    async def take() -> None:
        for _ in range(len(wanted)):
            frame = await inbox.next()
            assert frame.payload == wanted.pop(frame.header)
            frame.release()

    async with asyncio.TaskGroup() as group:
        for header, data in tuple(wanted.items()):
            group.create_task(send(link, data, header))
        group.create_task(take())
    assert not wanted


async def test_export_times_out_when_slots_are_used_up_and_goes_on_after_release(kit: Kit) -> None:
    link = await (await kit.endpoint("a", shm_bytes=4 * MIB, send_bytes=4 * MIB)).connect(
        (await kit.endpoint("b")).address, 5
    )
    held = [await link.export(MIB, 1) for _ in range(2)]  # one link gets half of the memory
    with pytest.raises(Overloaded):
        await link.export(MIB, 0.05)
    waiting = asyncio.create_task(link.export(MIB, 5))
    await asyncio.sleep(0)
    held[0].release()
    held[0].release()
    slot = await waiting
    slot.release()
    held[1].release()
    # Every byte is back: another size takes the place of the idle segments.
    (await link.export(2 * MIB, 0.05)).release()


async def test_a_frame_that_never_fits_is_refused_at_once(kit: Kit) -> None:
    endpoint = await kit.endpoint("a", max_frame_bytes=MIB)
    link = await endpoint.connect((await kit.endpoint("b")).address, 5)
    with pytest.raises(PayloadTooLarge):
        await link.export(MIB + 1, 1)


async def test_a_peer_with_a_lower_limit_drops_the_connection_not_itself(kit: Kit) -> None:
    inbox = Inbox()
    sender = await kit.endpoint("a")
    receiver = await kit.endpoint("b", inbox, max_frame_bytes=MIB)
    link = await sender.connect(receiver.address, 5)
    with contextlib.suppress(PartitionLost):
        await send(link, bytes(2 * MIB))
    await until(lambda: link.closed)
    assert inbox.frames.empty()
    again = await sender.connect(receiver.address, 5)
    await send(again, b"fits")
    assert (await inbox.next()).payload == b"fits"


async def test_a_slot_is_pushed_once_and_by_its_own_link(kit: Kit) -> None:
    sender, receiver = await kit.endpoint("a"), await kit.endpoint("b")
    link, other = [await sender.connect(receiver.address, 5) for _ in range(2)]
    slot = await link.export(10_000, 1)
    with pytest.raises(InvalidInput, match="slot"):
        await other.push(slot, b"", 1)
    await link.push(slot, b"", 1)
    with pytest.raises(InvalidInput, match="slot"):
        await link.push(slot, b"", 1)
    released = await link.export(10_000, 1)
    released.release()
    with pytest.raises(InvalidInput, match="slot"):
        await link.push(released, b"", 1)


async def test_a_cancelled_export_loses_no_slot(kit: Kit) -> None:
    link = await (await kit.endpoint("a", shm_bytes=2 * MIB, send_bytes=2 * MIB)).connect(
        (await kit.endpoint("b")).address, 5
    )
    for _ in range(5):
        held = await link.export(MIB, 1)
        waiting = asyncio.create_task(link.export(MIB, 5))
        await asyncio.sleep(0)
        held.release()  # the waiting task has it now, and is cancelled before it can say so
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    (await link.export(MIB, 0.1)).release()


async def test_a_receiver_without_memory_holds_the_sender_up_and_nothing_is_lost(kit: Kit) -> None:
    inbox = Inbox()
    sender = await kit.endpoint("a", shm_bytes=8 * MIB, send_bytes=8 * MIB)
    receiver = await kit.endpoint("b", inbox, receive_bytes=4 * MIB)
    link = await sender.connect(receiver.address, 5)
    frames = [pattern(MIB, i) for i in range(24)]

    async def send_all() -> None:
        for data in frames:
            await send(link, data)

    sending = asyncio.create_task(send_all())
    first = [await inbox.next() for _ in range(2)]
    await asyncio.sleep(0.3)  # long enough for all of it, were nothing to hold it up
    assert not sending.done()
    assert inbox.frames.qsize() <= 4
    for index, data in enumerate(frames):
        frame = first[index] if index < 2 else await inbox.next()
        assert frame.payload == data
        frame.release()
    await sending


async def test_frames_beyond_the_held_limit_wait_their_turn(kit: Kit) -> None:
    inbox = Inbox()
    receiver = await kit.endpoint("b", inbox, max_unreleased_frames=3)
    link = await (await kit.endpoint("a")).connect(receiver.address, 5)
    for index in range(10):
        await send(link, b"", str(index).encode())
    held = [await inbox.next() for _ in range(3)]
    await asyncio.sleep(0.1)
    assert inbox.frames.empty()
    for index in range(10):
        frame = held[index] if index < 3 else await inbox.next()
        assert frame.header == str(index).encode()
        frame.release()


async def test_a_cancelled_push_leaves_whole_frames_behind(kit: Kit) -> None:
    inbox = Inbox()
    receiver = await kit.endpoint("b", inbox, receive_bytes=64 * MIB)
    link = await (await kit.endpoint("a")).connect(receiver.address, 5)
    cancelled = asyncio.create_task(send(link, pattern(20 * MIB), b"cancelled"))
    # Somewhere between its start and its end; whichever it is, what follows must be in step.
    for _ in range(6):
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await send(link, b"after", b"after")
    frame = await inbox.next()
    if frame.header == b"cancelled":
        assert frame.payload == pattern(20 * MIB)
        frame.release()
        frame = await inbox.next()
    assert (frame.header, bytes(frame.payload)) == (b"after", b"after")


async def test_a_push_nobody_takes_ends_the_link(kit: Kit) -> None:
    inbox = Inbox()
    receiver = await kit.endpoint("b", inbox, max_unreleased_frames=1)
    link = await (await kit.endpoint("a")).connect(receiver.address, 5)

    async def push_without_end() -> None:
        while True:
            slot = await link.export(8000 if kit.transport == "shm" else 4 * MIB, 0.3)
            await link.push(slot, b"", 0.3)

    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(push_without_end(), 20)
    await link.close()
    with pytest.raises(PartitionLost):
        await link.export(1, 1)


async def test_nobody_there_is_partition_lost(kit: Kit) -> None:
    sender, receiver = await kit.endpoint("a"), await kit.endpoint("b")
    address = receiver.address
    await receiver.close()
    with pytest.raises(PartitionLost):
        await sender.connect(address, 2)


async def test_closing_the_receiver_fails_waiting_and_later_calls(kit: Kit) -> None:
    receiver = await kit.endpoint("b")
    link = await (await kit.endpoint("a", shm_bytes=2 * MIB, send_bytes=2 * MIB)).connect(
        receiver.address, 5
    )
    held = await link.export(MIB, 1)
    waiting = asyncio.create_task(link.export(MIB, 20))
    await asyncio.sleep(0)
    await receiver.close()
    with pytest.raises(PartitionLost):
        await asyncio.wait_for(waiting, 30)
    assert link.closed
    with pytest.raises(PartitionLost):
        await link.push(held, b"", 1)
    with pytest.raises(PartitionLost):
        await link.export(0, 1)


async def test_frames_stay_readable_after_their_sender_left(kit: Kit) -> None:
    inbox = Inbox()
    sender = await kit.endpoint("a")
    link = await sender.connect((await kit.endpoint("b", inbox)).address, 5)
    data = pattern(3 * MIB)
    await send(link, data)
    frame = await inbox.next()
    await sender.close()
    gc.collect()
    assert frame.payload == data
    frame.release()


async def test_concurrent_links_carry_their_own_frames(kit: Kit) -> None:
    inbox = Inbox()
    receiver = await kit.endpoint("b", inbox)
    senders = [await kit.endpoint(f"a{i}") for i in range(3)]
    links = [await sender.connect(receiver.address, 5) for sender in senders]

    async def send_some(index: int) -> None:
        for turn in range(10):
            await send(links[index], pattern(100_000, index), f"{index}.{turn}".encode())

    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async with asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(send_some(index))
        for _ in range(30):
            frame = await inbox.next()
            who, turn = map(int, frame.header.split(b"."))
            seen[who].append(turn)
            assert frame.payload == pattern(100_000, who)
            frame.release()
    assert all(turns == list(range(10)) for turns in seen.values())


async def test_a_handler_that_fails_loses_only_its_frame(kit: Kit) -> None:
    inbox = Inbox()

    def handler(frame: object) -> None:
        if frame.header == b"bad":  # type: ignore[attr-defined]
            raise RuntimeError("handler")
        inbox(frame)  # type: ignore[arg-type]

    link = await (await kit.endpoint("a")).connect((await kit.endpoint("b", handler)).address, 5)
    await send(link, bytes(20_000), b"bad")
    await send(link, bytes(20_000), b"good")
    assert (await inbox.next()).header == b"good"


async def test_a_killed_peer_gives_its_slots_back_and_fails_calls_fast(
    kit: Kit, spawn: Spawn
) -> None:
    if kit.kind.endswith("tls"):
        pytest.skip("the peer process of this test speaks plain connections")
    foreign = await spawn(kit.transport, kit.settings.runtime_dir)
    # Its death alone can tell: neither a lease nor the export itself ends before an hour.
    memory = {"shm_bytes": 8 * MIB, "send_bytes": 8 * MIB}
    sender = await kit.endpoint("a", lease_s=3600.0, **memory)
    link = await sender.connect(foreign.address, 5)
    for _ in range(4):
        await send(link, bytes(MIB))
        assert int(await foreign.received()) == MIB
    # Over shm the peer's unreleased frames are all the memory this link gets; else we hold it.
    held = [] if kit.transport == "shm" else [await link.export(MIB, 1) for _ in range(4)]
    waiting = asyncio.create_task(link.export(MIB, 3600))
    await asyncio.sleep(0)
    assert not waiting.done()
    await foreign.kill()
    with pytest.raises(PartitionLost):
        await asyncio.wait_for(waiting, 30)
    assert link.closed
    with pytest.raises(PartitionLost):
        await link.export(MIB, 1)
    for slot in held:
        slot.release()
    # A successor at a new address gets all of the memory.
    successor = await spawn(kit.transport, kit.settings.runtime_dir)
    again = await sender.connect(successor.address, 5)
    for slot in [await again.export(MIB, 1) for _ in range(4)]:
        slot.release()
    await send(again, bytes(4 * MIB))
    assert int(await successor.received()) == 4 * MIB


async def test_nothing_is_left_open(kit: Kit) -> None:
    async def use() -> None:
        inbox = Inbox()
        receiver, sender = await kit.endpoint("b", inbox), await kit.endpoint("a")
        link = await sender.connect(receiver.address, 5)
        for nbytes in (0, 5000, 3 * MIB, 20_000):
            await send(link, bytes(nbytes))
            (await inbox.next()).release()
        await sender.close()
        await receiver.close()

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    await use()  # whatever is opened once per process (gRPC's own threads, for one)
    before, tasks = descriptors(), len(asyncio.all_tasks())
    for _ in range(3):
        await use()
    await until(lambda: descriptors() <= before)
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    if kit.settings.runtime_dir.exists():
        assert os.listdir(kit.settings.runtime_dir) == []


MEGABIT = 125_000
STALL_S = 0.6
"""Within which something must move; a frame of `CHUNK` takes five times as long at 20 Mbit/s."""
CHUNK = 8 * MIB


@pytest.mark.parametrize("megabits", [20, 50])
async def test_a_frame_over_a_slow_link_lives_as_long_as_it_moves(kit: Kit, megabits: int) -> None:
    if kit.transport == "shm":
        pytest.skip("there is no network between two processes of one machine")
    inbox = Inbox()
    receiver = await kit.endpoint("b", inbox)
    sender = await kit.endpoint("a")
    async with slow_network(receiver.address.address, megabits * MEGABIT) as network:
        slow = replace(receiver.address, address=network.address)
        link = await sender.connect(slow, 20, "b")
        data = pattern(CHUNK)
        slot = await link.export(len(data), 5)
        slot.view[:] = data
        await link.push(slot, b"chunk", STALL_S)
        frame = await asyncio.wait_for(inbox.frames.get(), 60)
        assert frame.payload == data
        frame.release()
        assert not link.closed
        await link.close()


async def test_a_frame_over_a_link_that_stalls_ends_it(kit: Kit) -> None:
    if kit.transport == "shm":
        pytest.skip("there is no network between two processes of one machine")
    sender, receiver = await kit.endpoint("a"), await kit.endpoint("b")
    async with slow_network(receiver.address.address, 20 * MEGABIT) as network:
        slow = replace(receiver.address, address=network.address)
        link = await sender.connect(slow, 20, "b")
        network.stall()
        lasted_s = []

        async def push() -> None:
            slot = await link.export(3 * CHUNK, 5)
            began = time.monotonic()
            try:
                await link.push(slot, b"", STALL_S)
            finally:
                lasted_s.append(time.monotonic() - began)

        async def push_many() -> None:  # the first may fit into buffers of the kernel
            for _ in range(100):
                await push()

        with pytest.raises((DeadlineExceeded, PartitionLost)):
            await push_many()
        assert lasted_s[-1] < 15
        assert link.closed


async def test_a_receiver_that_takes_frames_slowly_is_not_taken_for_lost(kit: Kit) -> None:
    inbox = Inbox()
    receiver = await kit.endpoint("b", inbox, max_unreleased_frames=2)
    link = await (await kit.endpoint("a")).connect(receiver.address, 5)
    count = 120

    async def take() -> None:
        for _ in range(count):
            frame = await inbox.next()
            await asyncio.sleep(0.02)
            frame.release()

    taking = asyncio.create_task(take())
    for _ in range(count):
        slot = await link.export(8000, 5)
        await link.push(slot, b"", STALL_S)
    await taking
    assert not link.closed
