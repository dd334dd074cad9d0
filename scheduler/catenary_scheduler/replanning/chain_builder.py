"""Composes chains for the models that generate text, in the memory that other models leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import DeployedModel, ModelPlacement, Placement
from catenary_scheduler.planning.chains import (
    ChainTask,
    Composition,
    Tuning,
    best_composition,
    recompose,
)
from catenary_scheduler.planning.live import (
    USUAL_FRAME_NS,
    ChainCluster,
    ChainLoad,
    SessionShape,
    chain_jobs,
    explain_chains,
    taken_by,
)
from catenary_scheduler.planning.search import (
    ChainSearch,
    idle_reasons,
    in_words,
    search_chains,
)
from catenary_scheduler.replanning.changed_times import Factors
from catenary_scheduler.scaling import SessionLoad
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible
from catenary_services.log import get_logger

_log = get_logger(__name__)
NO_AGENTS = ChainCluster((), (), {}, {}, Placement(()))
_QUICK_AGENTS = 6
"""Searching for so many agents takes 20 to 45 ms: less than starting a process would."""
_QUICK_LINKED = 3
"""The same where links are slow and paths over pairs are looked for, which takes up to three times
as long: at most 25 ms for three agents, and 80 ms for six."""
_NOTABLE = 1.05


@dataclass(frozen=True, slots=True)
class ComposedChains:
    """Chains of the models of a cluster, with notes about them; pickled by the solver."""

    models: tuple[ModelPlacement, ...] = ()
    problems: tuple[str, ...] = ()
    """Reasons why other models have no chains."""
    lines: tuple[str, ...] = ()
    """Sentences on the chains and on what else was there, for people."""
    idle: Mapping[AgentId, tuple[str, ...]] = field(default_factory=dict)
    """Reasons why an agent is on no chain of a model, a model each."""
    guessed: tuple[ModelKey, ...] = ()
    """Models whose chains go by guesses, since no agent has measured them."""


ComposeCluster = Callable[[ChainCluster], Awaitable[ComposedChains]]


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """Models to compose chains for, and the agents and loads to compose them for."""

    models: tuple[DeployedModel, ...]
    """The models that generate text."""
    agents: tuple[Agent, ...]
    loads: Mapping[ModelKey, SessionLoad]
    present: Placement
    """The placement in force or proposed until now."""


class ChainBuilder:
    """Makes chains in this process where that is quick, else in a process of its own.

    Args:
        deployments: The deployed models.
        measured: The measurements of agents.
        compose_elsewhere: Composes the chains of a cluster in another process.
        rules: An empty cluster, with what an operator asked of all chains.
    """

    def __init__(
        self,
        deployments: Deployments,
        measured: MeasuredProfiles,
        compose_elsewhere: ComposeCluster,
        rules: ChainCluster = NO_AGENTS,
    ) -> None:
        self._deployments = deployments
        self._measured = measured
        self._compose_elsewhere = compose_elsewhere
        self._rules = rules

    def link_factors(self, agents: Sequence[Agent]) -> Factors:
        """Returns by how much longer the links between agents take than is assumed."""
        return self._measured.links.known.factors(agents, USUAL_FRAME_NS)

    def is_quick(self, agents: Sequence[Agent], loads: Mapping[ModelKey, SessionLoad]) -> bool:
        """True if `make_now` is fast enough to be called on the event loop: nothing is replayed."""
        if any(load.log is not None for load in loads.values()):
            return False
        is_linked = any(factor > _NOTABLE for factor in self.link_factors(agents).values())
        return len(agents) <= (_QUICK_LINKED if is_linked else _QUICK_AGENTS)

    def is_measured(self, model: ModelPlacement) -> bool:
        """True if every agent on the chains of a model has measured what it hosts of it."""
        costs = self._measured.generation()
        places = [
            (host.agent, PartitionKey(model.model, host.first_block, host.last_block))
            for host in model.hosts
        ]
        # Agents without room for a session measure nothing and report 0.
        known = [costs[place].decode(1) for place in places if place in costs]
        return len(known) == len(places) and any(step_ns > 0 for step_ns in known)

    def make_now(self, request: ChainRequest, pooled: Placement) -> ComposedChains:
        """Returns the chains that fit beside the placement of pooled models."""
        return _noted(compose_cluster(self._cluster(request, pooled)))

    async def make(self, request: ChainRequest, pooled: Placement) -> ComposedChains:
        """Returns the chains that fit beside the placement of pooled models.

        Raises:
            Unavailable: They were not composed in time.
            InternalError: The process crashed.
        """
        if self.is_quick(request.agents, request.loads):
            return self.make_now(request, pooled)
        return _noted(await self._compose_elsewhere(self._cluster(request, pooled)))

    def _cluster(self, request: ChainRequest, pooled: Placement) -> ChainCluster:
        ready = self._deployments.ready
        weights = {key: each.assumed_block_bytes for key, each in ready.items()}
        loads = []
        for model in request.models:
            load = request.loads.get(model.key, SessionLoad())
            shape = SessionShape(load.prompt_tokens, load.output_tokens)
            loads.append(ChainLoad(model, load.rate_per_s, shape, load.log))
        return replace(
            self._rules,
            agents=request.agents,
            loads=tuple(loads),
            taken_bytes=taken_by(pooled, weights),
            measured=self._measured.generation(),
            present=request.present,
            links=self._measured.links.known,
        )


def compose_cluster(cluster: ChainCluster) -> ComposedChains:
    """Returns the chains of every model for which there is room, as one search finds them.

    Models that do not fit are left out one by one, the largest first; the others share the memory.
    """
    loads = list(cluster.loads)
    problems: list[str] = []
    while loads:
        found: list[ChainSearch] = []
        failed = {}
        for job in chain_jobs(replace(cluster, loads=tuple(loads))):
            try:
                found.append(search_chains(job, cluster, compose))
            except PlanInfeasible as error:
                failed[job.load.deployed.key] = (job.model_bytes, error.message)
        if not failed:
            return _composed(found, problems)
        largest = max(failed, key=lambda key: failed[key][0])
        problems.append(failed[largest][1])
        loads = [load for load in loads if load.deployed.key != largest]
    return ComposedChains(problems=tuple(problems))


def _composed(found: Sequence[ChainSearch], problems: Sequence[str]) -> ComposedChains:
    idle: dict[AgentId, tuple[str, ...]] = {}
    for search in found:
        for agent, why in idle_reasons(search).items():
            idle[agent] = (*idle.get(agent, ()), why)
    answers = [answer for search in found for answer in search.chosen.shape.answers]
    lines = [line for answer in answers for line in explain_chains(*answer)]
    return ComposedChains(
        tuple(search.chosen.shape.placement for search in found),
        tuple(problems),
        (*lines, *(line for search in found for line in in_words(search))),
        idle,
        tuple(s.job.load.deployed.key for s in found if s.chosen.figures is None),
    )


def compose(task: ChainTask, previous: Composition | None, tune: Tuning = "lower") -> Composition:
    """Composes chains of one model, near the previous composition if there is one.

    The number c of sessions that every block has room for is tuned by a measure.
    """
    if previous is not None and previous.hosted:
        return recompose(task, previous, tune)
    return best_composition(task, tune)


def _noted(composed: ComposedChains) -> ComposedChains:
    for problem in composed.problems:
        _log.warning("no_chains", error=problem)
    return composed
