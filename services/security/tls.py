"""TLS credentials of servers and clients, from PEM files.

Between our processes TLS is mutual: each side shows a certificate signed by `tls_ca_file`. A door
for the public (`mutual=False`) shows its certificate and asks for none; API keys say who calls.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.errors import InvalidInput
from services.log import get_logger
from services.settings import ProcessSettings

_log = get_logger("services.security")


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

    @classmethod
    def from_settings(cls, settings: ProcessSettings, *, mutual: bool = True) -> ServerSecurity:
        """Returns what the settings ask for.

        Args:
            settings: Of the process.
            mutual: False for a door whose clients have keys instead of certificates.

        Raises:
            InvalidInput: neither TLS files nor `insecure`, or both, or a file is missing.
        """
        if _is_insecure(settings):
            return cls(insecure=True)
        cert, key = _own_pair(settings)
        if mutual and settings.tls_ca_file is None:
            raise InvalidInput("tls_ca_file", "needed to check the certificates of peers")
        return cls(cert_file=cert, key_file=key, ca_file=settings.tls_ca_file if mutual else None)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Returns gRPC credentials, or None when insecure."""
        if self.insecure:
            return None
        # gRPC would find out at the first handshake, and tell only its own log.
        self.ssl_context()
        return grpc.ssl_server_credentials(
            [(_read("tls_key_file", self.key_file), _read("tls_cert_file", self.cert_file))],
            root_certificates=_read("tls_ca_file", self.ca_file) if self.ca_file else None,
            require_client_auth=self.ca_file is not None,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns a context for listening sockets (HTTP, frames), or None when insecure."""
        if self.insecure:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_pair(context, self.cert_file, self.key_file)
        if self.ca_file is not None:
            _load_authority(context, self.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


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
        return cls(ca_file=settings.tls_ca_file, cert_file=cert, key_file=key)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Returns gRPC credentials, or None when insecure."""
        if self.insecure:
            return None
        # As in `ServerSecurity`: files that do not fit are reported here and not by gRPC.
        self.ssl_context()
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls_ca_file", self.ca_file) if self.ca_file else None,
            private_key=_read("tls_key_file", self.key_file) if self.key_file else None,
            certificate_chain=_read("tls_cert_file", self.cert_file) if self.cert_file else None,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns a context for connecting sockets, or None when insecure."""
        if self.insecure:
            return None
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        if self.ca_file is not None:
            # Peers are signed by our authority and by no public one.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _load_authority(context, self.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert_file is not None:
            _load_pair(context, self.cert_file, self.key_file)
        return context


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


def _read(field: str, file: Path | None) -> bytes:
    if file is None:
        raise InvalidInput(field, "not set")
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidInput(field, f"cannot be read: {error}") from error


def _load_pair(context: ssl.SSLContext, cert: Path | None, key: Path | None) -> None:
    _read("tls_cert_file", cert)
    _read("tls_key_file", key)
    try:
        context.load_cert_chain(str(cert), str(key))
    except ssl.SSLError as error:
        raise InvalidInput("tls_cert_file", f"does not fit tls_key_file: {error}") from error


def _load_authority(context: ssl.SSLContext, file: Path) -> None:
    _read("tls_ca_file", file)
    try:
        context.load_verify_locations(str(file))
    except ssl.SSLError as error:
        raise InvalidInput("tls_ca_file", f"holds no certificate: {error}") from error
