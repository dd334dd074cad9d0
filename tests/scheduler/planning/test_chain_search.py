from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning import ChainPlacement, DeployedModel, HopPlacement, Placement
from catenary_scheduler.planning.latency import ClusterLines
from catenary_scheduler.planning.live import (
    ChainCluster,
    ChainLoad,
    GenerationCost,
    SessionShape,
    chain_jobs,
    joined_roles,
    placed,
)
from catenary_scheduler.planning.search import (
    ChainSearch,
    SearchOrder,
    ServingFigures,
    ShapeKind,
    figures_of,
    in_words,
    search_chains,
)
from catenary_scheduler.planning.search.search import (
    NOTABLE_ATTAINMENT,
    NOTABLE_GAIN,
    PricedShape,
    best_of,
)
from catenary_scheduler.replanning.chain_builder import compose, compose_cluster
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.plan import Agent
from scheduling_cases.sized_decoders import BLOCKS, block_table, decoder_table

LLM = ModelKey("llm", "1")
MS = 1_000_000
ROOMY = 10**6
DECODER = decoder_table()
NEW = GenerationCost(2 * MS, MS // 10, 10 * MS, MS // 10)
OLD = GenerationCost(9 * MS, MS // 2, 30 * MS, MS)


def agent(name: str, device_class: str = "new", memory_bytes: int = ROOMY) -> Agent:
    return Agent(AgentId(name), device_class, ServerId(name), memory_bytes, 10**9)


def cluster(
    *agents: Agent,
    costs: dict[str, GenerationCost] | None = None,
    rate: float = 0.5,
    objectives: TokenObjectives | None = None,
    **changes: object,
) -> ChainCluster:
    """Returns a cluster in which each class was measured on its first agent."""
    model = DeployedModel(
        LLM,
        block_table(),
        10**9,
        4,
        True,
        decoder=DECODER,
        session_tokens=64,
        objectives=objectives,
    )
    known = {"new": NEW, "old": OLD} if costs is None else costs
    first = {each.device_class: each.agent_id for each in reversed(agents)}
    whole = PartitionKey(LLM, 0, BLOCKS)
    measured = {(first[name], whole): cost for name, cost in known.items() if name in first}
    load = ChainLoad(model, rate, SessionShape(20, 30))
    return replace(
        ChainCluster(agents, (load,), {}, measured, Placement(())),
        **changes,  # type: ignore[arg-type]
    )


def found(there: ChainCluster, order: SearchOrder = SearchOrder.THROUGHPUT) -> ChainSearch:
    (job,) = chain_jobs(there)
    return search_chains(job, there, compose, order)


def present(search: ChainSearch, kind: ShapeKind) -> Placement:
    """Returns the placement of a shape that the search found."""
    shape = next(each.shape for each in (search.chosen, *search.others) if each.shape.kind is kind)
    return Placement(joined_roles(placed(*answer) for answer in shape.answers))


def figures(search: ChainSearch) -> list[ServingFigures]:
    return [each.figures for each in (search.chosen, *search.others) if each.figures is not None]


clusters = st.builds(
    lambda classes, memory, costs, rate, objectives: cluster(
        *(
            agent(f"{name}-{number}", name, size)
            for number, (name, size) in enumerate(zip(classes, memory, strict=False))
        ),
        costs=costs,
        rate=rate,
        objectives=objectives,
    ),
    st.lists(st.sampled_from(["new", "old"]), min_size=1, max_size=5),
    st.lists(st.sampled_from([1_100, 1_500, ROOMY]), min_size=5, max_size=5),
    st.fixed_dictionaries(
        {
            name: st.builds(
                GenerationCost,
                st.integers(0, 20 * MS),
                st.integers(1, MS),
                st.integers(MS, 50 * MS),
                st.integers(0, MS),
            )
            for name in ("new", "old")
        }
    ),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.sampled_from([None, TokenObjectives(500 * MS, 40 * MS), TokenObjectives(0, 20 * MS)]),
)


@settings(max_examples=60, deadline=None)
@given(clusters, st.sampled_from(SearchOrder))
def test_no_shape_is_better_in_the_stated_order_by_more_than_counts(
    there: ChainCluster, order: SearchOrder
) -> None:
    """The composed chains, the rings and the split that used to be chosen apart are among them."""
    search = found(there, order)
    chosen = search.chosen.figures
    assert chosen is not None
    kinds = {each.shape.kind for each in (search.chosen, *search.others)}
    assert kinds & {ShapeKind.COMPOSED, ShapeKind.REPLICAS}
    left = figures(search)
    best = max(each.attainment for each in left)
    assert chosen.attainment >= best - NOTABLE_ATTAINMENT
    left = [each for each in left if each.attainment >= best - NOTABLE_ATTAINMENT]
    if order is SearchOrder.FEWEST_GPUS:
        assert chosen.gpus == min(each.gpus for each in left)
        left = [each for each in left if each.gpus == chosen.gpus]
    most = max(each.rate_per_s for each in left)
    assert chosen.rate_per_s * (1 + NOTABLE_GAIN) >= most * (1 - 1e-9)
    left = [each for each in left if each.rate_per_s * (1 + NOTABLE_GAIN) >= most]
    least_ns = min(each.response_ns for each in left)
    assert chosen.response_ns <= least_ns * (1 + NOTABLE_GAIN) * (1 + 1e-9)


def every_placement(agents: int, blocks: int) -> Iterator[list[list[tuple[int, int, int]]]]:
    """Yields every way to cut blocks over disjoint chains of agents: (agent, first, end) a hop."""
    for order in itertools.permutations(range(agents)):
        for cuts in itertools.product([False, True], repeat=agents - 1):
            groups: list[list[int]] = [[order[0]]]
            for cut, name in zip(cuts, order[1:], strict=True):
                if cut:
                    groups.append([])
                groups[-1].append(name)
            options = [
                [
                    [
                        (name, *ends)
                        for name, ends in zip(
                            group, itertools.pairwise((0, *inner, blocks)), strict=True
                        )
                    ]
                    for inner in itertools.combinations(range(1, blocks), len(group) - 1)
                ]
                for group in groups
            ]
            for chains in itertools.product(*options):
                yield list(chains)


@pytest.mark.parametrize(
    "classes", [["new"], ["new", "new"], ["new", "old"], ["new", "old", "old"]]
)
def test_with_room_no_placement_of_disjoint_chains_sustains_notably_more(
    classes: list[str],
) -> None:
    """Twin: all cuts of the blocks over all orders of the agents, priced by the same lines."""
    there = cluster(*(agent(f"a{n}", name) for n, name in enumerate(classes)))
    search = found(there)
    (load,) = there.loads
    lines = ClusterLines(DECODER, there.agents, there.measured, LLM)
    best = 0.0
    for chains in every_placement(len(classes), BLOCKS):
        priced = figures_of(
            [
                ChainPlacement(
                    4, tuple(HopPlacement(AgentId(f"a{n}"), a, b, a) for n, a, b in hops)
                )
                for hops in chains
            ],
            load,
            lines.lines,
        )
        assert priced is not None
        best = max(best, priced.rate_per_s)
    assert search.chosen.figures is not None
    assert search.chosen.figures.rate_per_s >= best / (1 + NOTABLE_GAIN)


def test_agents_that_are_strong_at_prompts_run_them_for_the_others() -> None:
    """A device with fast prompts and slow steps beside one that is the other way round."""
    costs = {
        "new": GenerationCost(0, MS // 100, 60 * MS, 10 * MS),
        "old": GenerationCost(0, 20 * MS, 10 * MS, MS // 10),
    }
    there = cluster(
        agent("a", "new"),
        agent("b", "old"),
        costs=costs,
        rate=2.0,
        objectives=TokenObjectives(300 * MS, 20 * MS),
    )
    chosen = found(there).chosen
    assert chosen.shape.kind is ShapeKind.SPLIT
    assert chosen.figures is not None
    assert chosen.figures.attainment == 1.0
    # An operator's word stands, in either direction.
    never = found(replace(there, prefill_agents=0))
    assert ShapeKind.SPLIT not in {e.shape.kind for e in (never.chosen, *never.others)}
    alike = found(replace(cluster(agent("a"), agent("b"), agent("c")), prefill_agents=1))
    assert (alike.chosen.shape.kind, alike.chosen.shape.asked_for) == (ShapeKind.SPLIT, True)


def test_what_runs_is_kept_unless_the_gain_is_notable() -> None:
    there = cluster(agent("a"), agent("b"))
    first = found(there)
    rings = present(first, ShapeKind.RINGS)
    other = found(replace(there, present=rings))
    assert other.chosen.shape.kind is not ShapeKind.RINGS, "replicas give twice as much"
    kept = found(replace(there, present=present(first, first.chosen.shape.kind)))
    assert kept.chosen.shape.chains == first.chosen.shape.chains
    assert kept.chosen.moved_blocks == 0


def test_what_is_held_decides_between_shapes_that_differ_by_less_than_counts() -> None:
    there = cluster(agent("a"), agent("b"))
    search = found(there)
    chosen, other = search.chosen, search.others[0]
    assert chosen.figures is not None

    def priced(gain: float, moved: int) -> PricedShape:
        assert chosen.figures is not None
        faster = replace(chosen.figures, rate_per_s=chosen.figures.rate_per_s * (1 + gain))
        return PricedShape(other.shape, faster, moved)

    runs = replace(chosen, moved_blocks=0)
    slightly, notably = priced(0.08, 3), priced(0.12, 3)
    assert best_of([runs, slightly], SearchOrder.THROUGHPUT) is runs
    assert best_of([runs, notably], SearchOrder.THROUGHPUT) is notably
    assert best_of([runs, priced(0.08, 0)], SearchOrder.THROUGHPUT) is not runs


def test_if_asked_the_fewest_gpus_that_keep_the_objectives_are_taken() -> None:
    there = cluster(agent("a"), agent("b", "old"), agent("c", "old"), rate=0.5)
    few, most = found(there, SearchOrder.FEWEST_GPUS).chosen, found(there).chosen
    assert few.figures is not None
    assert most.figures is not None
    assert (few.figures.gpus, most.figures.gpus) == (1, 3)
    assert few.figures.attainment == 1.0
    assert few.shape.name == "only new"


def test_without_measurements_chains_go_by_guesses_as_composed() -> None:
    there = cluster(agent("a"), agent("b", memory_bytes=900), costs={})
    search = found(there)
    assert search.chosen.shape.kind is ShapeKind.COMPOSED
    assert search.chosen.figures is None
    assert "nothing is measured yet" in " ".join(in_words(search))
    (answer,) = compose_cluster(there).answers
    assert answer == search.chosen.shape.answers[0]


def test_the_choice_the_others_and_every_idle_agent_are_told_in_a_sentence_each() -> None:
    there = cluster(agent("a"), agent("b", "old"), agent("tiny", "old", 150))
    lines = in_words(found(there))
    assert all(line.startswith("llm:1: ") for line in lines)
    assert any("composed chains are predicted to give" in line for line in lines)
    assert any("instead, only old would give" in line for line in lines)
    (idle,) = [line for line in lines if "is idle" in line]
    assert "tiny is idle: one block with the cache of a session takes" in idle
    assert "bytes more it could be used" in idle
    assert set(lines) <= set(compose_cluster(there).lines)


def test_an_agent_that_asked_for_chains_leave_over_is_told_what_it_would_give() -> None:
    there = cluster(agent("a"), agent("b"), agent("c"), partitions=2)
    search = found(there)
    assert search.chosen.shape.asked_for
    (idle,) = [line for line in in_words(search) if "is idle" in line]
    assert "with it, whole replicas would give" in idle or "with it, composed" in idle
