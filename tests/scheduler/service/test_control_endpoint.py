"""The control endpoint refuses what is no control stream, holds little for strangers, and says why."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import pytest

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.rpc import service
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.control.connecting import connected
from catenary_services.errors import InvalidInput, InvalidMessage, Overloaded, Unavailable
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from scheduler_harness import Crowd, FakeGateway, scheduler
from shared_helpers.control_streams import ScriptedEnd, talking
from shared_helpers.waiting import until

Configured = Callable[..., SchedulerSettings]
_OPEN = ClientSecurity(insecure=True)
_END = encode_prefix(MessagePrefix(MessageKind.END))[:6]
"""What the prefix of a message of the kind END begins with."""


def framed(kind: MessageKind, data: bytes) -> bytes:
    return encode_prefix(MessagePrefix(kind, payload_bytes=len(data))) + data


def of_version(version: int) -> bytes:
    body = bytearray(encode_prefix(MessagePrefix(MessageKind.HELLO))[:-4])
    body[4] = version
    return bytes(body) + zlib.crc32(body).to_bytes(4, "little")


async def answer(process: SchedulerProcess, said: bytes) -> bytes:
    """What somebody is told, until the scheduler hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", process.control_port)
    try:
        writer.write(said)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


HELLO = scheduler_pb2.ControlHello(role=scheduler_pb2.CONTROL_ROLE_AGENT)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (of_version(2), b"version 2, this side speaks 1"),
        (b"C" * 64, b"not a Catenary frame"),
        (framed(MessageKind.PACK, b""), b"PACK before HELLO"),
        (framed(MessageKind.HELLO, b"\xff" * 40), b"cannot be read"),
        (framed(MessageKind.HELLO, bytes(2_000)), b"2000 exceeds 1024"),
        (framed(MessageKind.HELLO, b"\x08\x09"), b"opens no control streams"),
        (framed(MessageKind.HELLO, HELLO.SerializeToString()) * 2, b"unexpected HELLO"),
        (
            framed(MessageKind.HELLO, HELLO.SerializeToString()) + framed(MessageKind.PACK, b""),
            b"must be the first message of an agent",
        ),
    ],
)
async def test_whoever_speaks_otherwise_is_told_in_a_sentence(
    configured: Configured, said: bytes, told: bytes
) -> None:
    async with scheduler(configured()) as process:
        heard = await answer(process, said)
        assert heard.startswith(_END)
        assert told in heard


async def test_who_speaks_http_is_told_nothing(configured: Configured) -> None:
    async with scheduler(configured()) as process:
        assert await answer(process, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == b""


async def test_a_standby_refuses_streams_that_come_unasked(configured: Configured) -> None:
    async with scheduler(configured()), scheduler(configured(scheduler_id="standby")) as standby:
        end = ScriptedEnd(scheduler_pb2.SchedulerToAgentMessages)
        await connected(end.stream, "127.0.0.1", standby.control_port, Role.AGENT, _OPEN)
        async with asyncio.timeout(30):
            assert await end.read() is None
        assert isinstance(end.error, Unavailable)
        assert "does not lead" in end.error.message


async def test_a_peer_that_says_no_hello_loses_its_stream(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HELLO_TIMEOUT_S", 0.2)
    async with (
        scheduler(configured()) as process,
        talking(f"127.0.0.1:{process.port}", Role.AGENT) as end,
        asyncio.timeout(30),
    ):
        assert await end.read() is None
        assert isinstance(end.error, InvalidInput)
        assert end.error.details["field"] == "hello"


async def test_there_are_only_so_many_streams(
    configured: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_STREAMS", 2)
    async with scheduler(configured()) as process:
        for number in range(2):
            gateway = await crowd.gateway(process.port, f"gateway-{number}")
            await until(lambda gateway=gateway: gateway.received, "welcomed")
        third = await crowd.gateway(process.port, "gateway-2")
        await until(lambda: third.ended, "refused")
        assert isinstance(third.error, Overloaded)
        await gateway.close()
        await until(lambda: len(process._service._streams) == 1, "it is forgotten")
        fourth = await crowd.gateway(process.port, "gateway-3")
        await until(lambda: fourth.received, "welcomed")


async def test_who_names_nobody_is_accused_by_its_own_word(
    configured: Configured, crowd: Crowd
) -> None:
    """Bytes that are no pack count as a message that cannot be true."""
    async with scheduler(configured()) as process:
        liar: FakeGateway = await crowd.gateway(process.port, "liar")
        await until(lambda: liar.received, "welcomed")
        assert liar.end is not None
        await liar.end.write_bytes(b"\xff" * 100)
        await until(lambda: liar.ended, "thrown out")
        assert isinstance(liar.error, InvalidMessage)
        counted = process._metrics.invalid_messages.labels("gateway")
        assert counted._value.get() == 1


async def test_a_newer_stream_of_an_agent_ends_the_older_one(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        older = await crowd.agent(process.port, "agent-0")
        await until(lambda: older.received, "welcomed")
        newer = await crowd.agent(process.port, "agent-0")
        await until(lambda: newer.received and older.ended, "it took over")
        assert isinstance(older.error, Unavailable)
        assert "took over" in older.error.message
        record = process.leader().cluster.registry["agent-0"]  # type: ignore[index]
        await until(lambda: record.session is not None, "it is known")
        assert not newer.ended


async def test_the_streams_of_a_scheduler_that_stops_end_with_a_reason(
    configured: Configured,
) -> None:
    async with scheduler(configured()) as process:
        hello = scheduler_pb2.GatewayHello(
            gateway_id="gateway-0", incarnation=1, peer=common_pb2.Peer(peer_id="gateway-0")
        )
        async with talking(f"127.0.0.1:{process.port}", Role.GATEWAY) as end:
            message = scheduler_pb2.GatewayMessage(hello=hello)
            await end.write(scheduler_pb2.GatewayMessages(messages=[message]))
            async with asyncio.timeout(30):
                assert await end.read() is not None
                await process.stop()
                while await end.read() is not None:
                    pass
        assert isinstance(end.error, Unavailable)
        assert end.error.message
