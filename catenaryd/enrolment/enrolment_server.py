"""The enrolment service: TLS connections of strangers, bounded in number, time and size.

A connection may show a certificate; without one it can only learn what is public and present a
token. Nothing is read of a message before its length is known, and nothing is decided before it
keeps its rules. Whoever is refused too often waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections import Counter, OrderedDict
from functools import partial
from typing import Protocol

from cryptography import x509

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.addresses import host_port, is_unspecified
from catenary_services.errors import CatenaryError, InvalidMessage, Unavailable
from catenary_services.log import get_logger
from catenary_services.security.identity import socket_identity
from catenary_services.security.key_limits import RateLimit
from catenary_services.security.rotation import WatchedFiles
from catenary_services.security.token_bucket import TokenBucket
from catenary_services.security.x509 import key_digest
from catenaryd.enrolment.enrolment import EnrolmentCaller
from catenaryd.enrolment.enrolment_streams import (
    LARGEST_REQUEST_BYTES,
    read_message,
    write_message,
)

log = get_logger(__name__)

MOST_CONNECTIONS = 64
MOST_CONNECTIONS_OF_ONE = 8
"""Connections from one address, or from one IPv6 network of 64 bits."""
MOST_EXCHANGES = 64
MOST_MEASURED_BYTES = 128 << 20
"""Bytes of `MeasureLink` on one connection."""
HANDSHAKE_S = 5.0
REQUEST_S = 10.0
"""Seconds that a request may take to arrive, and its answer to be taken."""
CONNECTION_S = 120.0
REFUSALS = RateLimit(per_s=0.2, burst=5.0)
"""Refused enrolments of one source: five at once, then one in five seconds."""
_MOST_SOURCES = 4_096


class Answerer(Protocol):
    """Answers requests that kept their rules."""

    async def answer(
        self, request: pb.EnrolmentRequest, caller: EnrolmentCaller
    ) -> pb.EnrolmentAnswer:
        """Returns the answer.

        Raises:
            CatenaryError: The request is refused; with Unavailable only for now.
        """
        ...


class EnrolmentServer:
    """Listens for machines that join; serves each connection by an `Answerer`."""

    def __init__(self, answerer: Answerer, files: WatchedFiles) -> None:
        """`files` are the certificate of the service, its key, and the trusted authorities."""
        self._answerer = answerer
        self._files = files
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._sources: Counter[str] = Counter()
        self._refused = RefusalLimits()

    async def start(self, host: str, port: int) -> int:
        """Listens on all addresses of `host` and returns the port, a free one if `port` is 0.

        Raises:
            Unavailable: The port is in use, or the address is not this machine's.
        """
        loop = asyncio.get_running_loop()
        try:
            for family, name in await _addresses(host):
                listening = socket.create_server(
                    (name, port),
                    family=family,
                    backlog=MOST_CONNECTIONS,
                    dualstack_ipv6=family == socket.AF_INET6 and is_unspecified(name),
                )
                listening.setblocking(False)
                self._listening.append(listening)
                port = int(listening.getsockname()[1])
        except OSError as error:
            await self.close()
            raise Unavailable(
                f"cannot listen on {host_port(host, port)} for machines that join:"
                f" {error.strerror or error}; is another cluster running here (--join-port)?"
            ) from error
        self._accepting = [loop.create_task(self._accept(each)) for each in self._listening]
        return port

    async def close(self) -> None:
        """Ends all connections; idempotent."""
        tasks = [*self._accepting, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._listening:
            listening.close()
        self._listening.clear()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listening)
            except OSError as error:  # out of descriptors: those there are come free
                log.warning("enrolment_not_accepted", error=str(error))
                await asyncio.sleep(0.1)
                continue
            address = plain_address(str(peer[0]))
            source = source_of(address)
            is_full = len(self._serving) >= MOST_CONNECTIONS
            if is_full or self._sources[source] >= MOST_CONNECTIONS_OF_ONE:
                connection.close()
                continue
            self._sources[source] += 1
            task = loop.create_task(self._serve(connection, address))
            self._serving.add(task)
            task.add_done_callback(partial(self._ended, source))

    def _ended(self, source: str, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._sources[source] -= 1
        if not self._sources[source]:
            del self._sources[source]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("enrolment_connection_failed", exc_info=error)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 16, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(CONNECTION_S):
                made, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._files.context(server=True, needs_client=False),
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=HANDSHAKE_S,
                )
                transport = made
                self._files.register(transport)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                await self._exchange(reader, writer, _caller(transport, address))
        except (OSError, TimeoutError, ssl.SSLError, CatenaryError) as error:
            # Probes connect and say nothing.
            tell = log.debug if transport is None else log.info
            tell("enrolment_connection_ended", peer=address, error=str(error))
        finally:
            if transport is not None:
                transport.close()  # what is queued still goes, for a few seconds
            else:
                connection.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: EnrolmentCaller
    ) -> None:
        measured = 0
        for _ in range(MOST_EXCHANGES):
            async with asyncio.timeout(REQUEST_S):
                try:
                    request = await read_message(reader, pb.EnrolmentRequest, LARGEST_REQUEST_BYTES)
                except InvalidMessage as error:
                    await _refuse(writer, error.message)
                    return
            if request is None:
                return
            measured += request.measure.bytes
            if measured > MOST_MEASURED_BYTES:
                await _refuse(writer, "more bytes than are given for one measurement")
                return
            answer = await self._answer(request, caller)
            write_message(writer, answer)
            async with asyncio.timeout(REQUEST_S):
                await writer.drain()

    async def _answer(
        self, request: pb.EnrolmentRequest, caller: EnrolmentCaller
    ) -> pb.EnrolmentAnswer:
        kind, source = request.WhichOneof("kind"), source_of(caller.address)
        is_guess = kind in ("enrol", "process")
        if is_guess and (wait_s := self._refused.wait_s(source)):
            why = f"too many refusals from {source}; try again in {wait_s:.0f} s"
            return pb.EnrolmentAnswer(refused=pb.EnrolmentRefused(why=why, later=True))
        try:
            return await self._answerer.answer(request, caller)
        except CatenaryError as error:
            log.warning("enrolment_refused", asked=kind, peer=caller.address, why=error.message)
            later = isinstance(error, Unavailable)
            if is_guess and not later:
                self._refused.count(source)
            return pb.EnrolmentAnswer(refused=pb.EnrolmentRefused(why=error.message, later=later))


class RefusalLimits:
    """Counts of recent refusals by source; the longest unheard of are forgotten first."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def wait_s(self, source: str) -> float:
        """Returns the seconds that a source has to wait; 0 for none."""
        bucket = self._buckets.get(source)
        return 0.0 if bucket is None else bucket.wait_ns(1.0, time.monotonic_ns()) / 1e9

    def count(self, source: str) -> None:
        """Counts one refusal of a source."""
        now = time.monotonic_ns()
        bucket = self._buckets.setdefault(source, TokenBucket(REFUSALS, now))
        bucket.charge(1.0, now)
        self._buckets.move_to_end(source)
        while len(self._buckets) > _MOST_SOURCES:
            self._buckets.popitem(last=False)


def plain_address(address: str) -> str:
    """Returns the IPv4 address in an IPv6 one that stands for it, else the address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def source_of(address: str) -> str:
    """Returns who is counted for an address: itself, or its IPv6 network of 64 bits."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(ipaddress.ip_network((found, 64), strict=False))


def _caller(transport: asyncio.BaseTransport, address: str) -> EnrolmentCaller:
    connection = transport.get_extra_info("ssl_object")
    shown: bytes | None = connection.getpeercert(binary_form=True)
    if not shown:
        return EnrolmentCaller(address)
    key = key_digest(x509.load_der_x509_certificate(shown).public_key()).hex()
    return EnrolmentCaller(address, socket_identity(connection), key)


async def _refuse(writer: asyncio.StreamWriter, why: str) -> None:
    write_message(writer, pb.EnrolmentAnswer(refused=pb.EnrolmentRefused(why=why)))
    async with asyncio.timeout(REQUEST_S):
        await writer.drain()


async def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Returns the addresses of a host name, or the one that `host` is; "::" includes IPv4."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))
