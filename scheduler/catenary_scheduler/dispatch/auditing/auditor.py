"""Decides which differences are leaks.

A difference seen once may be due to a frame in flight. A difference in two audits in a row,
`grace_ns` or more apart, is a leak: no frame is in flight for so long. So a leak is repaired by the
second audit after it came about, if audits are that far apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from catenary_scheduler.dispatch.auditing.holdings import (
    AgentHoldings,
    GatewayRequests,
    SchedulerHoldings,
)
from catenary_scheduler.dispatch.auditing.leaks import AuditAnswers, Leak, suspicions
from catenary_services.domain.ids import AgentId, GatewayId, Nanoseconds

_Key = tuple[object, ...]


class Auditor:
    """Runs audits: `begin`, the answers, `end`, and again.

    Attributes:
        audits: Number of finished audits.
        mended: Leaks of the previous audit that the latest one no longer found.
    """

    def __init__(self, grace_ns: Nanoseconds) -> None:
        """Starts without suspicions."""
        self.audits = 0
        self.mended: list[Leak] = []
        self._grace_ns = grace_ns
        self._asked: SchedulerHoldings | None = None
        self._agents: dict[AgentId, AgentHoldings] = {}
        self._gateways: dict[GatewayId, GatewayRequests] = {}
        self._suspected: dict[_Key, Nanoseconds] = {}
        """First moment at which each present difference was seen."""
        self._leaked: list[Leak] = []

    @property
    def is_open(self) -> bool:
        """True while an audit waits for answers."""
        return self._asked is not None

    @property
    def is_complete(self) -> bool:
        """True once every agent has answered that was connected at the beginning of the audit."""
        return self._asked is not None and self._asked.agents <= self._agents.keys()

    @property
    def agents(self) -> Mapping[AgentId, AgentHoldings]:
        """The latest holdings of the agents that have answered."""
        return self._agents

    def begin(self, book: SchedulerHoldings) -> None:
        """Begins an audit; agents and gateways are being asked."""
        self._asked = book
        self._agents, self._gateways = {}, {}

    def agent_says(self, agent: AgentId, held: AgentHoldings) -> None:
        if self._asked is not None and agent in self._asked.agents:
            self._agents[agent] = held

    def gateway_says(self, gateway: GatewayId, wants: GatewayRequests) -> None:
        if self._asked is not None:
            self._gateways[gateway] = wants

    def gone(self, who: AgentId | GatewayId) -> None:
        """Drops the answer of an agent or a gateway whose stream ended."""
        self._agents.pop(AgentId(who), None)
        self._gateways.pop(GatewayId(who), None)

    def end(self, book: SchedulerHoldings, now: Nanoseconds) -> list[Leak]:
        """Ends the audit and returns the leaks; agents that have not answered are not judged.

        Args:
            book: The book at this moment.
            now: The moment.
        """
        if self._asked is None:
            return []
        said = AuditAnswers(self._agents, self._gateways, self._grace_ns)
        leaks: list[Leak] = []
        still: dict[_Key, Nanoseconds] = {}
        found = {key_of(leak): leak for leak in suspicions(self._asked, book, said)}
        for key, leak in found.items():
            since = self._suspected.get(key, now)
            if now - since >= self._grace_ns and key in self._suspected:
                leaks.append(leak)
            else:
                still[key] = since
        self.mended = [leak for leak in self._leaked if key_of(leak) not in found]
        self._leaked = leaks
        self._suspected = still
        self._asked = None
        self.audits += 1
        return leaks


def key_of(leak: Leak) -> _Key:
    """Returns a key that is the same in two audits if the leak is the same."""
    return (leak.kind, leak.agent, leak.session, leak.batch, leak.request, leak.partition)
