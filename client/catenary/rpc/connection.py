"""Connection settings of a client: targets, TLS, API key and channel options. Pure until opened."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from catenary.errors import InvalidInputError
from catenary.rpc.calls import Service
from catenary.rpc.retry import RetryPolicy
from catenary_protos.catenary.v1 import admin_pb2_grpc, generation_pb2_grpc
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc

DEFAULT_TARGET = "127.0.0.1:8001"
ADMIN_PORT = 8003
LARGEST_REPLY_BYTES = 1 << 30
NO_RETRY = RetryPolicy(attempts=1)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Certificates by which a client trusts a server and identifies itself; files are PEM.

    Attributes:
        ca_file: Certificates to trust; None for those of the system.
        certificate_file: The client's certificate chain, for servers that ask for one (mTLS).
        key_file: The private key of `certificate_file`.
        server_name: Name the server's certificate must have, if not the target's host.
    """

    ca_file: str | Path | None = None
    certificate_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Connection:
    """Settings with which both clients connect; see `Client` for the fields."""

    target: str
    api_key: str | None
    tls: TlsConfig | None
    insecure: bool
    timeout_s: float
    admin_target: str | None
    retry: RetryPolicy

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise InvalidInputError.at("timeout_s", "must be positive")
        if self.tls is not None and self.insecure:
            raise InvalidInputError.at("insecure", "contradicts tls")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidInputError.at("api_key", "must be printable ASCII")
        _check_plain(self, "target", self.target)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every gRPC call: the API key, if there is one."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def address(self, *, admin: bool) -> str:
        """Returns the target of the admin port or of the serving port."""
        if not admin:
            return self.target
        if self.admin_target is not None:
            _check_plain(self, "admin_target", self.admin_target)
            return self.admin_target
        host, separator, port = self.target.rpartition(":")
        if not separator or not port.isdigit():
            raise InvalidInputError.at(
                "admin_target", f"is needed, because {self.target!r} does not end in a port"
            )
        return f"{host}:{ADMIN_PORT}"

    def options(self, target: str) -> list[tuple[str, Any]]:
        """Returns channel options: large messages, keepalive while calls are in flight."""
        options: list[tuple[str, Any]] = [
            # The server decides which messages are too large.
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", LARGEST_REPLY_BYTES),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # In spite of its name the time that an attempt to connect may take, with handshakes.
            ("grpc.min_reconnect_backoff_ms", 10_000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        if is_loopback(target):
            # gRPC would otherwise send even loopback traffic through http_proxy.
            options.append(("grpc.enable_http_proxy", 0))
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns TLS credentials, None for an unencrypted channel."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca_file", self.tls.ca_file),
            private_key=_read("key_file", self.tls.key_file),
            certificate_chain=_read("certificate_file", self.tls.certificate_file),
        )


def stub_class(service: Service) -> Callable[[Any], Any]:
    """Returns the generated stub class of a service, which takes sync and asyncio channels."""
    return _STUBS[service]


_STUBS: dict[Service, Callable[[Any], Any]] = {
    "inference": oip_grpc.GRPCInferenceServiceStub,
    "admin": admin_pb2_grpc.AdminStub,
    "generation": generation_pb2_grpc.GenerationStub,
}


def is_loopback(target: str) -> bool:
    """Returns True if a gRPC target is on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.rpartition("/")[2]
    if host.rpartition(":")[2].isdigit():
        host = host.rpartition(":")[0]
    host = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_plain(connection: Connection, field: str, target: str) -> None:
    if not target:
        raise InvalidInputError.at(field, "is empty")
    if connection.tls is None and not connection.insecure and not is_loopback(target):
        raise InvalidInputError.at(
            field, f"{target} is not this machine; give TLS settings or say insecure"
        )


def _read(field: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError.at(field, f"cannot be read: {error.strerror}") from error
