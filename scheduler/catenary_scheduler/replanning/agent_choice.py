"""Chooses the agents to plan on by what they are able to do, and says when that has changed."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.requirements import needs_any
from catenary_services.domain.ids import AgentId, ModelKey

Unable = Mapping[ModelKey, frozenset[AgentId]]
"""Agents that could not load a part of a model, by model."""


class AgentChoice:
    """The choice of agents that are fit to be planned on, and of those to plan a model around.

    Attributes:
        left_out: The agents that the last choice left out because they are broken, in quarantine or
            draining.
    """

    def __init__(self, availability: Availability) -> None:
        self._availability = availability
        self._around: Unable = {}
        """The agents that were left out by model when the last plan was made."""
        self._takes_unfit = False
        """True if no plan was possible without agents that are broken or in quarantine."""
        self.left_out: frozenset[AgentId] = frozenset()

    def fit(self, there: frozenset[AgentId]) -> frozenset[AgentId]:
        """Returns the agents to plan on: unfit ones only if there is no plan without them."""
        fit = self._availability.plannable(there)
        self.left_out = there - fit
        if not self.left_out:
            self._takes_unfit = False
        return there if self._takes_unfit else fit

    def take_the_unfit(self) -> bool:
        """Has unfit agents planned on from now on; False if that changes nothing."""
        if not self.left_out or self._takes_unfit:
            return False
        self._takes_unfit = True
        return True

    def unable(self, agents: frozenset[AgentId]) -> Unable:
        """Returns, by model, those of some agents that could not load a part of it."""
        known = self._availability.unable()
        found = {model: names & agents for model, names in known.items()}
        return {model: names for model, names in found.items() if names}

    def planned(self, unable: Unable) -> None:
        """Records the agents that a plan leaves out for a model."""
        self._around = unable

    def changed(self, placement: Placement | None, agents: frozenset[AgentId]) -> str:
        """Returns in words whose abilities make another plan worth while; empty if nobody's do.

        Args:
            placement: The placement of the last plan; None if there is none.
            agents: The agents that it was made for.
        """
        if placement is None:
            return ""
        unable, none = self.unable(agents), frozenset[AgentId]()
        for model, around in self._around.items():
            back = around & agents & self._availability.connected_agents
            if able := sorted(back - unable.get(model, none)):
                return f"{', '.join(able)} can load {model} after all"
        for placed in placement.models:
            around = self._around.get(placed.model, none)
            new = unable.get(placed.model, none) - around
            if new and needs_any(placed, new | around) and agents - new - around:
                return f"{', '.join(sorted(new))} cannot load {placed.model}"
        return ""
