"""The best shape of a model's chains, in a stated order, and what the others would give.

The order: what survives the loss of an agent (where that is wanted), the share of the load that is
served within the objectives, then the sessions per second that are sustained, then the mean time of
a session. If the fewest GPUs are asked for, they come before the rate, and survival is only told.
Of shapes that differ by less than counts, the one for which agents that serve already load least is
taken, which is usually what runs: predictions are no better than that, and a change of plan is not
free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from catenary_scheduler.planning.latency.cluster import ClusterLines
from catenary_scheduler.planning.live.chains import ChainCluster, ChainJob, Compose
from catenary_scheduler.planning.live.links import ServerLinks
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_scheduler.planning.search.figures import figures_of
from catenary_scheduler.planning.search.options import SearchOrder, ServingFigures
from catenary_scheduler.planning.search.shapes import InfeasibleShape, Shape, ShapeKind, shapes_of
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId
from catenary_services.errors import PlanInfeasible

NOTABLE_GAIN = 0.1
"""Least relative gain in rate or time that counts as one."""
NOTABLE_ATTAINMENT = 0.01
"""Least gain in attainment that counts as one."""


@dataclass(frozen=True, slots=True)
class SearchRules:
    """The rules by which one shape is better than another."""

    order: SearchOrder = SearchOrder.THROUGHPUT
    survival_first: bool = True

    @property
    def wants_survival(self) -> bool:
        return self.survival_first and self.order is SearchOrder.THROUGHPUT


@dataclass(frozen=True, slots=True)
class PricedShape:
    """A shape with its figures; None while nothing is measured."""

    shape: Shape
    figures: ServingFigures | None
    moved_blocks: int = 0
    """Blocks that agents which host some already would have to load."""


@dataclass(frozen=True, slots=True)
class ChainSearch:
    """Outcome of the search for one model."""

    job: ChainJob
    rules: SearchRules
    chosen: PricedShape
    others: tuple[PricedShape, ...]
    """The other shapes, the best first."""
    impossible: tuple[InfeasibleShape, ...] = ()


def search_chains(
    job: ChainJob,
    cluster: ChainCluster,
    compose: Compose,
    order: SearchOrder = SearchOrder.THROUGHPUT,
) -> ChainSearch:
    """Returns the best shape of one model's chains, and the others.

    While nothing is measured the shape is the composed one, from guesses of their times.

    Raises:
        PlanInfeasible: All agents together have no room for the model.
    """
    deployed = job.load.deployed
    if deployed.decoder is None:
        raise PlanInfeasible(f"{deployed.key} does not generate text")
    lines = ClusterLines(
        deployed.decoder,
        cluster.agents,
        cluster.measured,
        deployed.key,
        precision=deployed.precision,
        links=cluster.links,
    )
    present = next((m for m in cluster.present.models if m.model == deployed.key), None)
    possible, impossible = shapes_of(job, cluster, compose)
    priced = []
    for shape in possible:
        figures = figures_of(
            shape.placement, job.load, lines.lines, _handover_ns(job, shape, cluster.links)
        )
        priced.append(PricedShape(shape, figures, _moved(shape, present)))
    rules = SearchRules(order, cluster.survival_first)
    chosen = best_of(priced, rules)
    others = sorted(
        (each for each in priced if each is not chosen),
        key=lambda each: _key(each, rules),
        reverse=True,
    )
    return ChainSearch(job, rules, chosen, tuple(others), tuple(impossible))


def best_of(priced: Sequence[PricedShape], rules: SearchRules) -> PricedShape:
    """Returns the shape to take; the first one if it was asked for, or nothing is measured."""
    known = [each for each in priced if each.figures is not None]
    if priced[0].shape.asked_for or not known:
        return priced[0]
    if rules.wants_survival:
        known = _within(known, lambda f: float(f.survives), 0.0, absolute=True)
    left = _within(known, lambda f: f.attainment, NOTABLE_ATTAINMENT, absolute=True)
    if rules.order is SearchOrder.FEWEST_GPUS:
        left = _within(left, lambda f: -float(f.gpus), 0.0, absolute=True)
    left = _within(left, lambda f: f.rate_per_s, NOTABLE_GAIN)
    left = _within(left, lambda f: 1.0 / max(1.0, f.response_ns), NOTABLE_GAIN)
    least = min(each.moved_blocks for each in left)
    return max(
        (each for each in left if each.moved_blocks == least), key=lambda each: _key(each, rules)
    )


def why_not(search: ChainSearch, other: PricedShape) -> str:
    """Returns in words why another shape was taken than this one."""
    chosen = search.chosen
    best, mine = chosen.figures, other.figures
    if chosen.shape.asked_for:
        return "another shape was asked for"
    if best is None or mine is None:
        return "nothing is measured yet"
    few = search.rules.order is SearchOrder.FEWEST_GPUS
    reasons = (
        (
            search.rules.wants_survival and best.survives and not mine.survives,
            "it would not survive the loss of an agent",
        ),
        (
            mine.attainment < best.attainment - NOTABLE_ATTAINMENT,
            "it would serve less of the load within the objectives",
        ),
        (few and mine.gpus > best.gpus, "it would take more GPUs"),
        (mine.rate_per_s * (1.0 + NOTABLE_GAIN) < best.rate_per_s, "it would sustain less"),
        (
            mine.response_ns > best.response_ns * (1.0 + NOTABLE_GAIN),
            "its sessions would take longer",
        ),
        (
            other.moved_blocks > chosen.moved_blocks,
            f"it gains too little to load {other.moved_blocks} block(s) for",
        ),
    )
    usual = "it is no better by more than predictions can tell"
    return next((said for applies, said in reasons if applies), usual)


def _key(priced: PricedShape, rules: SearchRules) -> tuple[float, ...]:
    figures = priced.figures
    if figures is None:
        return (-1.0,)
    survives = float(figures.survives and rules.wants_survival)
    few = -float(figures.gpus)
    rest = (figures.rate_per_s, -figures.response_ns)
    if rules.order is SearchOrder.FEWEST_GPUS:
        return (survives, figures.attainment, few, *rest)
    return (survives, figures.attainment, *rest, few)


def _within(
    priced: Sequence[PricedShape],
    value: Callable[[ServingFigures], float],
    tolerance: float,
    *,
    absolute: bool = False,
) -> list[PricedShape]:
    """Returns the shapes whose value differs from the best by less than counts."""
    values = [value(each.figures) for each in priced if each.figures is not None]
    best = max(values)
    least = best - tolerance if absolute else best / (1.0 + tolerance)
    return [each for each, found in zip(priced, values, strict=True) if found >= least]


def _handover_ns(job: ChainJob, shape: Shape, links: ServerLinks) -> float:
    """Returns how long the caches of a mean prompt travel between chains; 0 if nobody hands any.

    They travel at the rate of the slowest link; links of unknown rates do not count.
    """
    if shape.kind is not ShapeKind.SPLIT:
        return 0.0
    rooms = [job.memories[str(agent)] for agent in sorted(shape.agents)]
    senders, receivers = (
        {
            job.memories[str(hop.agent)].agent
            for chain in shape.chains
            if (chain.role == "prefill") is runs_prompts
            for hop in chain.hops
        }
        for runs_prompts in (True, False)
    )
    rates = [r for one in senders for other in receivers if (r := links.rate(one.server, other))]
    if not rates:
        return 0.0
    each = max(room.held.cache_bytes_per_token for room in rooms) * job.task.blocks
    return job.load.shape.prompt_tokens * each * NANOSECONDS_PER_SECOND / min(rates)


def _moved(shape: Shape, present: ModelPlacement | None) -> int:
    """Returns the number of blocks that agents which host some would have to load."""
    if present is None:
        return 0
    had = _blocks((host.agent, host.first_block, host.last_block) for host in present.hosts)
    wanted = _blocks(
        (hop.agent, hop.first_block, hop.last_block) for chain in shape.chains for hop in chain.hops
    )
    return sum(len(blocks - had[agent]) for agent, blocks in wanted.items() if agent in had)


def _blocks(ranges: Iterable[tuple[AgentId, int, int]]) -> dict[AgentId, set[int]]:
    found: dict[AgentId, set[int]] = {}
    for agent, first, last in ranges:
        found.setdefault(agent, set()).update(range(first, last))
    return found
