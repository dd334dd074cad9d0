"""The best shape of a model's chains, in a stated order, and what the others would give.

The order: the share of the load that is served within the objectives, then the sessions per second
that are sustained (or, if asked, the fewest GPUs), then the mean time of a session. Of shapes that
differ by less than counts, the one for which agents that serve already load least is taken, which
is usually what runs: predictions are no better than that, and a change of plan is not free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from catenary_scheduler.planning.latency.cluster import ClusterLines
from catenary_scheduler.planning.live.chains import ChainCluster, ChainJob, Compose
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_scheduler.planning.search.figures import ServingFigures, figures_of
from catenary_scheduler.planning.search.shapes import Shape, shapes_of
from catenary_services.domain.ids import AgentId
from catenary_services.errors import PlanInfeasible

NOTABLE_GAIN = 0.1
"""Least relative gain in rate or time that counts as one."""
NOTABLE_ATTAINMENT = 0.01
"""Least gain in attainment that counts as one."""


class SearchOrder(StrEnum):
    """The quantity that decides once the objectives are met."""

    THROUGHPUT = "throughput"
    FEWEST_GPUS = "fewest-gpus"


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
    chosen: PricedShape
    others: tuple[PricedShape, ...]
    """The other shapes, the best first."""


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
    )
    present = next((m for m in cluster.present.models if m.model == deployed.key), None)
    priced = []
    for shape in shapes_of(job, cluster, compose):
        figures = figures_of(shape.chains, job.load, lines.lines)
        priced.append(PricedShape(shape, figures, _moved(shape, present)))
    chosen = best_of(priced, order)
    ranked = _ranked([each for each in priced if each is not chosen], order)
    return ChainSearch(job, chosen, tuple(ranked))


def best_of(priced: Sequence[PricedShape], order: SearchOrder) -> PricedShape:
    """Returns the shape to take; the first one if it was asked for, or nothing is measured."""
    known = [each for each in priced if each.figures is not None]
    if priced[0].shape.asked_for or not known:
        return priced[0]
    left = _within(known, lambda f: f.attainment, NOTABLE_ATTAINMENT, absolute=True)
    if order is SearchOrder.FEWEST_GPUS:
        left = _within(left, lambda f: -float(f.gpus), 0.0, absolute=True)
    left = _within(left, lambda f: f.rate_per_s, NOTABLE_GAIN)
    left = _within(left, lambda f: 1.0 / max(1.0, f.response_ns), NOTABLE_GAIN)
    least = min(each.moved_blocks for each in left)
    return max(
        (each for each in left if each.moved_blocks == least), key=lambda each: _key(each, order)
    )


def _ranked(priced: Sequence[PricedShape], order: SearchOrder) -> list[PricedShape]:
    return sorted(priced, key=lambda each: _key(each, order), reverse=True)


def _key(priced: PricedShape, order: SearchOrder) -> tuple[float, ...]:
    figures = priced.figures
    if figures is None:
        return (-1.0,)
    few = -float(figures.gpus)
    rest = (figures.rate_per_s, -figures.response_ns)
    if order is SearchOrder.FEWEST_GPUS:
        return (figures.attainment, few, *rest)
    return (figures.attainment, *rest, few)


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
