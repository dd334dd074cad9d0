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
    peer_identity,
    require_name,
    require_role,
)
from catenary_services.security.keys import SCOPE_ADMIN, ApiKeys

_log = get_logger("catenary_services.security")
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """The callers a method admits."""

    roles: frozenset[Role]
    """Roles that are admitted by their certificate alone."""
    with_key: frozenset[Role] = frozenset()
    """Roles that are admitted on behalf of an operator, whose API key (scope `admin`) comes with
    the call."""
    is_door: bool = False
    """Whether the method is for the public: the service itself checks API keys instead of
    certificates."""


ANYBODY: Final = Rule(frozenset(Role))
GATEWAYS: Final = Rule(frozenset({Role.GATEWAY}))
AGENTS: Final = Rule(frozenset({Role.AGENT}))
PEERS: Final = Rule(frozenset({Role.GATEWAY, Role.AGENT}))
LOOK: Final = Rule(frozenset({Role.GATEWAY, Role.OPERATOR}))
CHANGE: Final = Rule(frozenset({Role.OPERATOR}), with_key=frozenset({Role.GATEWAY}))
DOOR: Final = Rule(frozenset(), is_door=True)

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        # Scheduler: streams of gateways and agents
        "/catenary.v1.Scheduler/GatewaySession": GATEWAYS,
        "/catenary.v1.Scheduler/AgentSession": AGENTS,
        # Scheduler, and the gateway's port for operators: methods that only read
        "/catenary.v1.Admin/GetStatus": LOOK,
        "/catenary.v1.Admin/GetPlan": LOOK,
        "/catenary.v1.Admin/ListSessions": LOOK,
        "/catenary.v1.Admin/GetTrace": LOOK,
        "/catenary.v1.Admin/GetTimelines": LOOK,
        "/catenary.v1.Admin/ListRequests": LOOK,
        "/catenary.v1.Admin/WatchScaling": LOOK,
        # The same: methods that change the cluster; a gateway alone cannot drain
        "/catenary.v1.Admin/ApplyPlan": CHANGE,
        "/catenary.v1.Admin/Replan": CHANGE,
        "/catenary.v1.Admin/DeployModel": CHANGE,
        "/catenary.v1.Admin/DrainAgent": CHANGE,
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
        "/inference.GRPCInferenceService/ServerLive": DOOR,
        "/inference.GRPCInferenceService/ServerReady": DOOR,
        "/inference.GRPCInferenceService/ServerMetadata": DOOR,
        "/inference.GRPCInferenceService/ModelReady": DOOR,
        "/inference.GRPCInferenceService/ModelMetadata": DOOR,
        "/inference.GRPCInferenceService/ModelInfer": DOOR,
        "/inference.GRPCInferenceService/ModelStreamInfer": DOOR,
        "/inference.GRPCInferenceService/RepositoryIndex": DOOR,
        "/inference.GRPCInferenceService/RepositoryModelLoad": DOOR,
        "/inference.GRPCInferenceService/RepositoryModelUnload": DOOR,
        "/catenary.v1.Generation/Generate": DOOR,
    }
)


class Guard:
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

    def check_name(self, context: Context, claimed: str) -> None:
        """Checks that the caller has the name it claims.

        Raises:
            PermissionDenied: The caller's certificate has another name.
        """
        identity = self.identity(context)
        if identity is not None:
            require_name(identity, claimed)

    def check(self, method: str, context: Context) -> None:
        """Checks that the caller may call a method.

        Raises:
            PermissionDenied: The caller may not, or nobody may.
            Unauthenticated: The caller shows no certificate of this system.
        """
        rule = RULES.get(method)
        if rule is None:
            raise PermissionDenied(f"nobody may call {method}")
        if rule.is_door:
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


class RoleGate:
    """Admits the calls that the table allows, before the service sees them."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns "", by which the caller's address stands for the caller in limits.

        Raises:
            PermissionDenied: The caller may not make this call.
            Unauthenticated: The caller shows no certificate of this system.
        """
        try:
            self._guard.check(method, context)
        except CatenaryError as error:
            self.refused(method, context, error)
            raise
        return ""

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Logs a call that was not admitted."""
        _log.warning("call_refused", method=method, reason=error.message, peer=context.peer())


class OpenGate:
    """Admits everybody, at a server without a guard."""

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns "", by which the caller's address stands for the caller in limits."""
        return ""

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Ignores the refusal, of which the caller learns."""
