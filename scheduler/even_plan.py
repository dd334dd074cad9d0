"""Follows the agents that are there with an even split, without haste.

A new agent is used after a quiet moment (others may be coming), a lost one is waited for a while
(it is probably being restarted, and loading its partitions again is quicker than moving them all).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.planning import DeployedModel, Placement, even_split
from scheduler.roster import Roster, present
from scheduler.targets import agents_of, without
from services.domain.ids import AgentId
from services.errors import CatenaryError


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an even split waits for what."""

    settle_s: float = 1.0
    replan_after_s: float = 5.0
    expected_agents: int = 1


class EvenPlan:
    """The present even split, if any.

    Attributes:
        problem: Why there is none, or not the one there should be; empty if all is well.
    """

    def __init__(self, patience: Patience, started_s: float) -> None:
        self._patience = patience
        self._started_s = started_s
        self._placement: Placement | None = None
        self._agents: frozenset[AgentId] = frozenset()
        self._models: tuple[DeployedModel, ...] = ()
        self.problem = ""

    def restore(self, placement: Placement, models: Sequence[DeployedModel]) -> None:
        """Goes on from what a predecessor had."""
        self._placement = placement
        self._agents = frozenset(agents_of(placement))
        self._models = tuple(models)

    def follow(
        self, models: Sequence[DeployedModel], roster: Roster, now_s: float
    ) -> Placement | None:
        """Returns the split to be served by now; None if there cannot be one yet."""
        there = {record.agent.agent_id: record for record in present(roster)}
        eligible = frozenset(there) | self._awaited(roster, now_s)
        if eligible == self._agents and tuple(models) == self._models:
            return self._placement
        new = there.keys() - self._agents
        arrived_s = max((there[agent].since_s for agent in new), default=0.0)
        unseen = eligible - roster.keys()  # after a change of leader; they are about to report
        if unseen or now_s - arrived_s < self._patience.settle_s:
            return self._kept(roster)
        if self._placement is None and len(eligible) < self._patience.expected_agents:
            self.problem = (
                f"{len(eligible)} of {self._patience.expected_agents} expected agents are there"
            )
            return None
        self._agents, self._models = eligible, tuple(models)
        self._split(roster)
        return self._kept(roster)

    def _split(self, roster: Roster) -> None:
        agents = [roster[agent].agent for agent in sorted(self._agents) if agent in roster]
        if not agents or not self._models:
            self.problem = "no agent is there" if self._models else ""
            self._placement = None
            return
        try:
            self._placement = even_split(self._models, agents)
            self.problem = ""
        except CatenaryError as error:
            self.problem = error.message

    def _awaited(self, roster: Roster, now_s: float) -> frozenset[AgentId]:
        """Agents of the split that are gone, but may come back."""
        awaited = set()
        for agent in self._agents:
            record = roster.get(agent)
            gone_s = self._started_s if record is None else record.since_s
            is_gone = record is None or (record.session is None and not record.draining)
            if is_gone and now_s - gone_s < self._patience.replan_after_s:
                awaited.add(agent)
        return frozenset(awaited)

    def _kept(self, roster: Roster) -> Placement | None:
        if self._placement is None:
            return None
        return without(self._placement, {a for a, record in roster.items() if record.draining})
