"""Targets: what processes of a cluster send each other, and HTTP/2 with gRPC on it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import grpc
from google.protobuf import wrappers_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hpack import Decoder, Encoder, HPACKError

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_protos.catenary.v1.frame_pb2 import FrameHeader
from catenary_services.control.arrival_budget import ArrivalBudget
from catenary_services.control.control_stream import ControlStream
from catenary_services.domain.tensors import DTYPE_OF
from catenary_services.errors import (
    CatenaryError,
    InternalError,
    InvalidInput,
    InvalidMessage,
    PayloadTooLarge,
)
from catenary_services.grpc.grpc_kit import create_server
from catenary_services.grpc.server.compression import inflated
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.http2 import frames as http2_frames
from catenary_services.http2.connection import ServerConnection
from catenary_services.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    PADDED,
    ConnectionViolation,
    frame,
    settings_frame,
    window_frame,
)
from catenary_services.http2.header_blocks import HeaderDecoder, Headers
from catenary_services.http2.limits import BLOCK_BYTES, ConnectionLimits
from catenary_services.http2.protocol import ConnectionProtocol
from catenary_services.http2.stream import ServerStream
from catenary_services.rules import parsed
from catenary_services.rules.vocabulary import FLOATS, TEXTS, is_nested
from catenary_services.security.tls import ServerSecurity
from catenary_services.transport.bytes_tensors import decode_bytes
from catenary_services.transport.frames import (
    MessageKind,
    MessagePrefix,
    decode_prefix,
    encode_prefix,
    tensor_views,
)
from catenary_services.transport.memory import MemoryPool, MemoryShare, private_segment
from catenary_services.transport.tcp.tcp_stream import TcpStream
from hostile.any_message import message_types
from parser_fuzzing.scripted import ScriptedTransport, fed, in_loop, pieces, settle
from parser_fuzzing.target import BrokenPromise, FuzzTarget
from shared_helpers.raw_http2 import GREETING, Turns, call_headers, data, opening, prefixed

_SHORT = struct.Struct("<BHH")

# ---- messages between processes ----


def sample(descriptor: Descriptor, depth: int = 3) -> Message:
    """Returns a message of a type in which every field has a plain value."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if is_nested(field):
            if depth and field.message_type is not None:
                inner = sample(field.message_type, depth - 1)
                owner: Any = getattr(message, field.name)
                owner.add().CopyFrom(inner) if field.is_repeated else owner.CopyFrom(inner)
            continue
        value: Any = 2 if field.name.startswith("last") else 1
        if field.type == FieldDescriptor.TYPE_BYTES:
            value = b"a"
        elif field.type in TEXTS:
            value = "agent-0"
        elif field.type in FLOATS:
            value = 1.5
        elif field.type == FieldDescriptor.TYPE_BOOL:
            value = True
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


@cache
def _types() -> list[Descriptor]:
    return sorted(message_types(), key=lambda each: each.full_name)


def _read_message(data: bytes) -> object:
    kinds = _types()
    if len(data) < 2:
        return None
    kind = kinds[int.from_bytes(data[:2], "little") % len(kinds)]
    return parsed(GetMessageClass(kind), data[2:])


def _messages() -> Iterator[bytes]:
    for at, kind in enumerate(_types()):
        yield at.to_bytes(2, "little") + sample(kind).SerializeToString()


# ---- frames ----


def _stream_of(data: bytes) -> bytes:
    """Returns messages with right checksums, which nobody guesses: kind, argument, length, bytes.

    A length beyond the end stays as it is, for a message that is never finished.
    """
    out, at = data[:1], 1
    while at + _SHORT.size <= len(data):
        kind, argument, size = _SHORT.unpack_from(data, at)
        at += _SHORT.size
        body = data[at : at + size]
        at += size
        if not kind % 16:
            out += body  # whatever it is
            continue
        head = min(argument, size)
        known = MessageKind((kind % 16 - 1) % len(MessageKind) + 1)
        prefix = MessagePrefix(known, head, size - head, argument if kind & 16 else 0)
        out += encode_prefix(prefix) + body
    return out


def _written(kind: int, header: bytes, payload: bytes = b"") -> bytes:
    return _SHORT.pack(kind, len(header), len(header) + len(payload)) + header + payload


def _tensors_header(count: int) -> FrameHeader:
    made: Any = sample(FrameHeader.DESCRIPTOR, 2)
    for field, value in made.ListFields():
        if is_nested(field) and field.is_repeated and field.message_type.name == "TensorHeader":
            del value[:]
            for at in range(count):
                value.add(name=f"t{at}", datatype="FP32", shape=[1, 4], offset=64 * at, nbytes=16)
    return made  # type: ignore[no-any-return]


def _read_frame(header: bytes, payload: memoryview) -> None:
    """Does with a frame what every receiver does: rules, then tensors."""
    message: Any = parsed(FrameHeader, header)
    for field, value in message.ListFields():
        if is_nested(field) and field.is_repeated and field.message_type.name == "TensorHeader":
            views = tensor_views(value, payload)
            for tensor in value:
                if tensor.datatype == "BYTES":
                    decode_bytes(bytes(views[tensor.name]), tensor.shape)
                elif views[tensor.name].dtype != DTYPE_OF[tensor.datatype]:
                    raise BrokenPromise("a view is of another type")


def _take(protocol: asyncio.BufferedProtocol) -> Any:
    def take(piece: bytes) -> None:
        while piece:
            room = protocol.get_buffer(-1)
            if not len(room):
                raise BrokenPromise("there is no room to read into")
            part, piece = piece[: len(room)], piece[len(room) :]
            room[: len(part)] = part
            protocol.buffer_updated(len(part))

    return take


def _read_frames(data: bytes) -> None:
    if len(data) >= 32:
        decode_prefix_or_not(data)
    transport = ScriptedTransport()
    trouble: list[Exception] = []

    def on_frame(prefix: MessagePrefix, header: bytes, payload: memoryview, release: Any) -> None:
        if prefix.kind is MessageKind.HELLO:
            stream.trust()
            return
        try:
            _read_frame(header, payload)
        except (InvalidInput, InvalidMessage):
            pass  # an agent would drop it
        except Exception as error:
            trouble.append(error)
        finally:
            release()

    def make() -> TcpStream:
        pool = MemoryPool(1 << 20, private_segment)
        made = TcpStream(
            1 << 18,
            on_frame,
            lambda _: None,
            secure=False,
            make_share=lambda: MemoryShare(pool),
        )
        made.connection_made(transport)
        return made

    stream = in_loop(make)
    try:
        fed(transport, _stream_of(data), _take(stream))
        if trouble:
            raise trouble[0]
    finally:
        in_loop(lambda: stream.connection_lost(None))


def decode_prefix_or_not(data: bytes) -> None:
    """Reads a prefix, which for any bytes is one or is refused."""
    with contextlib.suppress(InvalidInput):
        decode_prefix(data, 1 << 20)


def _frames() -> Iterator[bytes]:
    hello = _written(1, b"agent-0")
    for count in (0, 1, 3):
        header = _tensors_header(count).SerializeToString()
        yield b"\3" + hello + _written(3, header, bytes(64 * count))
        short = FrameHeader()
        yield b"\2" + hello + _written(3, short.SerializeToString(), b"")
    yield b"\1" + hello + hello
    yield b"\0" + encode_prefix(MessagePrefix(MessageKind.HELLO, 3)) + b"abc"


class _Packs:
    """Takes packs as a scheduler does, of agents or gateways."""

    def __init__(self, kind: type[Message]) -> None:
        self._kind = kind
        self.stream = ControlStream(self, ArrivalBudget(1 << 20))

    def received(self, kind: MessageKind, data: bytes) -> None:
        if kind is MessageKind.HELLO:
            parsed(scheduler_pb2.ControlHello, data)
            self.stream.trust()
        else:
            parsed(self._kind, data)

    def resumed(self) -> None: ...

    def ended(self, error: CatenaryError) -> None: ...


def _read_control(data: bytes) -> None:
    if not data:
        return
    transport = ScriptedTransport()
    kinds = (scheduler_pb2.AgentMessages, scheduler_pb2.GatewayMessages)
    handler = in_loop(lambda: _Packs(kinds[data[0] >> 7]))
    stream, close = handler.stream, handler.stream.close

    def watched(error: CatenaryError) -> None:
        if isinstance(error, InternalError):
            raise BrokenPromise(error.message) from error.__cause__
        close(error)

    stream.close = watched
    in_loop(lambda: stream.connection_made(transport))
    fed(transport, _stream_of(data), _take(stream))
    in_loop(lambda: stream.connection_lost(None))


def _control() -> Iterator[bytes]:
    hello = sample(scheduler_pb2.ControlHello.DESCRIPTOR).SerializeToString()
    begin = _SHORT.pack(1, 0, len(hello)) + hello
    for first, kind in ((3, scheduler_pb2.AgentMessages), (131, scheduler_pb2.GatewayMessages)):
        inner: Any = sample(kind.DESCRIPTOR, 0)
        item = kind.DESCRIPTOR.fields[0].message_type
        assert item is not None
        for field in item.fields:
            pack: Any = kind()
            one = getattr(pack, kind.DESCRIPTOR.fields[0].name).add()
            if field.message_type is not None and not field.is_repeated:
                getattr(one, field.name).CopyFrom(sample(field.message_type, 2))
            body = pack.SerializeToString()
            yield bytes((first,)) + begin + _SHORT.pack(9, 0, len(body)) + body
        yield bytes((first,)) + begin + _SHORT.pack(10, 0, 0) + inner.SerializeToString()


# ---- HTTP/2 ----


class _Listener:
    """Notes what is heard on the streams of a connection."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def parse(self, headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
        return tuple(headers)

    def opened(self, stream: ServerStream, head: Any, is_whole: bool) -> None:
        self.heard.append((stream.number, head, is_whole))
        number, heard = stream.number, self.heard

        class Receiver:
            def on_data(self, data: bytes, begin: int, end: int, is_last: bool) -> None:
                heard.append((number, bytes(data[begin:end]), is_last))

            def on_reset(self) -> None:
                heard.append((number, "reset"))

            def on_drained(self) -> None: ...

        stream.receiver = Receiver()


def _heard(parts: Iterator[bytes] | list[bytes]) -> tuple[list[Any], int | None, int, int]:
    """Returns what was heard, the error, and how many bytes came and went."""
    listener = _Listener()
    connection: ServerConnection[Any] = ServerConnection(
        listener, ConnectionLimits(), Turns().budget, lambda: None, 0.0
    )
    came = went = 0
    try:
        for part in parts:
            came += len(part)
            connection.receive(part, 0.0)
            while connection.has_more:
                connection.receive(b"", 0.0)
            went += sum(map(len, connection.sending.take()))
    except ConnectionViolation as violation:
        return listener.heard, violation.code, came, went
    return listener.heard, None, came, went


def _read_http2(data: bytes) -> None:
    """Compares what is heard of bytes as a whole and in pieces, and bounds what is answered."""
    rest = data[1:]
    whole, error, _, _ = _heard([rest])
    cut, cut_error, came, went = _heard(pieces(data))
    if whole != cut or error != cut_error:
        raise BrokenPromise(f"cut into pieces it is {cut_error}, else {error}")
    if went > 1_000 + 4 * came:
        raise BrokenPromise(f"{went} bytes answer {came}")


def _http2() -> Iterator[bytes]:
    call = opening(1, "/t.T/Say")
    block = call_headers("/t.T/Say", ("x-y", "z" * 40))
    packed = Encoder().encode([(b":method", b"POST"), (b":path", b"/t.T/Say"), (b"a", b"b" * 30)])
    many = [
        [call, data(1, prefixed(b"x"), ends=True)],
        [
            frame(http2_frames.HEADERS, 0, 1, block[:20]),
            frame(http2_frames.CONTINUATION, END_HEADERS, 1, block[20:]),
        ],
        [
            frame(http2_frames.HEADERS, END_HEADERS | END_STREAM, 1, packed),
            frame(http2_frames.HEADERS, END_HEADERS | HAS_PRIORITY, 3, bytes(5) + packed),
        ],
        [call, frame(0, PADDED | END_STREAM, 1, b"\x02abc\0\0")],
        [call, frame(http2_frames.RST_STREAM, 0, 1, bytes(4)), call],
        [call, window_frame(0, 9), window_frame(1, 9), frame(http2_frames.PING, 0, 0, bytes(8))],
        [settings_frame({1: 0, 3: 1, 4: 9, 5: 20_000, 6: 9, 2: 0}), frame(4, 1, 0)],
        [frame(http2_frames.PRIORITY, 0, 3, bytes(5)), frame(http2_frames.GOAWAY, 0, 0, bytes(8))],
        [frame(5, 0, 1, bytes(4)), frame(99, 0, 0, b"?")],
    ]
    for at, each in enumerate(many):
        yield bytes((at,)) + GREETING + b"".join(each)


def _read_hpack(data: bytes) -> None:
    """Decodes blocks, each behind its length, and compares with the library's decoder."""
    ours: HeaderDecoder[tuple[tuple[bytes, bytes], ...]] = HeaderDecoder(tuple, BLOCK_BYTES)
    theirs = Decoder(max_header_list_size=BLOCK_BYTES)
    theirs.max_allowed_table_size = 4_096
    at = 0
    while at < len(data):
        block = data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]
        found = ours.decode(block)
        try:
            expected = tuple((bytes(n), bytes(v)) for n, v in theirs.decode(block, raw=True))
        except HPACKError as error:
            raise BrokenPromise(f"the library refuses it: {error!r}") from None
        if tuple(found) != expected:
            raise BrokenPromise(f"{found!r} is not {expected!r}")


def _hpack() -> Iterator[bytes]:
    encoder = Encoder()
    fields = [(b":path", b"/a"), (b"authorization", b"Bearer x"), (b"x-y", b"z" * 30)]
    for huffman in (True, False):
        blocks = [encoder.encode(fields, huffman=huffman) for _ in range(2)]
        yield b"".join(bytes((len(block),)) + block for block in blocks)
    yield b"\x03\x3f\xe1\x1f"
    yield bytes((len(call_headers("/a")),)) + call_headers("/a")


# ---- gRPC ----


class _Service(grpc.GenericRpcHandler):
    """Echoes numbers, one or many."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        kind = wrappers_pb2.BytesValue
        if details.method == "/t.T/Say":
            return grpc.unary_unary_rpc_method_handler(
                self.say, kind.FromString, kind.SerializeToString
            )
        if details.method == "/t.T/Talk":
            return grpc.stream_stream_rpc_method_handler(
                self.talk, kind.FromString, kind.SerializeToString
            )
        return None

    async def say(self, request: Any, _: Any) -> Any:
        return request

    async def talk(self, requests: Any, _: Any) -> Any:
        async for request in requests:
            yield request


@cache
def _server() -> GrpcServer:
    def make() -> GrpcServer:
        server = create_server(ServerSecurity(insecure=True), max_message_bytes=1 << 16)
        server.add_generic_rpc_handlers((_Service(),))
        return server

    made: GrpcServer = in_loop(make)
    return made


def _read_grpc(data: bytes) -> None:
    """Serves calls on a connection, and checks that nothing is left of them."""
    server, transport = _server(), ScriptedTransport()
    protocol: Any = in_loop(lambda: ConnectionProtocol(server, server.limits, lambda: None))
    in_loop(lambda: protocol.connection_made(transport))
    receive, trouble = protocol.connection.receive, []

    def watched(piece: bytes, now_s: float) -> None:
        try:
            receive(piece, now_s)
        except ConnectionViolation:
            raise
        except Exception as error:  # the protocol would only log it
            trouble.append(error)
            raise

    protocol.connection.receive = watched
    try:
        fed(transport, data, protocol.data_received)
    finally:
        in_loop(lambda: protocol.connection_lost(None))
        settle()
    if trouble:
        raise trouble[0]
    if server.calls or server.connections or server.budget.held:
        left = (server.calls, server.connections, server.budget.held)
        server.calls = 0
        raise BrokenPromise(f"calls, connections and bytes that are left: {left}")


def _grpc() -> Iterator[bytes]:
    one = wrappers_pb2.BytesValue(value=b"abc").SerializeToString()
    for first, path in enumerate(("/t.T/Say", "/t.T/Talk", "/t.T/No")):
        call = opening(1, path, ("grpc-timeout", "1S"), ("a-bin", "YWI="))
        yield bytes((first,)) + GREETING + call + data(1, prefixed(one), ends=True)
        long = opening(3, path, ("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip"))
        yield bytes((first,)) + GREETING + long + data(3, b"\1" + prefixed(one)[1:])
        cut = prefixed(one)
        yield bytes((first,)) + GREETING + call + data(1, cut[:3]) + data(1, cut[3:], ends=True)
        reset = frame(http2_frames.RST_STREAM, 0, 1, bytes(4))
        yield bytes((first,)) + GREETING + call + data(1, cut[:6]) + reset


def _read_inflated(data: bytes) -> object:
    return inflated(
        data[1:], ("gzip", "deflate", "identity", "br")[data[0] & 3 if data else 0], 4096
    )


def _inflated() -> Iterator[bytes]:
    import gzip
    import zlib

    for text in (b"", b"abc" * 9, bytes(100_000)):
        yield b"\0" + gzip.compress(text)
        yield b"\1" + zlib.compress(text)


_NONE: tuple[type[Exception], ...] = ()
TARGETS = (
    FuzzTarget("wire/messages", _read_message, (InvalidMessage,), _messages),
    FuzzTarget("wire/frames", _read_frames, _NONE, _frames),
    FuzzTarget("wire/control", _read_control, _NONE, _control),
    FuzzTarget("wire/http2", _read_http2, _NONE, _http2, words=(GREETING,)),
    FuzzTarget("wire/hpack", _read_hpack, (ConnectionViolation,), _hpack, 1024),
    FuzzTarget(
        "wire/grpc",
        _read_grpc,
        _NONE,
        _grpc,
        words=(GREETING, b"/t.T/Say", b"/t.T/Talk", b"grpc-timeout", b"grpc-encoding", b"-bin"),
    ),
    FuzzTarget("wire/compressed", _read_inflated, (InvalidInput, PayloadTooLarge), _inflated),
)
