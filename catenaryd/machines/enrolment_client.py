"""The joiner's side of enrolment: connections to the host, and the trust they rest on.

The first connection believes nobody: it fetches the authority's certificate, which anybody may see,
and compares its key with the pin of the join line. All later ones verify the host by it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.addresses import host_port
from catenary_services.errors import (
    InvalidInput,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from catenary_services.security.identity import Role, server_name_of
from catenary_services.security.x509 import (
    certificates_in,
    cluster_of,
    is_for_key,
    pem_of,
)
from catenaryd.enrolment.enrolment_streams import (
    LARGEST_ANSWER_BYTES,
    read_message,
    write_message,
)

CONNECT_S = 10.0
ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class HostTrust:
    """The certificates by which a host is recognised, and those it is shown."""

    cluster: str
    authorities: bytes
    """PEM certificates, one of which must have signed the host's."""
    cert_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Returns the context of a connection to the host.

        Raises:
            InvalidInput: A certificate or key cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(cadata=self.authorities.decode("ascii"))
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ValueError) as error:
            raise InvalidInput("certificates", f"cannot be used: {error}") from error
        return context


class EnrolmentConnection:
    """A connection to the host that machines enrol with."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address

    @property
    def local_address(self) -> str:
        """This machine's address on the way to the host."""
        return str(self._writer.get_extra_info("sockname")[0]).partition("%")[0]

    async def ask(self, request: pb.EnrolmentRequest) -> pb.EnrolmentAnswer:
        """Returns the host's answer.

        Raises:
            PermissionDenied: The host refuses; the message is its sentence.
            Unavailable: It refuses for now, or does not answer.
            InvalidMessage: What it answers breaks the rules.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                write_message(self._writer, request)
                await self._writer.drain()
                answer = await read_message(self._reader, pb.EnrolmentAnswer, LARGEST_ANSWER_BYTES)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{self._address} does not answer: {error or 'in time'}") from error
        if answer is None:
            raise Unavailable(f"{self._address} ended the connection without an answer")
        if answer.HasField("refused"):
            kind = Unavailable if answer.refused.later else PermissionDenied
            raise kind(answer.refused.why)
        return answer

    async def close(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()


@asynccontextmanager
async def connected(
    host: str, port: int, trust: HostTrust | None
) -> AsyncIterator[EnrolmentConnection]:
    """Connects to a host for the length of the block.

    Args:
        host: Address or name of the host.
        port: Port of its enrolment service.
        trust: By what the host is recognised; None to believe nobody, for what is public.

    Raises:
        Unavailable: Nobody listens there.
        Unauthenticated: Somebody else listens there than the host of the cluster.
    """
    where = host_port(host, port)
    context, name = _stranger(), ""
    if trust is not None:
        context, name = trust.context(), server_name_of(Role.AUTHORITY, trust.cluster)
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=name, limit=1 << 20
            )
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        raise Unauthenticated(
            f"who listens at {where} is not the cluster of the join line: {why}"
        ) from error
    except (OSError, TimeoutError) as error:
        raise Unavailable(
            f"nothing answers at {where} ({error or 'no answer in time'}): is `catenaryd up --host`"
            " running there, and is the port open?"
        ) from error
    connection = EnrolmentConnection(reader, writer, where)
    try:
        yield connection
    finally:
        await connection.close()


async def discover(host: str, port: int, pin: bytes) -> HostTrust:
    """Returns the trust in a cluster by the pin of its authority's key.

    Raises:
        Unauthenticated: The host knows no authority with that key.
        Unavailable: Nobody answers.
    """
    async with connected(host, port, None) as connection:
        answer = await connection.ask(pb.EnrolmentRequest(discover=pb.DiscoverCluster()))
    try:
        shown = certificates_in("authorities", answer.cluster.authorities.encode())
    except InvalidInput as error:
        raise Unauthenticated(f"{host_port(host, port)} shows no authority") from error
    for authority in shown:
        if is_for_key(authority, pin):
            cluster = cluster_of(authority)
            if cluster is None:
                break
            return HostTrust(cluster, pem_of([authority]))
    raise Unauthenticated(
        f"the authority of the cluster at {host_port(host, port)} is not the one the join line"
        " names (ca=sha256:...): it is another cluster, or somebody in between"
    )


def authorities_in(pem: bytes, cluster: str) -> list[x509.Certificate]:
    """Returns the certificates in a bundle that the host of a cluster sent.

    Raises:
        InvalidInput: It holds none, or one of another cluster.
    """
    found = certificates_in("authorities", pem)
    if any(cluster_of(each) != cluster for each in found):
        raise InvalidInput("authorities", f"are not all of cluster {cluster}")
    return found


@dataclass(frozen=True, slots=True)
class HostInfo:
    """The facts that the host tells of itself, and the distance to it."""

    identity: pb.ClusterIdentity
    round_trip_s: float
    clock_difference_s: float
    """The host's clock minus this machine's, correct to half a round trip."""
    local_address: str


async def look_at(connection: EnrolmentConnection, tries: int = 5) -> HostInfo:
    """Returns what the host says of itself, and the shortest of `tries` round trips to it."""
    best: HostInfo | None = None
    for _ in range(tries):
        sent, began = time.time(), time.perf_counter()
        answer = await connection.ask(pb.EnrolmentRequest(discover=pb.DiscoverCluster()))
        took = time.perf_counter() - began
        if best is None or took < best.round_trip_s:
            difference = answer.cluster.unix_ns / 1e9 - (sent + took / 2)
            best = HostInfo(answer.cluster, took, difference, connection.local_address)
    assert best is not None
    return best


LEAST_PROBE_S = 0.2
MOST_PROBE_BYTES = 16 << 20
PROBES = 3
_FIRST_PROBE_BYTES = 64 << 10


async def link_rate(connection: EnrolmentConnection, round_trip_s: float) -> float:
    """Returns the rate of the link from the host, in bytes a second, with framing and TLS.

    Probes grow until one takes long enough to be told from the round trip. The best of several
    counts: a busy machine makes a link look slow, and nothing makes it look fast.
    """
    enough_s = max(LEAST_PROBE_S, 5 * round_trip_s)
    size, best, counted = _FIRST_PROBE_BYTES, 0.0, 0
    while counted < PROBES:
        began = time.perf_counter()
        request = pb.EnrolmentRequest(measure=pb.MeasureLink(bytes=size))
        answer = await connection.ask(request)
        took = max(1e-6, time.perf_counter() - began)
        best = max(best, len(answer.payload.zeros) / took)
        if took >= enough_s or size >= MOST_PROBE_BYTES:
            counted += 1
        else:
            size = min(MOST_PROBE_BYTES, 4 * size)
    return best


def _stranger() -> ssl.SSLContext:
    """Returns a context that believes whoever answers; nothing secret goes over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def share_of_life_left(certificate: x509.Certificate) -> float:
    """Returns the share of a certificate's validity that is left; negative once it has ended."""
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return (certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)) / life
