"""TLS credentials of servers and clients, from PEM files.

Between our processes TLS is mutual: each side shows a certificate signed by `tls_ca_file`, which
names its cluster, role and name. An endpoint for the public (`mutual=False`) shows its certificate
and asks for none; API keys say who calls. Files that change are taken up by every new connection.
"""

from __future__ import annotations

import ssl
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
    """How a server proves who it is, and whether its clients have to."""

    insecure: bool = False
    """True: no TLS at all."""
    cert_file: Path | None = None
    """PEM chain the server shows."""
    key_file: Path | None = None
    """PEM key of `cert_file`."""
    ca_file: Path | None = None
    """If set, a client must show a certificate signed by one of these."""
    cluster: str = DEFAULT_CLUSTER
    """Cluster that clients must belong to."""

    @classmethod
    def from_settings(cls, settings: ProcessSettings, *, mutual: bool = True) -> ServerSecurity:
        """Returns what the settings ask for.

        Args:
            settings: Of the process.
            mutual: False for an endpoint whose clients have keys instead of certificates.

        Raises:
            InvalidInput: neither TLS files nor `insecure`, or both, or a file is missing.
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
        """The files, as of now."""
        return watched_files(self.cert_file, self.key_file, self.ca_file)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Returns gRPC credentials, or None when insecure.

        Raises:
            InvalidInput: the files are not good: gRPC would find out at the first handshake, and
                tell only its own log.
        """
        if self.insecure:
            return None
        newest = _Newest(self.files)
        return grpc.dynamic_ssl_server_credentials(
            newest.configuration(),
            newest.changed,  # type: ignore[arg-type]  # the stubs forget that None is allowed
            require_client_authentication=self.ca_file is not None,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns a context for listening sockets (HTTP, frames), or None when insecure.

        Raises:
            InvalidInput: the files are not good.
        """
        return None if self.insecure else self.files.listening_context()


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """How a client checks a server, and what it shows if asked."""

    insecure: bool = False
    """True: no TLS at all."""
    ca_file: Path | None = None
    """PEM authorities the server must be signed by; None: those of the system."""
    cert_file: Path | None = None
    """PEM chain shown to servers that ask (mutual TLS)."""
    key_file: Path | None = None
    """PEM key of `cert_file`."""
    cluster: str = DEFAULT_CLUSTER
    """Cluster that servers must belong to."""

    @classmethod
    def from_settings(cls, settings: ProcessSettings) -> ClientSecurity:
        """Returns what the settings ask for: mutual TLS, or nothing if `insecure`.

        Raises:
            InvalidInput: neither TLS files nor `insecure`, or both, or a file is missing.
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
        """The files, as of now."""
        return watched_files(self.cert_file, self.key_file, self.ca_file)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Returns gRPC credentials, or None when insecure.

        A channel keeps them: whoever connects anew opens a new channel.

        Raises:
            InvalidInput: the files are not good.
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
        """Returns a context for the next connection, or None when insecure.

        Raises:
            InvalidInput: the files are not good.
        """
        return None if self.insecure else self.files.context(server=False)

    def peer_context(self) -> ssl.SSLContext | None:
        """Returns a context for a connection whose other side is known by its identity.

        The chain is checked, the host name is not: look at the certificate after the handshake.

        Raises:
            InvalidInput: the files are not good.
        """
        return None if self.insecure else self.files.context(server=False, checks_name=False)


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


class _Newest:
    """What gRPC asks at every handshake of one server."""

    def __init__(self, files: WatchedFiles) -> None:
        self._files = files
        self._number = 0

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Returns what is in force."""
        material = self._files.current()
        assert material.key is not None
        assert material.chain is not None
        self._number = material.number
        return grpc.ssl_server_certificate_configuration(
            [(material.key, material.chain)], root_certificates=material.authorities
        )

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns what is in force if that is not what was returned before."""
        if self._files.current().number == self._number:
            return None
        return self.configuration()
