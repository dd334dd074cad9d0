"""The placement policies by name."""

from __future__ import annotations

from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.placement.least_time_placer import LeastTimePlacer
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.policies.jffc import JoinFastestFreeChain
from catenary_scheduler.dispatch.chained.policies.pairing import PairPolicy
from catenary_scheduler.dispatch.chained.queues.wait_queue import CentralQueue, PolicyFactory
from catenary_services.errors import InvalidInput


def _fastest_free_chain(slots: SlotLedger) -> CentralQueue:
    return CentralQueue(PairPolicy(JoinFastestFreeChain(slots), slots))


_FACTORIES: dict[str, PolicyFactory] = {
    "jffc": _fastest_free_chain,
    "slo": SloPlacer,
    "least-time": LeastTimePlacer,
}
POLICIES = tuple(_FACTORIES)
"""Names of the policies; the one of a deployment without settings is `chain_policy`'s default."""


def policy_factory(name: str) -> PolicyFactory:
    """Returns the factory of a policy; it is called once per model.

    Raises:
        InvalidInput: There is no policy of this name.
    """
    if name not in _FACTORIES:
        raise InvalidInput("policy", f"must be one of {', '.join(POLICIES)}")
    return _FACTORIES[name]
