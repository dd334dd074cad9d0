"""A peer that says hello as an agent does, and then whatever its seed makes it say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc

LIAR = "agent-99"
_INTEGERS = (0, 1, 2**31 - 1, 2**53 + 1, 2**63, 2**64 - 1)
_SIGNED = (0, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
_NUMBERS = (0.0, -1.0, 1e308, float("inf"), float("nan"))
_BEAT_S = 0.2


class Liar:
    """Lies to every scheduler until it is told to stop; comes back when it is thrown out."""

    def __init__(self, draw: random.Random, addresses: list[str]) -> None:
        self._draw = draw
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
            async with grpc.aio.insecure_channel(address) as channel:
                stub = scheduler_pb2_grpc.SchedulerStub(channel)
                call = stub.AgentSession(self._lies())
                with suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
            await asyncio.sleep(0.3)

    async def _lies(self) -> AsyncIterator[Any]:
        yield scheduler_pb2.AgentMessages(messages=[self._hello()])
        while True:
            await asyncio.sleep(_BEAT_S)
            yield scheduler_pb2.AgentMessages(messages=[self._lie() for _ in range(5)])

    def _hello(self) -> scheduler_pb2.AgentMessage:
        hello = scheduler_pb2.AgentHello(agent_id=LIAR, incarnation=self._draw.getrandbits(40),
                                         device="cpu", device_class="cpu", server_id=LIAR)  # fmt: skip
        hello.memory_bytes, hello.link_bytes_per_second = 10**10, 10**9
        for name in self._draw.sample(sorted(hello.DESCRIPTOR.fields_by_name), 4):
            if name not in ("agent_id", "peer"):
                self._fill(hello, hello.DESCRIPTOR.fields_by_name[name], 0)
        return scheduler_pb2.AgentMessage(hello=hello)

    def _lie(self) -> scheduler_pb2.AgentMessage:
        message = scheduler_pb2.AgentMessage()
        kinds = [
            each
            for each in message.DESCRIPTOR.oneofs_by_name["kind"].fields
            if each.name != "hello"
        ]
        self._fill(message, self._draw.choice(kinds), 0)
        return message

    def _fill(self, message: Message, field: Any, depth: int) -> None:
        repeated = (
            field.is_repeated
            if hasattr(field, "is_repeated")
            else field.label == Field.LABEL_REPEATED
        )
        if field.type == Field.TYPE_MESSAGE:
            self._fill_message(message, field, repeated, depth)
        elif repeated:
            getattr(message, field.name).extend(
                self._value(field) for _ in range(self._draw.randrange(4))
            )
        else:
            setattr(message, field.name, self._value(field))

    def _fill_message(self, message: Message, field: Any, repeated: bool, depth: int) -> None:
        if field.message_type.GetOptions().map_entry:
            return
        inside = getattr(message, field.name)
        inside = inside.add() if repeated else inside
        inside.SetInParent() if not repeated else None
        for each in inside.DESCRIPTOR.fields:
            if depth < 4 and self._draw.random() < 0.7:
                self._fill(inside, each, depth + 1)

    def _value(self, field: Any) -> Any:
        draw = self._draw
        kind = field.cpp_type
        if kind == Field.CPPTYPE_STRING:
            if field.type == Field.TYPE_BYTES:
                return draw.randbytes(draw.randrange(64))
            return draw.choice(
                ["", "agent-0", "tiny", "1", "\x00", "é" * 500, "../../etc", "efficientnet-lite0"]
            )
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
