"""Composed chains in the simulator, served by the scheduler's own dispatcher."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory
from catenary_scheduler.dispatch.events import AgentJoined, PlanActivated
from catenary_scheduler.planning.chains.problem import Composition
from catenary_scheduler.planning.chains.replay import replayed
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    Nanoseconds,
    ServerId,
)
from catenary_services.domain.plan import Agent
from catenary_simulator.chains.cluster import ChainsCluster
from catenary_simulator.chains.loop import SessionDurations, SessionLoop
from catenary_simulator.chains.plan import plan_of
from catenary_simulator.chains.result import ChainResult, result_of
from catenary_simulator.chains.workload import SessionWorkload

MODEL = ModelKey("simulated", "1")
JFFC = "jffc"
_BYTES_PER_GB = 10**9


def serve_chains(
    cluster: ChainsCluster,
    composition: Composition,
    policy: str | PolicyFactory,
    workload: SessionWorkload,
    stopwatch: Callable[[], Nanoseconds] | None = None,
    *,
    checked: bool = False,
) -> ChainResult:
    """Runs a workload on composed chains, and returns its times.

    Args:
        cluster: The servers.
        composition: The chains over the servers.
        policy: The choice of a session's chain: a name of the scheduler's, or a policy factory.
        workload: The sessions.
        stopwatch: Clock in nanoseconds to time every decision with; None: they are not timed.
        checked: True if all invariants of the dispatcher are checked after every event, for tests.
    """
    # No session is rejected, because queues in the paper's model are unlimited.
    most = len(workload) + 1
    limits = ChainedConfig(max_queued=most, max_requests=most, checked=checked)
    dispatcher = ChainedDispatcher(limits, policy=policy, stopwatch=stopwatch)
    for server in cluster.servers:
        dispatcher.handle(AgentJoined(_agent(server.name, server.gpu.memory_gb)), 0)
    dispatcher.handle(PlanActivated(plan_of(composition, MODEL)), 0)
    # The book's journal is for Redis; here nothing reads it, so it is dropped as it grows.
    loop = SessionLoop(
        dispatcher, MODEL, workload, SessionDurations(cluster, workload), dispatcher.take_changes
    )
    loop.run()
    return result_of(workload, loop, dispatcher.take_decision_times())


class ReplayEvaluator:
    """An evaluator of chains for tuning c, which returns their mean response to a workload.

    The bounds of Theorem 3.7 use only the mean rate and assume Poisson arrivals; for bursty load
    they choose too few caches.

    Args:
        cluster: The servers.
        workload: The sessions that are replayed.
        policy: The choice of a session's chain.
    """

    def __init__(
        self,
        cluster: ChainsCluster,
        workload: SessionWorkload,
        policy: str | PolicyFactory = "jffc",
    ) -> None:
        self._cluster = cluster
        self._workload = workload
        self._policy = policy

    def __call__(self, composition: Composition) -> float:
        """Returns the mean response in seconds; infinity if there is no chain."""
        if not composition.feasible:
            return float("inf")
        if self._policy == JFFC:
            return self._replayed_s(composition)
        served = serve_chains(self._cluster, composition, self._policy, self._workload)
        return served.mean_response_s

    def _replayed_s(self, composition: Composition) -> float:
        """Returns what the dispatcher would give by JFFC, as the scheduler tunes its own chains."""
        plan = plan_of(composition, MODEL).models[0]
        chains = sorted(plan.chains, key=lambda chain: chain.service_ns)
        durations = SessionDurations(self._cluster, self._workload)
        responses = replayed(
            [chain.capacity for chain in chains],
            self._workload.arrived_ns,
            lambda number, rank: durations.of(number, chains[rank].hops),
        )
        return sum(responses) / len(responses) / NANOSECONDS_PER_SECOND


def _agent(name: str, memory_gb: float) -> Agent:
    memory = round(memory_gb * _BYTES_PER_GB)
    return Agent(AgentId(name), "simulated", ServerId(name), memory, link_bytes_per_second=1)
