"""The caller of the present call or request, who is charged if a refusal is the caller's fault."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from catenary_gateway.admission.quotas import Quotas
from catenary_services.errors import CatenaryError, ClientError, RequestCancelled
from catenary_services.security.keys import Principal


@dataclass(slots=True)
class Caller:
    """The sender of the call or request that is being worked on."""

    quotas: Quotas
    subject: str
    """Name of who is charged: an address, or a key once it is known."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text metadata of a gRPC call; empty for HTTP."""
    principal: Principal | None = None
    read_bytes: int = 0
    """Bytes of the body that were read so far, decompressed."""

    def charge(self, error: CatenaryError) -> None:
        """Charges the caller for a refused request, if the error is the caller's fault."""
        if isinstance(error, ClientError) and not isinstance(error, RequestCancelled):
            self.quotas.fault(self.subject, self.read_bytes)


caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the present call. Each gRPC call has a context of its own; the HTTP endpoint sets
the variable for each request."""


def entered() -> Principal:
    """Returns the principal that was let in at the headers of this call."""
    found = caller.get()
    assert found is not None
    assert found.principal is not None
    return found.principal


def presented() -> Mapping[str, str]:
    """Returns the text metadata of this call."""
    found = caller.get()
    return {} if found is None else found.metadata


def charged_subject() -> str:
    """Returns who is charged for this call: a key, or an address; "" outside of calls."""
    found = caller.get()
    return "" if found is None else found.subject


def charge(error: CatenaryError) -> None:
    """Charges the present caller if `error` is the caller's fault."""
    found = caller.get()
    if found is not None:
        found.charge(error)
