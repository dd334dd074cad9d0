"""Shapes in which agents can serve a model that generates text.

Everything that used to be chosen apart is one list here: chains composed of unlike agents, chains
of so many agents each (whole replicas if it is one), agents that only run prompts, and only some of
the agents. What an operator asked for stands: then there is one shape to choose, and the others are
there to compare with. Shapes for which there is no room are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from catenary_scheduler.planning.chain_placement import ChainPlacement
from catenary_scheduler.planning.chains import Composition, Server
from catenary_scheduler.planning.live.chains import (
    ChainCluster,
    ChainJob,
    Compose,
    jobs_by_role,
    placed,
    solve_job,
    solve_roles,
)
from catenary_scheduler.planning.live.rings import rings
from catenary_scheduler.planning.live.roles import joined_roles
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_scheduler.planning.survival import agents_of
from catenary_services.domain.ids import AgentId
from catenary_services.errors import PlanInfeasible

MOST_AGENTS_PER_CHAIN = 8
"""Longest chain of a given number of agents that is tried."""
MOST_CLASSES = 4
"""Largest number of device classes of which each is tried by itself."""
_PREFILL_PARTS = (8, 4, 3, 2)
"""Parts of the agents that are tried as those that run prompts only: 1/8, 1/4 and so on."""
_Answers = list[tuple[ChainJob, Composition]]


class ShapeKind(StrEnum):
    """The kind of a shape, by how its chains came about."""

    COMPOSED = "composed"
    REPLICAS = "replicas"
    RINGS = "rings"
    SPLIT = "split"
    ONE_CLASS = "one-class"
    CLASSES_APART = "classes-apart"
    ENGINES = "engines"


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to serve a model: its chains, and how they came about."""

    kind: ShapeKind
    name: str
    answers: tuple[tuple[ChainJob, Composition], ...]
    placement: ModelPlacement
    asked_for: bool = False
    """True if an operator asked for this shape, so that no other one is taken."""
    also: tuple[str, ...] = ()
    """Names of other shapes that came to the same chains."""

    @property
    def chains(self) -> tuple[ChainPlacement, ...]:
        return self.placement.chains

    @property
    def agents(self) -> set[AgentId]:
        return agents_of(self.placement)


@dataclass(frozen=True, slots=True)
class InfeasibleShape:
    """A shape that agents have no room for, and the reason in words."""

    name: str
    problem: str


def shapes_of(
    job: ChainJob, cluster: ChainCluster, compose: Compose
) -> tuple[list[Shape], list[InfeasibleShape]]:
    """Returns the shapes that agents have room for, and the others.

    The first shape is the one that is taken while nothing is measured.

    Args:
        job: The task of one model.
        cluster: The cluster that it came from.
        compose: Composes chains.

    Raises:
        PlanInfeasible: All agents together have no room for the model.
    """
    engines = _engines(job)
    found: dict[tuple[ChainPlacement, ...], Shape] = {}
    impossible = []
    for shape in _with_engines(_cut(job, cluster, compose, engines), engines):
        if isinstance(shape, InfeasibleShape):
            impossible.append(shape)
        else:
            known = found.setdefault(shape.chains, shape)
            if shape.name not in (known.name, *known.also):
                found[shape.chains] = replace(known, also=(*known.also, shape.name))
    return list(found.values()), impossible


def _cut(
    job: ChainJob, cluster: ChainCluster, compose: Compose, engines: _Answers
) -> Iterator[Shape | InfeasibleShape]:
    """Yields the shapes of agents that run blocks; none if engines are all that has room.

    Raises:
        PlanInfeasible: They have no room for the model, and no engine serves it.
    """
    if engines and not job.task.servers:
        return
    try:
        usual = solve_roles(job, compose)
    except PlanInfeasible as error:
        if not engines:
            raise
        yield InfeasibleShape("chains of blocks", error.message)
        return
    asked_for = bool(job.per_chain) or bool(cluster.prefill_agents)
    yield _usual(job, usual, asked_for=asked_for)
    yield from _rings(job)
    yield from _split(job, cluster, compose)
    yield from _classes(job, compose)


def _engines(job: ChainJob) -> _Answers:
    """Returns the chains of agents whose engine serves the model; none if none has room.

    Raises:
        PlanInfeasible: None has room, and there are no other agents.
    """
    if job.engines is None:
        return []
    most = job.load.deployed.max_batch
    try:
        return [(job.engines, rings(job.engines.task, 1, most, job.engines.previous))]
    except PlanInfeasible:
        if not job.task.servers:
            raise
        return []


def _with_engines(
    shapes: Iterator[Shape | InfeasibleShape], engines: _Answers
) -> Iterator[Shape | InfeasibleShape]:
    """Yields each shape beside the engines and alone, and the engines alone.

    Caches that are handed over are read by no engine, so a split shape is not joined with any.
    """
    for shape in shapes:
        if engines and isinstance(shape, Shape) and shape.kind is not ShapeKind.SPLIT:
            answers = [*shape.answers, *engines]
            name = f"{shape.name} beside engines"
            yield _shape(shape.kind, name, answers, asked_for=shape.asked_for)
            yield replace(shape, asked_for=False)
        else:
            yield shape
    if engines:
        yield _shape(ShapeKind.ENGINES, "engines alone", engines)


def _usual(job: ChainJob, answers: _Answers, *, asked_for: bool) -> Shape:
    if len(answers) > 1:
        prefill = len({hop.server for chain in answers[0][1].chains for hop in chain.hops})
        return _shape(ShapeKind.SPLIT, _split_name(prefill), answers, asked_for=asked_for)
    if job.per_chain:
        length = max(len(chain.hops) for chain in answers[0][1].chains)
        return _ring_shape(length, answers, asked_for=asked_for)
    return _shape(ShapeKind.COMPOSED, "composed chains", answers, asked_for=asked_for)


def _rings(job: ChainJob) -> Iterator[Shape | InfeasibleShape]:
    longest = min(len(job.task.servers), job.task.blocks, MOST_AGENTS_PER_CHAIN)
    for length in range(1, longest + 1):
        mine = replace(job, roles=(), per_chain=length)
        try:
            made = rings(job.task, length, job.load.deployed.max_batch, job.previous)
            yield _ring_shape(length, [(mine, made)])
        except PlanInfeasible as error:
            yield InfeasibleShape(_ring_name(length), error.message)


def _split(
    job: ChainJob, cluster: ChainCluster, compose: Compose
) -> Iterator[Shape | InfeasibleShape]:
    runtimes = {job.memories[server.name].agent.runtime for server in job.task.servers}
    # Caches are handed over in one form, and 0 says that nobody is to hand over any.
    if job.roles or cluster.prefill_agents == 0 or len(runtimes) > 1:
        return
    count = len(job.task.servers)
    for prefill in sorted({max(1, count // part) for part in _PREFILL_PARTS}):
        parts = jobs_by_role(job, replace(cluster, prefill_agents=prefill))
        if parts:
            try:
                answers = [(part, solve_job(part, compose)) for part in parts]
                yield _shape(ShapeKind.SPLIT, _split_name(prefill), answers)
            except PlanInfeasible as error:
                yield InfeasibleShape(_split_name(prefill), error.message)


def _classes(job: ChainJob, compose: Compose) -> Iterator[Shape | InfeasibleShape]:
    by_class: dict[str, list[Server]] = {}
    for server in job.task.servers:
        name = job.memories[server.name].agent.device_class
        by_class.setdefault(name, []).append(server)
    if not 1 < len(by_class) <= MOST_CLASSES:
        return
    apart: _Answers = []
    for name, servers in sorted(by_class.items()):
        mine = replace(job, roles=(), task=job.task.among(servers))
        try:
            answer = (mine, solve_job(mine, compose))
            yield _shape(ShapeKind.ONE_CLASS, f"only {name}", [answer])
            apart.append(answer)
        except PlanInfeasible as error:
            yield InfeasibleShape(f"only {name}", error.message)
    if len(apart) > 1:
        yield _shape(ShapeKind.CLASSES_APART, "each class by itself", apart)


def _ring_name(length: int) -> str:
    return "whole replicas" if length == 1 else f"chains of {length} agents each, cut evenly"


def _ring_shape(length: int, answers: _Answers, *, asked_for: bool = False) -> Shape:
    kind = ShapeKind.REPLICAS if length == 1 else ShapeKind.RINGS
    return _shape(kind, _ring_name(length), answers, asked_for=asked_for)


def _split_name(prefill: int) -> str:
    return f"{prefill} agent(s) that run the prompts of the others"


def _shape(kind: ShapeKind, name: str, answers: _Answers, *, asked_for: bool = False) -> Shape:
    (model,) = joined_roles(placed(*answer) for answer in answers)
    if not model.chains:
        raise PlanInfeasible("no chain of it has room for a session")
    return Shape(kind, name, tuple(answers), model, asked_for)
