"""Who a call or request is from, for the length of it: what is its fault is charged to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from catenary_gateway.admission.quotas import Quotas
from catenary_services.errors import CatenaryError, ClientError, RequestCancelled
from catenary_services.security.keys import Principal


@dataclass(slots=True)
class Caller:
    """Whoever sent what is worked on now."""

    quotas: Quotas
    subject: str
    """Who is charged: an address, or a key once it is known."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of a gRPC call."""
    principal: Principal | None = None
    read_bytes: int = 0
    """Of the body, decompressed, until now."""

    def charge(self, error: CatenaryError) -> None:
        """Charges a request that was refused for what it is."""
        if isinstance(error, ClientError) and not isinstance(error, RequestCancelled):
            self.quotas.fault(self.subject, self.read_bytes)


caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Each gRPC call has a context of its own; the HTTP endpoint sets it anew for each request."""


def entered() -> Principal:
    """Returns who was let in at the headers of this call."""
    found = caller.get()
    assert found is not None
    assert found.principal is not None
    return found.principal


def presented() -> Mapping[str, str]:
    """Returns the text metadata of this call."""
    found = caller.get()
    return {} if found is None else found.metadata


def charged_subject() -> str:
    """Returns who is charged for this call: a key, or an address."""
    found = caller.get()
    return "" if found is None else found.subject


def charge(error: CatenaryError) -> None:
    """Charges whoever sent what is worked on now, if `error` is their fault."""
    found = caller.get()
    if found is not None:
        found.charge(error)
