"""Which differences are leaks.

What differs once may be a frame under way. What differs in two audits in a row, `grace_ns` or more
apart, is a leak: no frame is under way for so long. So a leak is mended by the second audit after
it came about, if audits are that far apart.
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
    """Asks and judges: `begin`, answers, `end`, and again.

    Attributes:
        audits: How many are done.
        mended: What the audit before the last one found leaked, and the last one did not any more.
    """

    def __init__(self, grace_ns: Nanoseconds) -> None:
        """Suspects nobody."""
        self.audits = 0
        self.mended: list[Leak] = []
        self._grace_ns = grace_ns
        self._asked: SchedulerHoldings | None = None
        self._agents: dict[AgentId, AgentHoldings] = {}
        self._gateways: dict[GatewayId, GatewayRequests] = {}
        self._suspected: dict[_Key, Nanoseconds] = {}
        """Since when."""
        self._leaked: list[Leak] = []

    @property
    def is_open(self) -> bool:
        """True while answers are waited for."""
        return self._asked is not None

    @property
    def is_complete(self) -> bool:
        """True once every agent that was there when it was asked has answered."""
        return self._asked is not None and self._asked.agents <= self._agents.keys()

    @property
    def agents(self) -> Mapping[AgentId, AgentHoldings]:
        """What agents said last, as far as they have answered."""
        return self._agents

    def begin(self, book: SchedulerHoldings) -> None:
        """Agents and gateways are being asked."""
        self._asked = book
        self._agents, self._gateways = {}, {}

    def agent_says(self, agent: AgentId, held: AgentHoldings) -> None:
        """An agent has answered."""
        if self._asked is not None and agent in self._asked.agents:
            self._agents[agent] = held

    def gateway_says(self, gateway: GatewayId, wants: GatewayRequests) -> None:
        """A gateway has answered."""
        if self._asked is not None:
            self._gateways[gateway] = wants

    def gone(self, who: AgentId | GatewayId) -> None:
        """An agent's or gateway's stream ended: what it said is not true of the next one."""
        self._agents.pop(AgentId(who), None)
        self._gateways.pop(GatewayId(who), None)

    def end(self, book: SchedulerHoldings, now: Nanoseconds) -> list[Leak]:
        """Returns what leaked; who has not answered is not judged.

        Args:
            book: As it is now.
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
    """Returns what is the same in two audits if it is the same leak."""
    return (leak.kind, leak.agent, leak.session, leak.batch, leak.request, leak.partition)
