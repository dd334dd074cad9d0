"""Chains for the models of a cluster that generate text: from agents to a task, and back.

The memory of every agent that pooled models leave is divided among the models that generate, in
proportion to their weights. Of its share each model keeps room for embedding, last norm and
projection on *every* agent, because any of them may come to hold the first or the last block. That
is conservative (only two agents of a chain need them), so no plan asks an agent for more than it
has. All sizes are those on the very agent (`AllocatedSizes`), and the memory of a step of the
largest batch is added.

Agents with an engine hold a model whole or not at all, so each of them is a chain by itself, and no
chain that is composed leads over one ("ADR 0049").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean

from catenary_scheduler.planning.chain_placement import ChainPlacement, HopPlacement, hosts_for
from catenary_scheduler.planning.chains import (
    ChainTask,
    ComposedChain,
    Composition,
    Server,
    Tuning,
)
from catenary_scheduler.planning.chains.replay import (
    LEAST_SESSIONS,
    LogReplay,
    SessionLog,
)
from catenary_scheduler.planning.even_split import DeployedModel
from catenary_scheduler.planning.live.agent_memory import (
    AgentMemory,
    forms_in_words,
    left_out,
    left_out_in_words,
    memories_of,
    whole_bytes,
    within_memory,
)
from catenary_scheduler.planning.live.generation import ChainCosts, GenerationTimes, SessionShape
from catenary_scheduler.planning.live.links import NO_LINKS, ServerLinks
from catenary_scheduler.planning.live.rings import composition_of, rings
from catenary_scheduler.planning.live.roles import divided, of_agents, of_role
from catenary_scheduler.planning.placement import ModelPlacement, Placement
from catenary_services.domain.decoder import DecoderTable, serves_whole
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.domain.plan import Agent, ChainRole
from catenary_services.errors import PlanInfeasible

_NS_PER_MS, _BYTES_PER_MB = 1e6, 1e6
_DIGITS = 9
"""Number of decimals of times in seconds: the planner gets whole nanoseconds, with which it
computes exactly."""

Compose = Callable[[ChainTask, Composition | None, Tuning], Composition]
"""Composes chains for the best c by a measure. If present chains are given, it moves as few blocks
as it can."""


@dataclass(frozen=True, slots=True)
class ChainLoad:
    """A deployed model that generates text, with the rate and the shape of its sessions."""

    deployed: DeployedModel
    rate_per_s: float
    shape: SessionShape
    log: SessionLog | None = None
    """The sessions that arrived lately; None if they are too few to tune chains by."""


@dataclass(frozen=True, slots=True)
class ChainCluster:
    """Agents, models and settings from which chains are composed.

    Attributes:
        agents: All agents that can be planned on.
        loads: The models that generate text.
        taken_bytes: Memory that the pooled models take of each agent.
        measured: Generation costs by agent and partition.
        present: The present placement, whose blocks are already loaded.
        partitions: Number of agents per chain, unless a model's deployment says otherwise; 0 lets
            the planner decide.
        prefill_agents: Number of agents of a model that run prompts for the others, 0 if all of
            them do both; None lets the search decide.
        oversubscription: Slots per session of full length that fits into memory. It applies if
            agents allocate cache memory as it is used and the model does not say otherwise.
        survival_first: True if chains that survive the loss of an agent go before chains that
            serve more.
        links: The measured links between servers.
    """

    agents: tuple[Agent, ...]
    loads: tuple[ChainLoad, ...]
    taken_bytes: Mapping[AgentId, int]
    measured: GenerationTimes
    present: Placement
    partitions: int = 0
    prefill_agents: int | None = None
    oversubscription: float = 1.0
    survival_first: bool = True
    links: ServerLinks = NO_LINKS


@dataclass(frozen=True, slots=True)
class ChainJob:
    """A task for the planner: one model's chains. It is pickled for the solver process."""

    load: ChainLoad
    task: ChainTask
    previous: Composition | None
    per_chain: int
    """Number of agents per chain; 0 lets the planner decide."""
    costs: ChainCosts
    """The times of the load's sessions."""
    role: ChainRole = "mixed"
    roles: tuple[ChainJob, ...] = ()
    """Jobs of the same model with its agents divided by role; empty if they are not divided."""
    oversubscription: float = 1.0
    memories: Mapping[str, AgentMemory] = field(default_factory=dict)
    """Memory of every agent that can load the model, by agent."""
    left_out: Mapping[str, Sequence[AgentId]] = field(default_factory=dict)
    """Agents that cannot load the model, by the reason in words."""
    tune: Tuning = "lower"
    """The measure by which c is tuned."""
    engines: ChainJob | None = None
    """The job of the agents whose engine serves the model whole, which `task` leaves out; None if
    there are none."""

    @property
    def model_bytes(self) -> int:
        """Bytes of the weights of the whole model, in the form in which it was imported."""
        return whole_bytes(_decoder(self.load.deployed).held(None))


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """The times of a mean session on composed chains."""

    costs: ChainCosts

    def __call__(self, chain: ComposedChain) -> float:
        """Returns the seconds of a session on a chain."""
        return self.costs.session_s(_parts(chain))


def _parts(chain: ComposedChain) -> list[tuple[AgentId, int]]:
    return [(AgentId(hop.server), hop.blocks) for hop in chain.hops]


def chain_jobs(cluster: ChainCluster) -> list[ChainJob]:
    """Returns one job per model, in the order of the cluster's loads."""
    present = {model.model: model for model in cluster.present.models}
    jobs = []
    for load in cluster.loads:
        memories = memories_of(
            load.deployed,
            cluster.agents,
            [each.deployed for each in cluster.loads],
            cluster.taken_bytes,
        )
        costs = _costs(load, cluster)
        task = _timed(_sized(load, memories), costs)
        before = present.get(load.deployed.key)
        own = load.deployed.cache_oversubscription
        whole = {name for name, room in memories.items() if serves_whole(room.agent.runtime)}
        job = ChainJob(
            load,
            task.among([each for each in task.servers if each.name not in whole]),
            _previous(load, before, memories.keys() - whole),
            load.deployed.partitions or cluster.partitions,
            costs,
            oversubscription=cluster.oversubscription if own is None else own,
            memories=memories,
            left_out=left_out(load.deployed, cluster.agents),
            tune=_tuning(load, cluster),
        )
        if whole:
            of_engines = replace(
                job,
                task=task.among([each for each in task.servers if each.name in whole]),
                previous=_previous(load, before, whole),
                per_chain=1,
            )
            job = replace(job, engines=of_engines)
        jobs.append(replace(job, roles=jobs_by_role(job, cluster)))
    return jobs


def _previous(
    load: ChainLoad, before: ModelPlacement | None, agents: AbstractSet[str]
) -> Composition | None:
    """Returns the present chains of a model that lead over the given agents only."""
    mine = of_agents(before, agents)
    return composition_of(mine, load.rate_per_s) if mine is not None else None


def jobs_by_role(job: ChainJob, cluster: ChainCluster) -> tuple[ChainJob, ...]:
    """Returns one job for the agents that run prompts and one for those that generate.

    Returns an empty tuple if roles are not divided.
    """
    shape, made = job.load.shape, []
    roles: tuple[tuple[ChainRole, SessionShape], ...] = (
        ("prefill", replace(shape, output_tokens=1.0)),
        ("decode", replace(shape, prompt_tokens=1.0)),
    )
    before = next((m for m in cluster.present.models if m.model == job.load.deployed.key), None)
    whole = _retimed(job.task, replace(job.load, shape=roles[0][1]), cluster)
    parts = divided(whole, cluster.prefill_agents or 0, before)
    if parts is None:
        return ()
    for (role, done), servers in zip(roles, parts, strict=True):
        load = replace(job.load, shape=done)
        task = _retimed(whole.among(servers), load, cluster)
        mine = of_role(before, role)
        previous = composition_of(mine, load.rate_per_s) if mine is not None else None
        made.append(
            replace(
                job,
                load=load,
                task=task,
                previous=previous,
                costs=_costs(load, cluster),
                role=role,
                tune="lower",
            )
        )
    return tuple(made)


def solve_roles(job: ChainJob, compose: Compose) -> list[tuple[ChainJob, Composition]]:
    """Returns the chains of one model, by role if that is wanted and there is room for it.

    Raises:
        PlanInfeasible: All agents together have no room for the model.
    """
    if job.roles:
        # Without room for both roles all agents do both, which `explain_chains` reports.
        with suppress(PlanInfeasible):
            return [(part, solve_job(part, compose)) for part in job.roles]
    return [(job, solve_job(job, compose))]


def solve_job(job: ChainJob, compose: Compose) -> Composition:
    """Returns the composed chains of one model.

    Raises:
        PlanInfeasible: All agents together have no room for the model.
    """
    if not job.task.servers:
        raise PlanInfeasible("; ".join(left_out_in_words(job.load.deployed, job.left_out)))
    if job.per_chain:
        return rings(job.task, job.per_chain, job.load.deployed.max_batch, job.previous)
    try:
        return compose(job.task, job.previous, job.tune)
    except PlanInfeasible as error:
        raise PlanInfeasible(f"{job.load.deployed.key}: {error.message}") from error


def placed(job: ChainJob, composition: Composition) -> ModelPlacement:
    """Returns the placement that corresponds to a composition.

    A chain takes at most as many sessions as the model's largest batch, and agents keep only the
    slots that their chains can use, since more would waste memory. If agents allocate cache memory
    as it is used, a chain has `oversubscription` times as many slots as it holds sessions of full
    length.
    """
    deployed = job.load.deployed
    hosted = {host.server: host for host in composition.hosted}
    chains = tuple(
        ChainPlacement(
            slots,
            tuple(
                HopPlacement(
                    AgentId(hop.server),
                    hosted[hop.server].first_block,
                    hosted[hop.server].last_block,
                    hop.first_block,
                )
                for hop in chain.hops
            ),
            job.role,
            tokens,
        )
        for chain in composition.chains
        for slots, tokens in (_slots_and_tokens(job, chain),)
    )
    chains = within_memory(deployed, job.memories, chains)
    hosts = hosts_for(chains, deployed.session_tokens)
    return ModelPlacement(
        deployed.key,
        deployed.slo_ns,
        deployed.float16_boundaries,
        (),
        chains,
        hosts,
        deployed.session_tokens,
        deployed.objectives,
        deployed.packing,
    )


def _slots_and_tokens(job: ChainJob, chain: ComposedChain) -> tuple[int, int]:
    """Returns a chain's sessions at a time, and the tokens it holds (0 if all have full length).

    The planner counts sessions of full length, so any one session has room when it is alone.
    """
    deployed = job.load.deployed
    whole = min(chain.capacity, deployed.max_batch)
    if job.oversubscription <= 1.0 or not all(
        job.memories[hop.server].agent.commits_caches_on_use for hop in chain.hops
    ):
        return whole, 0
    slots = min(math.floor(whole * job.oversubscription), deployed.max_batch)
    return (slots, whole * deployed.session_tokens) if slots > whole else (whole, 0)


def explain_chains(job: ChainJob, composition: Composition) -> list[str]:
    """Returns sentences that describe the chains that were composed."""
    load, model = job.load, placed(job, composition)
    capacity = sum(chain.capacity for chain in model.chains)
    agents = len({host.agent for host in model.hosts})
    how = f"of {job.per_chain} agents each" if job.per_chain else _c_in_words(job, composition)
    how = "whole, by engines" if _is_of_engines(job) else how
    kind = "" if job.role == "mixed" else f"{job.role} "
    tokens = sum(chain.cache_tokens for chain in model.chains)
    lines = [
        f"{load.deployed.key}: {len(model.chains)} {kind}chain(s) over {agents} agent(s) ({how})"
        f" for {capacity} sessions at a time; composed for {load.rate_per_s:.2g} sessions/s of"
        f" {load.shape.prompt_tokens:.0f} and {load.shape.output_tokens:.0f} tokens."
    ]
    lines += forms_in_words(load.deployed, job.memories, {host.agent for host in model.hosts})
    if tokens:
        lines.append(
            f"{load.deployed.key}: slots are {job.oversubscription:g} times what memory holds at"
            f" full length; chains hold {tokens} tokens in all."
        )
    if job.roles:
        lines.append(
            f"{load.deployed.key}: the agents have no room for prefill and for decode chains; all"
            " of them do both."
        )
    if job.previous is not None:
        lines.append(
            f"{load.deployed.key}: agents that were there before host"
            f" {composition.moved_blocks} block(s) that they did not."
        )
    lines += _links_in_words(job, composition)
    return [*lines, *(f"{line}." for line in left_out_in_words(load.deployed, job.left_out))]


def _c_in_words(job: ChainJob, composition: Composition) -> str:
    if not isinstance(job.tune, LogReplay):
        return f"c = {composition.c}"
    sessions, mean_s = len(job.tune.log), job.tune(composition)
    return (
        f"c = {composition.c} by a replay of the last {sessions:,} sessions, which take"
        f" {mean_s:.2g} s there on average"
    )


def _is_of_engines(job: ChainJob) -> bool:
    return all(serves_whole(job.memories[each.name].agent.runtime) for each in job.task.servers)


def _links_in_words(job: ChainJob, composition: Composition) -> list[str]:
    """Returns a sentence about the link that binds: on which a session takes longest.

    Of several chains it is the one whose sessions take the largest share of their time there.
    """
    passed: list[tuple[float, float, AgentId, AgentId]] = []
    for chain in composition.chains:
        whole_s = job.costs.session_s(_parts(chain))
        ways = job.costs.ring_ways_s([agent for agent, _ in _parts(chain)])
        passed += [
            ((way_s + ways.get((other, one), 0.0)) / whole_s, whole_s, one, other)
            for (one, other), way_s in ways.items()
        ]
    if not passed:
        return []
    share, whole_s, source, target = max(passed, key=lambda each: each[0])
    figures = job.costs.figures(source, target)
    how = "nobody has measured it"
    if figures is not None:
        how = (
            f"measured: a round trip of {figures.round_trip_ns / _NS_PER_MS:.3g} ms,"
            f" {figures.bytes_per_second / _BYTES_PER_MB:,.1f} MB/s"
        )
    return [
        f"{job.load.deployed.key}: the link that binds is the one from {source} to {target}:"
        f" a session takes {share * whole_s:.3g} s of its {whole_s:.3g} s ({100 * share:.0f} %) by"
        f" it, in both directions ({how})."
    ]


def taken_by(
    placement: Placement, block_weights: Mapping[ModelKey, Sequence[int]]
) -> dict[AgentId, int]:
    """Returns the bytes that pooled models take of every agent; unknown weights count as 0."""
    taken: dict[AgentId, dict[tuple[ModelKey, int, int], int]] = {}
    for model in placement.models:
        weights = block_weights.get(model.model, ())
        for pipeline in model.pipelines:
            for stage in pipeline.stages:
                size = sum(weights[stage.first_block : stage.last_block])
                for agent in stage.agents:
                    key = (model.model, stage.first_block, stage.last_block)
                    taken.setdefault(agent, {})[key] = size
    return {agent: sum(sizes.values()) for agent, sizes in taken.items()}


def _sized(load: ChainLoad, memories: Mapping[str, AgentMemory]) -> ChainTask:
    """Returns the task of a load without the times of its servers."""
    deployed, decoder = load.deployed, _decoder(load.deployed)
    servers = []
    for name, room in memories.items():
        block, slot = room.held.largest_block_bytes, room.held.slot_bytes(deployed.session_tokens)
        # More memory than a whole model with the caches of all its sessions is never used.
        most = Fraction(decoder.blocks * (block + deployed.max_batch * slot))
        memory = most if room.memory is None else max(Fraction(0), min(most, room.memory))
        servers.append(Server(name, memory, 0.0, 1.0, Fraction(block), Fraction(slot)))
    return ChainTask(
        servers=tuple(servers),
        blocks=decoder.blocks,
        block_memory=Fraction(decoder.block_bytes),
        cache_memory=Fraction(decoder.slot_bytes(deployed.session_tokens)),
        rate_per_s=load.rate_per_s,
    )


def _tuning(load: ChainLoad, cluster: ChainCluster) -> Tuning:
    """Returns the replay of a load's log, or the lower bound if there is too little to replay."""
    log, shape = load.log, load.shape
    if log is None or len(log) < LEAST_SESSIONS or shape.output_tokens <= 1.0:
        return "lower"
    prompts = replace(load, shape=replace(shape, output_tokens=1.0))
    return LogReplay(
        log.at_rate(load.rate_per_s),
        SessionTimes(_costs(prompts, cluster)),
        SessionTimes(_costs(load, cluster)),
        shape.prompt_tokens,
        shape.output_tokens,
        load.deployed.max_batch,
    )


def _retimed(task: ChainTask, load: ChainLoad, cluster: ChainCluster) -> ChainTask:
    """Returns a task with the times that a load's sessions take on its servers and links."""
    return _timed(replace(task, links=None), _costs(load, cluster))


def _costs(load: ChainLoad, cluster: ChainCluster) -> ChainCosts:
    decoder = _decoder(load.deployed)
    deployed = load.deployed
    return ChainCosts(
        decoder,
        cluster.agents,
        cluster.measured,
        deployed.key,
        load.shape,
        deployed.precision,
        links=cluster.links,
    )


def _timed(task: ChainTask, costs: ChainCosts) -> ChainTask:
    """Returns a task with the times of its servers, and of the links if any is slow."""
    agents = [AgentId(server.name) for server in task.servers]
    links = costs.links(agents)
    travel_s = {agent: costs.communication_s(agent) for agent in agents}
    if links is not None:  # the planner then orders servers by the mean of their links
        for agent in agents:
            travel_s[agent] = fmean(
                links[before, agent] for before in (None, *agents) if before != agent
            )
    servers = tuple(
        replace(
            server,
            communication_s=round(travel_s[AgentId(server.name)], _DIGITS),
            block_s=round(max(1e-9, costs.block_s(AgentId(server.name))), _DIGITS),
        )
        for server in task.servers
    )
    return replace(task, servers=servers, links=links)


def _decoder(deployed: DeployedModel) -> DecoderTable:
    if deployed.decoder is None:
        raise PlanInfeasible(f"{deployed.key} does not generate text")
    return deployed.decoder
