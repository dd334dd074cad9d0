"""Frames whose headers are any bytes at all, over every transport: others' frames still arrive."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import common_pb2, frame_pb2
from catenary_services.errors import CatenaryError, InvalidMessage
from catenary_services.transport.frames import read_header
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import ReceivedFrame
from catenary_services.transport.settings import TransportSettings

GOOD = frame_pb2.FrameHeader(
    kind=frame_pb2.FRAME_KIND_FEATURE_MAP,
    epoch=3,
    batch_id=7,
    batch_rows=2,
    rows=2,
    slices=[common_pb2.Slice(gateway_id="good", request_id=1, rows=2)],
    route=[common_pb2.Hop(agent_id="b", model="m", model_version="1", last_block=4)],
    tensors=[frame_pb2.TensorHeader(name="x", datatype="FP32", shape=[2, 4], nbytes=32)],
    session_rows=[frame_pb2.SessionRows(session_id=1, position=2, tokens=3)],
)


def mutated(chance: random.Random) -> bytes:
    """Returns a header with some bytes changed, cut or added; or noise."""
    data = bytearray(GOOD.SerializeToString())
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 2:
            data[at:at] = b"\xff" * chance.randint(1, 10)
        else:
            data[at:at] = chance.randbytes(chance.randint(1, 32))
        data = data or bytearray(b"\x00")
    return bytes(data)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_no_header_harms_the_receiver_or_another_sender(
    transport: str, tmp_path: Path
) -> None:
    refused: list[str] = []
    hubs = {
        name: TransportHub(
            name, TransportSettings((transport,), runtime_dir=tmp_path / name), refused.append
        )
        for name in ("receiver", "good", "liar")
    }
    heard: dict[str, int] = {"good": 0, "liar": 0, "refused": 0}

    def take(frame: ReceivedFrame) -> None:
        try:
            read_header(frame)
            heard[frame.sender.name] += 1
        except InvalidMessage:
            heard["refused"] += 1
        finally:
            frame.release()

    for hub in hubs.values():
        await hub.start(take)
    peer = common_pb2.Peer(peer_id="receiver", incarnation=1)
    for each in hubs["receiver"].addresses:
        peer.addresses.add(transport=each.transport, address=each.address, host_id=each.host_id)
    for name in ("good", "liar"):
        hubs[name].update_directory([peer])

    async def push(name: str, header: bytes) -> None:
        link = await hubs[name].link_to("receiver", 10)
        await link.push(await link.export(32, 5), header, 5)

    async def lie(header: bytes) -> None:
        link = await hubs["liar"].link_to("receiver", 10)
        before = heard["liar"] + heard["refused"]
        await link.push(await link.export(32, 5), header, 5)
        async with asyncio.timeout(20):
            while heard["liar"] + heard["refused"] == before and not link.closed:
                await asyncio.sleep(0.001)

    chance = random.Random(17)
    try:
        for number in range(150):
            with contextlib.suppress(CatenaryError):  # closed for the frame before
                await lie(mutated(chance))
            if number % 10 == 0:
                await push("good", GOOD.SerializeToString())
        async with asyncio.timeout(20):
            while heard["good"] < 15:
                await asyncio.sleep(0.01)
        assert heard["refused"] > 20
        assert refused.count("invalid_header") == heard["refused"]
    finally:
        for hub in hubs.values():
            await hub.close()
