"""Changes of the cluster: agents that come and go, plans, and measured costs."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.admission.adoption import SessionAdoption
from catenary_scheduler.dispatch.chained.chain_state import set_capacities
from catenary_scheduler.dispatch.chained.sessions.chain_offers import ChainOffers
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.misplaced import MisplacedSessions
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.step_lines import refit_step_lines, take_step_lines
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    LatencyRefitted,
    MoveCostsMeasured,
    PlanActivated,
    SessionsFound,
    SessionsHeld,
)


class ClusterEvents:
    """Handles what changes the chains that sessions may use.

    Args:
        table: The state.
        ledger: Answers requests that no plan serves any more.
        adoption: Compares the book with the sessions that agents hold.
        offers: Has chains used or avoided.
        misplaced: Finds the sessions that must move.
    """

    def __init__(
        self,
        table: SessionTable,
        ledger: RequestLedger,
        adoption: SessionAdoption,
        offers: ChainOffers,
        misplaced: MisplacedSessions,
    ) -> None:
        self._table = table
        self._ledger = ledger
        self._adoption = adoption
        self._offers = offers
        self._misplaced = misplaced

    def agent_joined(self, event: AgentJoined) -> None:
        """Handles an agent that joined: chains through it may be used."""
        table = self._table
        agent = event.agent.agent_id
        table.agents.add(agent)
        table.present.add(agent)
        if not table.availability.is_connected(agent):
            table.availability.connected(agent)
        table.migration_budget.agent_joined(event.agent)
        self._offers.refresh()
        self._misplaced.find()

    def agent_lost(self, event: AgentLost) -> None:
        """Handles the loss of an agent: its sessions are started again elsewhere."""
        table = self._table
        agent = event.agent
        table.agents.discard(agent)
        table.present.discard(agent)
        table.backoff.forget(agent)
        if table.availability.is_connected(agent):
            table.availability.disconnected(agent)
        for model_queue in table.model_queues.values():
            model_queue.prefixes.agent_lost(agent)
        self._adoption.lost(agent, table.slots.sessions_at(agent))
        self._offers.refresh()

    def sessions_held(self, event: SessionsHeld) -> None:
        """Handles the list of all sessions that a connecting agent holds."""
        agent = event.agent
        self._table.present.add(agent)
        held = {each.session for each in event.sessions}
        gone = [each for each in self._table.slots.sessions_at(agent) if each not in held]
        self._adoption.lost(agent, gone)
        for each in event.sessions:
            self._adoption.found(agent, each)

    def sessions_found(self, event: SessionsFound) -> None:
        """Handles sessions that an agent holds and the book lacks, or has with too few slots."""
        for each in event.sessions:
            self._adoption.found(event.agent, each)

    def plan_activated(self, event: PlanActivated) -> None:
        """Takes a plan: sessions go on where they are, waiting requests use the new chains."""
        table = self._table
        table.plan = event.plan
        self._misplaced.hosted_by(event.plan)
        models = {model.model: model for model in event.plan.models}
        for model in models:
            table.model_queue(model)
        for key, model_queue in table.model_queues.items():
            model_queue.activate(models.get(key))
        set_capacities(event.plan, table.slots)
        take_step_lines(event.plan, table.slots)
        self._offers.refresh()
        self._misplaced.find()
        for key, model_queue in list(table.model_queues.items()):
            if not model_queue.served:
                for sequence in model_queue.waiting.sequences():
                    self._ledger.unserved(sequence)
            if model_queue.is_over:
                del table.model_queues[key]

    def refitted(self, event: LatencyRefitted) -> None:
        """Takes in new latency lines of chains."""
        refit_step_lines(event.lines, self._table.slots)
        model_queue = self._table.model_queues.get(event.model)
        if model_queue is not None and model_queue.placer is not None:
            model_queue.placer.workers.refit(event.lines)
            self._table.dirty[event.model] = None

    def move_costs_measured(self, event: MoveCostsMeasured) -> None:
        """Takes in new costs of moves."""
        table = self._table
        for source, target, bytes_per_second in event.links:
            table.migration_budget.measured(source, target, bytes_per_second)
        for model, cache_bytes in event.cache_bytes:
            table.migration_budget.model_has(model, cache_bytes)
        for model, runtime, cache_bytes in event.held_bytes:
            table.migration_budget.model_has(model, cache_bytes, runtime)
