"""The book against what agents hold and gateways wait for: what leaked is found and mended.

    facts       what the book says, what agents and gateways say, at one moment
    suspicions  where they differ
    auditor     which of that is a leak, and not a message under way
    remedies    what mends a leak: the events and orders there are anyway

Pure: time is an argument. `scheduler/catenary_scheduler/runtime/book_audit.py` asks agents and
gateways, and carries remedies out.
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
