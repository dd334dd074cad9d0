"""Identity of a process according to its certificate: cluster, role and name.

A certificate carries one URI, `spiffe://catenary/<cluster>/<role>/<name>`. Beside it stands the DNS
name `<role>.<cluster>.catenary.internal`, so that a client can demand the role of a server while it
connects, whatever address it dials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from catenary_services.errors import InvalidInput, PermissionDenied, Unauthenticated

TRUST_DOMAIN = "catenary"
_PREFIX = f"spiffe://{TRUST_DOMAIN}/"
_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_SPIFFE_ID = "peer_spiffe_id"
"""Property that gRPC sets if the peer's verified certificate has exactly one URI."""


class Role(StrEnum):
    """The kind of process, or person, a certificate was made for."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    OPERATOR = "operator"
    """A person or a tool that may change the cluster."""
    REDIS = "redis"
    AUTHORITY = "authority"
    """The process that issues certificates to machines that join."""


PEER_ROLES = (Role.GATEWAY, Role.AGENT)
"""The roles whose processes send each other frames."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a certificate."""

    cluster: str
    role: Role
    name: str

    @classmethod
    def of(cls, cluster: str, role: str, name: str) -> Identity:
        """Returns an identity whose parts fit into a URI.

        Raises:
            InvalidInput: There is no such role, or a part has other characters than letters,
                digits, '.', '_' and '-'.
        """
        if role not in tuple(Role):
            raise InvalidInput("role", f"{role!r}; there are {', '.join(Role)}")
        for field, part in (("cluster", cluster), ("name", name)):
            if _PART.fullmatch(part) is None:
                raise InvalidInput(field, f"{part!r}: only letters, digits, '.', '_' and '-'")
            if is_reserved(part):
                raise InvalidInput(field, f"{part!r} stands for a role")
        return cls(cluster, Role(role), name)

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Returns the identity that a URI names.

        Raises:
            InvalidInput: The URI has another form.
        """
        parts = uri.removeprefix(_PREFIX).split("/")
        if not uri.startswith(_PREFIX) or len(parts) != 3:
            raise InvalidInput("identity", f"{uri!r} is not {_PREFIX}<cluster>/<role>/<name>")
        return cls.of(*parts)

    @property
    def uri(self) -> str:
        """The URI that stands in the certificate."""
        return f"{_PREFIX}{self.cluster}/{self.role}/{self.name}"

    @property
    def server_names(self) -> tuple[str, ...]:
        """DNS names in the certificate: of the role and, for senders of frames, of the name."""
        if self.role is Role.OPERATOR:  # a person serves nothing
            return ()
        if self.role in PEER_ROLES:
            return (
                server_name_of(self.role, self.cluster),
                peer_name_of(self.name, self.cluster),
            )
        return (server_name_of(self.role, self.cluster),)

    def __str__(self) -> str:
        """Returns the identity for messages, e.g. "agent agent-0 of cluster main"."""
        return f"{self.role} {self.name} of cluster {self.cluster}"


def server_name_of(role: Role, cluster: str) -> str:
    """Returns the DNS name by which a client demands the role of a server."""
    return f"{role}.{cluster}.{TRUST_DOMAIN}.internal"


def is_reserved(name: str) -> bool:
    """Returns True for a DNS name that stands for a role and may not be chosen freely."""
    return name.lower().rstrip(".").endswith(f"{TRUST_DOMAIN}.internal")


def peer_name_of(name: str, cluster: str) -> str:
    """Returns the DNS name by which a sender of frames demands the gateway or agent `name`."""
    return f"{name}.peer.{cluster}.{TRUST_DOMAIN}.internal"


class HasAuthContext(Protocol):
    """The part of a gRPC servicer context that tells who calls."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns the properties of the peer that the handshake established."""
        ...


def peer_identity(context: HasAuthContext) -> Identity:
    """Returns the identity of a caller, by the certificate of its connection.

    Raises:
        Unauthenticated: There is no certificate, or it names no identity of this system.
    """
    uris = tuple(context.auth_context().get(_SPIFFE_ID, ()))
    if len(uris) != 1:
        raise Unauthenticated("needs a client certificate with one Catenary identity")
    return _identity_of(uris[0].decode("utf-8", "replace"))


class HasPeerCertificate(Protocol):
    """The part of an `ssl.SSLObject` or `ssl.SSLSocket` that tells who the peer is."""

    def getpeercert(self) -> Mapping[str, object] | None:
        """Returns the verified certificate of the other side."""
        ...


def socket_identity(connection: HasPeerCertificate) -> Identity:
    """Returns the identity at the other end of a TLS connection.

    Raises:
        Unauthenticated: There is no certificate, or it names no identity of this system.
    """
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    assert isinstance(names, tuple)
    uris = [value for kind, value in names if kind == "URI"]
    if len(uris) != 1:
        raise Unauthenticated("needs a certificate with one Catenary identity")
    return _identity_of(uris[0])


def identity_of_socket(connection: object) -> Identity:
    """Returns the identity at the other end, by the `ssl_object` of a connection.

    Raises:
        Unauthenticated: There is no certificate, or it names no identity of this system.
    """
    if not hasattr(connection, "getpeercert"):
        raise Unauthenticated("the connection has no certificate")
    return socket_identity(connection)


def require_role(identity: Identity, cluster: str, roles: Iterable[Role], doing: str) -> None:
    """Checks that an identity belongs to the cluster and has one of the roles.

    Args:
        identity: The identity.
        cluster: The cluster of this process.
        roles: The roles that are allowed.
        doing: The action, for the message, e.g. "open an agent session".

    Raises:
        PermissionDenied: It is of another cluster, or has another role.
    """
    if identity.cluster != cluster:
        raise PermissionDenied(f"{identity} has no business in cluster {cluster}")
    if identity.role not in roles:
        raise PermissionDenied(f"{identity} may not {doing}")


def require_name(identity: Identity, claimed: str) -> None:
    """Checks that an identity has the name its holder claims.

    Raises:
        PermissionDenied: The certificate has another name.
    """
    if identity.name != claimed:
        raise PermissionDenied(f"{identity} may not speak for {claimed!r}")


def _identity_of(uri: str) -> Identity:
    try:
        return Identity.parse(uri)
    except InvalidInput as error:
        raise Unauthenticated(f"the certificate names nobody of ours: {error.message}") from None
