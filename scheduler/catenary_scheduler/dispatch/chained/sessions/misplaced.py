"""Finds misplaced sessions: those on agents that drain, or on partitions no plan has any more."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.tracking import Session
from catenary_services.domain.plan import Plan


class MisplacedSessions:
    """Keeps `SessionTable.misplaced` up to date.

    Args:
        table: The state.
    """

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    def hosted_by(self, plan: Plan) -> None:
        """Notes the partitions of a plan."""
        hosted = {(each.agent, each.partition) for model in plan.models for each in model.caches}
        for model in plan.models:
            for chain in model.chains:
                hosted.update([(hop.agent, hop.partition) for hop in chain.hops])
        self._table.hosted = hosted

    def find(self) -> None:
        """Finds all misplaced sessions after a change of agents or plan."""
        self._table.misplaced = {}
        for session in self._table.sessions.values():
            self.look_at(session)

    def look_at(self, session: Session) -> None:
        """Checks whether a session is misplaced that may be so since now."""
        if session.sequence is not None and self._is_misplaced(session):
            self._table.misplaced[session.session_id] = None
            self._table.dirty[session.sequence.model] = None

    def _is_misplaced(self, session: Session) -> bool:
        table = self._table
        if any(hop.agent in table.draining for hop in session.hops):
            return True
        route = session.route
        if route is None or route.capacity > 0 or table.plan is None:
            return False
        return any((hop.agent, hop.partition) not in table.hosted for hop in session.hops)
