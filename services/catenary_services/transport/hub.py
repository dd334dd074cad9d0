"""All transports of one process, with one link to each peer over the best of them.

The hub prefers shared memory where the peer is on this machine and its socket is reachable, then
TCP, then gRPC, and tries them in turn when a link is first needed. NIXL is used where it is asked
for. Links are kept, and made again when they broke or when the directory says that the peer was
restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from catenary_protos.catenary.v1.common_pb2 import Peer
from catenary_services.errors import InvalidInput, PartitionLost, Unavailable
from catenary_services.log import get_logger
from catenary_services.transport.grpc.grpc_stream import GrpcEndpoint
from catenary_services.transport.interface import (
    Endpoint,
    EndpointAddress,
    FrameHandler,
    Link,
    ReceivedFrame,
)
from catenary_services.transport.known_senders import KnownSenders
from catenary_services.transport.nixl.nixl import NixlEndpoint
from catenary_services.transport.settings import TransportSecurity, TransportSettings, host_id
from catenary_services.transport.shared_memory.shm import ShmEndpoint
from catenary_services.transport.tcp.tcp import TcpEndpoint

__all__ = ["TransportHub", "TransportSecurity", "TransportSettings"]

_ENDPOINTS: dict[str, Callable[[str, TransportSettings], Endpoint]] = {
    "shm": ShmEndpoint,
    "tcp": TcpEndpoint,
    "grpc": GrpcEndpoint,
    "nixl": NixlEndpoint,
}
_OPTIONAL = "nixl"
"""The transport without which a process starts where its library is missing."""
_log = get_logger("catenary_services.transport")


@dataclass(frozen=True, slots=True)
class _Peer:
    incarnation: int
    addresses: tuple[EndpointAddress, ...]


class TransportHub:
    """Receives frames over every transport, and keeps one link per peer for sending."""

    def __init__(
        self,
        peer_id: str,
        settings: TransportSettings,
        on_refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Creates the endpoints without opening them.

        `on_refused` is told why a frame was refused.
        """
        for name in settings.enabled:
            if name not in _ENDPOINTS:
                raise InvalidInput("transports", f"{name!r}; there are {', '.join(_ENDPOINTS)}")
        if not settings.enabled:
            raise InvalidInput("transports", "none is enabled")
        self._peer_id = peer_id
        self._on_refused = on_refused
        self._senders: KnownSenders | None = None
        self._knows_senders = not settings.security.server.insecure
        self._endpoints: dict[str, Endpoint] = {
            name: _ENDPOINTS[name](peer_id, settings) for name in settings.enabled
        }
        self._peers: dict[str, _Peer] = {}
        self._links: dict[str, tuple[int, Link]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._started: list[Endpoint] = []
        self._closed = False

    @property
    def addresses(self) -> tuple[EndpointAddress, ...]:
        """Addresses at which peers reach this process; known after `start`."""
        return tuple(endpoint.address for endpoint in self._endpoints.values())

    async def start(self, handler: FrameHandler) -> None:
        """Starts to receive; `handler` gets the frames of every transport.

        With TLS it gets only those of peers in the directory.
        """
        handler = self._counting(handler)
        if self._knows_senders:
            self._senders = KnownSenders(handler, self._on_refused)
            handler = self._senders.take
        try:
            for name, endpoint in tuple(self._endpoints.items()):
                try:
                    await endpoint.start(handler)
                except Unavailable as error:
                    if name != _OPTIONAL or len(self._endpoints) == 1:
                        raise
                    _log.warning("transport_left_out", transport=name, why=error.message)
                    del self._endpoints[name]
                else:
                    self._started.append(endpoint)
        except BaseException:
            await self.close()
            raise

    def _counting(self, handler: FrameHandler) -> FrameHandler:
        def take(frame: ReceivedFrame) -> None:
            handler(frame)
            if frame.sender.is_refused:  # set by `read_header`: the connection ends with it
                self._on_refused("invalid_header")

        return take

    def update_directory(self, peers: Iterable[Peer]) -> None:
        """Takes over the peers with their addresses, and closes links to restarted peers.

        A peer that is no longer listed keeps its open link (a new scheduler learns of its peers one
        by one), but no new link to it is made.
        """
        known: dict[str, _Peer] = {}
        for peer in peers:
            addresses = tuple(
                EndpointAddress(each.transport, each.address, each.host_id)
                for each in peer.addresses
            )
            known[peer.peer_id] = _Peer(peer.incarnation, addresses)
        self._peers = known
        if self._senders is not None:
            self._senders.listed(known)
        for peer_id, (incarnation, link) in tuple(self._links.items()):
            listed = known.get(peer_id)
            if link.closed or (listed is not None and listed.incarnation != incarnation):
                self._drop(peer_id, link)
        for peer_id in [each for each in self._turns if each not in known]:
            if not self._turns[peer_id].locked():
                del self._turns[peer_id]

    def _drop(self, peer_id: str, link: Link) -> None:
        del self._links[peer_id]
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def link_to(self, peer_id: str, timeout_s: float) -> Link:
        """Returns an open link to a peer, made anew if there is none.

        Raises:
            PartitionLost: The peer is unknown, or answers over no transport within `timeout_s`.
        """
        if (link := self.open_link(peer_id)) is not None:
            return link
        if peer_id not in self._peers or self._closed:
            raise PartitionLost(f"{peer_id} is in no directory")
        turn = self._turns.setdefault(peer_id, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s), turn:
                return self.open_link(peer_id) or await self._connect(peer_id, timeout_s)
        except TimeoutError as error:
            raise PartitionLost(f"{peer_id} does not answer within {timeout_s:g} s") from error

    def is_local(self, peer_id: str) -> bool:
        """Returns True if a peer is on this host, as the directory has it; any thread may ask."""
        peer = self._peers.get(peer_id)
        return peer is not None and any(each.host_id == host_id() for each in peer.addresses)

    def open_link(self, peer_id: str) -> Link | None:
        """Returns the link to a peer if one is open."""
        entry = self._links.get(peer_id)
        return entry[1] if entry is not None and not entry[1].closed else None

    async def _connect(self, peer_id: str, timeout_s: float) -> Link:
        peer = self._peers.get(peer_id)
        if peer is None:
            raise PartitionLost(f"{peer_id} is in no directory")
        ways = self._ways_to(peer)
        reasons: list[str] = []
        for index, (endpoint, address) in enumerate(ways):
            # An attempt gets a third of the time, so that a later one has its chance, too.
            share_s = timeout_s if index == len(ways) - 1 else timeout_s / 3
            try:
                link = await endpoint.connect(address, share_s, peer_id)
            except PartitionLost as error:
                reasons.append(error.message)
                continue
            if not await self._is_right(link, peer_id, peer):
                reasons.append(f"{address.transport}: somebody else answered")
                continue
            self._links[peer_id] = (peer.incarnation, link)
            _log.debug("link_opened", peer=peer_id, transport=address.transport)
            return link
        raise PartitionLost(f"{peer_id} cannot be reached: {'; '.join(reasons) or 'no address'}")

    async def _is_right(self, link: Link, peer_id: str, peer: _Peer) -> bool:
        """Returns False, and closes a link, if it reached another process or an outdated peer."""
        answered = getattr(link, "peer_id", peer_id)
        if answered == peer_id and not self._closed and self._peers.get(peer_id, peer) == peer:
            return True
        await link.close()
        return False

    def _ways_to(self, peer: _Peer) -> list[tuple[Endpoint, EndpointAddress]]:
        """Returns the transports that both sides have, in this side's order of preference."""
        ways: list[tuple[Endpoint, EndpointAddress]] = []
        for name, endpoint in self._endpoints.items():
            for address in peer.addresses:
                local = address.host_id == host_id()
                if address.transport == name and (name != "shm" or local):
                    ways.append((endpoint, address))
        return ways

    async def close(self) -> None:
        """Stops receiving and closes every link."""
        self._closed = True
        if self._senders is not None:
            self._senders.close()
        for peer_id, (_, link) in tuple(self._links.items()):
            self._drop(peer_id, link)
        while self._closing:
            await asyncio.wait(tuple(self._closing))
        while self._started:
            await self._started.pop().close()
