"""Compares the book with what agents hold and gateways wait for; finds leaks and repairs them.

    holdings  what the book says, what agents and gateways say, at one moment
    leaks     where they differ
    auditor   which of the differences are leaks, and not messages in flight
    remedies  what repairs a leak: events and orders that exist anyway

Nothing here does I/O, and time is an argument. `book_audit.py` of the `runtime` package asks agents
and gateways, and carries the remedies out.
"""

from catenary_scheduler.dispatch.auditing.auditor import Auditor
from catenary_scheduler.dispatch.auditing.holdings import (
    AgentHoldings,
    ExpectedSession,
    GatewayRequests,
    SchedulerHoldings,
)
from catenary_scheduler.dispatch.auditing.leaks import Leak, LeakKind
from catenary_scheduler.dispatch.auditing.remedies import Remedy, remedy_of

__all__ = [
    "AgentHoldings",
    "Auditor",
    "ExpectedSession",
    "GatewayRequests",
    "Leak",
    "LeakKind",
    "Remedy",
    "SchedulerHoldings",
    "remedy_of",
]
