"""Composes chains for the models that generate text, beside whatever serves the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import DeployedModel, ModelPlacement, Placement
from catenary_scheduler.planning.chains import ChainTask, Composition, best_composition, recompose
from catenary_scheduler.planning.live import (
    ChainCluster,
    ChainJob,
    ChainLoad,
    SessionShape,
    chain_jobs,
    explain_chains,
    joined_roles,
    placed,
    solve_roles,
    taken_by,
)
from catenary_scheduler.scaling import SessionLoad
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible
from catenary_services.log import get_logger

_log = get_logger(__name__)
_QUICK_AGENTS = 40
"""Composing for so many takes some 20 ms: less than starting a process, and no request waits."""


@dataclass(frozen=True, slots=True)
class ComposedChains:
    """Chains of the models of a cluster, as far as there are any (pickled by the solver)."""

    answers: tuple[tuple[ChainJob, Composition], ...] = ()
    problems: tuple[str, ...] = ()


ComposeCluster = Callable[[ChainCluster], Awaitable[ComposedChains]]


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """What chains are wanted for."""

    models: tuple[DeployedModel, ...]
    """Those that generate text."""
    agents: tuple[Agent, ...]
    loads: Mapping[ModelKey, SessionLoad]
    present: Placement
    """What there was before."""


@dataclass(frozen=True, slots=True)
class BuiltChains:
    """Chains of some models."""

    models: tuple[ModelPlacement, ...] = ()
    lines: tuple[str, ...] = ()
    """In words."""
    problems: tuple[str, ...] = ()
    """Why other models have none."""
    loads: Mapping[ModelKey, SessionLoad] = field(default_factory=dict)
    """What they were composed for."""


class ChainBuilder:
    """Makes chains in this process where that is quick, else in one of its own.

    Args:
        deployments: The models.
        measured: What agents measured.
        compose_elsewhere: Composes the chains of a cluster in another process.
        partitions: Agents per chain where the deployment does not say; 0: as is best.
        prefill_agents: Agents of a model that run prompts for the others; 0: all do both.
        oversubscription: Slots per session of full length that fits into memory.
    """

    def __init__(
        self,
        deployments: Deployments,
        measured: MeasuredProfiles,
        compose_elsewhere: ComposeCluster,
        partitions: int = 0,
        prefill_agents: int = 0,
        oversubscription: float = 1.0,
    ) -> None:
        self._deployments = deployments
        self._measured = measured
        self._compose_elsewhere = compose_elsewhere
        self._partitions = partitions
        self._prefill_agents = prefill_agents
        self._oversubscription = oversubscription

    def is_quick(self, agents: Sequence[Agent]) -> bool:
        """True if `make_now` does not keep anybody waiting."""
        return len(agents) <= _QUICK_AGENTS

    def make_now(self, request: ChainRequest, pooled: Placement) -> BuiltChains:
        """Returns the chains, beside what pooled models take."""
        return _built(request, compose_cluster(self._cluster(request, pooled)))

    async def make(self, request: ChainRequest, pooled: Placement) -> BuiltChains:
        """Returns the chains, beside what pooled models take.

        Raises:
            Unavailable: they were not composed in time.
            InternalError: the process crashed.
        """
        cluster = self._cluster(request, pooled)
        if self.is_quick(request.agents):
            return _built(request, compose_cluster(cluster))
        return _built(request, await self._compose_elsewhere(cluster))

    def _cluster(self, request: ChainRequest, pooled: Placement) -> ChainCluster:
        ready = self._deployments.ready
        weights = {key: each.assumed_block_bytes for key, each in ready.items()}
        loads = []
        for model in request.models:
            load = request.loads.get(model.key, SessionLoad())
            shape = SessionShape(load.prompt_tokens, load.output_tokens)
            loads.append(ChainLoad(model, load.rate_per_s, shape))
        return ChainCluster(
            agents=request.agents,
            loads=tuple(loads),
            taken_bytes=taken_by(pooled, weights),
            measured=self._measured.generation(),
            present=request.present,
            partitions=self._partitions,
            prefill_agents=self._prefill_agents,
            oversubscription=self._oversubscription,
        )


def compose_cluster(cluster: ChainCluster) -> ComposedChains:
    """Returns the chains of every model there is room for.

    One that does not fit gives its share of the memory to the others; the largest goes first.
    """
    loads = list(cluster.loads)
    problems: list[str] = []
    while loads:
        answers: list[tuple[ChainJob, Composition]] = []
        failed = {}
        for job in chain_jobs(replace(cluster, loads=tuple(loads))):
            try:
                answers += solve_roles(job, compose)
            except PlanInfeasible as error:
                failed[job.load.deployed.key] = (job.model_bytes, error.message)
        if not failed:
            return ComposedChains(tuple(answers), tuple(problems))
        largest = max(failed, key=lambda key: failed[key][0])
        problems.append(failed[largest][1])
        loads = [load for load in loads if load.deployed.key != largest]
    return ComposedChains((), tuple(problems))


def compose(task: ChainTask, previous: Composition | None) -> Composition:
    """Composes with c by the lower bound, near what there was before if there was anything."""
    if previous is not None and previous.hosted:
        return recompose(task, previous)
    return best_composition(task, tune="lower")


def _built(request: ChainRequest, composed: ComposedChains) -> BuiltChains:
    for problem in composed.problems:
        _log.warning("no_chains", error=problem)
    lines = [line for answer in composed.answers for line in explain_chains(*answer)]
    models = joined_roles(placed(*answer) for answer in composed.answers)
    return BuiltChains(models, tuple(lines), composed.problems, request.loads)
