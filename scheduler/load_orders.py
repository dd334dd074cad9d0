"""Which partitions were ordered from which agents, and when to ask again."""

from __future__ import annotations

from dataclasses import dataclass

from services.domain.ids import AgentId, ModelKey, PartitionKey

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0


@dataclass(slots=True)
class _Order:
    again_s: float
    """Not to be sent again before this."""
    failures: int = 0
    problem: str = ""


class LoadOrders:
    """Orders under way or failed, by agent and partition."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._orders: dict[tuple[AgentId, PartitionKey], _Order] = {}

    def is_due(self, agent: AgentId, partition: PartitionKey, now_s: float) -> bool:
        """True if the order should be sent now; it then counts as sent."""
        order = self._orders.get((agent, partition))
        if order is not None and now_s < order.again_s:
            return False
        if order is None:
            order = self._orders[agent, partition] = _Order(0.0)
        order.again_s = now_s + self._timeout_s
        return True

    def loaded(self, agent: AgentId, partition: PartitionKey) -> None:
        """The order was carried out."""
        self._orders.pop((agent, partition), None)

    def failed(self, agent: AgentId, partition: PartitionKey, problem: str, now_s: float) -> None:
        """The agent could not; it is asked again after a while that doubles every time."""
        order = self._orders.setdefault((agent, partition), _Order(0.0))
        backoff = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**order.failures)
        order.failures += 1
        order.problem = problem
        order.again_s = now_s + backoff

    def forget(self, agent: AgentId) -> None:
        """The agent is gone, and every order with it."""
        for key in [key for key in self._orders if key[0] == agent]:
            del self._orders[key]

    def problems(self, model: ModelKey) -> list[str]:
        """Returns, in words, what could not be loaded of a model."""
        return [
            f"{agent} cannot load {partition}: {order.problem}"
            for (agent, partition), order in self._orders.items()
            if partition.model == model and order.problem
        ]
