"""Orders to load that were sent to agents, and the times of their repetition.

An agent that cannot load something is no obstacle to the others: the availability says so from then
on, and planner and dispatcher go on without it. It is asked again after a pause that doubles every
time, and at once if it connects anew.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.planning.requirements import CacheRequirement, PartitionRequirement
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, PartitionKey

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0


@dataclass(slots=True)
class _Order:
    again_s: float
    """The order is not sent again before this moment."""
    open: bool = False
    """True if it was sent, and neither carried out nor refused."""
    failures: int = 0
    problem: str = ""
    out_of_memory: bool = False
    """True if the last failure was for lack of memory, which unloading other partitions may
    provide."""
    since_s: float = 0.0
    """Moment at which an open order was first sent."""
    requirement: PartitionRequirement | None = None
    """The requirement with which it was last ordered."""


class LoadOrders:
    """Orders that are open or failed, by agent and partition.

    Args:
        timeout_s: An order not answered for this long has failed.
        attempts: Number of failures after which an agent counts as unable.
        availability: Is told which agents are unable.
    """

    def __init__(
        self, timeout_s: float, attempts: int = 1, availability: Availability | None = None
    ) -> None:
        self._availability = availability or Availability()
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._orders: dict[AgentId, dict[PartitionKey, _Order]] = {}

    def is_due(
        self,
        agent: AgentId,
        partition: PartitionKey,
        now_s: float,
        requirement: PartitionRequirement | None = None,
    ) -> bool:
        """True if the order should be sent now; it then counts as sent.

        An open order is sent again at once if another cache is needed than it asked for.
        """
        order = self._of(agent, partition)
        is_another = (
            order is not None
            and order.open
            and _cache_of(order.requirement) != _cache_of(requirement)
        )
        if order is not None and now_s < order.again_s and not is_another:
            return False
        if order is None:
            order = self._new(agent, partition)
        if not order.open:
            order.since_s = now_s
        order.again_s = now_s + self._timeout_s
        order.open, order.requirement = True, requirement
        return True

    def is_open(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True while an order waits for its answer."""
        order = self._of(agent, partition)
        return order is not None and order.open

    def open_of(self, agent: AgentId) -> dict[PartitionKey, PartitionRequirement | None]:
        """Returns the open orders of an agent, with their requirements."""
        return {
            k: order.requirement for k, order in self._orders.get(agent, {}).items() if order.open
        }

    def lacks_memory(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True if the last attempt failed for lack of memory."""
        order = self._of(agent, partition)
        return order is not None and order.out_of_memory and not order.open

    def refused(self, agent: AgentId) -> dict[PartitionKey, PartitionRequirement]:
        """Returns the partitions that an agent failed to load, with their requirements."""
        return {
            key: order.requirement
            for key, order in self._orders.get(agent, {}).items()
            if order.failures and order.requirement is not None
        }

    def expire(self, now_s: float) -> None:
        """Counts open orders that timed out as failed."""
        for agent, orders in self._orders.items():
            for partition, order in list(orders.items()):
                if order.open and now_s - order.since_s >= self._timeout_s:
                    problem = f"it was not done within {self._timeout_s:g} s"
                    self.failed(agent, partition, problem, now_s)

    def progressed(self, agent: AgentId, model: ModelKey, since_s: float) -> None:
        """Notes that an agent made progress with a model: its orders count from that moment.

        It fetches the model's files, or loads them, as an engine that says how it starts.
        """
        for partition, order in self._orders.get(agent, {}).items():
            if order.open and partition.model == model and since_s > order.since_s:
                order.since_s = since_s
                order.again_s = since_s + self._timeout_s

    def loaded(self, agent: AgentId, partition: PartitionKey) -> None:
        """Handles an order that was carried out."""
        self._orders.get(agent, {}).pop(partition, None)
        self._availability.may_load(agent, partition)

    def failed(
        self,
        agent: AgentId,
        partition: PartitionKey,
        problem: str,
        now_s: float,
        *,
        out_of_memory: bool = False,
    ) -> None:
        """Handles a failed order; it is repeated after a pause that doubles every time."""
        order = self._of(agent, partition) or self._new(agent, partition)
        backoff = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**order.failures)
        order.failures += 1
        order.problem = problem
        order.out_of_memory = out_of_memory
        order.again_s = now_s + backoff
        order.open = False
        if order.failures >= self._attempts:
            until = int(order.again_s * NANOSECONDS_PER_SECOND)
            self._availability.cannot_load(agent, partition, problem, until)

    def forget(self, agent: AgentId) -> None:
        """Forgets all orders of an agent that is gone or has made room."""
        for partition in self._orders.pop(agent, {}):
            self._availability.may_load(agent, partition)

    def keep(
        self,
        required: Callable[[AgentId], Container[PartitionKey]],
        models: Container[ModelKey] = (),
    ) -> None:
        """Forgets the orders that are no longer wanted, except failures of the given models."""
        for agent, orders in self._orders.items():
            mine = required(agent)
            for key in [key for key in orders if key not in mine]:
                if not orders[key].failures or key.model not in models:
                    del orders[key]
                    self._availability.may_load(agent, key)

    def problems(
        self, model: ModelKey, server_of: Mapping[AgentId, str] | None = None
    ) -> list[str]:
        """Returns sentences about what could not be loaded of a model, and on which machine."""
        servers = server_of or {}
        where = {agent: f" on server {server}" for agent, server in servers.items()}
        return [
            f"agent {agent}{where.get(agent, '')} cannot load {partition.model} blocks "
            f"{partition.first_block} to {partition.last_block}: {order.problem}"
            for agent, orders in self._orders.items()
            for partition, order in orders.items()
            if partition.model == model and order.problem
        ]

    def _of(self, agent: AgentId, partition: PartitionKey) -> _Order | None:
        return self._orders.get(agent, {}).get(partition)

    def _new(self, agent: AgentId, partition: PartitionKey) -> _Order:
        order = self._orders.setdefault(agent, {})[partition] = _Order(0.0)
        return order


def _cache_of(requirement: PartitionRequirement | None) -> CacheRequirement | None:
    return requirement.cache if requirement is not None else None
