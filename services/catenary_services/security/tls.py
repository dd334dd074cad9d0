"""TLS credentials of servers and clients, from PEM files.

Between processes of the cluster TLS is mutual: each side shows a certificate signed by
`tls_ca_file`, which names its cluster, role and name. A server for the public (`mutual=False`)
shows its certificate and asks for none; API keys identify the callers. Every new connection uses
the files as they are then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from catenary_services.errors import InvalidInput
from catenary_services.log import get_logger
from catenary_services.security.rotation import WatchedFiles, watched_files
from catenary_services.settings import DEFAULT_CLUSTER, ProcessSettings

_log = get_logger("catenary_services.security")


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """The certificate a server shows, and those it demands of clients."""

    insecure: bool = False
    """Whether to run without TLS."""
    cert_file: Path | None = None
    """PEM file of the certificate chain the server shows."""
    key_file: Path | None = None
    """PEM file of the key of `cert_file`."""
    ca_file: Path | None = None
    """PEM file of authorities, one of which must have signed a client's certificate; None to ask
    for none."""
    cluster: str = DEFAULT_CLUSTER
    """Cluster to which clients must belong."""

    @classmethod
    def from_settings(cls, settings: ProcessSettings, *, mutual: bool = True) -> ServerSecurity:
        """Returns the security of a server according to the settings.

        Args:
            settings: Settings of the process.
            mutual: False for a server whose clients have API keys instead of certificates.

        Raises:
            InvalidInput: Neither TLS files nor `insecure` are set, or both are, or a file is
                missing.
        """
        if _is_insecure(settings):
            return cls(insecure=True)
        cert, key = _own_pair(settings)
        if mutual and settings.tls_ca_file is None:
            raise InvalidInput("tls_ca_file", "needed to check the certificates of peers")
        ca_file = settings.tls_ca_file if mutual else None
        return cls(cert_file=cert, key_file=key, ca_file=ca_file, cluster=settings.cluster)

    @property
    def files(self) -> WatchedFiles:
        """The files, read again whenever they change."""
        return watched_files(self.cert_file, self.key_file, self.ca_file)

    def ssl_context(self, speaks: str | None = None) -> ssl.SSLContext | None:
        """Returns a context for listening sockets, None without TLS.

        Args:
            speaks: The protocol by its name for ALPN; None to name none.

        Raises:
            InvalidInput: The files are not good.
        """
        return None if self.insecure else self.files.listening_context(speaks)

    def register(self, transport: asyncio.BaseTransport) -> Callable[[], None]:
        """Notes an accepted connection, which ends when its peer is not to be trusted any more.

        Returns what takes it off again. Without TLS, or if the peer has shown no certificate, there
        is nothing to note.

        Raises:
            Unauthenticated: The peer's certificate was revoked; the connection is closed.
        """
        return _nothing if self.insecure else self.files.register(transport)


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """The authorities by which a client checks servers, and the certificate it shows them."""

    insecure: bool = False
    """Whether to connect without TLS."""
    ca_file: Path | None = None
    """PEM file of the authorities that may sign a server's certificate; None for those of the
    system."""
    cert_file: Path | None = None
    """PEM file of the certificate chain shown to servers that ask for it (mutual TLS)."""
    key_file: Path | None = None
    """PEM file of the key of `cert_file`."""
    cluster: str = DEFAULT_CLUSTER
    """Cluster to which servers must belong."""

    @classmethod
    def from_settings(cls, settings: ProcessSettings) -> ClientSecurity:
        """Returns the security of a client according to the settings: mutual TLS, or none.

        Raises:
            InvalidInput: Neither TLS files nor `insecure` are set, or both are, or a file is
                missing.
        """
        if _is_insecure(settings):
            return cls(insecure=True)
        cert, key = _own_pair(settings)
        if settings.tls_ca_file is None:
            raise InvalidInput("tls_ca_file", "needed to check the certificates of peers")
        return cls(
            ca_file=settings.tls_ca_file, cert_file=cert, key_file=key, cluster=settings.cluster
        )

    @property
    def files(self) -> WatchedFiles:
        """The files, read again whenever they change."""
        return watched_files(self.cert_file, self.key_file, self.ca_file)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Returns gRPC credentials, None without TLS.

        A channel keeps its credentials. For newer ones, open a new channel.

        Raises:
            InvalidInput: The files are not good.
        """
        if self.insecure:
            return None
        material = self.files.current()
        return grpc.ssl_channel_credentials(
            root_certificates=material.authorities,
            private_key=material.key,
            certificate_chain=material.chain,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns a context for the next connection, None without TLS.

        Raises:
            InvalidInput: The files are not good.
        """
        return None if self.insecure else self.files.context(server=False)

    def peer_context(self) -> ssl.SSLContext | None:
        """Returns a context for a connection whose other side is known by its identity.

        The chain is verified but the host name is not: check the certificate after the handshake.

        Raises:
            InvalidInput: The files are not good.
        """
        return None if self.insecure else self.files.context(server=False, checks_name=False)

    def register(self, transport: asyncio.BaseTransport) -> Callable[[], None]:
        """Notes a connection to a server; see `ServerSecurity.register`."""
        return _nothing if self.insecure else self.files.register(transport)


def _nothing() -> None:
    """Takes off a connection without certificates, which was never noted."""


def _is_insecure(settings: ProcessSettings) -> bool:
    files = (settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file)
    if not settings.insecure:
        return False
    if any(file is not None for file in files):
        raise InvalidInput("insecure", "contradicts the TLS files that are set as well")
    _log.warning("running_without_tls", hint="anyone who reaches a port can read and send")
    return True


def _own_pair(settings: ProcessSettings) -> tuple[Path, Path]:
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None:
        raise InvalidInput(
            "tls_cert_file", "not set: give tls_cert_file and tls_key_file, or set insecure"
        )
    if key is None:
        raise InvalidInput("tls_key_file", "not set, but tls_cert_file is")
    return cert, key
