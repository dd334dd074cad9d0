from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning import (
    ChainPlacement,
    DeployedModel,
    HopPlacement,
    ModelPlacement,
    Placement,
)
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
    SearchRules,
    ServingFigures,
    ShapeKind,
    answer_of,
    best_of,
    figures_of,
    idle_reasons,
    in_words,
    search_chains,
    why_not,
)
from catenary_scheduler.planning.search.search import (
    NOTABLE_ATTAINMENT,
    NOTABLE_GAIN,
    PricedShape,
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
    if order is SearchOrder.THROUGHPUT and any(each.survives for each in left):
        assert chosen.survives
        left = [each for each in left if each.survives]
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


def disjoint_chains(there: ChainCluster) -> Iterator[ServingFigures]:
    """Yields the figures of all cuts of the blocks over all orders of the agents."""
    (load,) = there.loads
    lines = ClusterLines(DECODER, there.agents, there.measured, LLM)
    names = [each.agent_id for each in there.agents]
    for chains in every_placement(len(names), BLOCKS):
        placed_chains = tuple(
            ChainPlacement(4, tuple(HopPlacement(names[n], a, b, a) for n, a, b in hops))
            for hops in chains
        )
        model = ModelPlacement(LLM, 10**9, True, (), placed_chains)
        priced = figures_of(model, load, lines.lines)
        assert priced is not None
        yield priced


TINY = [["new"], ["new", "new"], ["new", "old"], ["new", "old", "old"]]


@pytest.mark.parametrize("classes", TINY)
def test_with_room_no_placement_of_disjoint_chains_sustains_notably_more(
    classes: list[str],
) -> None:
    """Twin: all placements, priced by the same lines."""
    agents = [agent(f"a{n}", name) for n, name in enumerate(classes)]
    there = cluster(*agents, survival_first=False)
    best = max(each.rate_per_s for each in disjoint_chains(there))
    chosen = found(there).chosen.figures
    assert chosen is not None
    assert chosen.rate_per_s >= best / (1 + NOTABLE_GAIN)


@pytest.mark.parametrize("objectives", [None, TokenObjectives(0, 25 * MS)])
@pytest.mark.parametrize("classes", TINY)
def test_the_loss_of_an_agent_is_survived_wherever_that_is_possible(
    classes: list[str], objectives: TokenObjectives | None
) -> None:
    """Twin: all placements, of which those that survive go first, by rate."""
    agents = [agent(f"a{n}", name) for n, name in enumerate(classes)]
    there = cluster(*agents, objectives=objectives)
    surviving = [each.rate_per_s for each in disjoint_chains(there) if each.survives]
    chosen = found(there).chosen.figures
    assert chosen is not None
    assert chosen.survives == bool(surviving)
    if surviving:
        assert chosen.rate_per_s >= max(surviving) / (1 + NOTABLE_GAIN)


def test_what_survives_is_preferred_only_where_that_is_wanted() -> None:
    there = cluster(agent("a"), agent("b"))
    priced = found(there).chosen
    assert priced.figures is not None
    safe = replace(priced, figures=replace(priced.figures, survives=True))
    fast = replace(
        priced,
        shape=replace(priced.shape, name="a fragile shape"),
        figures=replace(priced.figures, survives=False, rate_per_s=10 * priced.figures.rate_per_s),
    )
    assert best_of([fast, safe], SearchRules()) is safe
    assert best_of([fast, safe], SearchRules(survival_first=False)) is fast
    few = SearchRules(SearchOrder.FEWEST_GPUS)
    assert best_of([safe, fast], few) is fast, "survival is no part of that order"
    search = replace(found(there), chosen=safe, others=(fast,))
    assert why_not(search, fast) == "it would not survive the loss of an agent"


def test_of_no_load_all_is_served_or_nothing() -> None:
    for objectives, attained in ((None, 1.0), (TokenObjectives(1, 1), 0.0)):
        there = cluster(agent("a"), objectives=objectives)
        (load,) = there.loads
        lines = ClusterLines(DECODER, there.agents, there.measured, LLM)
        placement = found(there).chosen.shape.placement
        priced = figures_of(placement, replace(load, rate_per_s=0.0), lines.lines)
        assert priced is not None
        assert priced.attainment == attained


def test_caches_that_are_handed_over_take_their_time() -> None:
    """The split phase is priced with the way of the caches of a mean prompt."""
    agents = [agent(name) for name in "abcd"]
    slow = [replace(each, link_bytes_per_second=1_000) for each in agents]
    quick, late = (found(cluster(*each)) for each in (agents, slow))

    def per_token_ns(search: ChainSearch) -> float:
        (split,) = [e for e in search.others if e.shape.name.startswith("1 agent(s) that run")]
        assert split.figures is not None
        return split.figures.per_token_ns

    # 20 tokens of 1 byte in each of 6 blocks at 1 kB/s: 120 ms, over 29 further tokens.
    assert per_token_ns(late) - per_token_ns(quick) > 120 * MS / 29 * 0.9


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
    assert best_of([runs, slightly], SearchRules()) is runs
    assert best_of([runs, notably], SearchRules()) is notably
    assert best_of([runs, priced(0.08, 0)], SearchRules()) is not runs


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
    assert compose_cluster(there).models == (search.chosen.shape.placement,)


def test_the_choice_the_others_and_every_idle_agent_are_told_in_a_sentence_each() -> None:
    there = cluster(agent("a"), agent("b", "old"), agent("tiny", "old", 150))
    search = found(there)
    lines = in_words(search)
    assert all(line.startswith("llm:1: ") for line in lines)
    assert any("composed chains would give" in line for line in lines)
    assert any("instead, only old would give" in line for line in lines)
    told = [line for line in lines if "instead" in line or "not possible" in line]
    assert len(told) == len(search.others) + len(search.impossible)
    (why,) = idle_reasons(search).values()
    assert "one block with the cache of a session takes" in why
    assert "bytes more it could be used" in why
    composed = compose_cluster(there)
    assert (composed.lines[-len(lines) :], composed.idle) == (
        tuple(lines),
        {AgentId("tiny"): (why,)},
    )


def test_an_agent_that_asked_for_chains_leave_over_is_told_what_it_would_give() -> None:
    there = cluster(agent("a"), agent("b"), agent("c"), partitions=2)
    search = found(there)
    assert search.chosen.shape.asked_for
    (why,) = idle_reasons(search).values()
    assert "with it, whole replicas of llm:1 would give" in why or "with it, composed" in why
    assert why.endswith("another shape was asked for")


def test_shapes_without_room_are_told_with_the_reason() -> None:
    """A model of which no agent has room for more than half."""
    search = found(cluster(agent("a", memory_bytes=700), agent("b", memory_bytes=700)))
    (replicas,) = [each for each in search.impossible if each.name == "whole replicas"]
    assert "needs room for 6 blocks" in replicas.problem
    answer = answer_of(search)
    options = {each.name: each for each in answer.options}
    assert answer.options[0].why_not == ""
    assert (options["whole replicas"].placement, options["whole replicas"].figures) == (None, None)
    assert all(each.why_not for each in answer.options[1:])
