"""Keeps the directory: the addresses at which frames reach every agent and gateway.

An entry outlives the peer's control stream for a while and, by way of Redis, a change of leader. A
broken control stream says nothing about the data plane, which a directory without half of the peers
would cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.tables import peer_text
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds


@dataclass(slots=True)
class _Entry:
    peer: common_pb2.Peer
    gone_s: float | None
    """Moment at which its stream ended, in monotonic seconds; None while it is connected."""


class PeerDirectory:
    """The peers that are connected, or were until moments ago.

    Args:
        linger_s: Seconds for which a peer stays in the directory after its stream ended.
        clock_s: Returns monotonic seconds.
    """

    table = RedisTable.PEERS

    def __init__(self, linger_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._linger_s = linger_s
        self._clock_s = clock_s
        self._entries: dict[str, _Entry] = {}
        self._message: scheduler_pb2.Directory | None = None
        """The message of all entries; None if they changed since it was made."""

    def joined(self, peer_id: str, peer: common_pb2.Peer) -> None:
        """Notes that a peer is connected, perhaps at new addresses."""
        self._entries[peer_id] = _Entry(peer, None)
        self._message = None

    def left(self, peer_id: str, now_s: float) -> None:
        """Notes that a peer's stream ended."""
        entry = self._entries.get(peer_id)
        if entry is not None and entry.gone_s is None:
            entry.gone_s = now_s

    def tick(self, now: Nanoseconds) -> None:
        """Forgets the peers that stayed away too long."""
        self.sweep(now / NANOSECONDS_PER_SECOND)

    def sweep(self, now_s: float) -> bool:
        """Forgets the peers that stayed away too long; returns True if any was forgotten."""
        late = [
            peer_id
            for peer_id, entry in self._entries.items()
            if entry.gone_s is not None and now_s - entry.gone_s > self._linger_s
        ]
        for peer_id in late:
            del self._entries[peer_id]
        if late:
            self._message = None
        return bool(late)

    def directory(self, gateways: int) -> scheduler_pb2.Directory:
        """Returns the message that all agents and gateways get: the same one until it changes.

        Args:
            gateways: Number of gateways that there are.
        """
        if self._message is None or self._message.gateways != gateways:
            peers = [entry.peer for entry in self._entries.values()]
            self._message = scheduler_pb2.Directory(peers=peers, gateways=gateways)
        return self._message

    def records(self) -> dict[str, str | None]:
        """Returns the records that Redis keeps, by peer."""
        return {peer_id: peer_text(entry.peer) for peer_id, entry in self._entries.items()}

    def restore(self, peers: Mapping[str, common_pb2.Peer]) -> None:
        """Takes over an earlier leader's peers; those that do not connect soon are forgotten."""
        now_s = self._clock_s()
        for peer_id, peer in peers.items():
            self._entries[peer_id] = _Entry(peer, now_s)
        self._message = None
