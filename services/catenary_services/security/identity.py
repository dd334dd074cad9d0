"""Who a process is, as its certificate says: cluster, role and name.

A certificate of ours carries one URI, `spiffe://catenary/<cluster>/<role>/<name>`. Beside it stands
the DNS name `<role>.<cluster>.catenary.internal`, so that a client can demand the role of a server
while it connects, whatever address it dials.
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
"""Set by gRPC if the peer's certificate, whose chain was checked, has exactly one URI."""


class Role(StrEnum):
    """What kind of process, or person, a certificate was made for."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    OPERATOR = "operator"
    """A person or tool that may change the cluster."""
    REDIS = "redis"


PEER_ROLES = (Role.GATEWAY, Role.AGENT)
"""Those who send each other frames."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One certificate's holder."""

    cluster: str
    role: Role
    name: str

    @classmethod
    def of(cls, cluster: str, role: str, name: str) -> Identity:
        """Returns an identity whose parts fit into a URI.

        Raises:
            InvalidInput: there is no such role, or a part has other characters than letters,
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
        """Returns whom a URI names.

        Raises:
            InvalidInput: it is none of ours.
        """
        parts = uri.removeprefix(_PREFIX).split("/")
        if not uri.startswith(_PREFIX) or len(parts) != 3:
            raise InvalidInput("identity", f"{uri!r} is not {_PREFIX}<cluster>/<role>/<name>")
        return cls.of(*parts)

    @property
    def uri(self) -> str:
        """As certificates carry it."""
        return f"{_PREFIX}{self.cluster}/{self.role}/{self.name}"

    @property
    def server_names(self) -> tuple[str, ...]:
        """The DNS names that stand for it: of the role, and for peers of frames of the name."""
        if self.role is Role.OPERATOR:  # a person serves nothing
            return ()
        if self.role in PEER_ROLES:
            return (
                server_name_of(self.role, self.cluster),
                peer_name_of(self.name, self.cluster),
            )
        return (server_name_of(self.role, self.cluster),)

    def __str__(self) -> str:
        """Returns it for messages, e.g. "agent agent-0 of cluster main"."""
        return f"{self.role} {self.name} of cluster {self.cluster}"


def server_name_of(role: Role, cluster: str) -> str:
    """Returns the DNS name a client demands of a server, to know its role."""
    return f"{role}.{cluster}.{TRUST_DOMAIN}.internal"


def is_reserved(name: str) -> bool:
    """Returns whether a DNS name says something about a role, and may not be chosen freely."""
    return name.lower().rstrip(".").endswith(f"{TRUST_DOMAIN}.internal")


def peer_name_of(name: str, cluster: str) -> str:
    """Returns the DNS name a sender of frames demands of the gateway or agent `name`."""
    return f"{name}.peer.{cluster}.{TRUST_DOMAIN}.internal"


class HasAuthContext(Protocol):
    """What is needed of a gRPC servicer context."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns what the handshake found out about the peer."""
        ...


def peer_identity(context: HasAuthContext) -> Identity:
    """Returns who calls, by the certificate of the connection.

    Raises:
        Unauthenticated: without a certificate, or with one that names nobody of ours.
    """
    uris = tuple(context.auth_context().get(_SPIFFE_ID, ()))
    if len(uris) != 1:
        raise Unauthenticated("needs a client certificate with one Catenary identity")
    return _identity_of(uris[0].decode("utf-8", "replace"))


class HasPeerCertificate(Protocol):
    """What is needed of an `ssl.SSLObject` or `ssl.SSLSocket`."""

    def getpeercert(self) -> Mapping[str, object] | None:
        """Returns the checked certificate of the other side."""
        ...


def socket_identity(connection: HasPeerCertificate) -> Identity:
    """Returns who is at the other end of a TLS connection.

    Raises:
        Unauthenticated: without a certificate, or with one that names nobody of ours.
    """
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    assert isinstance(names, tuple)
    uris = [value for kind, value in names if kind == "URI"]
    if len(uris) != 1:
        raise Unauthenticated("needs a certificate with one Catenary identity")
    return _identity_of(uris[0])


def require_role(identity: Identity, cluster: str, roles: Iterable[Role], doing: str) -> None:
    """Returns if somebody belongs to the cluster and has one of the roles.

    Args:
        identity: Whoever it is.
        cluster: Ours.
        roles: Those that may.
        doing: What it is about, for the message, e.g. "open an agent session".

    Raises:
        PermissionDenied: another cluster, or another role.
    """
    if identity.cluster != cluster:
        raise PermissionDenied(f"{identity} has no business in cluster {cluster}")
    if identity.role not in roles:
        raise PermissionDenied(f"{identity} may not {doing}")


def require_name(identity: Identity, claimed: str) -> None:
    """Returns if somebody is who they say they are.

    Raises:
        PermissionDenied: the certificate is another's.
    """
    if identity.name != claimed:
        raise PermissionDenied(f"{identity} may not speak for {claimed!r}")


def _identity_of(uri: str) -> Identity:
    try:
        return Identity.parse(uri)
    except InvalidInput as error:
        raise Unauthenticated(f"the certificate names nobody of ours: {error.message}") from None
