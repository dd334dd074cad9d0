"""Peers that say hello as ours do, and then whatever their seed makes them say."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.errors import CatenaryError
from catenary_services.security.identity import Role
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from shared_helpers.control_streams import ScriptedEnd, talking

LIAR = "agent-99"
_INTEGERS = (0, 1, 2**31 - 1, 2**53 + 1, 2**63, 2**64 - 1)
_SIGNED = (0, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
_NUMBERS = (0.0, -1.0, 1e308, float("inf"), float("nan"))
_TEXTS = ("", "agent-0", "tiny", "1", "\x00", "é" * 500, "../../etc", "efficientnet-lite0")
_DEEPEST = 4
_BEAT_S = 0.2


class Nonsense:
    """Fills messages with values that nobody means."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def fill(self, message: Message, field: Any, depth: int = 0) -> None:
        """Gives one field of a message something, and most fields below it."""
        repeated = (
            field.is_repeated
            if hasattr(field, "is_repeated")
            else field.label == Field.LABEL_REPEATED
        )
        if field.type == Field.TYPE_MESSAGE:
            self._fill_message(message, field, repeated, depth)
        elif repeated:
            values = [self._value(field) for _ in range(self.draw.randrange(4))]
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, self._value(field))

    def _fill_message(self, message: Message, field: Any, repeated: bool, depth: int) -> None:
        if field.message_type.GetOptions().map_entry:
            return
        inside = getattr(message, field.name)
        if repeated:
            inside = inside.add()
        else:
            inside.SetInParent()
        for each in inside.DESCRIPTOR.fields:
            if depth < _DEEPEST and self.draw.random() < 0.7:
                self.fill(inside, each, depth + 1)

    def _value(self, field: Any) -> Any:
        draw, kind = self.draw, field.cpp_type
        if field.type == Field.TYPE_BYTES:
            return draw.randbytes(draw.randrange(64))
        if kind == Field.CPPTYPE_STRING:
            return draw.choice(_TEXTS)
        if kind == Field.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
            return draw.choice(_NUMBERS)
        if kind == Field.CPPTYPE_ENUM:
            return draw.choice([0, 1, 2, 17])
        if kind in (Field.CPPTYPE_INT64, Field.CPPTYPE_INT32):
            most = 31 if kind == Field.CPPTYPE_INT32 else 63
            return draw.choice([each for each in _SIGNED if -(2**most) <= each < 2**most])
        most = 32 if kind == Field.CPPTYPE_UINT32 else 64
        return draw.choice([each for each in _INTEGERS if each < 2**most])


class LyingAgent:
    """Lies to every scheduler until it is told to stop; comes back when it is thrown out."""

    def __init__(self, draw: random.Random, addresses: list[str]) -> None:
        self._nonsense = Nonsense(draw)
        self._addresses = addresses
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._lie_to(each)) for each in self._addresses]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _lie_to(self, address: str) -> None:
        while True:
            with suppress(CatenaryError):
                async with talking(address, Role.AGENT) as end:
                    await self._lie(end)
            await asyncio.sleep(0.3)

    async def _lie(self, end: ScriptedEnd) -> None:
        await end.write(scheduler_pb2.AgentMessages(messages=[self._hello()]))
        while not end.stream.closed:
            await asyncio.sleep(_BEAT_S)
            lies = [self._one_lie() for _ in range(5)]
            await end.write(scheduler_pb2.AgentMessages(messages=lies))

    def _hello(self) -> scheduler_pb2.AgentMessage:
        draw = self._nonsense.draw
        hello = scheduler_pb2.AgentHello(
            agent_id=LIAR,
            incarnation=draw.getrandbits(40),
            device="cpu",
            device_class="cpu",
            server_id=LIAR,
            memory_bytes=10**10,
            link_bytes_per_second=10**9,
        )
        fields = hello.DESCRIPTOR.fields_by_name
        for name in draw.sample(sorted(set(fields) - {"agent_id", "peer"}), 4):
            self._nonsense.fill(hello, fields[name])
        return scheduler_pb2.AgentMessage(hello=hello)

    def _one_lie(self) -> scheduler_pb2.AgentMessage:
        message = scheduler_pb2.AgentMessage()
        kinds = [
            each
            for each in message.DESCRIPTOR.oneofs_by_name["kind"].fields
            if each.name != "hello"
        ]
        self._nonsense.fill(message, self._nonsense.draw.choice(kinds))
        return message


class LyingPeer:
    """Sends frames of nonsense to one process until it is told to stop."""

    def __init__(self, draw: random.Random, host: str, port: int) -> None:
        self._nonsense = Nonsense(draw)
        self._host, self._port = host, port
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._lie())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _lie(self) -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    await self._frames(writer)
                finally:
                    writer.close()
            await asyncio.sleep(_BEAT_S)

    async def _frames(self, writer: asyncio.StreamWriter) -> None:
        name = LIAR.encode()
        writer.write(encode_prefix(MessagePrefix(MessageKind.HELLO, len(name))) + name)
        while not writer.is_closing():
            writer.write(self._frame())
            await writer.drain()
            await asyncio.sleep(_BEAT_S / 4)

    def _frame(self) -> bytes:
        draw = self._nonsense.draw
        payload = draw.randbytes(draw.randrange(4096))
        if draw.random() < 0.1:
            return payload  # not even a prefix
        header = draw.randbytes(draw.randrange(200))
        if draw.random() < 0.8:
            message = frame_pb2.FrameHeader()
            for field in message.DESCRIPTOR.fields:
                if draw.random() < 0.7:
                    self._nonsense.fill(message, field)
            header = message.SerializeToString()
        return (
            encode_prefix(MessagePrefix(MessageKind.FRAME, len(header), len(payload)))
            + header
            + payload
        )
