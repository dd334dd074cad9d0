"""TLS of a gateway's endpoints, and the credentials it passes on to the scheduler."""

from __future__ import annotations

from contextvars import ContextVar

from catenary_gateway.settings import GatewaySettings
from catenary_services.errors import InvalidInput
from catenary_services.security.roles import RoleAuthorizer
from catenary_services.security.tls import ServerSecurity

on_behalf_of: ContextVar[str] = ContextVar("on_behalf_of", default="")
"""The `authorization` that the present call's sender gave. The scheduler gets it too, because a
gateway may not change the cluster by itself. Each call has a context of its own."""


def passed_on(metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...] | None:
    """Returns the metadata of a call to the scheduler, with the sender's credentials if any."""
    presented = on_behalf_of.get()
    return (*metadata, ("authorization", presented)) if presented else metadata or None


def endpoint_security(settings: GatewaySettings) -> ServerSecurity:
    """Returns the TLS settings for clients: TLS without client certificates by default.

    Raises:
        InvalidInput: The settings contradict each other.
    """
    if settings.endpoints_insecure and not settings.insecure:
        if settings.endpoint_cert_file is not None:
            raise InvalidInput("endpoints_insecure", "contradicts endpoint_cert_file")
        return ServerSecurity(insecure=True)
    usual = ServerSecurity.from_settings(settings, mutual=False)
    if settings.endpoint_cert_file is None:
        return usual
    if settings.insecure:
        raise InvalidInput("insecure", "contradicts endpoint_cert_file")
    if settings.endpoint_key_file is None:
        raise InvalidInput("endpoint_key_file", "not set, but endpoint_cert_file is")
    return ServerSecurity(
        cert_file=settings.endpoint_cert_file, key_file=settings.endpoint_key_file
    )


def admin_security(
    settings: GatewaySettings, *, has_keys: bool
) -> tuple[ServerSecurity, RoleAuthorizer | None]:
    """Returns TLS and authorization for operators, who have keys or else certificates."""
    if has_keys or settings.endpoints_insecure or settings.insecure:
        return endpoint_security(settings), None
    return ServerSecurity.from_settings(settings), RoleAuthorizer(settings.cluster, insecure=False)
