"""Keeps stragglers, and agents that fell silent, out of what is dispatched by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from scheduler.clock import now_ns
from scheduler.stragglers import Stragglers
from services.domain.ids import AgentId, Nanoseconds
from services.domain.plan import Plan
from services.log import get_logger

_log = get_logger(__name__)


class HasHeard(Protocol):
    """What is needed of a session with an agent."""

    heard_s: float


@dataclass(frozen=True, slots=True)
class StragglerRules:
    """When an agent counts as slow, or as quiet."""

    factor: float
    """See `Stragglers`."""
    quiet_s: float
    """Who has said nothing for so long gets nothing new."""


class StragglerDesk:
    """Reports and plans in, plans without those who are set aside out."""

    def __init__(
        self,
        rules: StragglerRules,
        sessions: Callable[[], Iterable[tuple[AgentId, HasHeard]]],
        dispatch: Callable[[Plan], None],
        note: Callable[[str, dict[str, str]], None],
        show: Callable[[float], None],
    ) -> None:
        """Wires it to a term.

        Args:
            rules: Limits.
            sessions: Returns the agents that are connected.
            dispatch: Is told by which plan to dispatch.
            note: Enters what happened into the event stream.
            show: Is told how many are set aside for being slow.
        """
        self._stragglers = Stragglers(rules.factor)
        self._quiet_s = rules.quiet_s
        self._sessions = sessions
        self._dispatch = dispatch
        self._note = note
        self._show = show
        self._plan: Plan | None = None

    def planned(self, plan: Plan) -> None:
        """Dispatch by this plan from now on, as far as its agents are well."""
        self._plan = plan
        self._dispatch(self._stragglers.without(plan))

    def reported(self, agent: AgentId, real_ns: Nanoseconds, booked_ns: Nanoseconds) -> None:
        """An agent took so long for what was booked to take so long."""
        self._stragglers.reported(agent, real_ns, booked_ns, now_ns())

    def forget(self, agent: AgentId) -> None:
        """An agent is gone."""
        self._stragglers.forget(agent)

    def look(self) -> None:
        """Gives nothing new to agents that became slow, and tries those again that were."""
        before = self._stragglers.slow
        if not self._stragglers.look(now_ns(), self._quiet_agents()):
            return
        slow = self._stragglers.slow
        for agent in sorted(slow ^ before):
            kind = "straggler_set_aside" if agent in slow else "straggler_tried_again"
            _log.warning(kind, agent=agent)
            self._note(kind, {"agent": agent})
        self._show(len(slow))
        if self._plan is not None:
            self._dispatch(self._stragglers.without(self._plan))

    def _quiet_agents(self) -> frozenset[AgentId]:
        since_s = time.monotonic() - self._quiet_s
        return frozenset(agent for agent, each in self._sessions() if each.heard_s < since_s)
