"""The table of who may call which gRPC method, and the gate of every server inside the cluster.

A method that is missing from the table is refused. Without TLS callers cannot be told apart, so
that only what needs an operator's key is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import grpc.aio

from catenary_services.errors import CatenaryError, PermissionDenied, Unauthenticated
from catenary_services.log import get_logger
from catenary_services.security.identity import (
    Identity,
    Role,
    identity_of_socket,
    peer_identity,
    require_role,
)
from catenary_services.security.keys import SCOPE_ADMIN, ApiKeys

_log = get_logger("catenary_services.security")
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class AccessRule:
    """The callers a method admits."""

    roles: frozenset[Role]
    """Roles that are admitted by their certificate alone."""
    with_key: frozenset[Role] = frozenset()
    """Roles that are admitted on behalf of an operator, whose API key (scope `admin`) comes with
    the call."""
    is_public: bool = False
    """Whether the method is for the public: the service itself checks API keys instead of
    certificates."""


ANYBODY: Final = AccessRule(frozenset(Role))
PEERS: Final = AccessRule(frozenset({Role.GATEWAY, Role.AGENT}))
LOOK: Final = AccessRule(frozenset({Role.GATEWAY, Role.OPERATOR}))
CHANGE: Final = AccessRule(frozenset({Role.OPERATOR}), with_key=frozenset({Role.GATEWAY}))
PUBLIC: Final = AccessRule(frozenset(), is_public=True)

RULES: Final[Mapping[str, AccessRule]] = MappingProxyType(
    {
        # Scheduler: where gateways and agents open their streams
        "/catenary.v1.Scheduler/GetControlEndpoint": PEERS,
        # Scheduler, and the gateway's port for operators: methods that only read
        "/catenary.v1.Admin/GetStatus": LOOK,
        "/catenary.v1.Admin/GetPlan": LOOK,
        "/catenary.v1.Admin/ListSessions": LOOK,
        "/catenary.v1.Admin/GetStory": LOOK,
        "/catenary.v1.Admin/GetTrace": LOOK,
        "/catenary.v1.Admin/GetTimelines": LOOK,
        "/catenary.v1.Admin/ListRequests": LOOK,
        "/catenary.v1.Admin/WatchScaling": LOOK,
        # The same: methods that change the cluster, or keep it busy; a gateway alone cannot drain
        "/catenary.v1.Admin/SearchPlan": CHANGE,
        "/catenary.v1.Admin/ApplyPlan": CHANGE,
        "/catenary.v1.Admin/Replan": CHANGE,
        "/catenary.v1.Admin/DeployModel": CHANGE,
        "/catenary.v1.Admin/UndeployModel": CHANGE,
        "/catenary.v1.Admin/ImportModel": CHANGE,
        "/catenary.v1.Admin/DrainAgent": CHANGE,
        "/catenary.v1.Admin/UndrainAgent": CHANGE,
        "/catenary.v1.Admin/MoveSession": CHANGE,
        # The gateway's port for operators: KEDA
        "/externalscaler.ExternalScaler/IsActive": LOOK,
        "/externalscaler.ExternalScaler/StreamIsActive": LOOK,
        "/externalscaler.ExternalScaler/GetMetricSpec": LOOK,
        "/externalscaler.ExternalScaler/GetMetrics": LOOK,
        # Gateways and agents: frames
        "/catenary.v1.PeerTransport/Frames": PEERS,
        # Every server
        "/grpc.health.v1.Health/Check": ANYBODY,
        "/grpc.health.v1.Health/Watch": ANYBODY,
        "/grpc.health.v1.Health/List": ANYBODY,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ANYBODY,
        # The gateway's ports for clients
        "/inference.GRPCInferenceService/ServerLive": PUBLIC,
        "/inference.GRPCInferenceService/ServerReady": PUBLIC,
        "/inference.GRPCInferenceService/ServerMetadata": PUBLIC,
        "/inference.GRPCInferenceService/ModelReady": PUBLIC,
        "/inference.GRPCInferenceService/ModelMetadata": PUBLIC,
        "/inference.GRPCInferenceService/ModelInfer": PUBLIC,
        "/inference.GRPCInferenceService/ModelStreamInfer": PUBLIC,
        "/inference.GRPCInferenceService/RepositoryIndex": PUBLIC,
        "/inference.GRPCInferenceService/RepositoryModelLoad": PUBLIC,
        "/inference.GRPCInferenceService/RepositoryModelUnload": PUBLIC,
        "/inference.GRPCInferenceService/ModelConfig": PUBLIC,
        "/inference.GRPCInferenceService/ModelStatistics": PUBLIC,
        "/inference.GRPCInferenceService/SystemSharedMemoryStatus": PUBLIC,
        "/inference.GRPCInferenceService/SystemSharedMemoryRegister": PUBLIC,
        "/inference.GRPCInferenceService/SystemSharedMemoryUnregister": PUBLIC,
        "/inference.GRPCInferenceService/CudaSharedMemoryStatus": PUBLIC,
        "/inference.GRPCInferenceService/CudaSharedMemoryRegister": PUBLIC,
        "/inference.GRPCInferenceService/CudaSharedMemoryUnregister": PUBLIC,
        "/inference.GRPCInferenceService/TraceSetting": PUBLIC,
        "/inference.GRPCInferenceService/LogSettings": PUBLIC,
        "/catenary.v1.Generation/Generate": PUBLIC,
    }
)


class RoleAuthorizer:
    """Establishes who calls, and decides what they may do."""

    def __init__(self, cluster: str, keys: ApiKeys | None = None, *, insecure: bool) -> None:
        """Admits callers of `cluster`.

        Args:
            cluster: Cluster of this process.
            keys: API keys of operators; None if nobody has one.
            insecure: Whether connections are without certificates.
        """
        self._cluster = cluster
        self._keys = keys or ApiKeys()
        self._insecure = insecure

    def identity(self, context: Context) -> Identity | None:
        """Returns the identity of the caller; None without TLS, where it is unknown.

        Raises:
            Unauthenticated: With TLS, the caller has no identity of this system.
        """
        return None if self._insecure else peer_identity(context)

    def stream_identity(self, connection: object, role: Role) -> Identity | None:
        """Returns who opens a control stream as a gateway or an agent; None without TLS.

        Args:
            connection: The TLS object of the connection.
            role: The role in which it is opened.

        Raises:
            Unauthenticated: The peer has no identity of this system.
            PermissionDenied: It is of another cluster, or has another role.
        """
        if self._insecure:
            return None
        identity = identity_of_socket(connection)
        require_role(identity, self._cluster, (role,), f"open a control stream as {role}")
        return identity

    def check(self, method: str, context: Context) -> None:
        """Checks that the caller may call a method.

        Raises:
            PermissionDenied: The caller may not, or nobody may.
            Unauthenticated: The caller shows no certificate of this system.
        """
        rule = RULES.get(method)
        if rule is None:
            raise PermissionDenied(f"nobody may call {method}")
        if rule.is_public:
            return
        doing = f"call {method.rpartition('/')[2]}"
        identity = self.identity(context)
        if identity is not None:
            require_role(identity, self._cluster, rule.roles | rule.with_key, doing)
            if identity.role in rule.roles:
                return
        if rule.with_key and (identity is not None or self._keys.enabled):
            self._check_key(context, doing)

    def _check_key(self, context: Context, doing: str) -> None:
        if not self._keys.enabled:
            raise PermissionDenied(f"only an operator may {doing}")
        metadata = context.invocation_metadata() or ()
        presented = next((str(value) for key, value in metadata if key == "authorization"), None)
        try:
            self._keys.check(presented).require(SCOPE_ADMIN)
        except Unauthenticated as error:
            # The caller is known and lacks only the right to make this call.
            raise PermissionDenied(
                f"to {doing} takes an operator's key with the scope '{SCOPE_ADMIN}'"
            ) from error


class RoleCallAuthorizer:
    """Admits the calls that the table allows, before the service sees them."""

    def __init__(self, authorizer: RoleAuthorizer) -> None:
        self._authorizer = authorizer

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns "", by which the caller's address stands for the caller in limits.

        Raises:
            PermissionDenied: The caller may not make this call.
            Unauthenticated: The caller shows no certificate of this system.
        """
        try:
            self._authorizer.check(method, context)
        except CatenaryError as error:
            self.refused(method, context, error)
            raise
        return ""

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Logs a call that was not admitted."""
        _log.warning("call_refused", method=method, reason=error.message, peer=context.peer())


class OpenCallAuthorizer:
    """Admits everybody, at a server without an authorizer."""

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns "", by which the caller's address stands for the caller in limits."""
        return ""

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Ignores the refusal, of which the caller learns."""
