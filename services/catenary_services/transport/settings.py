"""Settings that the transports of one process share."""

from __future__ import annotations

import hashlib
import re
import socket
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from catenary_services.security.tls import ClientSecurity, ServerSecurity

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TransportSecurity:
    """TLS of data connections between machines; file modes protect shared memory."""

    server: ServerSecurity = field(default_factory=lambda: ServerSecurity(insecure=True))
    """Certificates shown to peers that connect to this process, and demanded of them."""
    client: ClientSecurity = field(default_factory=lambda: ClientSecurity(insecure=True))
    """Certificates shown to peers this process connects to, and demanded of them."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Settings of a `TransportHub`."""

    enabled: tuple[str, ...] = ("shm", "tcp", "grpc")
    """Transports offered and used, the preferred first."""
    host: str = "127.0.0.1"
    """Interface the tcp and grpc transports listen on."""
    advertise_host: str | None = None
    """Host name that peers are told; None for `host`, or this machine's name if `host` means "all".
    """
    tcp_port: int = 0
    """Port of the tcp transport; 0 for any free one."""
    grpc_port: int = 0
    """Port of the grpc transport; 0 for any free one."""
    runtime_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "catenary")
    """Folder of the shm transport's socket; both sides of a pair must see it."""
    shm_bytes: int = 512 * _MIB
    """The most shared memory this process owns for sending; one link gets at most half."""
    send_bytes: int = 256 * _MIB
    """The most memory for outgoing frames, for tcp, grpc and nixl each."""
    receive_bytes: int = 512 * _MIB
    """The most memory for frames that came in, for tcp and for grpc each; one peer gets half. That
    much again is the most for rings of nixl."""
    ring_bytes: int = 32 * _MIB
    """Memory that nixl lends each sender to write into; frames that are larger go over TCP."""
    max_frame_bytes: int = 256 * _MIB
    """The largest payload accepted from a peer, and the largest one exported."""
    max_unreleased_frames: int = 4096
    """Frames of one connection the handler may hold before no more are read from it."""
    lease_s: float = 30.0
    """A peer that has not released a shared slot for so many seconds is taken for dead."""
    trusted_network: bool = False
    """True if nobody but peers reaches this process over the network, which nixl demands: what it
    sends is not encrypted, and its library lets those that reach its ports write into memory."""
    security: TransportSecurity = field(default_factory=TransportSecurity)
    """TLS of the tcp and grpc transports."""

    @property
    def reachable_host(self) -> str:
        """Host part of the addresses that peers are told."""
        if self.advertise_host is not None:
            return self.advertise_host
        return socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host


@cache
def host_id() -> str:
    """Returns an identifier of this machine: its boot id, else its host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


def socket_path(runtime_dir: Path, peer_id: str) -> Path:
    """Returns the path of the socket on which `peer_id` listens for peers on its machine.

    Socket addresses hold 107 bytes; a longer path is replaced by one named after its hash.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", peer_id)
    if name != peer_id:
        name += "-" + hashlib.sha256(peer_id.encode()).hexdigest()[:8]
    path = runtime_dir / f"{name}.shm.sock"
    if len(bytes(path)) <= 107:
        return path
    digest = hashlib.sha256(bytes(path)).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"catenary-{digest}.shm.sock"
