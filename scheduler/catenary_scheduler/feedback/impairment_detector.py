"""Impairs agents that became slow, and those that have not been heard of for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from catenary_scheduler.agents.registry import AgentStream
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.observed.stragglers import StragglerDetector
from catenary_services.domain.ids import AgentId, Nanoseconds, PartitionKey
from catenary_services.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImpairmentRules:
    """Limits beyond which an agent counts as slow or as silent."""

    factor: float
    silent_s: float
    """Seconds of silence after which an agent, and all that is sent to it, may be lost."""


class ImpairmentDetector:
    """Turns reports and silence of agents into impairments."""

    def __init__(
        self,
        rules: ImpairmentRules,
        availability: Availability,
        sessions: Callable[[], Iterable[tuple[AgentId, AgentStream]]],
        note: Callable[[str, dict[str, str]], None],
    ) -> None:
        """Makes a detector that impairs nobody yet.

        Args:
            rules: Limits of slowness and silence.
            availability: Is told of impairments.
            sessions: Returns the connected agents with their sessions.
            note: Enters an event, by its kind and its facts, into the event stream.
        """
        self._stragglers = StragglerDetector(rules.factor)
        self._silent_s = rules.silent_s
        self._availability = availability
        self._sessions = sessions
        self._note = note

    def reported(
        self,
        agent: AgentId,
        partition: PartitionKey,
        rows: int,
        real_ns: Nanoseconds,
        now: Nanoseconds,
    ) -> None:
        """Compares a batch's duration with earlier ones; impairs an agent that became slow.

        `now` is the moment of the report; reports come in the order of their moments.
        """
        found = self._stragglers.reported(agent, partition, rows, real_ns, now)
        if found is not None:
            why = f"it takes {found.ratio:.1f} times as long as before, others do not"
            self._availability.impair(agent, Impairment.STRAGGLING, until=found.until, why=why)
            self._tell("straggler_set_aside", agent)

    def forget(self, agent: AgentId) -> None:
        """Clears the impairments of an agent that is gone."""
        self._stragglers.forget(agent)
        self._availability.clear(agent, Impairment.STRAGGLING)
        self._availability.clear(agent, Impairment.SILENT)

    def tick(self, now: Nanoseconds) -> None:
        """Clears slow agents whose time is over, and impairs or clears agents by their silence."""
        for agent in self._stragglers.look(now):
            self._availability.clear(agent, Impairment.STRAGGLING)
            self._tell("straggler_tried_again", agent)
        since_s = time.monotonic() - self._silent_s
        for agent, session in self._sessions():
            is_marked = self._availability.mark_of(agent, Impairment.SILENT) is not None
            if session.heard_s >= since_s and is_marked:
                self._availability.clear(agent, Impairment.SILENT)
            elif session.heard_s < since_s and not is_marked:
                why = f"nothing was heard of it for {self._silent_s:g} s"
                self._availability.impair(agent, Impairment.SILENT, why=why)

    def _tell(self, kind: str, agent: AgentId) -> None:
        _log.warning(kind, agent=agent)
        self._note(kind, {"agent": agent})
